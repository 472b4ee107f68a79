from __future__ import annotations

import pytest
import torch

from seqdiff.sample import gaussian_noise
from seqdiff.types import as_seeds


def test_noise_is_bit_equal_alone_in_any_split_and_under_padding():
    whole = gaussian_noise((7, 3), as_seeds(5, 6, 4)).z
    alone = gaussian_noise((7, 3), as_seeds(5, 1, 1, first_item=3)).z
    assert torch.equal(whole[3:4, :1], alone)
    padded = gaussian_noise((12, 3), as_seeds(5, 6, 4)).z
    assert torch.equal(padded[:, :, :7], whole)


def test_samples_items_and_seeds_differ():
    z = gaussian_noise((50, 2), as_seeds(0, 2, 2)).z.flatten(2)
    other = gaussian_noise((50, 2), as_seeds(1, 2, 2)).z.flatten(2)
    rows = torch.cat([z.flatten(0, 1), other.flatten(0, 1)])
    corr = torch.corrcoef(rows) - torch.eye(8)
    assert corr.abs().max() < 0.4


def test_noise_is_standard_normal():
    z = gaussian_noise((10, 10), as_seeds(3, 20, 50)).z
    assert z.mean().item() == pytest.approx(0, abs=0.01)
    assert z.var().item() == pytest.approx(1, abs=0.02)
    assert (z**4).mean().item() == pytest.approx(3, abs=0.1)


def test_temperature_scales_and_zero_makes_all_the_same():
    seeds = as_seeds(0, 1, 3)
    assert torch.equal(gaussian_noise((4, 2), seeds, 0.5).z, 0.5 * gaussian_noise((4, 2), seeds).z)
    assert (gaussian_noise((4, 2), seeds, 0.0).z == 0).all()
    with pytest.raises(ValueError, match="temperature"):
        gaussian_noise((4, 2), seeds, -1.0)


def test_seeds_out_of_range_are_refused():
    with pytest.raises(ValueError, match="seed"):
        as_seeds(-1, 1, 1)
    with pytest.raises(ValueError, match="samples"):
        as_seeds(0, 1, 5000)
