"""Which windows a split has, and who is on the road when: compact arrays, built in one pass over the validity runs.

Letters: W windows, S scenes of the split ("slots"), P pairs (window, track).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from tqdm import tqdm

from seqdiff.domains.trajectory.ragged import ranges
from seqdiff.domains.trajectory.store import Store

BUCKET = 16  # steps; tracks are listed once for each bucket of time in which they have rows
_CHUNK_ROWS = 2_000_000


@dataclass(frozen=True)
class WindowSpec:
    """Which windows are cut from a store, and what each holds. Exactly one window for each (scene, t0).

    history_s, horizon_s: seconds before and after t0. At dt 0.1 a history of 2.0 s is 21 frames, t0's own among them.
    stride_s: seconds between two t0 of one scene.
    radius_m: agents further than this from the focal one at t0 are left alone; None = no limit.
    max_agents: at most this many, the nearest; the others are counted in `left_out`.
    focal: "one" = one road user chosen by a hash of (scene, t0) among those scored, one that moved during the history
        if there is any; "marked" = the data set's own focal track; "all" = nobody, the whole scene round its centre.
    min_agents: a window needs at least this many scored agents.
    history_rule: who can be scored: "any" = present at t0, "full" = present in every frame of the history.
    scored: "full_horizon" = everybody recorded over the whole horizon; "marked" = of these the data set's scored ones.
    max_segments, segment_m: map tokens: at most this many, the nearest, of at most this length.
    """

    history_s: float = 2.0
    horizon_s: float = 6.0
    stride_s: float = 2.0
    radius_m: float | None = 80.0
    max_agents: int = 64
    focal: Literal["one", "all", "marked"] = "one"
    min_agents: int = 1
    history_rule: Literal["any", "full"] = "any"
    scored: Literal["full_horizon", "marked"] = "full_horizon"
    max_segments: int = 128
    segment_m: float = 10.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("focal", ("one", "all", "marked")),
            ("history_rule", ("any", "full")),
            ("scored", ("full_horizon", "marked")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"windows.{name} is {getattr(self, name)!r}; write one of {', '.join(allowed)}")
        for name, least in (("max_agents", 1), ("max_segments", 0), ("min_agents", 0 if self.focal == "all" else 1)):
            if getattr(self, name) < least:
                raise ValueError(f"windows.{name} is {getattr(self, name)}; write {least} or more")
        if self.focal == "all" and self.radius_m is not None:
            raise ValueError(
                f"windows.radius_m is {self.radius_m} with focal='all', which has no agent to measure from; "
                "write radius_m: null, or focal: one"
            )
        if not self.segment_m > 0 or (self.radius_m is not None and not self.radius_m > 0):
            raise ValueError(f"windows.segment_m {self.segment_m} and radius_m {self.radius_m} must be metres above 0")

    def frames(self, dt: float) -> tuple[int, int]:
        """History frames h (t0's own among them) and future frames t at `dt` seconds a step."""
        return whole_steps(self.history_s, dt, "history_s", 0) + 1, whole_steps(self.horizon_s, dt, "horizon_s", 1)


def whole_steps(seconds: float, dt: float, name: str, least: int) -> int:
    """Seconds as a whole number of steps; raises ValueError naming the setting if they are not."""
    steps = round(seconds / dt)
    if abs(seconds / dt - steps) > 0.01 or not least <= steps < 65535:
        near = max(steps, least) * dt
        raise ValueError(f"windows.{name} is {seconds:g} s at dt {dt:g} s; write whole steps, e.g. {name}: {near:g}")
    return steps


@dataclass
class WindowIndex:
    """Windows and time buckets of a split. All arrays, 8 bytes a window."""

    scenes: np.ndarray  # int64 S: scene of each slot
    slot: np.ndarray  # int32 W, ascending
    t0: np.ndarray  # int32 W, ascending within a slot
    bucket_base: np.ndarray  # int64 S: first bucket of each slot
    alive: np.ndarray  # int32: global tracks, bucket after bucket
    alive_ends: np.ndarray  # int64
    left: dict[str, int] = field(default_factory=dict)  # candidate (scene, t0) that gave no window, by reason

    def keep(self, chosen: np.ndarray, reason: str) -> None:
        """Keeps windows where `chosen` (bool W), counting the others under `reason`."""
        lost = int((~chosen).sum())
        if lost:
            self.left[reason] = self.left.get(reason, 0) + lost
            self.slot, self.t0 = self.slot[chosen], self.t0[chosen]


def scored_rows(store: Store, spec: WindowSpec, track: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Is the agent of this row [N], taken as t0, one that counts in metrics? bool [N]."""
    h, t = spec.frames(store.dt)
    ok = store.arrays["run_ahead"][row] >= t
    ok &= store.arrays["run_back"][row] >= (h if spec.history_rule == "full" else 1)
    if spec.scored == "marked":
        ok &= store.arrays["track_scored"][track] | store.arrays["track_focal"][track]
    return ok


def build_index(store: Store, spec: WindowSpec, split: str, stride: int) -> WindowIndex:
    """All windows of a split, `stride` steps apart from the first t0 with a full history in the scene.

    Windows with too few scored agents anywhere in the scene are left out and counted.
    """
    h, t = spec.frames(store.dt)
    scenes = store.scenes(split)
    steps = store.arrays["scene_steps"][scenes].astype(np.int64)
    n_buckets = (steps + BUCKET - 1) // BUCKET
    base = np.cumsum(n_buckets) - n_buckets
    few, short = 0, int((steps < h + t).sum())
    slots, starts, alive, alive_count = [], [], [], []
    for part in tqdm(_chunks(store, scenes), desc=f"windows of {split}", unit="chunk", delay=2, leave=False):
        who, sizes = _alive(store, scenes[part], n_buckets[part])
        alive.append(who)
        alive_count.append(sizes)
        n = np.maximum((steps[part] - t - h) // stride + 1, 0)
        at, owner = ranges(np.zeros(len(n), np.int64), n)
        t0 = h - 1 + at * stride
        counts = _count_scored(store, spec, scenes[part], steps[part])
        enough = counts[(np.cumsum(steps[part]) - steps[part])[owner] + t0] >= spec.min_agents
        few += int((~enough).sum())
        slots.append((owner[enough] + part.start).astype(np.int32))
        starts.append(t0[enough].astype(np.int32))
    ends = np.concatenate([[0], np.cumsum(np.concatenate(alive_count))])
    index = WindowIndex(scenes, np.concatenate(slots), np.concatenate(starts), base, np.concatenate(alive), ends)
    index.left = {k: v for k, v in (("scenes shorter than a window", short), (_too_few(spec), few)) if v}
    return index


def _too_few(spec: WindowSpec) -> str:
    focal = " or without the marked focal track at t0" if spec.focal == "marked" else ""
    return f"windows with fewer than {spec.min_agents} scored agents{focal}"


def _chunks(store: Store, scenes: np.ndarray) -> list[slice]:
    """Slices of `scenes` with about _CHUNK_ROWS rows each."""
    ends = store.arrays["track_row_ends"]
    tracks = store.arrays["scene_track_ends"]
    rows = np.cumsum(ends[tracks[scenes + 1]] - ends[tracks[scenes]])
    cuts = np.flatnonzero(np.diff(rows // _CHUNK_ROWS)) + 1
    edges = [0, *cuts.tolist(), len(scenes)]
    return [slice(lo, hi) for lo, hi in itertools.pairwise(edges) if hi > lo]


def _tracks(store: Store, scenes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ends = store.arrays["scene_track_ends"]
    return ranges(ends[scenes], ends[scenes + 1] - ends[scenes])


def _alive(store: Store, scenes: np.ndarray, n_buckets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tracks of each (scene, bucket) in turn, int32, and how many each bucket has."""
    track, owner = _tracks(store, scenes)
    start = store.arrays["track_start"][track].astype(np.int64)
    length = store.arrays["track_row_ends"][track + 1] - store.arrays["track_row_ends"][track]
    first = start // BUCKET
    bucket, who = ranges(first + (np.cumsum(n_buckets) - n_buckets)[owner], (start + length - 1) // BUCKET - first + 1)
    order = np.argsort(bucket, kind="stable")
    return track[who[order]].astype(np.int32), np.bincount(bucket, minlength=int(n_buckets.sum()))


def _count_scored(store: Store, spec: WindowSpec, scenes: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Scored agents at each step taken as t0, scene after scene. -1 where a marked focal track is not on the road."""
    track, owner = _tracks(store, scenes)
    ends = store.arrays["track_row_ends"]
    row, who = ranges(ends[track], ends[track + 1] - ends[track])
    step = row - ends[track][who] + store.arrays["track_start"][track][who] + (np.cumsum(steps) - steps)[owner][who]
    ok = scored_rows(store, spec, track[who], row)
    counts = np.bincount(step[ok], minlength=int(steps.sum()))
    if spec.focal == "marked":
        there = store.arrays["track_focal"][track][who] & store.arrays["valid"][row]
        counts[np.bincount(step[there], minlength=len(counts)) == 0] = -1
    return counts
