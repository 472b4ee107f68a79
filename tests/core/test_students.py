"""Students against closed forms: the mean velocity of a Gaussian's flow is known, and so is the best energy score."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from seqdiff.objectives import reveal
from seqdiff.path import Path
from seqdiff.sample import sample
from seqdiff.steps import find_step
from seqdiff.students import BestOfK, Distill, MeanFlow
from seqdiff.types import Cond, Draw, FlowMap, as_seeds

PATH = Path()
F64 = torch.float64


def condition(b: int, n: int) -> Cond:
    return Cond(
        mask=torch.ones(b, 1, n, dtype=torch.bool),
        pos=torch.zeros(b, n, 1),
        group=torch.zeros(b, n, dtype=torch.int64),
        ctx=torch.ones(b, 1, 1),
        ctx_pos=torch.zeros(b, 1, 1),
        ctx_mask=torch.ones(b, 1, dtype=torch.bool),
    )


class GaussianFlow(nn.Module):
    """The exact u(z, t, s) of x0 ~ N(mean, std^2) on the linear path: (z_t - z_s) / (t - s) along
    z_s = a_s mean + (z_t - a_t mean) r_s / r_t, r_t^2 = a_t^2 std^2 + t^2."""

    latent_dim = 2

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def prepare(self, cond: Cond) -> Cond:
        return cond

    def forward(self, z: Tensor, t: Tensor | float, s: Tensor | float, prepared: Cond) -> Tensor:
        t, s = (v[:, :, None, None] if isinstance(v, Tensor) else torch.tensor(v, dtype=z.dtype) for v in (t, s))
        r2 = ((1 - t) * self.std) ** 2 + t**2
        y = z - (1 - t) * self.mean
        there = (((1 - s) * self.std) ** 2 + s**2) / r2
        jump = -(t - s) * self.mean + y * (1 - there.sqrt())
        instant = -self.mean + y * (t - (1 - t) * self.std**2) / r2
        near = (t - s).abs() < 1e-9
        return torch.where(near, instant, jump / torch.where(near, 1.0, t - s))


def test_the_slope_makes_the_mean_velocity_the_instantaneous_one():
    """u + (t - s) du/dt = v: the identity that mean flow trains by (Geng et al. 2025, equation 6)."""
    net = GaussianFlow(1.5, 0.5)
    g = torch.Generator().manual_seed(0)
    z = torch.randn(3, 4, 2, 2, generator=g, dtype=F64)
    t = 0.3 + 0.7 * torch.rand(3, 4, generator=g, dtype=F64)
    s = t * torch.rand(3, 4, generator=g, dtype=F64)
    slope = MeanFlow.slope(net, z, t, s, condition(3, 2))
    compound = net(z, t, s, condition(3, 2)) + (t - s)[:, :, None, None] * slope
    torch.testing.assert_close(compound, net(z, t, t, condition(3, 2)), rtol=1e-6, atol=1e-8)


def test_mean_flow_of_the_exact_net_costs_the_conditional_variance():
    """Var(v | z_t) = std^2 / ((1-t)^2 std^2 + t^2) at the times that were drawn; any other net costs more."""
    b, std = 3000, 0.5
    objective = MeanFlow(draws=4)
    z0 = 1.5 + std * torch.randn(b, 1, 2, 2, generator=torch.Generator().manual_seed(0))

    def loss(net: nn.Module) -> float:
        return objective(net, z0, torch.ones(b, 2), condition(b, 2), torch.Generator().manual_seed(1)).mean().item()

    t, s = objective.times(b, torch.Generator().manual_seed(1), torch.device("cpu"))
    variance = (std**2 / (((1 - t) * std) ** 2 + t**2)).mean().item()
    assert loss(GaussianFlow(1.5, std)) == pytest.approx(variance, rel=0.02)
    assert loss(GaussianFlow(1.2, std)) > 1.05 * variance
    assert (s[:, :2] == t[:, :2]).all() and (s[:, 2:] < t[:, 2:]).all()
    whole = ((t == 1) & (s == 0))[:, 2:].float().mean().item()
    assert whole == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_distilling_the_exact_flow_costs_the_teachers_own_error(kind):
    """The exact student's loss is only what the teacher's steps miss: it falls with their number, while a wrong student's stays."""
    z0 = torch.zeros(50, 1, 2, 2)
    losses = {}
    for steps in (4, 16):
        objective = Distill(Path(kind), step="heun", steps=steps, draws=2)
        teacher = GaussianFlow(1.5, 0.5) if kind == "linear" else _CosineGaussian(1.5, 0.5)
        objective.attach(teacher)
        for name, net in (("exact", teacher), ("wrong", GaussianFlow(0.5, 0.5))):
            g = torch.Generator().manual_seed(0)
            losses[name, steps] = objective(net, z0, torch.ones(50, 2), condition(50, 2), g).mean().item()
    assert losses["exact", 16] < 0.15 * losses["exact", 4] < 0.05 * losses["wrong", 4]
    assert losses["wrong", 16] > 0.2


class _CosineGaussian(GaussianFlow):
    """The exact net on the cosine path: its jump is the DDIM update with the x0 it points to, given as v."""

    def forward(self, z: Tensor, t: Tensor | float, s: Tensor | float, prepared: Cond) -> Tensor:
        path = Path("cosine")
        t, s = float(torch.as_tensor(t).flatten()[0]), float(torch.as_tensor(s).flatten()[0])
        a, sig, a_s, sig_s = path.alpha(t), path.sigma(t), path.alpha(s), path.sigma(s)
        r2, r2_s = (a * self.std) ** 2 + sig**2, (a_s * self.std) ** 2 + sig_s**2
        if t - s < 1e-9:
            x0 = self.mean + a * self.std**2 / r2 * (z - a * self.mean)
        else:
            end = a_s * self.mean + (z - a * self.mean) * math.sqrt(r2_s / r2)
            ratio = sig_s / sig
            x0 = (end - ratio * z) / (a_s - ratio * a)
        return path.velocity(x0, path.to_eps(x0, z, t), t)


def test_distill_without_a_teacher_is_refused_and_with_one_copies_it():
    objective, net = Distill(), nn.Linear(2, 2)
    objective.attach(net)
    with pytest.raises(ValueError, match="init=RUN"):
        objective.begin(net, continued=False)
    with torch.no_grad():
        net.weight.fill_(3.0)
    objective.begin(net, continued=True)
    assert (objective.teacher.weight == 3).all() and not objective.teacher.weight.requires_grad


class Guided(nn.Module):
    """Predicts x0: 2 with the context and 1 without; the student's answer is the guidance weight it is told."""

    def prepare(self, cond: Cond) -> Cond:
        return cond

    def forward(self, z: Tensor, t: float, s: float, prepared: Cond) -> Tensor:
        if prepared.guidance is not None:
            return 1 + prepared.guidance[:, None, None, None].expand_as(z)
        return 1 + prepared.ctx_mask.any(1).to(z.dtype)[:, None, None, None].expand_as(z)


def test_guidance_as_an_input_is_taught_by_the_guided_teacher():
    """x_u + w (x_c - x_u) = 1 + w: a net that answers 1 + w to the weight w has no loss left."""
    objective = Distill(prediction="x0", guidance=(0.5, 4.0))
    objective.attach(Guided())
    loss = objective(Guided(), torch.zeros(9, 1, 2, 2), torch.ones(9, 2), condition(9, 2), torch.Generator())
    assert loss.abs().max() < 1e-9


def test_the_jump_of_the_exact_net_is_the_flow_on_either_path():
    for kind, net in (("linear", GaussianFlow(1.5, 0.5)), ("cosine", _CosineGaussian(1.5, 0.5))):
        path, objective = Path(kind), Distill(Path(kind))
        z = torch.linspace(-2, 2, 9, dtype=F64).view(1, 1, 9, 1)
        jump = FlowMap(lambda z, t, s, o=objective, u=net: o.jump(u(z, t, s, condition(1, 9)), z, t, s))
        for times in ([1.0, 0.0], [1.0, 0.4, 0.0]):
            out = sample(jump, Draw(z, torch.zeros(1, 1)), times, path=path, step=find_step("flow_map").step).z
            torch.testing.assert_close(out, 1.5 + 0.5 * z, rtol=0, atol=1e-7)


def test_the_score_of_a_set_by_hand():
    """Two end points, two tokens of one channel. Token a: 0 and 2 against 1; token b: 0 and 2 against 0. Errors a: 1, 1; b: 0, 2;
    joint per end point: .5 and 1.5; pairs are 2 apart in both tokens."""
    z = torch.tensor([[[[0.0], [0.0]], [[2.0], [2.0]]]])
    z0 = torch.tensor([[[[1.0], [0.0]]]])
    weight = torch.ones(1, 2)

    def value(joint: bool, best: float, energy: float, w: Tensor = weight, scale: Tensor | None = None) -> float:
        return BestOfK(k=2, joint=joint, best=best, energy=energy).of_set(z, z0, w, scale).item()

    assert value(True, 1.0, 0.0) == pytest.approx(0.5, abs=1e-3)
    assert value(False, 1.0, 0.0) == pytest.approx((1 + 0) / 2, abs=1e-3)
    assert value(False, 0.0, 1.0) == pytest.approx((0.5 + 1.5) / 2 - 0.5 * 2, abs=1e-3)
    # as a whole, root mean square over the tokens: sqrt(1/2) and sqrt(5/2) off, 2 apart
    whole = (math.sqrt(0.5) + math.sqrt(2.5)) / 2 - 0.5 * 2
    assert value(True, 0.0, 1.0) == pytest.approx((0 + whole) / 2, abs=1e-3)
    assert value(True, 1.0, 0.0, torch.tensor([[1.0, 0.0]])) == pytest.approx(1.0, abs=1e-3)
    # channels of another size: token a counts in its own units, all sizes relative to their mean square
    scale = torch.tensor([[[2.0], [1.0]]])
    unit = math.sqrt((4 + 1) / 2)
    assert value(True, 1.0, 0.0, scale=scale) == pytest.approx((2 / unit + 0) / 2, abs=1e-3)


def test_the_best_of_a_joint_set_is_one_end_point_for_all_tokens():
    """End point 1 is right for token a, end point 2 for token b: jointly either is off by .5, marginally by 0."""
    z = torch.tensor([[[[1.0], [1.0]], [[0.0], [0.0]]]])
    z0 = torch.tensor([[[[1.0], [0.0]]]])
    joint, marginal = (
        BestOfK(k=2, joint=j, best=1.0, energy=0.0).of_set(z, z0, torch.ones(1, 2)).item() for j in (True, False)
    )
    assert joint == pytest.approx(0.5, abs=1e-3) and marginal == pytest.approx(0.0, abs=1e-3)


def test_the_energy_term_is_least_at_the_true_spread_and_the_best_of_k_alone_is_not():
    """x0 ~ N(0, 1). Energy score of N(0, s^2), closed form (Gneiting & Raftery 2007): sqrt(2 (1 + s^2) / pi) - s / sqrt(pi)."""
    g = torch.Generator().manual_seed(0)
    b, k = 20_000, 6
    z0, noise = torch.randn(b, 1, 1, 1, generator=g), torch.randn(b, k, 1, 1, generator=g)
    many = torch.randn(4000, 30, 1, 1, generator=g)
    energy, best = BestOfK(k=k), BestOfK(k=30, best=1.0, energy=0.0)
    scores, least = [], []
    for s in (0.5, 1.0, 1.5):
        scores.append(energy.of_set(noise * s, z0, torch.ones(b, 1)).mean().item())
        least.append(best.of_set(many * s, z0[:4000], torch.ones(4000, 1)).mean().item())
        expected = math.sqrt(2 * (1 + s * s) / math.pi) - s / math.sqrt(math.pi)
        assert scores[-1] == pytest.approx(expected, abs=0.012)
    assert scores[1] < min(scores[0], scores[2])
    assert least[2] < least[1]  # wider than the law is rewarded: coverage alone is no probability


def test_only_the_joint_score_sees_which_token_goes_with_which():
    """Two tokens that are always equal, against sets with the same marginals and independent tokens."""
    g = torch.Generator().manual_seed(0)
    b, k = 5000, 6
    sides = torch.randint(0, 2, (b, k + 1, 1, 1), generator=g).float().expand(b, k + 1, 2, 1) * 2 - 1
    right, z0 = sides[:, :k], sides[:, k:]
    wrong = torch.cat([right[:, :, :1], right[:, torch.randperm(k, generator=g), 1:]], 2)

    def score(z: Tensor, joint: bool) -> float:
        return BestOfK(k=k, joint=joint).of_set(z, z0, torch.ones(b, 2)).mean().item()

    assert score(wrong, False) == pytest.approx(score(right, False), abs=1e-4)
    assert score(wrong, True) > score(right, True) + 0.008


def test_learned_starts_come_by_mass_and_their_weights_average_to_one():
    objective = BestOfK(k=2, starts=3, best=1.0)
    objective.attach(GaussianFlow(0.0, 1.0))
    with torch.no_grad():
        objective.mass.copy_(torch.tensor([0.2, 0.5, 0.3]).log())
    draw = objective.starts((4, 2), as_seeds(0, 2, 2))
    assert draw.z.shape == (2, 2, 4, 2)
    torch.testing.assert_close(draw.z[0, 0, 0], objective.start[1].detach())
    torch.testing.assert_close(draw.log_weight[1], torch.tensor([0.5 / 0.8 * 2, 0.3 / 0.8 * 2]).log())
    with pytest.raises(ValueError, match="learned 3 starts"):
        objective.starts((4, 2), as_seeds(0, 2, 4))
    z0 = torch.randn(5, 1, 4, 2)
    objective(GaussianFlow(0.0, 1.0), z0, torch.ones(5, 4), condition(5, 4), torch.Generator()).sum().backward()
    assert objective.start.grad.abs().sum() > 0 and objective.mass.grad.abs().sum() > 0


def test_revealed_parts_are_data_and_never_tokens_without_weight():
    z0 = torch.randn(4000, 1, 6, 2)
    weight = torch.ones(4000, 6)
    weight[:, 5] = 0
    cond = reveal(z0, weight, condition(4000, 6), 0.5, torch.Generator().manual_seed(0))
    mask = cond.known_mask
    assert torch.equal(cond.known, torch.where(mask, z0, torch.zeros_like(z0)))
    assert not mask[:, :, 5].any() and mask.any(-1).eq(mask.all(-1)).all()
    some = mask[:, 0, :5, 0].any(1).float().mean().item()
    assert 0.35 < some < 0.5  # half of the items, less those whose span or rate came out empty
    share = mask[:, 0, :5, 0].float().mean().item()
    assert 0.15 < share < 0.25  # half of 1/2 by single tokens, a third by spans


@pytest.mark.parametrize(
    "make",
    [
        lambda: MeanFlow(Path("cosine")),
        lambda: MeanFlow(draws=1),
        lambda: Distill(steps=1),
        lambda: BestOfK(k=1),
        lambda: BestOfK(k=6, starts=4),
        lambda: BestOfK(best=0.0, energy=0.0),
        lambda: BestOfK(known=1.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match=r"expected|linear path"):
        make()
