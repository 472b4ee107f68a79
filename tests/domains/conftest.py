"""A small made-up SceneBatch, shared by the tests of metrics, floors, energies, sample files and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqdiff.domains.trajectory.batch import SceneBatch

Make = Callable[..., SceneBatch]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _make_batch(hist: Tensor, fut: Tensor, dt: float = 0.1, **given: Any) -> SceneBatch:
    """hist: [b, a, h, 3], fut: [b, a, t, 3]; everything else has a plain default that `given` replaces."""
    b, a, h, _ = hist.shape
    t = fut.shape[2]
    fields: dict[str, Any] = dict(
        hist=hist.float(),
        hist_valid=torch.ones(b, a, h, dtype=torch.bool),
        fut=fut.float(),
        fut_valid=torch.ones(b, a, t, dtype=torch.bool),
        mask=torch.ones(b, a, dtype=torch.bool),
        scored=torch.ones(b, a, dtype=torch.bool),
        type=torch.zeros(b, a, dtype=torch.long),
        size=torch.tensor([4.0, 2.0]).expand(b, a, 2).clone(),
        size_known=torch.ones(b, a, dtype=torch.bool),
        seg=torch.zeros(b, 0, 2, 2),
        seg_mask=torch.zeros(b, 0, dtype=torch.bool),
        seg_kind=torch.zeros(b, 0, dtype=torch.long),
        seg_signal=torch.zeros(b, 0, dtype=torch.long),
        map_known=torch.zeros(b, dtype=torch.bool),
        origin=torch.zeros(b, 2, dtype=torch.float64),
        scene_id=[f"s{i}" for i in range(b)],
        t0=[10 * i for i in range(b)],
        agent_id=[[f"a{j}" for j in range(a)] for _ in range(b)],
        focal=torch.full((b,), -1),
        left_out=torch.zeros(b, dtype=torch.long),
        drivable=[None] * b,
        dt=dt,
    )
    unknown = set(given) - set(fields)
    assert not unknown, unknown
    return SceneBatch(**{**fields, **given})


@pytest.fixture
def make_batch() -> Make:
    return _make_batch
