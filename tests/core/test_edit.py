from __future__ import annotations

import math

import pytest
import torch

from seqdiff.edit import Direction, Sampling, fit_direction, interpolate, invert, move, redraw
from seqdiff.path import Path, time_grid
from seqdiff.resampling import Resample
from seqdiff.sample import gaussian_noise
from seqdiff.steps import STEPS
from seqdiff.testing import Gaussian, Mixture
from seqdiff.types import Draw, FlowMap, as_seeds

RHO = 0.9
COV = torch.tensor([[1.0, RHO], [RHO, 1.0]])


def pair(path):
    """Denoiser of a Gaussian pair (d = 2) with correlation RHO."""

    def denoise(z, t):
        a, s = path.alpha(t), path.sigma(t)
        return z @ (a * torch.linalg.solve(a * a * COV + s * s * torch.eye(2), COV))

    return denoise


def sampling(step="dpmpp_2m", steps=8, **more):
    return Sampling(pair(Path()), Path(), STEPS[step].step, time_grid(Path(), steps), **more)


def test_interpolated_noise_is_standard_normal_in_any_dimension():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1, 20000, 1, 2, generator=g)
    for w in (0.0, 0.3, 0.5, 1.0):
        z = interpolate(a, b, w).view(-1, 2)
        assert abs(z.mean()) < 0.02 and (torch.cov(z.T) - torch.eye(2)).abs().max() < 0.03
        square = z.square().sum(-1)  # chi^2 with 2 degrees of freedom: mean 2, variance 4
        assert abs(square.mean() - 2) < 0.06 and abs(square.var() - 4) < 0.35
    related = 0.6 * a + 0.8 * b
    half = interpolate(a, related, 0.5, correlation=0.6).flatten()
    assert abs(half.var() - 1) < 0.02
    assert abs(interpolate(a, related, 0.5).var() - 1.6) < 0.04  # what a wrong correlation costs: 1 + rho
    assert interpolate(a, b, 0.5, "linear").var().item() == pytest.approx(0.5, abs=0.02)


def test_interpolation_meets_its_ends_and_takes_a_row_of_weights():
    a, b = torch.randn(2, 1, 1, 3, 2)
    w = torch.tensor([[0.0, 0.5, 1.0]])
    out = interpolate(a, b, w)
    torch.testing.assert_close(out, torch.cat([a, (a + b) / math.sqrt(2), b], 1))
    torch.testing.assert_close(interpolate(a, a, 0.4, correlation=1.0), a)
    with pytest.raises(ValueError, match="only the number of samples"):
        interpolate(a, b[:, :, :2], 0.5)
    with pytest.raises(ValueError, match="expected latents b k n d"):
        interpolate(a[0], b[0], 0.5)
    with pytest.raises(ValueError, match="correlation is -1"):
        interpolate(a, b, 0.5, correlation=-1.0)


def test_the_direction_between_two_gaussians():
    """Means +-delta / 2, common covariance: direction delta / |delta|, scale |delta|, accuracy Phi(Mahalanobis / 2)."""
    g = torch.Generator().manual_seed(0)
    delta = torch.tensor([[1.2, 0.0], [0.0, -0.9]])
    chol = torch.eye(4) + 0.4 * torch.tril(torch.ones(4, 4), -1)
    label = torch.arange(4000) % 2 == 0
    label = label[torch.randperm(4000, generator=g)]
    z = (torch.randn(4000, 4, generator=g) @ chol.T).view(-1, 2, 2) + (label.double() - 0.5)[:, None, None] * delta
    got = fit_direction(z, label, ridge=1e-3)
    assert (got.unit * delta).sum() / delta.norm() > 0.995
    assert got.scale == pytest.approx(float(delta.norm()), abs=0.1)
    far = torch.linalg.solve_triangular(chol, delta.view(4, 1), upper=False).norm()
    assert got.score == pytest.approx(float(torch.special.ndtr(far / 2)), abs=0.02) and 0.5 <= got.chance < 0.52
    noise = fit_direction(z, label[torch.randperm(4000, generator=g)])
    assert abs(noise.score - 0.5) < 0.04
    moved = move(z[None], got, 1.0)
    torch.testing.assert_close((moved - z[None])[0].mean(0), delta.double(), rtol=0, atol=0.1)


def test_the_direction_of_a_number():
    """label = 2 z_1 + noise of variance 1 for white z: Cov / Var = (2, 0) / 5, R^2 = 4 / 5."""
    g = torch.Generator().manual_seed(1)
    z = torch.randn(5000, 1, 2, generator=g)
    label = 2 * z[:, 0, 0] + torch.randn(5000, generator=g)
    got = fit_direction(z, label, ridge=1e-3)
    assert (
        got.unit[0, 0] > 0.998
        and got.scale == pytest.approx(0.4, abs=0.02)
        and got.score == pytest.approx(0.8, abs=0.02)
    )
    with pytest.raises(ValueError, match="one label for each n d"):
        fit_direction(z, label[:-1])
    with pytest.raises(ValueError, match="too few"):
        fit_direction(z, torch.zeros(5000, dtype=torch.bool))
    with pytest.raises(ValueError, match="not finite"):
        fit_direction(z, label * math.nan)


def test_moving_and_denoising_brings_a_sample_back_to_the_law():
    """Moved along (1, -1), against the correlation, a sample leaves the law (x1 - x2 has standard deviation .45); noised to .6 and
    denoised it is back within it, and what the move did along is kept in part."""
    g = torch.Generator().manual_seed(0)
    direction = Direction(torch.tensor([[1.0, 0.0]]), 1.0, 1.0, 0.5)
    z = (torch.randn(1, 2000, 1, 2, generator=g).double() @ torch.linalg.cholesky(COV.double()).T).float()
    noise = torch.randn(z.shape, generator=g)
    plain = move(z, direction, 2.0)
    again = Sampling(pair(Path()), Path(), STEPS["ddim"].step, [0.6 * (1 - i / 32) for i in range(33)])
    back = move(z, direction, 2.0, noise=noise, again=again)
    gap = plain[..., 0] - plain[..., 1], back[..., 0] - back[..., 1]
    assert gap[0].mean().item() == pytest.approx(2.0, abs=0.05) and abs(gap[1].mean()) < 0.75
    assert back[..., 1].mean() > 0.4  # the other channel followed
    with pytest.raises(ValueError, match="give both"):
        move(z, direction, 1.0, noise=noise)
    with pytest.raises(ValueError, match="pure noise"):
        move(z, direction, 1.0, noise=noise, again=sampling())
    with pytest.raises(ValueError, match="those tokens alone"):
        move(z.view(1, 1000, 2, 2), direction, 1.0)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_inversion_is_the_flow_backwards(kind):
    path = Path(kind)
    law = Gaussian(torch.tensor([1.0]).double(), torch.tensor([0.4]).double())
    z0 = torch.linspace(0, 2, 9, dtype=torch.float64).view(1, 1, 9, 1)
    noise = invert(law.denoiser(path), path, z0, time_grid(path, 32))
    torch.testing.assert_close(noise, (z0 - 1) / 0.4, rtol=0, atol=1e-5)
    errors = [
        (invert(law.denoiser(path), path, z0, time_grid(path, n)) - (z0 - 1) / 0.4).abs().max().item() for n in (8, 16)
    ]
    assert math.log2(errors[0] / errors[1]) > 3.4  # order 4


def test_inversion_then_sampling_returns_the_sample():
    path = Path()
    law = Mixture(torch.tensor([0.4, 0.6]), torch.tensor([-1.0, 1.0]), torch.tensor([0.3, 0.5]))
    z0 = torch.linspace(-1.6, 2, 13, dtype=torch.float64).view(1, 1, 13, 1)
    noise = invert(law.denoiser(path), path, z0, time_grid(path, 64))
    torch.testing.assert_close(law.flow(path, noise, 1.0), z0, rtol=0, atol=2e-3)
    again = Sampling(law.denoiser(path), path, STEPS["heun"].step, time_grid(path, 64))
    torch.testing.assert_close(again.run(Draw(noise, torch.zeros(1, 1))).z, z0, rtol=0, atol=0.01)
    with pytest.raises(ValueError, match="instantaneous field"):
        invert(FlowMap(lambda z, t, s: z), path, z0, time_grid(path, 4))
    with pytest.raises(ValueError, match="decrease strictly"):
        invert(law.denoiser(path), path, z0, [0.0, 1.0])


@pytest.mark.parametrize("step", ["ddim", "heun", "dpmpp_2m", "ab2", "ancestral"])
def test_redrawing_an_edit_of_nothing_changes_nothing(step):
    seeds = as_seeds(0, 2, 4)
    start = gaussian_noise((3, 2), seeds)
    again = sampling(step, seeds=seeds)
    plain = again.run(start)
    mask = torch.zeros(2, 1, 3, 2, dtype=torch.bool)
    mask[..., 0] = True
    original, edited = redraw(again, start, plain.z, mask)
    assert torch.equal(original.z, plain.z) and torch.equal(edited.z, plain.z)


def test_redrawing_keeps_the_edit_exactly_and_the_rest_follows():
    start = gaussian_noise((2, 2), as_seeds(0, 1, 6))
    mask = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    mask[:, :, 0, 0] = True  # first channel of the first token
    again = sampling("ddim", steps=64)
    plain = again.run(start).z
    _, edited = redraw(again, start, plain + 1.0, mask)
    change = edited.z - plain
    assert torch.equal(edited.z[..., 0, 0], plain[..., 0, 0] + 1.0)
    assert torch.equal(edited.z[:, :, 1], plain[:, :, 1])  # the other token does not depend on it
    rest = change[..., 0, 1]  # linear model: the same answer for each sample, towards rho
    assert 0.3 < rest.mean() < RHO and rest.std() < 1e-4
    with pytest.raises(ValueError, match="mask has shape"):
        redraw(again, start, plain, mask[:, :, :1])
    with pytest.raises(ValueError, match="Resample selects among the samples"):
        redraw(sampling(guides=[Resample(lambda x: x[..., 0, 0])]), start, plain, mask)


def test_redrawing_a_student():
    start = gaussian_noise((2, 2), as_seeds(0, 1, 3))
    again = Sampling(
        FlowMap(lambda z, t, s: z - (t - s) * z.sum(-1, keepdim=True)), Path(), STEPS["flow_map"].step, [1.0, 0.5, 0.0]
    )
    mask = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    mask[..., 0] = True
    plain = again.run(start).z
    assert torch.equal(redraw(again, start, plain, mask)[1].z, plain)
    edited = redraw(again, start, plain + 1.0, mask)[1].z
    # z of the known channel is 0.5 larger at t = .5, where the other one loses half of it
    torch.testing.assert_close(edited - plain, torch.tensor([1.0, -0.25]).expand_as(plain))
