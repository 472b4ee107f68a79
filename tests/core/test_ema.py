from __future__ import annotations

import pytest
import torch

from seqdiff.checkpoint import find, read
from seqdiff.cli import main
from seqdiff.ema import EMA


def average(decay: float):
    return EMA(decay)._kwargs["avg_fn"]


def test_the_decay_grows_with_the_number_of_updates():
    """decay_i = min(decay, (1 + i) / (10 + i))."""
    old, new = torch.zeros(1), torch.ones(1)
    for i, share in [(0, 0.9), (1, 9 / 11), (10, 9 / 20), (90, 9 / 100), (10_000, 0.01)]:
        assert average(0.99)(old, new, torch.tensor(i)).item() == pytest.approx(share, abs=1e-6)


def test_the_average_of_a_constant_is_the_constant_and_of_a_ramp_lags():
    value = torch.zeros(1)
    for i in range(500):
        value = average(0.9)(value, torch.tensor([float(i)]), torch.tensor(i))
    assert value.item() == pytest.approx(499 - 9, abs=0.1)  # a ramp is followed decay / (1 - decay) behind
    assert average(0.9)(torch.ones(3), torch.ones(3), torch.tensor(5)).tolist() == [1, 1, 1]


def test_what_is_no_number_is_taken_over():
    assert average(0.99)(torch.tensor(False), torch.tensor(True), torch.tensor(3)).item() is True


@pytest.mark.parametrize("bad", [-0.1, 1.0])
def test_a_decay_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=r"expected a number in \[0, 1\)"):
        EMA(bad)


@pytest.mark.slow
def test_without_decay_the_average_is_the_model(tiny_args, tmp_path):
    assert main(["fit", *tiny_args, "trainer.max_steps=2", "ema_decay=0.0", f"run={tmp_path / 'r'}"]) == 0
    content = read(find(tmp_path / "r"))
    assert all(torch.equal(v, content["current_model_state"][n]) for n, v in content["state_dict"].items())
