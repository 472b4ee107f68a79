from __future__ import annotations

import math

import pytest
import torch

from seqdiff.guidance import ClassifierFree, EnergyDescent, Infill, groups_known, prefix, weighted
from seqdiff.path import Path, time_grid
from seqdiff.sample import gaussian_noise, sample
from seqdiff.steps import STEPS, flow_map
from seqdiff.testing import Gaussian
from seqdiff.types import FlowMap, as_seeds

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


def test_rescaled_guidance_by_hand():
    """x_c = (0, 2), x_u = 0, weight 3: guided (0, 6) of standard deviation 3, the condition's is 1; at half the rescale the
    factor is (1/3 + 1) / 2. Padding does not count."""
    x_c = torch.tensor([0.0, 2.0, 50.0]).view(1, 1, 3, 1)
    mask = torch.tensor([True, True, False]).view(1, 1, 3)

    def guided(rescale, mask=mask, x_c=x_c):
        guide = ClassifierFree(lambda z, t: torch.zeros_like(z), 3.0, rescale=rescale, mask=mask)
        return guide(lambda z, t: x_c)(torch.zeros_like(x_c), 0.5).flatten()[:2]

    torch.testing.assert_close(guided(0.0), torch.tensor([0.0, 6.0]))
    torch.testing.assert_close(guided(1.0), torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(guided(0.5), torch.tensor([0.0, 4.0]))
    even = torch.full((1, 1, 2, 1), 2.0)
    torch.testing.assert_close(guided(1.0, None, even), torch.tensor([6.0, 6.0]))  # no spread: nothing to rescale
    for wrong in ({"rescale": 1.5}, {"interval": (0.6, 0.4)}, {"weight": math.inf}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ClassifierFree(lambda z, t: z, **{"weight": 2.0, **wrong})


def student(z, t, s):
    return z * (1 + s) / (1 + t)


def draw(guides, times=(1.0, 0.5, 0.0), n=3):
    noise = gaussian_noise((n, 2), as_seeds(0, 2, 4))
    return noise.z, sample(FlowMap(student), noise, times, path=PATH, step=flow_map, guides=guides).z


def test_classifier_free_guidance_of_a_student_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"two end points is not an end point.*Cond\.guidance"):
        draw([ClassifierFree(lambda z, t: z, 2.0)])


def test_energy_guides_a_students_finished_sample_alone():
    def energy(x):
        return (x[..., 0] - 0.1).clamp_min(0).square()

    guide = EnergyDescent(energy, iterations=30)
    z = torch.ones(1, 1, 1, 2)
    assert torch.equal(guide.on_flow_map(FlowMap(student))(z, 0.8, 0.2), student(z, 0.8, 0.2))
    noise, out = draw([guide])
    torch.testing.assert_close(guide.before, energy(noise / 2).sum(-1))
    torch.testing.assert_close(guide.after, energy(out).sum(-1))
    assert guide.before.max() > 0.1 and guide.after.max() < 1e-4 and not guide.kept.any()
    torch.testing.assert_close(out[..., 1], noise[..., 1] / 2)
    with pytest.raises(ValueError, match=r"times end at 0\.2"):
        draw([guide], times=(1.0, 0.2))


def test_infilling_of_a_student_is_exact_and_at_the_right_level_on_the_way():
    seen = []

    def watched(z, t, s):
        seen.append((z, t))
        return student(z, t, s)

    noise = gaussian_noise((5, 2), as_seeds(0, 2, 4))
    known, mask = prefix(torch.randn(2, 1, 2, 2), 5)
    guide = Infill(known, mask, noise.z, PATH)
    out = sample(FlowMap(watched), noise, [1.0, 0.6, 0.3, 0.0], path=PATH, step=flow_map, guides=[guide]).z
    assert (out - known)[mask.expand_as(out)].abs().max().item() == 0.0
    for z, t in seen:
        torch.testing.assert_close(z[:, :, :2], (1 - t) * known[:, :, :2] + t * noise.z[:, :, :2])
    torch.testing.assert_close(out[:, :, 2:], noise.z[:, :, 2:] / 2)


def test_weighted_energies():
    both = weighted([lambda x: x[..., 0], lambda x: x[..., 1]], [2.0, 0.5])
    torch.testing.assert_close(both(torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)), torch.tensor([[[8.0]]]))
    with pytest.raises(ValueError, match="2 energies and 1 weights"):
        weighted([abs, abs], [1.0])
    with pytest.raises(ValueError, match="never raised"):
        weighted([abs], [-1.0])


def test_the_report_is_of_the_finished_sample_and_names_who_kept_the_unguided_version():
    """The second token's energy has a gradient that points uphill: that sample cannot be lowered and stays as it was."""

    def energy(x):
        good = (x[..., 0] - 0.1).clamp_min(0).square()
        return torch.stack([good[:, 0], 1 - 1e-3 * x[:, 1, :, 0] + 2e-3 * x[:, 1, :, 0].detach()], 1)

    guide = EnergyDescent(energy, iterations=20, below=1.0)
    noise = gaussian_noise((1, 1), as_seeds(0, 3, 2))
    law = Gaussian(torch.ones(1), torch.ones(1) * 0.1)
    run = dict(path=PATH, step=STEPS["ab2"].step)
    out = sample(law.denoiser(PATH), noise, [1.0, 0.2, 0.0], guides=[guide], **run).z
    assert guide.kept.tolist() == [[False, True]] * 3
    torch.testing.assert_close(guide.after, energy(out).sum(-1))
    with pytest.raises(ValueError, match=r"nothing would be guided\. Set below=0\.5 or more"):
        sample(law.denoiser(PATH), noise, time_grid(PATH, 2), guides=[EnergyDescent(energy)], **run)
    assert guide.before is not None
    sample(lambda z, t: z, noise, [0.1, 0.05], guides=[guide], **run)
    assert guide.before.max() < 20


def test_what_is_known_of_a_whole():
    z = torch.randn(2, 1, 2, 3)
    known, mask = prefix(z, 4)
    assert torch.equal(known[:, :, :2], z) and mask[:, :, :2].all() and not mask[:, :, 2:].any()
    with pytest.raises(ValueError, match="2 tokens and the whole 2"):
        prefix(z, 2)
    group = torch.tensor([[0, 0, 1], [1, 2, 0]])
    _, mask = groups_known(torch.randn(2, 1, 3, 2), group, [1])
    assert mask[:, 0, :, 0].tolist() == [[False, False, True], [True, False, False]]
    with pytest.raises(ValueError, match=r"items \[0\] have no token of group 2"):
        groups_known(torch.randn(2, 1, 3, 2), group, [2])
    noise = torch.zeros(2, 4, 3, 2)
    with pytest.raises(ValueError, match="known has shape"):
        Infill(torch.zeros(2, 3, 2), torch.zeros(2, 1, 3, 2, dtype=torch.bool), noise, PATH)
    with pytest.raises(ValueError, match="not finite"):
        Infill(torch.full((2, 1, 3, 2), math.nan), torch.ones(2, 1, 3, 2, dtype=torch.bool), noise, PATH)


def test_guidance_and_energy_and_infilling_compose():
    """Guided Gaussians N(1, 1) over N(0, 1), an energy and a known part in one call; more guidance, higher mean."""
    noise = gaussian_noise((3, 2), as_seeds(0, 2, 64))
    known, mask = prefix(torch.full((2, 1, 1, 2), 0.25), 3)
    one, zero = (Gaussian(torch.full((2,), m), torch.ones(2)).denoiser(PATH) for m in (1.0, 0.0))
    means = []
    for weight in (1.0, 2.0):
        energy = EnergyDescent(lambda x: (x[..., 1] - 0.5).clamp_min(0).square(), below=1.0)
        guides = [ClassifierFree(zero, weight), energy, Infill(known, mask, noise.z, PATH)]
        out = sample(one, noise, time_grid(PATH, 4), path=PATH, step=STEPS["dpmpp_2m"].step, guides=guides).z
        assert (out - known)[mask.expand_as(out)].abs().max().item() == 0.0
        assert energy.after.mean() < 0.5 * energy.before.mean()
        means.append(out[:, :, 1:, 0].mean().item())
    assert means[0] == pytest.approx(1.0, abs=0.1) and means[1] == pytest.approx(2.0, abs=0.1)


def test_descent_through_the_net_takes_along_what_is_correlated():
    """x2 given x1 = 2 of a Gaussian with correlation .9: the truth is 1.8, with standard deviation .436. On x0 alone the wish moves
    x1, and x2 follows by half; along J^T grad both move in the law's proportion."""
    cov = torch.tensor([[1.0, 0.9], [0.9, 1.0]])

    def denoiser(z, t):
        a, s = PATH.alpha(t), PATH.sigma(t)
        return z @ (a * cov @ torch.linalg.inv(a * a * cov + s * s * torch.eye(2))).T

    def mean_of_second(through_net):
        guide = EnergyDescent(
            lambda x: (x[..., 0] - 2).square(), iterations=4, rate=2.0, max_step=9.0, below=1.0, through_net=through_net
        )
        noise = gaussian_noise((1, 2), as_seeds(0, 1, 1000))
        with torch.no_grad():
            out = sample(denoiser, noise, time_grid(PATH, 32), path=PATH, step=STEPS["ddim"].step, guides=[guide]).z
        assert (out[..., 0] - 2).abs().max() < 1e-3
        return out[..., 1].mean().item(), out[..., 1].std().item()

    mean, std = mean_of_second(True)
    assert abs(mean - 1.8) < 0.06 and abs(std - 0.436) < 0.06
    assert mean_of_second(False)[0] < 1.2
