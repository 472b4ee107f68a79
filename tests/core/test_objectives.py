"""Flow matching against closed forms; what counts in the loss and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seqdiff.objectives import FlowMatching, sample_times
from seqdiff.path import Path
from seqdiff.types import Cond

PATH = Path()


def condition(b: int, n: int, m: int = 2) -> Cond:
    return Cond(
        mask=torch.ones(b, 1, n, dtype=torch.bool),
        pos=torch.zeros(b, n, 1),
        group=torch.zeros(b, n, dtype=torch.int64),
        ctx=torch.ones(b, m, 1),
        ctx_pos=torch.zeros(b, m, 1),
        ctx_mask=torch.ones(b, m, dtype=torch.bool),
    )


class ExactNet:
    """E[v | z_t] for x0 ~ N(mean, std^2), or E[x0 | z_t]: the best that any net can do."""

    def __init__(self, mean: float, std: float, prediction: str) -> None:
        self.mean, self.std, self.prediction = mean, std, prediction
        self.seen: list[Any] = []

    def prepare(self, cond: Cond) -> Cond:
        self.seen.append(cond)
        return cond

    def __call__(self, z: torch.Tensor, t: torch.Tensor, s: torch.Tensor, prepared: Cond) -> torch.Tensor:
        t = t[:, :, None, None]
        a, sigma, var = 1 - t, t, self.std**2
        gain = 1 / (a**2 * var + sigma**2)
        x0 = self.mean + a * var * gain * (z - a * self.mean)
        eps = sigma * gain * (z - a * self.mean)
        return eps - x0 if self.prediction == "v" else x0


@pytest.mark.parametrize("prediction", ["v", "x0"])
@pytest.mark.parametrize("std", [0.5, 2.0])
def test_the_loss_of_the_exact_net_is_the_conditional_variance(prediction, std):
    """Var(v | z_t) = std^2 / ((1-t)^2 std^2 + t^2) on the linear path; Var(x0 | z_t) = t^2 times that. The mean over
    uniform t by quadrature: the loss that training cannot go below."""
    g = torch.Generator().manual_seed(0)
    z0 = 1.5 + std * torch.randn(4000, 1, 2, 2, generator=g)
    objective = FlowMatching(PATH, prediction, density="uniform", draws=8)
    net = ExactNet(1.5, std, prediction)
    loss = objective(net, z0, torch.ones(4000, 2), condition(4000, 2), g)
    t = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    variance = std**2 / ((1 - t) ** 2 * std**2 + t**2)
    if prediction == "x0":
        variance = variance * t**2
    assert loss.shape == (4000,)
    assert loss.mean().item() == pytest.approx(variance.mean().item(), rel=0.015)


def test_another_net_has_a_larger_loss():
    g = torch.Generator().manual_seed(0)
    z0 = 1.5 + 0.5 * torch.randn(2000, 1, 2, 2, generator=g)
    losses = [
        FlowMatching(PATH, density="uniform")(ExactNet(mean, 0.5, "v"), z0, torch.ones(2000, 2), condition(2000, 2),
                                              torch.Generator().manual_seed(1)).mean()
        for mean in (1.5, 1.2, 0.0)
    ]  # fmt: skip
    assert losses[0] < losses[1] < losses[2]


class Zero:
    """Predicts 0; remembers the conditions."""

    def __init__(self) -> None:
        self.seen: list[Cond] = []

    def prepare(self, cond: Cond) -> Cond:
        self.seen.append(cond)
        return cond

    def __call__(self, z: torch.Tensor, t: torch.Tensor, s: torch.Tensor, prepared: Cond) -> torch.Tensor:
        return torch.zeros_like(z)


def test_tokens_of_weight_zero_do_not_count():
    z0 = torch.randn(3, 1, 4, 2)
    weight = torch.ones(3, 4)
    weight[:, 2:] = 0
    weight[2] = 0

    def loss(x: torch.Tensor) -> torch.Tensor:
        return FlowMatching()(Zero(), x, weight, condition(3, 4), torch.Generator().manual_seed(0))

    changed = z0.clone()
    changed[:, :, 2:] = 1e6
    assert torch.equal(loss(z0), loss(changed))
    assert loss(z0)[2] == 0 and (loss(z0)[:2] > 0).all()  # an item with nothing to learn from


def test_the_loss_of_an_item_is_the_mean_over_its_tokens():
    z0 = torch.randn(1, 1, 4, 2).expand(2, 1, 4, 2).clone()
    z0[1, :, 2:] = z0[1, :, :2]
    weight = torch.tensor([[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]])
    same = FlowMatching(draws=1)
    losses = same(Zero(), z0, weight, condition(2, 4), torch.Generator().manual_seed(0))
    one = same(Zero(), z0, weight / 7, condition(2, 4), torch.Generator().manual_seed(0))
    torch.testing.assert_close(losses, one)  # only the proportions of the weights count


def test_context_drop_drops_whole_items():
    net = Zero()
    objective = FlowMatching(context_drop=0.25)
    objective(
        net, torch.randn(4000, 1, 1, 1), torch.ones(4000, 1), condition(4000, 1), torch.Generator().manual_seed(0)
    )
    kept = net.seen[0].ctx_mask
    assert (kept.all(1) | ~kept.any(1)).all()
    assert (~kept.any(1)).float().mean().item() == pytest.approx(0.25, abs=0.03)
    FlowMatching()(net, torch.randn(4, 1, 1, 1), torch.ones(4, 1), condition(4, 1))
    assert net.seen[1].ctx_mask.all()


def test_one_condition_serves_all_noise_levels_of_an_item():
    net = Zero()
    FlowMatching(draws=7)(net, torch.randn(4, 1, 2, 2), torch.ones(4, 2), condition(4, 2))
    assert len(net.seen) == 1


def test_the_same_generator_gives_the_same_loss():
    z0 = torch.randn(5, 1, 3, 2)
    objective = FlowMatching(context_drop=0.5)
    a, b, c = (
        objective(Zero(), z0, torch.ones(5, 3), condition(5, 3), torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_times_follow_their_density():
    g = torch.Generator().manual_seed(0)
    t = sample_times((20_000, 4), "logit_normal", g, torch.device("cpu")).double()
    logit = torch.logit(t)
    assert logit.mean().item() == pytest.approx(0, abs=0.01) and logit.std().item() == pytest.approx(1, abs=0.01)
    u = sample_times((20_000, 4), "uniform", g, torch.device("cpu"))
    assert ((u * 4).ceil().clamp(1, 4) == torch.arange(1, 5)).float().mean() > 0.999  # one in each quarter
    with pytest.raises(ValueError, match="unknown time density 'cosine'; one of uniform, logit_normal"):
        sample_times((1, 1), "cosine", g, torch.device("cpu"))


@pytest.mark.parametrize("wrong", [{"draws": 0}, {"context_drop": 1.0}, {"context_drop": -0.1}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"expected at least 1|expected shares in"):
        FlowMatching(**wrong)


@pytest.mark.parametrize("prediction", ["v", "x0", "eps"])
def test_denoise_turns_the_output_into_x0(prediction):
    objective = FlowMatching(PATH, prediction)
    x0, eps = torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 2)
    z = 0.6 * x0 + 0.4 * eps
    out = {"v": eps - x0, "x0": x0, "eps": eps}[prediction]
    torch.testing.assert_close(objective.denoise(out, z, 0.4), x0, rtol=0, atol=1e-6)
