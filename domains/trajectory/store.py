"""The packed store: memory-mapped flat arrays and a manifest. Opening it reads nothing but the manifest.

Letters: A tracks of a scene, N tracks asked for, n steps. Positions are metres relative to the scene's float64 origin,
headings radians. A store pickles as its path, so data loader workers map the same files again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import shapely

from seqdiff.domains.trajectory.pieces import Pieces, chop_map, ring_area
from seqdiff.domains.trajectory.scene import MAP_KINDS, SIGNAL_STATES, MapElement, RoadMap
from seqdiff.domains.trajectory.store_write import COLUMNS, FORMAT, VERSION, StoreWriter

__all__ = ["Store", "StoreError", "StoreWriter", "TrackTable"]

SceneIndex = int | np.int64  # as it comes out of scenes()
STEP_BITS = 31  # of a signal's key; 21 bits are left for the element and 11 for the scene within a batch
_CACHED_AREAS = 64  # drivable areas kept as shapely geometries
_CACHED_SIGNALS = 1024  # scenes whose signal tables are kept
_PIECES_IN_MEMORY = 20_000_000  # about 2 GB


class StoreError(ValueError):
    """A folder that is not a store, or one that is damaged or of another version."""


@dataclass
class TrackTable:
    """The tracks of one scene, in stored order."""

    id: list[str]
    type: np.ndarray  # int8 A: index into scene.AGENT_TYPES
    size: np.ndarray  # float32 A 2: length, width; NaN = not recorded
    start: np.ndarray  # int32 A: scene step of the first row
    length: np.ndarray  # int32 A: rows
    scored: np.ndarray  # bool A
    focal: np.ndarray  # bool A


class Store:
    """Reads a packed store at `path`. Raises StoreError for anything else, naming what was found and what to do."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = _read_manifest(self.path)
        self.arrays = {name: _open_array(self.path, name, entry) for name, entry in self.manifest["arrays"].items()}
        self.dt = float(self.manifest["dt"])
        self.content_hash: str = self.manifest["content_hash"]
        self.n_scenes = len(self.arrays["scene_steps"])
        self._areas: dict[int, Any] = {}
        self._views: dict[int, np.ndarray] = {}
        self._signals: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._pieces: dict[float, Pieces] = {}

    def __reduce__(self) -> tuple[Callable[[Path, str], Store], tuple[Path, str]]:
        return _reopen, (self.path, self.content_hash)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}: {self.manifest['name']}, {self.n_scenes} scenes, dt {self.dt:g} s)"

    # scenes

    @functools.cached_property
    def scene_ids(self) -> list[str]:
        return self._texts("scene_id", np.arange(self.n_scenes))

    @functools.cached_property
    def _index_of(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.scene_ids)}

    def scene_index(self, scene_id: str) -> int:
        """Index of a scene by its id. Raises KeyError with near names."""
        try:
            return self._index_of[scene_id]
        except KeyError:
            near = ", ".join(repr(s) for s in self.scene_ids[:3])
            raise KeyError(f"no scene {scene_id!r} in {self.path} ({self.n_scenes} scenes: {near}, ...)") from None

    @property
    def splits(self) -> list[str]:
        return list(self.manifest["splits"])

    def split_of(self, i: SceneIndex) -> str:
        return self.manifest["splits"][int(self.arrays["scene_split"][i])]

    def scenes(self, split: str) -> np.ndarray:
        """Indices of the scenes of a split, int64, ascending. Raises KeyError for a split the store does not have."""
        if split not in self.manifest["splits"]:
            raise KeyError(f"no split {split!r} in {self.path}; it has {', '.join(self.splits)}")
        return np.flatnonzero(self.arrays["scene_split"] == self.manifest["splits"].index(split))

    def n_steps(self, i: SceneIndex) -> int:
        return int(self.arrays["scene_steps"][i])

    def origin(self, i: SceneIndex) -> np.ndarray:
        """World position of the scene's origin, float64 [2]."""
        return np.array(self.arrays["scene_origin"][i])

    def meta(self, i: SceneIndex) -> dict[str, Any]:
        """What the reader said about the scene beyond its tracks."""
        return json.loads(self._texts("scene_meta", np.array([i]))[0])

    # tracks

    def track_range(self, i: SceneIndex) -> tuple[int, int]:
        """Global track numbers of scene i: first, end."""
        ends = self.arrays["scene_track_ends"]
        return int(ends[i]), int(ends[i + 1])

    def track_ids(self, track: np.ndarray) -> list[str]:
        """Ids of global track numbers [N]."""
        return self._texts("track_id", track)

    def tracks(self, i: SceneIndex) -> TrackTable:
        first, end = self.track_range(i)
        a = {k: np.array(self.arrays[f"track_{k}"][first:end]) for k in ("type", "size", "start", "scored", "focal")}
        length = np.diff(self.arrays["track_row_ends"][first : end + 1]).astype(np.int32)
        return TrackTable(id=self.track_ids(np.arange(first, end)), length=length, **a)

    def states(self, i: SceneIndex, first_step: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """All tracks of scene i at scene steps first_step ... first_step+n-1, also beyond the recording's ends.

        Returns xyh float32 [A, n, 3] relative to origin(i), 0 where not valid, and valid bool [A, n].
        """
        first, end = self.track_range(i)
        xyh, valid = self.gather(np.arange(first, end), np.full(end - first, first_step), n)
        xyh *= valid[..., None]
        return xyh, valid

    def gather(self, track: np.ndarray, first: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of global tracks [N] from scene steps `first` [N] on: xyh float32 [N, n, 3], valid bool [N, n].

        Rows that are not valid hold any finite number here: multiply by `valid` after shifting.
        """
        state, flag, ends = self.arrays["state"], self.arrays["valid"], self.arrays["track_row_ends"]
        begin = ends[track]
        offset = (first - self.arrays["track_start"][track]).astype(np.int64)
        left = (ends[track + 1] - begin - offset).astype(np.int32)  # rows from `first` to the end of the track
        steps = np.arange(n, dtype=np.int32)
        inside = steps < left[:, None]
        inside &= steps >= -offset.astype(np.int32)[:, None]
        base, last = begin + offset, len(flag) - n
        safe = np.clip(base, 0, max(last, 0))
        if last >= 0:  # rows of a track lie side by side: one copy per track
            xyh = self._window_view(n)[safe].reshape(-1, n, 3)
            valid = np.lib.stride_tricks.sliding_window_view(flag, n)[safe]
            off = np.flatnonzero(safe != base)
        else:
            xyh, valid = np.zeros((len(base), n, 3), np.float32), np.zeros((len(base), n), bool)
            off = np.arange(len(base))
        if len(off):  # windows over an end of the arrays
            rows = np.clip(base[off, None] + steps, 0, len(flag) - 1)
            xyh[off], valid[off] = state[rows], flag[rows]
        valid &= inside
        return xyh, valid

    def _window_view(self, n: int) -> np.ndarray:
        if n not in self._views:
            state = self.arrays["state"]
            shape, strides = (len(state) - n + 1, 3 * n), (state.strides[0], state.itemsize)
            self._views[n] = np.lib.stride_tricks.as_strided(state, shape, strides, writeable=False)
        return self._views[n]

    # map and signals

    def map_index(self, i: SceneIndex) -> int:
        """Number of the scene's map within the store, -1 = no map was recorded."""
        return int(self.arrays["scene_map"][i])

    def map(self, i: SceneIndex) -> RoadMap | None:
        """The scene's map with points relative to origin(i), float64, or None = unknown."""
        m = self.map_index(i)
        if m < 0:
            return None
        shift = self.arrays["map_origin"][m] - self.arrays["scene_origin"][i]
        elements = self._elements(m)
        for element in elements:
            element.points = element.points + shift
        return RoadMap(self._texts("map_id", np.array([m]))[0], elements)

    def _elements(self, m: int) -> list[MapElement]:
        """Elements of map m in the map's own origin."""
        first, end = self.arrays["map_element_ends"][m : m + 2]
        ends = self.arrays["element_point_ends"][first : end + 1]
        names = self._texts("element_id", np.arange(first, end))
        kinds = self.arrays["element_kind"][first:end]
        point = self.arrays["point"]
        return [
            MapElement(name, MAP_KINDS[kind], point[lo:hi].astype(np.float64))
            for name, kind, lo, hi in zip(names, kinds, ends[:-1], ends[1:])
        ]

    def drivable(self, i: SceneIndex) -> Any:
        """The drivable area as a shapely geometry relative to origin(i), or None = unknown."""
        return self.drivable_around(i, self.arrays["scene_origin"][i])

    def drivable_around(self, i: SceneIndex, origin: np.ndarray, scale: float = 1.0) -> Any:
        """As drivable(i), relative to a world position [2], times `scale`."""
        m = self.map_index(i)
        area = None if m < 0 else self._area(m)
        if area is None:
            return None
        shift = self.arrays["map_origin"][m] - origin
        return shapely.transform(area, lambda xy: (xy + shift) * scale)

    def _area(self, m: int) -> Any:
        """Union of the drivable areas of map m without its holes, in the map's origin; kept for the last few maps."""
        if m not in self._areas:
            rings: dict[str, list[Any]] = {"drivable_area": [], "drivable_hole": []}
            for e in self._elements(m):
                if e.kind in rings:
                    rings[e.kind].append(ring_area(e.points))
            area = None
            if rings["drivable_area"]:
                area = shapely.union_all(rings["drivable_area"])
                if rings["drivable_hole"]:
                    area = area.difference(shapely.union_all(rings["drivable_hole"]))
            if len(self._areas) >= _CACHED_AREAS:
                self._areas.pop(next(iter(self._areas)))
            self._areas[m] = area
        return self._areas[m]

    def signals(self, i: SceneIndex, step: int) -> dict[str, str]:
        """State at `step` of every lane that has a signal in scene i; "unknown" before its first recorded state."""
        m = self.map_index(i)
        if m < 0:
            return {}
        element, state = self.signal_states(i, step)
        names = self._texts("element_id", self.arrays["map_element_ends"][m] + element)
        return {name: SIGNAL_STATES[k] for name, k in zip(names, state)}

    def signal_states(self, i: SceneIndex, step: int) -> tuple[np.ndarray, np.ndarray]:
        """As signals(), by numbers: elements within the map (ascending) and their states, int64 [E] each."""
        key, states = self.signal_table(i)
        element = np.unique(key >> STEP_BITS)
        at = np.searchsorted(key, element << STEP_BITS | max(step, 0), side="right") - 1
        told = (at >= 0) & (key[at] >> STEP_BITS == element)
        return element, np.where(told, states[at], SIGNAL_STATES.index("unknown"))

    def signal_table(self, i: SceneIndex) -> tuple[np.ndarray, np.ndarray]:
        """Changes of scene i: ascending keys (element of the map << STEP_BITS | step) and the state from there on."""
        table = self._signals.get(int(i))
        if table is None:
            lo, hi = self.arrays["scene_signal_ends"][i : i + 2]
            key = self.arrays["signal_element"][lo:hi].astype(np.int64) << STEP_BITS | self.arrays["signal_step"][lo:hi]
            if len(self._signals) >= _CACHED_SIGNALS:
                self._signals.pop(next(iter(self._signals)))
            table = self._signals[int(i)] = (key, self.arrays["signal_state"][lo:hi].astype(np.int64))
        return table

    def pieces(self, segment_m: float) -> Pieces:
        """Map tokens of at most `segment_m` metres; ready in the store for its own length, else chopped now, once."""
        if segment_m not in self._pieces:
            self._pieces[segment_m] = self._chop(segment_m)
        return self._pieces[segment_m]

    def _chop(self, segment_m: float) -> Pieces:
        a = self.arrays
        if segment_m == self.manifest["segment_m"]:
            return Pieces(a["piece"], a["piece_mid"], a["piece_kind"], a["piece_element"], a["map_piece_ends"])
        expected = len(a["piece"]) * self.manifest["segment_m"] / segment_m
        if expected > _PIECES_IN_MEMORY:
            raise StoreError(
                f"{self.path} holds map pieces of {self.manifest['segment_m']:g} m; about {expected:.0f} pieces of "
                f"{segment_m:g} m do not fit in memory; write the store with segment_m={segment_m:g}"
            )
        parts = [chop_map(self._elements(m), segment_m) for m in range(len(a["map_origin"]))]
        if not parts:
            return Pieces(a["piece"], a["piece_mid"], a["piece_kind"], a["piece_element"], a["map_piece_ends"])
        ends = np.concatenate([[0], np.cumsum([len(p[0]) for p in parts])])
        points, mid, kind, element = (np.concatenate([p[k] for p in parts]) for k in range(4))
        return Pieces(points, mid, kind, element, ends)

    def _texts(self, name: str, index: np.ndarray) -> list[str]:
        ends = self.arrays[f"{name}_ends"]
        text = self.arrays[f"{name}_text"].data
        return [str(text[lo:hi], "utf-8") for lo, hi in zip(ends[index].tolist(), ends[index + 1].tolist())]


@functools.lru_cache(maxsize=8)
def _reopen(path: Path, content_hash: str) -> Store:
    """One mapping for each process, however often a store is unpickled (batches carry it for their drivable areas)."""
    store = Store(path)
    if store.content_hash != content_hash:
        raise StoreError(f"{path} was replaced by another store while in use; start again")
    return store


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    if not file.is_file():
        found = "is not there" if not path.exists() else "has no manifest.json"
        raise StoreError(f"{path} {found}, so it is not a store; write one with `seqdiff prepare ... out={path}`")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(f"{file} is not JSON ({error}); write the store again with `seqdiff prepare`") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        got = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise StoreError(f"{file} says format {got!r}, expected {FORMAT!r}; give a folder that `seqdiff prepare` wrote")
    if manifest.get("version") != VERSION:
        raise StoreError(
            f"{path} is a store of version {manifest.get('version')!r}, this seqdiff reads version {VERSION}; "
            "write it again with `seqdiff prepare`, or install the seqdiff that wrote it"
        )
    missing = sorted(set(COLUMNS) - set(manifest.get("arrays", {})))
    if missing:
        raise StoreError(f"{file} does not list {', '.join(missing)}; write the store again with `seqdiff prepare`")
    return manifest


def _open_array(path: Path, name: str, entry: dict[str, Any]) -> np.ndarray:
    file = path / f"{name}.npy"
    size = file.stat().st_size if file.is_file() else None
    if size != entry["bytes"]:
        got = "is missing" if size is None else f"has {size} bytes"
        raise StoreError(
            f"{file} {got}, the manifest says {entry['bytes']}: the store was cut short or copied in part; "
            "copy it again or write it again with `seqdiff prepare`"
        )
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise StoreError(f"{file} is not a .npy file ({error}); copy or write the store again") from error
    if array.dtype.str != entry["dtype"] or list(array.shape) != entry["shape"]:
        raise StoreError(
            f"{file} holds {array.dtype.str} {list(array.shape)}, the manifest says {entry['dtype']} {entry['shape']}; "
            "copy or write the store again"
        )
    return np.asarray(array)  # a plain view: indexing a memmap object is slow
