from __future__ import annotations

import pytest
import torch

from seqdiff.path import Path, target, time_grid
from seqdiff.sample import gaussian_noise, sample
from seqdiff.steps import STEPS, find_step
from seqdiff.testing import Gaussian, Mixture, order_of
from seqdiff.types import Draw, as_seeds

F64 = torch.float64
MIXTURE = Mixture(
    torch.tensor([0.3, 0.7], dtype=F64), torch.tensor([-1.0, 0.8], dtype=F64), torch.tensor([0.4, 0.6], dtype=F64)
)
GAUSSIAN = Gaussian(torch.tensor([0.3], dtype=F64), torch.tensor([0.5], dtype=F64))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("law", [GAUSSIAN, MIXTURE], ids=["gaussian", "mixture"])
def test_order_is_the_claim(name, kind, law):
    claim = STEPS[name]
    orders = order_of(claim.step, law, Path(kind), [32, 64, 128, 256])
    assert orders[-1] == pytest.approx(claim.order, abs=0.12), orders


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_steps_are_finite_and_counted(name, kind, steps):
    path, calls = Path(kind), []

    def counting(z, t):
        calls.append(t)
        return MIXTURE.denoiser(path)(z, t)

    z = torch.randn(2, 3, 4, 1, dtype=F64)
    out = sample(counting, Draw(z, torch.zeros(2, 3)), time_grid(path, steps), path=path, step=STEPS[name].step)
    assert torch.isfinite(out.z).all()
    assert len(calls) == STEPS[name].evaluations * (steps - 1) + 1
    assert min(calls) > 0  # sigma = 0 is never evaluated, nothing divides by it


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_error_falls_with_steps_from_pure_noise(name, kind):
    path = Path(kind)
    z = torch.linspace(-2, 2, 41, dtype=F64).view(1, 1, 41, 1)
    exact = MIXTURE.flow(path, z, 1.0)
    errors = [
        (sample(MIXTURE.denoiser(path), Draw(z, torch.zeros(1, 1)), time_grid(path, n), path=path, step=STEPS[name].step).z
         - exact).abs().mean().item()
        for n in (2, 4, 8, 16, 32)
    ]  # fmt: skip
    assert all(a > b for a, b in zip(errors[:-1], errors[1:], strict=True)), errors
    assert errors[-1] < 0.04


@pytest.mark.parametrize("name", STEPS)
def test_parametrisations_give_the_same_trajectory(name):
    for kind in ("linear", "cosine"):
        path = Path(kind)
        truth = MIXTURE.denoiser(path)
        z = torch.randn(1, 2, 5, 1, dtype=F64)
        ends = []
        for prediction in ("x0", "v", "eps"):

            def through(z, t, prediction=prediction, path=path, truth=truth):
                x0 = truth(z, t)
                out = target(path, x0, path.to_eps(x0, z, t), torch.tensor(t, dtype=F64), prediction)
                return path.to_x0(out, z, t, prediction)

            times = time_grid(path, 5, t_max=0.99)
            ends.append(sample(through, Draw(z, torch.zeros(1, 2)), times, path=path, step=STEPS[name].step).z)
        torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-9)
        torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-9)


def test_samples_of_a_gaussian_have_its_law():
    path = Path()
    noise = gaussian_noise((1, 1), as_seeds(0, 40, 500))
    law = Gaussian(torch.tensor([2.0]), torch.tensor([0.25]))
    out = sample(law.denoiser(path), noise, time_grid(path, 32), path=path, step=STEPS["dpmpp_2m"].step).z
    assert out.mean().item() == pytest.approx(2.0, abs=0.01)
    assert out.std().item() == pytest.approx(0.25, abs=0.01)


def test_memory_does_not_leak_between_runs():
    path = Path()
    z = torch.randn(1, 1, 3, 1, dtype=F64)

    def run():
        draw = Draw(z, torch.zeros(1, 1))
        return sample(MIXTURE.denoiser(path), draw, time_grid(path, 5), path=path, step=STEPS["dpmpp_2m"].step).z

    assert torch.equal(run(), run())


def test_unknown_step_lists_the_choices():
    with pytest.raises(ValueError, match="dpmpp_2m"):
        find_step("dpm++")


@pytest.mark.parametrize("times", [[1.0], [0.5, 0.5, 0.0], [0.0, 1.0], [1.2, 0.0]])
def test_times_must_decrease(times):
    with pytest.raises(ValueError, match="decrease strictly"):
        sample(
            lambda z, t: z,
            Draw(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1)),
            times,
            path=Path(),
            step=STEPS["ddim"].step,
        )
