"""Densities of a model's samples and of the record, against a closed form; whose density a student's is."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from seqdiff.densities import Densities, field_of
from seqdiff.likelihood import Likelihood
from seqdiff.objectives import FlowMatching
from seqdiff.path import Path
from seqdiff.students import BestOfK, Distill, MeanFlow
from seqdiff.testing import Gaussian
from seqdiff.types import Cond

LAW = Gaussian(torch.tensor([0.5, -1.0]), torch.tensor([0.5, 1.5]))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Adapter:
    """Two items of three tokens, of which the second has two; its last real token is recorded in part."""

    mask = torch.tensor([[True, True, True], [True, True, False]])

    def context(self, batch: object) -> Cond:
        none = torch.zeros(2, 1, 1)
        return Cond(
            self.mask[:, None], torch.zeros(2, 3, 3), torch.zeros(2, 3, dtype=torch.long), none, torch.zeros(2, 1, 3),
            torch.ones(2, 1, dtype=torch.bool),
        )  # fmt: skip

    def encode(self, batch: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((2, 1, 3, 2), 0.2), torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])

    def log_volume(self, batch: object) -> torch.Tensor:
        return torch.tensor([3.0, 2.0], dtype=torch.float64)

    def residual_log_density(self, batch: object) -> torch.Tensor:
        return torch.tensor([10.0, math.nan], dtype=torch.float64)


def task_of(**given) -> SimpleNamespace:
    objective = SimpleNamespace(few_step=False, prediction="v", path=Path(), teacher=None)
    return SimpleNamespace(
        adapter=Adapter(), objective=objective, denoiser=lambda cond, teacher=False: LAW.denoiser(Path()), **given
    )


def exact(z: torch.Tensor) -> torch.Tensor:
    std = (LAW.std.double() ** 2 + 0.01**2).sqrt()
    each = torch.distributions.Normal(LAW.mean.double(), std).log_prob(z.double()).sum(-1)
    return (each * Adapter.mask[:, None]).sum(-1)


def test_samples_and_record_have_the_closed_forms_density_in_data_units():
    z = torch.randn(2, 5, 3, 2, generator=torch.Generator().manual_seed(0))
    densities = Densities(task_of(), Likelihood(trace="rademacher", probes=1))  # the Jacobian is diagonal: one is exact
    got = densities.add(None, z, 0)
    volume = torch.tensor([[3.0], [2.0]], dtype=torch.float64)
    torch.testing.assert_close(got.log_prob, exact(z) - volume, rtol=0, atol=2e-3)
    record = exact(torch.full((2, 1, 3, 2), 0.2)) - volume
    assert got.record[0].item() == pytest.approx(record[0].item(), abs=2e-3)
    assert got.full[0].item() == pytest.approx(record[0].item() + 10, abs=2e-3)
    assert got.rank[0].item() == pytest.approx(
        (exact(z)[0] < exact(torch.full((1, 1, 3, 2), 0.2))[0]).double().mean().item()
    )
    assert got.dims.tolist() == [6, 4]
    # an unknown record is unknown, never imputed
    assert torch.isnan(torch.stack([got.record[1], got.full[1], got.rank[1]])).all()
    report = densities.report()
    assert report["records"]["known"] == report["records"]["unknown"] == 1 == sum(report["records"]["rank_fifths"])
    assert report["records"]["per_dim"] == pytest.approx(got.record[0].item() / 6)
    assert report["samples_per_dim"] == pytest.approx((got.log_prob / got.dims[:, None]).mean().item())
    assert report["measure"] == "data units on the codec's range" and report["field"] == "own"
    assert (
        report["sigma_max"] is None
        and report["not_finite"] == 0
        and report["evaluations"] == 4 * 16
        and report["standard_error"] is None
    )


def test_chunks_of_candidates_share_their_probes(monkeypatch):
    import seqdiff.densities as module

    z = torch.randn(2, 5, 3, 2)
    whole = Densities(task_of()).add(None, z, 0).log_prob
    monkeypatch.setattr(module, "TOKENS", 7)
    torch.testing.assert_close(Densities(task_of()).add(None, z, 0).log_prob, whole, rtol=1e-6, atol=0)


def test_a_domain_without_volumes_has_latent_densities():
    task = task_of()
    task.adapter = SimpleNamespace(context=task.adapter.context, encode=task.adapter.encode)
    densities = Densities(task)
    z = torch.randn(2, 5, 3, 2)
    torch.testing.assert_close(densities.add(None, z, 0).log_prob, exact(z), rtol=0, atol=1e-2)
    report = densities.report()
    assert report["measure"] == "latent" and report["records"]["full"] is None


def test_eps_prediction_ends_before_pure_noise():
    task = task_of()
    task.objective.prediction = "eps"
    assert Densities(task).how.sigma_max == 80.0 and Densities(task_of()).how.sigma_max == math.inf


def test_a_students_density_is_its_teachers_or_its_instantaneous_fields():
    asked = []

    def task(objective) -> SimpleNamespace:
        return SimpleNamespace(
            objective=objective, denoiser=lambda cond, teacher=False: asked.append(teacher) or (lambda z, t: z)
        )

    distill = Distill()
    distill.teacher = torch.nn.Linear(1, 1)
    for objective, whose, teacher in [
        (FlowMatching(), "own", False),
        (MeanFlow(), "instantaneous field", False),
        (BestOfK(), "instantaneous field", False),
        (distill, "teacher", True),
    ]:
        assert field_of(task(objective), None)[1] == whose and asked.pop() is teacher
    with pytest.raises(ValueError, match="instant = 0"):
        field_of(task(BestOfK(instant=0.0)), None)
