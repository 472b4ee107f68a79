"""Groups of unequal size as flat arrays: the few index tricks that batches are built with.

Letters: G groups, P elements, grouped one group after the other.
"""

from __future__ import annotations

import numpy as np


def ranges(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers first[g], first[g]+1, ... (count[g] of them) one group after the other [P], and the g of each [P]."""
    count = np.asarray(count, np.int64)
    group = np.repeat(np.arange(len(count)), count)
    return np.arange(len(group)) + np.repeat(first - (np.cumsum(count) - count), count), group


def places(group: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Place of each element within its group [P] (groups ascending) and the size of each group [G]."""
    count = np.bincount(group, minlength=groups)
    return np.arange(len(group)) - (np.cumsum(count) - count)[group], count


def nearest_first(group: np.ndarray, apart: np.ndarray, first: np.ndarray | None = None) -> np.ndarray:
    """Order [P] by group, then by distance `apart` (float32, 0 or more), then as given; `first` [G] leads its group."""
    rank = np.ascontiguousarray(apart, np.float32).view(np.int32).astype(np.int64)  # the bits of floats >= 0 sort alike
    if first is not None:
        rank += 1
        rank[first] = 0
    key = group.astype(np.int64) << 32 | rank
    order = np.argsort(key)  # several times faster than a stable sort, which only ties need
    if (np.diff(key[order]) == 0).any():
        order = np.argsort(key, kind="stable")
    return order


def move_and_mask(points: np.ndarray, shift: np.ndarray, scale: np.ndarray | None, mask: np.ndarray) -> None:
    """In place: (points[..., :2] - shift) * scale, and 0 where not mask.

    points float32 [P, n, 2 or 3], shift float32 [P, 2], scale float32 [P] or None, mask bool [P, n]. Coordinate by
    coordinate, since numpy is slow along an axis of two.
    """
    keep = mask.astype(np.float32)
    factor = keep if scale is None else keep * scale[:, None]
    for k in range(points.shape[-1]):
        column = points[..., k]
        if k < 2:
            column -= shift[:, k, None]
        column *= factor if k < 2 else keep
