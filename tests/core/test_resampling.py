from __future__ import annotations

import math

import pytest
import torch

from seqdiff.path import Path, time_grid
from seqdiff.resampling import Resample, effective_size, systematic
from seqdiff.sample import gaussian_noise, sample
from seqdiff.steps import STEPS, StepOut
from seqdiff.testing import Gaussian, Mixture
from seqdiff.types import Draw, FlowMap, as_seeds

PATH = Path()
UNIT = Gaussian(torch.zeros(1), torch.ones(1))


def noisy(std: float = 0.0):
    """Ancestral step with one generator for all samples: fast, for laws. `std` of the data: x0 is drawn from its posterior, so that
    a Gaussian has its exact law in any number of steps; 0: x0 = E[x0 | z_t], right in the limit of many steps."""
    generator = torch.Generator().manual_seed(0)

    def step(denoiser, path, z, t, s, memory=None, seeds=None):
        mean = denoiser(z, t)
        a_t, a_s, sig_t, sig_s = path.alpha(t), path.alpha(s), path.sigma(t), path.sigma(s)
        x0 = mean + std * sig_t / ((a_t * std) ** 2 + sig_t**2) ** 0.5 * torch.randn(z.shape, generator=generator)
        along = (a_t / a_s) * (sig_s / sig_t) ** 2  # z_s given x0 and z_t: mean a_s x0 + along (z_t - a_t x0)
        var = sig_s**2 * (1 - (a_t / a_s) * along)
        noise = torch.randn(z.shape, generator=generator)
        return StepOut(a_s * x0 + along * (z - a_t * x0) + var**0.5 * noise, mean, None)

    return step


def run(guide, *, law=UNIT, items=1, k=1000, steps=8, step=None, first_item=0):
    seeds = as_seeds(0, items, k, first_item)
    noise = Draw(torch.randn(items, k, 1, 1, generator=torch.Generator().manual_seed(1)), torch.zeros(items, k))
    if step is not None:
        noise = gaussian_noise((1, 1), seeds)
    step = noisy(float(law is UNIT)) if step is None else STEPS[step].step
    return sample(law.denoiser(PATH), noise, time_grid(PATH, steps), path=PATH, step=step, guides=[guide], seeds=seeds)


def moments(draw):
    """Weighted mean and variance of each item."""
    w = torch.softmax(draw.log_weight.double(), -1)
    x = draw.z[..., 0, 0].double()
    mean = (w * x).sum(-1)
    return mean, (w * (x - mean[:, None]) ** 2).sum(-1)


def test_effective_size_and_systematic_draws_by_hand():
    log_weight = torch.tensor([[0.0, 0, 0, 0], [0, -math.inf, -math.inf, -math.inf], [0, 0, -math.inf, -math.inf]]) + 7
    torch.testing.assert_close(effective_size(log_weight), torch.tensor([4.0, 1, 2]))
    half = torch.tensor([0.5])
    log_weight = torch.tensor([[0.5, 0.125, 0.375, 0.0]]).log()
    assert systematic(log_weight, half).tolist() == [[0, 0, 2, 2]]  # points .125 .375 .625 .875; edges .5 .625 1 1
    assert systematic(torch.zeros(1, 4), half).tolist() == [[0, 1, 2, 3]]
    g = torch.Generator().manual_seed(0)
    log_weight = torch.randn(1, 7, generator=g).double()
    draws = systematic(log_weight.expand(4000, 7), torch.rand(4000, generator=g))
    counts = torch.nn.functional.one_hot(draws, 7).sum(1).double()
    torch.testing.assert_close(counts.mean(0), 7 * torch.softmax(log_weight[0], -1), rtol=0, atol=0.03)  # unbiased
    assert ((counts - 7 * torch.softmax(log_weight, -1)).abs() < 1).all()  # floor or ceil


def test_weights_alone_with_a_deterministic_step_are_importance_weights():
    guide = Resample(lambda x: 2 * x[..., 0, 0], temperature=0.5, threshold=0.0)
    start = torch.linspace(-1, 0, 8).expand(2, 8)
    noise = Draw(gaussian_noise((1, 1), as_seeds(0, 2, 8)).z, start)
    out = sample(UNIT.denoiser(PATH), noise, time_grid(PATH, 8), path=PATH, step=STEPS["ddim"].step, guides=[guide])
    torch.testing.assert_close(out.log_weight, start + 4 * out.z[..., 0, 0])
    torch.testing.assert_close(guide.ess, effective_size(out.log_weight.double()))
    assert (guide.selected == 0).all() and (guide.distinct == 8).all()


def test_a_linear_reward_shifts_a_gaussian():
    """N(0, 1) tilted by exp(a x) is N(a, 1); 20 items of 1000 samples. What is left is of order 1 / k: k = 500 has 1.482, .956."""
    a = 1.5
    guide = Resample(lambda x: a * x[..., 0, 0], threshold=0.5)
    mean, var = moments(run(guide, items=20))
    base_mean, base_var = moments(run(Resample(lambda x: 0 * x[..., 0, 0]), items=20))
    assert abs(base_mean.mean()) < 0.03 and abs(base_var.mean() - 1) < 0.04
    assert abs(mean.mean() - a) < 0.05 and abs(var.mean() - 1) < 0.07
    weights_alone = Resample(lambda x: a * x[..., 0, 0], threshold=0.0)
    run(weights_alone, items=20)
    assert (guide.selected >= 1).all() and guide.ess.mean() > 2 * weights_alone.ess.mean()
    # (E w)^2 / E w^2 = exp(-a^2) in closed form, a little more with finite k
    assert math.exp(-(a**2)) < weights_alone.ess.mean() / 1000 < math.exp(-(a**2)) + 0.07


def test_the_normalising_constant_is_kept():
    """The mean of exp(log_weight) over the samples estimates E exp(reward) = exp(a^2 / 2)."""
    out = run(Resample(lambda x: x[..., 0, 0]), items=10)
    assert out.log_weight.double().exp().mean().item() == pytest.approx(math.exp(0.5), rel=0.08)


def test_a_mixture_goes_over_to_the_rewarded_mode():
    """Components at -2 and 2 (std .3, half each) with reward 1.5 on x > 0: mass e^1.5 / (1 + e^1.5) there."""
    law = Mixture(torch.tensor([0.5, 0.5]), torch.tensor([-2.0, 2.0]), torch.tensor([0.3, 0.3]))
    guide = Resample(lambda x: 1.5 * (x[..., 0, 0] > 0).double(), threshold=0.9)
    out = run(guide, law=law, items=5, steps=24)
    w = torch.softmax(out.log_weight.double(), -1)
    got = (w * (out.z[..., 0, 0] > 0)).sum(-1).mean().item()
    assert got == pytest.approx(1 / (1 + math.exp(-1.5)), abs=0.03)
    assert (guide.selected >= 1).all() and (guide.distinct < 1000).all()


def test_copies_go_apart_and_runs_repeat_whatever_the_batch_split():
    def ancestral(**where):
        return run(Resample(lambda x: 3 * x[..., 0, 0], threshold=1.0), k=8, steps=6, step="ancestral", **where)

    whole, again = ancestral(items=3), ancestral(items=3)
    assert torch.equal(whole.z, again.z) and torch.equal(whole.log_weight, again.log_weight)
    alone = ancestral(items=1, first_item=2)
    torch.testing.assert_close(alone.z[0], whole.z[2], rtol=0, atol=1e-5)
    torch.testing.assert_close(alone.log_weight[0], whole.log_weight[2], rtol=0, atol=1e-5)
    for row in whole.z[..., 0, 0]:
        assert len(row.unique()) == 8


def test_only_inside_the_interval():
    looks = []

    def reward(x):
        looks.append(1)
        return x[..., 0, 0]

    run(Resample(reward, interval=(0.2, 0.6)), k=8, steps=8)  # times .5, .375, .25 and the end (.625 is outside)
    assert len(looks) == 4


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="deterministic step ddim"):
        run(Resample(lambda x: x[..., 0, 0]), step="ddim")
    with pytest.raises(ValueError, match="pass seeds"):
        noise = gaussian_noise((1, 1), as_seeds(0, 1, 4))
        guide = Resample(lambda x: x[..., 0, 0])
        sample(UNIT.denoiser(PATH), noise, [1.0, 0.5, 0.2, 0.0], path=PATH, step=noisy(), guides=[guide])
    with pytest.raises(ValueError, match="4 of 4 rewards are not finite"):
        run(Resample(lambda x: x[..., 0, 0] * math.nan), k=4)
    with pytest.raises(ValueError, match=r"shape \(1, 4, 1\); expected one number a sample, \(1, 4\)"):
        run(Resample(lambda x: x[..., 0]), k=4)
    for wrong in ({"temperature": 0.0}, {"threshold": 1.5}, {"interval": (0.5, 0.2)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Resample(lambda x: x[..., 0, 0], **wrong)


def test_a_student_has_weights_and_with_noise_between_jumps_selection():
    """The exact flow map of N(1, 1/4): weights alone with its own jumps, selection with consistency steps; tilt by exp(2 x)
    gives N(1.5, 1/4)."""
    law = Gaussian(torch.ones(1), torch.full((1,), 0.5))

    def jump(z, t, s):
        def std(t):
            return ((1 - t) ** 2 / 4 + t**2) ** 0.5

        return (1 - s) + std(s) / std(t) * (z - (1 - t))

    assert torch.allclose(jump(torch.ones(1), 0.7, 0.0), law.flow(PATH, torch.ones(1), 0.7))
    seeds = as_seeds(0, 5, 400)
    noise = gaussian_noise((1, 1), seeds)
    times = time_grid(PATH, 6)
    for step, threshold in (("flow_map", 0.0), ("consistency", 0.7)):
        guide = Resample(lambda x: 2 * x[..., 0, 0], threshold=threshold)
        out = sample(FlowMap(jump), noise, times, path=PATH, step=STEPS[step].step, guides=[guide], seeds=seeds)
        mean, var = moments(out)
        assert abs(mean.mean() - 1.5) < 0.06 and abs(var.mean() - 0.25) < 0.05
        assert (guide.selected > 0).all() == (threshold > 0)
    with pytest.raises(ValueError, match="deterministic step flow_map"):
        sample(
            FlowMap(jump), noise, times, path=PATH, step=STEPS["flow_map"].step, guides=[Resample(lambda x: x[..., 0, 0])],
            seeds=seeds,
        )  # fmt: skip
