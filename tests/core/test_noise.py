from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
import torch

from seqdiff.noise import NOISE, find_noise, fresh_noise, gaussian_noise, quantiser, sobol_noise
from seqdiff.types import as_seeds

SOURCES = list(NOISE)


@pytest.mark.parametrize("name", SOURCES)
def test_bit_equal_in_any_split_over_items_and_under_padding(name):
    whole = NOISE[name]((7, 3), as_seeds(5, 6, 4))
    for first, count in ((0, 2), (2, 3), (5, 1)):
        part = NOISE[name]((7, 3), as_seeds(5, count, 4, first_item=first))
        assert torch.equal(whole.z[first : first + count], part.z)
        assert torch.equal(whole.log_weight[first : first + count], part.log_weight)
    padded = NOISE[name]((12, 3), as_seeds(5, 6, 4)).z
    assert torch.equal(padded[:, :, :7], whole.z)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 3, 2), (1, 7, 1, 1)])
def test_any_size_works_and_temperature_scales(name, shape):
    b, k, n, d = shape
    seeds = as_seeds(0, b, k)
    draw = NOISE[name]((n, d), seeds, 1.0)
    assert draw.z.shape == shape and torch.isfinite(draw.z).all() and draw.z.dtype == torch.float32
    assert torch.equal(NOISE[name]((n, d), seeds, 0.5).z, 0.5 * draw.z)
    assert (NOISE[name]((n, d), seeds, 0.0).z == 0).all()
    with pytest.raises(ValueError, match="temperature"):
        NOISE[name]((n, d), seeds, -1.0)


@pytest.mark.parametrize("name", SOURCES)
def test_masses_sum_to_one(name):
    draw = NOISE[name]((2, 2), as_seeds(0, 3, 12))
    torch.testing.assert_close((draw.log_weight.exp() / 12).sum(1), torch.ones(3))
    if name != "quantised":
        assert (draw.log_weight == 0).all()


@pytest.mark.parametrize("name", ["gaussian", "antithetic", "sobol"])
def test_each_sample_by_itself_is_standard_normal(name):
    z = (
        NOISE[name]((1, 2), as_seeds(3, 2500, 2)).z[:, 1].flatten()
    )  # the second of each item: never twice the same seed
    assert z.mean().item() == pytest.approx(0, abs=0.045)
    assert z.var().item() == pytest.approx(1, abs=0.06)
    assert (z.abs() > 1.96).float().mean().item() == pytest.approx(0.05, abs=0.01)


@lru_cache
def drawn(name: str, k: int, items: int):
    return NOISE[name]((1, 2), as_seeds(7, items, k))


def spread(name: str, f, k: int = 16, items: int = 150) -> tuple[float, float]:
    """Mean and standard deviation over items of the weighted mean of f over an item's k samples."""
    draw = drawn(name, k, items)
    mean = (f(draw.z[:, :, 0].double()) * draw.log_weight.double().exp()).mean(1)
    return mean.mean().item(), mean.std().item()


def test_gaussian_expectations_with_less_variance():
    """E z = 0, E z^2 = 1, E e^z = sqrt(e), E max(x, y) = 1 / sqrt(pi), each by 16 samples an item."""
    first = lambda z: z[..., 0]  # noqa: E731
    cases = {
        "linear": (first, 0.0),
        "square": (lambda z: first(z) ** 2, 1.0),
        "exp": (lambda z: first(z).exp(), math.exp(0.5)),
        "max": (lambda z: z.amax(-1), 1 / math.sqrt(math.pi)),
    }
    deviation = {}
    for case, (f, truth) in cases.items():
        for name in ("gaussian", "antithetic", "sobol"):
            mean, std = spread(name, f)
            assert mean == pytest.approx(truth, abs=4 * std / math.sqrt(150) + 1e-6), (case, name)
            deviation[case, name] = std
    assert deviation["linear", "antithetic"] < 1e-6  # odd: exact
    assert deviation["square", "antithetic"] == pytest.approx(deviation["square", "gaussian"] * math.sqrt(2), rel=0.3)
    for case in cases:
        assert deviation[case, "sobol"] < 0.6 * deviation[case, "gaussian"], (case, deviation)
    # along the quantised channel there is no chance at all: exact for what is linear, short by the cells' spread for squares
    mean, std = spread("quantised", first)
    assert abs(mean) < 1e-6 and std < 1e-6
    assert spread("quantised", cases["square"][0]) == pytest.approx(
        (1 - 0.0095, 0), abs=2e-4
    )  # distortion at k = 16, Max 1960
    assert spread("quantised", cases["exp"][0]) == pytest.approx((math.exp(0.5), 0), abs=0.02)


def test_quantiser_against_published_tables():
    """Max 1960, table I: two points at +-0.7980, four at +-0.4528 and +-1.510, distortion 0.3634 and 0.1175."""
    two, four = quantiser(2), quantiser(4)
    assert two[0] == pytest.approx([-0.7979, 0.7979], abs=1e-4) and two[1] == pytest.approx([0.5, 0.5])
    assert four[0] == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=5e-4)
    for (points, mass), distortion in ((two, 0.3634), (four, 0.1175)):
        assert 1 - (mass * points**2).sum() == pytest.approx(
            distortion, abs=1e-4
        )  # cells' means: E q^2 = 1 - distortion
    points, mass = quantiser(64)
    assert (np.diff(points) > 0).all() and mass.min() > 0 and mass.sum() == pytest.approx(1, abs=1e-15)
    assert quantiser(1) == (pytest.approx([0.0]), pytest.approx([1.0]))


def test_sobol_points_of_an_item_are_a_net():
    """Sixteen points: one in each sixteenth along every axis, one in each of 4 x 4 boxes of the first two (a (0, 4, 2)-net)."""
    u = torch.special.ndtr(sobol_noise((3, 2), as_seeds(0, 3, 16)).z.double()).flatten(2)  # b 16 6
    assert (torch.sort((u * 16).floor(), dim=1).values == torch.arange(16.0)[None, :, None]).all()
    boxes = (u[..., 0] * 4).floor() * 4 + (u[..., 1] * 4).floor()
    assert (torch.sort(boxes, dim=1).values == torch.arange(16.0)).all()
    assert not torch.equal(u[0], u[1])  # items are scrambled each by itself


def test_sobol_refuses_more_dimensions_than_are_known():
    with pytest.raises(ValueError, match="21201"):
        sobol_noise((6000, 4), as_seeds(0, 1, 2))


def test_antithetic_pairs():
    z = NOISE["antithetic"]((3, 2), as_seeds(0, 2, 5)).z
    assert torch.equal(z[:, 1], -z[:, 0]) and torch.equal(z[:, 3], -z[:, 2])
    assert torch.equal(z, torch.where(torch.tensor([True, False, True, False, True])[None, :, None, None],
                                      gaussian_noise((3, 2), as_seeds(0, 2, 5)).z, z))  # fmt: skip


def test_fresh_noise_is_new_in_each_step_and_the_same_alone_and_in_a_batch():
    seeds, z = as_seeds(2, 3, 4), torch.zeros(3, 4, 20, 5)
    steps = [gaussian_noise((20, 5), seeds).z, *(fresh_noise(z, seeds, i, "x") for i in range(3))]
    rows = torch.stack(steps).flatten(3).flatten(0, 2)
    corr = torch.corrcoef(rows) - torch.eye(len(rows))
    assert corr.abs().max() < 0.5  # 100 numbers each
    alone = fresh_noise(z[1:2, 2:3], seeds[1:2, 2:3], 1, "x")
    assert torch.equal(alone, steps[2][1:2, 2:3])
    assert fresh_noise(z.double(), seeds, 0, "x").dtype == torch.float64


def test_fresh_noise_without_seeds_is_refused():
    z = torch.zeros(2, 3, 1, 1)
    with pytest.raises(ValueError, match="ancestral draws fresh noise and got seeds: none"):
        fresh_noise(z, None, 0, "ancestral")
    with pytest.raises(ValueError, match=r"expected one a sample, shape \(2, 3\)"):
        fresh_noise(z, as_seeds(0, 2, 4), 0, "ancestral")


def test_unknown_source_lists_the_choices():
    with pytest.raises(ValueError, match="sobol"):
        find_noise("white")
