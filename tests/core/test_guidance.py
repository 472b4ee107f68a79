from __future__ import annotations

import torch

from seqdiff.guidance import ClassifierFree, Infill
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
