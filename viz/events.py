"""Where and when a joint future collides or leaves the road: the marks of the review page.

The rules are those of the energies (`seqdiff.domains.trajectory.energies`), so that a mark and a score never disagree.
"""

from __future__ import annotations

import numpy as np
import torch

from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.energies import all_steps, collisions, off_road
from seqdiff.viz.scene_view import Event


def find_events(
    xyh: np.ndarray, batch: SceneBatch, valid: torch.Tensor | None = None
) -> tuple[list[list[Event]], bool]:
    """Events of every future of a batch of one scene, earliest first; and whether off-road is known at all.

    xyh: [k, a, t, 3] relative to batch.origin, metres and radians; valid: bool [1, a, t], default every step.
    """
    if batch.n_scenes != 1:
        raise ValueError(f"find_events got a batch of {batch.n_scenes} scenes, expected one")
    futures = torch.as_tensor(xyh, dtype=torch.float32)[None]
    valid = all_steps(futures, batch) if valid is None else valid
    events: list[list[Event]] = [[] for _ in range(len(xyh))]
    pairs = collisions(futures, batch, valid).pairs.numpy()[:, 1:]  # k, first, second, t
    for (k, i, j), steps in _grouped(pairs):
        events[k] += [Event("collision", i, j, first + 1, last + 1) for first, last in runs(steps)]
    share = off_road(futures, batch, valid)
    outside = np.argwhere(share.bad[0].numpy() > 0)  # k, a, t
    for (k, a), steps in _grouped(outside):
        events[k] += [Event("off_road", a, -1, first + 1, last + 1) for first, last in runs(steps)]
    for row in events:
        row.sort(key=lambda e: (e.first, e.kind, e.a, e.b))
    return events, bool((share.of > 0).any())


def _grouped(rows: np.ndarray) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Rows [n, c] grouped by all but their last column: (key, ascending last column)."""
    if not len(rows):
        return []
    rows = rows[np.lexsort(rows.T[::-1])]
    cuts = np.flatnonzero((np.diff(rows[:, :-1], axis=0) != 0).any(1)) + 1
    return [(tuple(map(int, part[0, :-1])), part[:, -1]) for part in np.split(rows, cuts)]


def runs(steps: np.ndarray) -> list[tuple[int, int]]:
    """First and last of every unbroken run in ascending whole numbers [n]."""
    cuts = np.flatnonzero(np.diff(steps) > 1) + 1
    return [(int(part[0]), int(part[-1])) for part in np.split(steps, cuts) if len(part)]
