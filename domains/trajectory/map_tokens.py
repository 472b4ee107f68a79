"""The map tokens of a batch: for each window the nearest pieces of its map, and the signals that hold there.

Letters: B windows, s tokens, l points a piece.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from seqdiff.domains.trajectory.ragged import move_and_mask, nearest_first, places
from seqdiff.domains.trajectory.scene import MAP_KINDS, SIGNAL_STATES
from seqdiff.domains.trajectory.store import STEP_BITS, Store

CELL = 10.0  # metres; nearest pieces are looked up among those that can be nearest from anywhere in a cell
LANE, UNKNOWN = MAP_KINDS.index("lane_center"), SIGNAL_STATES.index("unknown")
_SCENES = 2**11  # scenes in one table of signals
_CACHED = 16_000_000  # numbers kept over all cells: 64 MB


class MapTokens:
    """Nearest `limit` pieces of at most `segment_m` metres round a place. Exact: cells only narrow the search."""

    def __init__(self, store: Store, segment_m: float, limit: int) -> None:
        self.store, self.limit, self.segment_m = store, limit, segment_m
        self.pieces = store.pieces(segment_m)
        self._cells: dict[tuple[int, int, int], np.ndarray] = {}
        self._held = 0

    def __getstate__(self) -> tuple[Store, float, int]:
        return self.store, self.segment_m, self.limit

    def __setstate__(self, state: tuple[Store, float, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def batch(
        self, scene: np.ndarray, t0: np.ndarray, origin: np.ndarray, scale: np.ndarray | None
    ) -> dict[str, Tensor]:
        """seg float32 [B, s, l, 2] relative to `origin` [B, 2] times `scale` [B], nearest first; seg_mask, seg_kind and
        seg_signal [B, s]; map_known [B]. s is the most that any of these windows has, at least 1."""
        n = len(scene)
        maps = self.store.arrays["scene_map"][scene].astype(np.int64)
        known = maps >= 0
        window, piece, centre = self._nearest(maps, origin)
        place, count = places(window, n)
        s = max(1, int(count.max(initial=0)))
        at = window * s + place
        mask, index, signal = np.zeros(n * s, bool), np.zeros(n * s, np.int64), np.zeros(n * s, np.int64)
        mask[at], index[at], signal[at] = True, piece, self._signals(scene, t0, window, piece)
        if len(piece):
            seg, kind = self.pieces.points[index], np.where(mask, self.pieces.kind[index], 0).astype(np.int64)
            full = np.broadcast_to(mask[:, None], seg.shape[:2])
            move_and_mask(seg, np.repeat(centre, s, axis=0), None if scale is None else np.repeat(scale, s), full)
        else:
            seg, kind = np.zeros((n * s, *self.pieces.points.shape[1:]), np.float32), np.zeros(n * s, np.int64)
        return {
            "seg": torch.from_numpy(seg.reshape(n, s, *seg.shape[1:])),
            "seg_mask": torch.from_numpy(mask.reshape(n, s)),
            "seg_kind": torch.from_numpy(kind.reshape(n, s)),
            "seg_signal": torch.from_numpy(signal.reshape(n, s)),
            "map_known": torch.from_numpy(known),
        }

    def _nearest(self, maps: np.ndarray, origin: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Window and piece of each token, nearest first, and the windows' origins in their maps' frames [B, 2]."""
        centre = np.zeros((len(maps), 2), np.float32)
        known = np.flatnonzero(maps >= 0)
        if not len(known) or self.limit == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), centre
        centre[known] = origin[known] - self.store.arrays["map_origin"][maps[known]]
        cells = np.floor(centre[known] / CELL).astype(np.int64).tolist()
        found = [self._cell(m, x, y) for m, (x, y) in zip(maps[known].tolist(), cells)]
        window = np.repeat(known, [len(f) for f in found])
        piece = np.concatenate(found).astype(np.int64)
        apart = self.pieces.mid[piece] - centre[window]
        order = nearest_first(window, apart[:, 0] ** 2 + apart[:, 1] ** 2)
        window, piece = window[order], piece[order]
        near = places(window, len(maps))[0] < self.limit
        return window[near], piece[near], centre

    def _cell(self, m: int, x: int, y: int) -> np.ndarray:
        """Pieces of map m that are among the nearest `limit` from some point of cell (x, y), int32."""
        found = self._cells.get((m, x, y))
        if found is None:
            lo, hi = self.pieces.ends[m : m + 2]
            middle = np.array([(x + 0.5) * CELL, (y + 0.5) * CELL], np.float32)
            apart = np.hypot(*(self.pieces.mid[lo:hi] - middle).T)
            found = np.arange(lo, hi, dtype=np.int32)
            if len(found) > self.limit:
                # |p - middle| <= CELL / sqrt(2) for any p of the cell: twice that beyond the limit-th nearest is enough
                found = found[apart <= np.partition(apart, self.limit - 1)[self.limit - 1] + 1.5 * CELL]
            if self._held > _CACHED:
                self._cells.clear()
                self._held = 0
            self._cells[m, x, y] = found
            self._held += len(found)
        return found

    def _signals(self, scene: np.ndarray, t0: np.ndarray, window: np.ndarray, piece: np.ndarray) -> np.ndarray:
        """State at t0 of the signal that controls each token's lane, 0 ("none") where there is no signal."""
        out = np.zeros(len(piece), np.int64)
        ends = self.store.arrays["scene_signal_ends"]
        lit = np.unique(scene[ends[scene + 1] > ends[scene]])
        token = np.flatnonzero(np.isin(scene, lit)[window] & (self.pieces.kind[piece] == LANE)) if len(lit) else lit
        for some in np.split(lit, range(_SCENES, len(lit), _SCENES)) if len(token) else []:
            tables = [self.store.signal_table(int(i)) for i in some]
            key = np.concatenate([table[0] | k << 52 for k, table in enumerate(tables)])
            state = np.concatenate([table[1] for table in tables])
            mine = token[np.isin(scene[window[token]], some)]
            lane = np.searchsorted(some, scene[window[mine]]) << 21 | self.pieces.element[piece[mine]].astype(np.int64)
            at = np.searchsorted(key, lane << STEP_BITS | t0[window[mine]], side="right")
            before, after = np.maximum(at - 1, 0), np.minimum(at, len(key) - 1)
            told = (at > 0) & (key[before] >> STEP_BITS == lane)
            later = key[after] >> STEP_BITS == lane  # a signal whose first state comes after t0
            out[mine] = np.where(told, state[before], np.where(later, UNKNOWN, 0))
        return out
