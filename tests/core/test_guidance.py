from __future__ import annotations

import torch

from seqdiff.guidance import ClassifierFree, EnergyDescent, Infill
from seqdiff.path import Path, time_grid
from seqdiff.sample import gaussian_noise, sample
from seqdiff.steps import STEPS
from seqdiff.testing import Gaussian
from seqdiff.types import as_seeds

PATH = Path()


def test_guidance_is_the_extrapolation_and_one_is_off():
    calls = []

    def unconditional(z, t):
        calls.append(t)
        return torch.zeros_like(z)

    guided = ClassifierFree(unconditional, 3.0)(lambda z, t: torch.ones_like(z))
    assert (guided(torch.zeros(2), 0.5) == 3).all()
    off = ClassifierFree(unconditional, 1.0)(lambda z, t: torch.ones_like(z))
    calls.clear()
    assert (off(torch.zeros(2), 0.5) == 1).all() and not calls
    late = ClassifierFree(unconditional, 3.0, interval=(0.2, 0.8))(lambda z, t: torch.ones_like(z))
    assert (late(torch.zeros(2), 0.9) == 1).all() and not calls


def test_infilling_keeps_the_known_part_exactly():
    noise = gaussian_noise((5, 2), as_seeds(0, 2, 8))
    known = torch.randn(2, 1, 5, 2)
    mask = torch.zeros(2, 1, 5, 2, dtype=torch.bool)
    mask[:, :, :2] = True
    seen = []

    def denoiser(z, t):
        seen.append((z, t))
        return Gaussian(torch.zeros(2), torch.ones(2)).denoiser(PATH)(z, t)

    guide = Infill(known, mask, noise.z, PATH)
    out = sample(denoiser, noise, time_grid(PATH, 4), path=PATH, step=STEPS["dpmpp_2m"].step, guides=[guide]).z
    assert (out - known)[mask.expand_as(out)].abs().max().item() == 0.0
    for z, t in seen:  # at the right noise level on the way
        expect = (1 - t) * known + t * noise.z
        torch.testing.assert_close(z[mask.expand_as(z)], expect[mask.expand_as(z)], rtol=0, atol=1e-6)
    assert out[:, :, 2:].std() > 0.5


def test_infilling_of_a_correlated_pair_moves_towards_the_conditional_mean():
    """x2 given x1 = 2 of a Gaussian with correlation .9: the truth is 1.8; replacement alone is known to fall short of it
    (Wu et al. 2023, section 2.2), here at 0.86: the docstring says so, and this holds the figure."""
    rho = 0.9
    cov = torch.tensor([[1.0, rho], [rho, 1.0]])

    def denoiser(z, t):
        a, s = PATH.alpha(t), PATH.sigma(t)
        gain = a * cov @ torch.linalg.inv(a * a * cov + s * s * torch.eye(2))
        return z @ gain.T

    noise = gaussian_noise((1, 2), as_seeds(0, 1, 1000))
    mask = torch.tensor([True, False]).view(1, 1, 1, 2)
    known = torch.tensor([2.0, 0.0]).view(1, 1, 1, 2)
    out = sample(
        denoiser,
        noise,
        time_grid(PATH, 64),
        path=PATH,
        step=STEPS["ddim"].step,
        guides=[Infill(known, mask, noise.z, PATH)],
    ).z
    assert (out[..., 0] == 2.0).all()
    assert abs(out[..., 1].mean().item() - 0.86) < 0.1


def test_descent_reaches_a_constraint_and_leaves_the_rest_alone():
    """Energy of a token = squared excess of its first channel over 1: Polyak's step lands on the constraint."""

    def energy(x):
        return (x[..., 0] - 1).clamp_min(0).square()

    x = torch.tensor([[[[1.5, 0.3], [0.2, 9.0]], [[0.9, 0.0], [1.2, 0.0]]]])  # 1 item, 2 samples, 2 tokens
    guide = EnergyDescent(energy, iterations=30, max_step=0.1)
    out = guide.descend(x)
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([1.0, 0.3]), rtol=0, atol=1e-3)
    torch.testing.assert_close(out[0, 1, 1], torch.tensor([1.0, 0.0]), rtol=0, atol=1e-3)
    assert torch.equal(out[0, 0, 1], x[0, 0, 1]) and torch.equal(out[0, 1, 0], x[0, 1, 0])
    torch.testing.assert_close(guide.before, torch.tensor([[0.25, 0.04]]))
    assert guide.after.max() < 1e-5


def test_one_move_is_bounded_and_only_near_the_end():
    guide = EnergyDescent(lambda x: x.square().sum(-1), iterations=1, max_step=0.1, below=0.3)
    z = torch.full((1, 1, 1, 1), 5.0)
    guided = guide(lambda z, t: z)
    torch.testing.assert_close(guided(z, 0.2), torch.full((1, 1, 1, 1), 4.9))
    assert torch.equal(guided(z, 0.5), z)


def test_a_sample_that_got_worse_keeps_its_unguided_version():
    def rising(x):  # its gradient points the wrong way
        return x.detach().abs().sum(-1) - 0.0 * x.sum(-1) - (x - x.detach()).sum(-1)

    x = torch.tensor([[[[2.0]]]])
    guide = EnergyDescent(rising, iterations=3)
    assert torch.equal(guide.descend(x), x)
    assert torch.equal(guide.before, guide.after)


def test_descent_works_under_inference_mode():
    with torch.inference_mode():
        x = torch.full((1, 1, 1, 1), 2.0)
        out = EnergyDescent(lambda v: (v[..., 0] - 1).clamp_min(0).square(), iterations=40)(lambda z, t: z)(x, 0.1)
    assert abs(out.item() - 1) < 1e-3
