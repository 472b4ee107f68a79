from __future__ import annotations

import math

import pytest
import torch

from seqdiff.guidance import EnergyDescent, Infill
from seqdiff.path import Path, time_grid
from seqdiff.projection import AllOf, Box, Equality, InData, Projection, Projector
from seqdiff.sample import gaussian_noise, sample
from seqdiff.steps import STEPS, flow_map
from seqdiff.testing import Gaussian
from seqdiff.types import FlowMap, as_seeds

PATH = Path()
LAW = Gaussian(torch.zeros(2), torch.ones(2))


def run(guides, steps=4, n=3, step="ddim"):
    noise = gaussian_noise((n, 2), as_seeds(0, 2, 5))
    return sample(LAW.denoiser(PATH), noise, time_grid(PATH, steps), path=PATH, step=STEPS[step].step, guides=guides).z


def test_equality_is_the_least_squares_projection_item_by_item():
    g = torch.Generator().manual_seed(0)
    matrix = torch.randn(2, 3, 6, generator=g, dtype=torch.float64)
    matrix[1, 2] = matrix[1, 0] + matrix[1, 1]  # one equation too many, not contradicting
    value = torch.randn(2, 3, generator=g, dtype=torch.float64)
    value[1, 2] = value[1, 0] + value[1, 1]
    x = torch.randn(2, 4, 3, 2, generator=g, dtype=torch.float64)
    out = Equality(matrix, value).project(x)
    for i in range(2):
        rows = matrix[i, :2] if i else matrix[i]
        right = value[i, : len(rows)]
        for j in range(4):
            kkt = torch.cat([
                torch.cat([torch.eye(6), rows.T], 1), torch.cat([rows, torch.zeros(len(rows), len(rows))], 1)
            ])  # fmt: skip
            want = torch.linalg.solve(kkt, torch.cat([x[i, j].flatten(), right]))[:6]
            torch.testing.assert_close(out[i, j].flatten(), want)
    assert Equality(matrix, value).violation(out).max() < 1e-12
    with pytest.raises(ValueError, match=r"equations of items \[1\] contradict"):
        Equality(matrix, value + torch.tensor([[0.0, 0, 0], [0, 0, 1]]))
    with pytest.raises(ValueError, match=r"asks for \(2, 3\)"):
        Equality(matrix, value[:, :2])


def test_equality_from_an_affine_function_fixes_a_first_point():
    basis = torch.randn(2, 5)

    def first_point(z):  # position 0 of token 0, metres
        return (z[..., 0, :] @ basis)[..., :1] + 3.0

    value = torch.tensor([[4.0], [-1.0]])
    guide = Projection(Equality.of(first_point, (2, 3, 2), value))
    out = run([guide])
    torch.testing.assert_close(first_point(out), value[:, None].expand(2, 5, 1), rtol=0, atol=2e-6)
    assert guide.before.max() > 0.5 and guide.after.max() < 2e-6 and guide.moved.max() < 1e-5
    with pytest.raises(ValueError, match="not affine"):
        Equality.of(lambda z: z[..., 0, :1].square(), (2, 3, 2), value)


def test_a_run_with_an_equality_has_the_conditional_law():
    """x1 + x2 = 1 of a standard normal pair: the difference stays N(0, 2), and sound at every t, unlike replacement."""
    noise = gaussian_noise((1, 2), as_seeds(1, 1, 1000))
    equality = Equality(torch.ones(1, 1, 2), torch.ones(1, 1))
    out = sample(
        LAW.denoiser(PATH),
        noise,
        time_grid(PATH, 64),
        path=PATH,
        step=STEPS["heun"].step,
        guides=[Projection(equality)],
    ).z[0, :, 0]
    assert (out.sum(-1) - 1).abs().max() < 1e-6
    assert abs((out[:, 0] - out[:, 1]).var().item() - 2) < 0.3  # 3 standard errors of a variance of 1000


def test_a_box_is_exact_and_padding_has_no_bounds():
    high = torch.tensor([0.3, math.inf]).expand(1, 1, 3, 2).clone()
    high[:, :, 2] = math.inf  # padding
    box = Box(-high, high)
    x = torch.tensor([[[[1.0, 9.0], [-0.2, 0.0], [7.0, 0.0]]]])
    torch.testing.assert_close(box.project(x), torch.tensor([[[[0.3, 9.0], [-0.2, 0.0], [7.0, 0.0]]]]))
    torch.testing.assert_close(box.violation(x), torch.tensor([[0.7]]))
    guide = Projection(box)
    out = run([guide])
    assert guide.after.max() == 0.0 and (guide.before > 0).any()
    assert out[:, :, :2, 0].abs().max() <= 0.3 and out[:, :, 2].abs().max() > 0.5
    with pytest.raises(ValueError, match="low > high"):
        Box(high, -high)


def test_dykstra_finds_the_nearest_point_of_an_intersection():
    """Box [0, 1]^3 and sum = 1: the projection onto the simplex of (1.2, 0.4, -0.5) is (0.9, 0.1, 0), by hand."""
    x = torch.tensor([1.2, 0.4, -0.5], dtype=torch.float64).view(1, 1, 3, 1)
    both = AllOf([Box(torch.zeros(()), torch.ones(())), Equality(torch.ones(1, 1, 3), torch.ones(1, 1))], rounds=60)
    out = both.project(x)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.9, 0.1, 0.0], dtype=torch.float64), rtol=0, atol=1e-6)
    assert both.violation(out).item() < 1e-6
    one = Box(torch.zeros(()), torch.ones(())).project(x)
    assert both.violation(one).item() == pytest.approx(0.4)  # (1, .4, 0) sums to 1.4


def test_a_callable_in_data_space():
    """Unit circle in data 2 x + 1: decoded samples end on it, what the codec does is undone."""
    circle = Projector(lambda y: y / y.norm(dim=-1, keepdim=True).clamp_min(1e-9))
    constraint = InData(lambda z: 2 * z + 1, lambda y: (y - 1) / 2, circle, rounds=1)
    guide = Projection(constraint, below=0.5)
    out = run([guide])
    torch.testing.assert_close((2 * out + 1).norm(dim=-1), torch.ones(2, 5, 3), rtol=0, atol=1e-5)
    assert guide.after.max() < 1e-6 < guide.before.max()


def test_a_truncated_codec_reports_what_remains():
    """The codec writes multiples of (1, 1) only; the box asks for y1 <= 1 and y2 >= 2: no multiple does, 0.5 remains."""
    box = Box(torch.tensor([-math.inf, 2.0]), torch.tensor([1.0, math.inf]))
    line = InData(lambda z: z.expand(*z.shape[:-1], 2), lambda y: y.mean(-1, keepdim=True), box, rounds=50)
    out = line.project(torch.full((1, 1, 1, 1), 4.0))
    assert out.item() == pytest.approx(1.5, abs=1e-4) and line.violation(out).item() == pytest.approx(0.5, abs=1e-4)


def test_projection_of_a_student_touches_its_finished_sample_alone():
    student = FlowMap(lambda z, t, s: z * (1 + s))
    box = Box(torch.tensor(-0.5), torch.tensor(0.5))
    guide = Projection(box)
    z = torch.full((1, 1, 1, 1), 3.0)
    assert torch.equal(guide.on_flow_map(student)(z, 0.8, 0.4), student(z, 0.8, 0.4))
    noise = gaussian_noise((3, 2), as_seeds(0, 2, 5))
    out = sample(student, noise, [1.0, 0.5, 0.0], path=PATH, step=flow_map, guides=[guide]).z
    torch.testing.assert_close(out, (1.5 * noise.z).clamp(-0.5, 0.5))
    torch.testing.assert_close(guide.before, ((1.5 * noise.z).abs().flatten(2).amax(-1) - 0.5).clamp_min(0))
    assert guide.after.max() == 0.0


def test_several_guides_in_one_call():
    """Energy, box and known part together: the known part exact to 0.0, the box held, the energy lower than before."""
    noise = gaussian_noise((3, 2), as_seeds(0, 2, 16))
    mask = torch.zeros(2, 1, 3, 2, dtype=torch.bool)
    mask[:, :, 0] = True
    known = torch.full((2, 1, 3, 2), 0.37)
    energy = EnergyDescent(lambda x: (x[..., 0] - 0.1).clamp_min(0).square(), below=1.0, max_step=0.3)
    box = Projection(Box(torch.tensor(-0.8), torch.tensor(0.8)))
    guides = [energy, box, Infill(known, mask, noise.z, PATH)]
    for name in ("ddim", "heun", "dpmpp_2m", "ab2"):
        out = sample(LAW.denoiser(PATH), noise, time_grid(PATH, 4), path=PATH, step=STEPS[name].step, guides=guides).z
        assert (out - known)[mask.expand_as(out)].abs().max().item() == 0.0
        assert box.after.max() == 0.0
        assert energy.after.mean() < energy.before.mean()
        torch.testing.assert_close(energy.after, (out[..., 0] - 0.1).clamp_min(0).square().sum(-1))
