"""Cuts windows out of a packed store and builds whole SceneBatches at once, without a Python object for any window.

Letters: B windows of a batch, a agents, h and t frames of history and future, P pairs (window, track).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from tqdm import tqdm

from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.map_tokens import MapTokens
from seqdiff.domains.trajectory.ragged import move_and_mask, nearest_first, places, ranges
from seqdiff.domains.trajectory.scene import AGENT_TYPES
from seqdiff.domains.trajectory.store import Store
from seqdiff.domains.trajectory.window_index import BUCKET, WindowSpec, build_index, scored_rows, whole_steps

__all__ = ["DEFAULT_SIZE", "Vary", "WindowDataset", "WindowSpec"]

_BY_TYPE = {
    "vehicle": (4.6, 1.9),
    "pedestrian": (0.5, 0.5),
    "bicycle": (1.8, 0.6),
    "motorcycle": (2.2, 0.8),
    "truck": (10.0, 2.5),
    "bus": (12.0, 2.6),
    "other": (4.6, 1.9),
}
DEFAULT_SIZE = np.array([_BY_TYPE[k] for k in AGENT_TYPES], np.float32)  # length, width where not recorded
MOVING = 0.5  # m/s over the history: above it a road user counts as moving
_REFINE = 256  # windows looked at together when min_agents is checked within the radius


@dataclass(frozen=True)
class Vary:
    """What training may vary from epoch to epoch; evaluation varies nothing.

    stride_s: seconds between two t0 instead of the spec's. random_focal: draw the focal agent anew each epoch.
    max_agents: fewer agents than the spec allows, so that a few crowded windows do not set the cost of every batch: the
    nearest to the focal agent, and with focal "all" to one drawn anew each epoch (or to the middle if min_agents is 0).
    scale: (low, high): positions about the window's origin are multiplied by a factor that is log-uniform between the
    two, with the map; agent sizes stay. mirror: half of the windows have left and right exchanged (for pedestrians; not
    where traffic keeps to one side), and their drivable area is unknown. seed: of all draws,
    together with the epoch and the window.
    """

    stride_s: float | None = None
    random_focal: bool = False
    scale: tuple[float, float] | None = None
    seed: int = 0
    max_agents: int | None = None
    mirror: bool = False

    def __post_init__(self) -> None:
        if self.max_agents is not None and self.max_agents < 1:
            raise ValueError(f"max_agents in training is {self.max_agents}; write 1 or more, or null")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale is {self.scale}; write two factors above 0, the lower first, e.g. [0.7, 1.5]")


class DrivableAreas(list[Any]):
    """Drivable areas of a batch relative to each origin, made when looked at: moving one costs more than its window."""

    def __init__(self, store: Store, scene: np.ndarray, origin: np.ndarray, scale: np.ndarray | None) -> None:
        super().__init__([None] * len(scene))
        self._store, self._scene, self._origin, self._scale = store, scene, origin, scale
        self._made = [False] * len(scene)

    def __reduce__(self) -> Any:
        return DrivableAreas, (self._store, self._scene, self._origin, self._scale)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        if not self._made[i]:
            scale = 1.0 if self._scale is None else float(self._scale[i])
            self[i] = self._store.drivable_around(int(self._scene[i]), self._origin[i], scale)
            self._made[i] = True
        return super().__getitem__(i)

    def __iter__(self) -> Iterator[Any]:
        return (self[k] for k in range(len(self)))


@dataclass
class _Pairs:
    """Who is in which window: P pairs, windows ascending, in the order of the a axis."""

    window: np.ndarray  # int64 P
    track: np.ndarray  # int64 P, global
    row: np.ndarray  # int64 P: row of t0
    scored: np.ndarray  # bool P
    place: np.ndarray  # int64 P: index on the a axis
    centre: np.ndarray  # float32 B 2: origin of the window relative to the scene's
    left_out: np.ndarray  # int64 B
    focal: np.ndarray  # int64 B: 0, or -1 = none


def _mix(*words: np.ndarray | int) -> np.ndarray:
    """A 64-bit hash of integers, element by element (splitmix64's finaliser after each word), alike on any machine."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            state = state + np.asarray(word).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return state


def mirror(batch: SceneBatch, chosen: torch.Tensor) -> None:
    """Exchange left and right (y and heading) of the chosen items (bool b), in place; their drivable area is unknown."""
    sign = torch.where(chosen, -1.0, 1.0)
    for xyh in (batch.hist, batch.fut):
        xyh[..., 1:] *= sign[:, None, None, None]
    batch.seg[..., 1] *= sign[:, None, None]
    areas = batch.drivable
    batch.drivable = [None if flip else areas[i] for i, flip in enumerate(chosen.tolist())]


class WindowDataset(torch.utils.data.Dataset[SceneBatch]):
    """The windows of one split, each (scene, t0) once. `batch(indices)` builds a SceneBatch; a DataLoader gets whole
    batches through `__getitems__` and needs `collate_fn=identity`.

    `left` counts candidate (scene, t0) that gave no window, by reason. Memory: 8 bytes a window and 4 bytes for every
    16 steps of a track; everything else stays in the mapped files.
    """

    def __init__(self, store: Store, spec: WindowSpec, split: str, vary: Vary | None = None) -> None:
        self.store, self.spec, self.split, self.vary = store, spec, split, vary or Vary()
        self.h, self.t = spec.frames(store.dt)
        stride_s = spec.stride_s if self.vary.stride_s is None else self.vary.stride_s
        self.index = build_index(store, spec, split, whole_steps(stride_s, store.dt, "stride_s", 1))
        self.epoch = 0
        ids = store.scene_ids
        self._crc = np.array([zlib.crc32(ids[i].encode()) for i in self.index.scenes], np.uint32)
        self._tokens = MapTokens(store, spec.segment_m, spec.max_segments)
        self._require_min_agents()

    def __len__(self) -> int:
        return len(self.index.t0)

    def __getitem__(self, index: int) -> SceneBatch:
        return self.batch([index])

    def __getitems__(self, indices: Sequence[int]) -> SceneBatch:
        return self.batch(indices)

    @property
    def left(self) -> dict[str, int]:
        """Candidate (scene, t0) that gave no window, by reason."""
        return self.index.left

    def set_epoch(self, epoch: int) -> None:
        """Draws of `vary` depend on it."""
        self.epoch = int(epoch)

    def find(self, scene_id: str, t0: int | np.int64 | np.int32) -> int:
        """Index of the window of (scene, t0). Raises KeyError naming the scene's windows."""
        i = self.store.scene_index(scene_id)
        slot = int(np.searchsorted(self.index.scenes, i))
        lo, hi = np.searchsorted(self.index.slot, [slot, slot + 1])
        at = int(lo + np.searchsorted(self.index.t0[lo:hi], t0))
        if slot < len(self.index.scenes) and self.index.scenes[slot] == i and at < hi and self.index.t0[at] == t0:
            return at
        split = self.store.split_of(i)
        if split != self.split:
            raise KeyError(f"scene {scene_id!r} is in split {split!r}, these are the windows of {self.split!r}")
        have = ", ".join(map(str, self.index.t0[lo:hi][:5])) or "none"
        raise KeyError(f"scene {scene_id!r} has no window at t0 {t0}; its {hi - lo} windows begin with t0 {have}")

    def batch(self, indices: Sequence[int] | np.ndarray) -> SceneBatch:
        """The windows at `indices` [B], agents padded to the fullest of them, map tokens likewise."""
        at = np.asarray(indices, np.int64).reshape(-1)
        if len(at) == 0 or at.min() < 0 or at.max() >= len(self):
            raise IndexError(f"window indices {at[:5].tolist()} ...; expected one or more in 0 ... {len(self) - 1}")
        slot, t0 = self.index.slot[at].astype(np.int64), self.index.t0[at].astype(np.int64)
        pairs = self._pairs(slot, t0)
        scene = self.index.scenes[slot]
        origin = self.store.arrays["scene_origin"][scene] + pairs.centre
        scale = self._scales(slot, t0)
        made = SceneBatch(
            **self._agents(pairs, t0, scale),
            **cast("dict[str, Any]", self._tokens.batch(scene, t0, origin, scale)),
            origin=torch.from_numpy(origin),
            scene_id=[self.store.scene_ids[i] for i in scene],
            t0=t0.tolist(),
            focal=torch.from_numpy(pairs.focal),
            left_out=torch.from_numpy(pairs.left_out),
            drivable=DrivableAreas(self.store, scene, origin, scale),
            dt=self.store.dt,
        )
        if self.vary.mirror:
            half = _mix(self.vary.seed, self.epoch, 4, self._crc[slot], t0) % np.uint64(2) == 1
            mirror(made, torch.from_numpy(half))
        return made

    def crowd(self, indices: np.ndarray) -> np.ndarray:
        """Agents present at t0 of each window, before radius and limits: what a batch will roughly cost. int64 [B]."""
        at = np.asarray(indices, np.int64)
        window, _, _ = self._present(self.index.slot[at].astype(np.int64), self.index.t0[at].astype(np.int64))
        return np.bincount(window, minlength=len(at))

    def _scales(self, slot: np.ndarray, t0: np.ndarray) -> np.ndarray | None:
        if self.vary.scale is None:
            return None
        draw = _mix(self.vary.seed, self.epoch, 1, self._crc[slot], t0) / 2.0**64
        low, high = np.log(self.vary.scale)
        return np.exp(low + (high - low) * draw).astype(np.float32)

    def _present(self, slot: np.ndarray, t0: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Everybody recorded at t0: window, track and row [P]."""
        a, index = self.store.arrays, self.index
        bucket = index.bucket_base[slot] + t0 // BUCKET
        first = index.alive_ends[bucket]
        at, window = ranges(first, index.alive_ends[bucket + 1] - first)
        track = index.alive[at].astype(np.int64)
        row = a["track_row_ends"][track]
        past = t0[window] - a["track_start"][track]
        inside = (past >= 0) & (past < a["track_row_ends"][track + 1] - row)
        window, track, row = window[inside], track[inside], (row + past)[inside]
        valid = a["valid"][row]
        return window[valid], track[valid], row[valid]

    def _pairs(self, slot: np.ndarray, t0: np.ndarray) -> _Pairs:
        """Chooses focal agent, neighbours and their order for B windows. Nothing after t0 is looked at but `scored`."""
        spec, n = self.spec, len(slot)
        window, track, row = self._present(slot, t0)
        scored = scored_rows(self.store, spec, track, row)
        xy = np.take(self.store.arrays["state"], row, axis=0)[:, :2]
        if spec.focal == "all":
            focal = np.full(n, -1)
            share = np.maximum(np.bincount(window, minlength=n), 1)
            centre = np.stack([np.bincount(window, xy[:, k], n) / share for k in (0, 1)], axis=1).astype(np.float32)
        else:
            chosen = self._focal(window, track, row, scored, _mix(*self._salt(), self._crc[slot], t0))
            focal, centre = np.zeros(n, np.int64), xy[chosen]
        limit, middle = spec.max_agents, centre
        if self.vary.max_agents is not None and self.vary.max_agents < limit:
            limit = self.vary.max_agents
            if spec.focal == "all" and spec.min_agents > 0:
                salt = _mix(self.vary.seed, self.epoch, 3, self._crc[slot], t0)
                middle = xy[self._focal(window, track, row, scored, salt)]
        step = xy - middle[window]
        apart = np.hypot(step[:, 0], step[:, 1])
        order = nearest_first(window, apart, None if spec.focal == "all" else chosen)
        if spec.radius_m is not None:
            order = order[apart[order] <= spec.radius_m]
        window = window[order]
        place, count = places(window, n)
        kept = place < limit
        order = order[kept]
        left_out = np.maximum(count - limit, 0)
        return _Pairs(window[kept], track[order], row[order], scored[order], place[kept], centre, left_out, focal)

    def _salt(self) -> tuple[int, ...]:
        return (self.vary.seed, self.epoch, 2) if self.vary.random_focal else (0, 0, 0)

    def _focal(
        self, window: np.ndarray, track: np.ndarray, row: np.ndarray, scored: np.ndarray, draw: np.ndarray
    ) -> np.ndarray:
        """Pair of each window's focal agent, int64 [B]."""
        a = self.store.arrays
        if self.spec.focal == "marked":
            return np.flatnonzero(a["track_focal"][track])
        pool = np.flatnonzero(scored)
        row, window = row[pool], window[pool]
        back = np.minimum(a["run_back"][row], self.h).astype(np.int64) - 1
        step = np.take(a["state"], row, axis=0) - np.take(a["state"], row - back, axis=0)
        moving = np.hypot(step[:, 0], step[:, 1]) > MOVING * self.store.dt * back
        some = np.bincount(window[moving], minlength=len(draw)) > 0
        wanted = moving | ~some[window]
        pool, window = pool[wanted], window[wanted]
        count = np.bincount(window, minlength=len(draw))
        return pool[np.cumsum(count) - count + (draw % count.astype(np.uint64)).astype(np.int64)]

    def _require_min_agents(self) -> None:
        """Counts scored agents again where the radius or the limit of agents may have left some of them out."""
        spec, index = self.spec, self.index
        if spec.min_agents == 0 or (spec.focal == "one" and spec.min_agents == 1):
            return  # the focal agent is scored
        doubtful = np.arange(len(self))
        if spec.focal == "all":
            bucket = index.bucket_base[index.slot] + index.t0 // BUCKET
            doubtful = doubtful[index.alive_ends[bucket + 1] - index.alive_ends[bucket] > spec.max_agents]
        enough = np.ones(len(self), bool)
        parts = np.split(doubtful, range(_REFINE, len(doubtful), _REFINE))
        for part in tqdm(parts, desc="windows with enough scored agents", unit="batch", delay=2, leave=False):
            pairs = self._pairs(index.slot[part].astype(np.int64), index.t0[part].astype(np.int64))
            enough[part] = np.bincount(pairs.window[pairs.scored], minlength=len(part)) >= spec.min_agents
        where = "among the nearest" if spec.focal == "all" else "near the focal one"
        index.keep(enough, f"windows with fewer than {spec.min_agents} scored agents {where}")

    def _agents(self, pairs: _Pairs, t0: np.ndarray, scale: np.ndarray | None) -> dict[str, Any]:
        n, a = len(t0), int(pairs.place.max(initial=0)) + 1
        at = pairs.window * a + pairs.place
        mask = np.zeros(n * a, bool)
        mask[at] = True
        track = np.zeros(n * a, np.int64)
        track[at] = pairs.track
        grid = track.reshape(n, a)  # padding repeats the window's first agent: cheap to gather, and the mask hides it
        track = np.where(mask.reshape(n, a), grid, grid[:, :1]).reshape(-1)
        now = np.repeat(t0, a)
        out: dict[str, Any] = {}
        for name, first, frames in (("hist", now - self.h + 1, self.h), ("fut", now + 1, self.t)):
            xyh, valid = self.store.gather(track, first, frames)
            valid &= mask[:, None]
            factor = None if scale is None else np.repeat(scale, a)
            move_and_mask(xyh, np.repeat(pairs.centre, a, axis=0), factor, valid)
            out[name] = torch.from_numpy(xyh.reshape(n, a, frames, 3))
            out[f"{name}_valid"] = torch.from_numpy(valid.reshape(n, a, frames))
        kind = np.where(mask, self.store.arrays["track_type"][track], 0).astype(np.int64)
        size = self.store.arrays["track_size"][track]
        known = mask & np.isfinite(size).all(axis=1)
        scored = np.zeros(n * a, bool)
        scored[at] = pairs.scored
        size = np.where(known[:, None], size, DEFAULT_SIZE[kind]) * mask[:, None]
        for name, flat in (("mask", mask), ("scored", scored), ("type", kind), ("size_known", known)):
            out[name] = torch.from_numpy(flat.reshape(n, a))
        out["size"] = torch.from_numpy(size.reshape(n, a, 2))
        names = iter(self.store.track_ids(pairs.track))
        out["agent_id"] = [[next(names) for _ in range(k)] for k in np.bincount(pairs.window, minlength=n)]
        return out
