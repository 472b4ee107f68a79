"""Our own traffic recordings: one .npz file of tracks, maps and signals, small enough to ship. Needs only numpy.

Coding. Positions are whole millimetres and headings units of 1e-4 rad. A track keeps its first row and of
the others the second differences in time (what a constant velocity leaves unexplained), as low and high bytes, each in
an array of its own, which zip then packs well. Decoding is exact in integers; what is lost is the rounding: at most
`POSITION_ERROR` and `HEADING_ERROR`. Map points are whole centimetres. Nothing in the file is pickled.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from seqdiff.domains.trajectory.scene import (
    AGENT_TYPES,
    MAP_KINDS,
    SIGNAL_STATES,
    Drop,
    MapElement,
    RoadMap,
    Scene,
    SceneError,
    Track,
)

FORMAT, VERSION = "seqdiff-recordings", 1
POSITION_UNIT, HEADING_UNIT, MAP_UNIT, SIZE_UNIT = 1e-3, 1e-4, 1e-2, 1e-2
POSITION_ERROR, HEADING_ERROR, MAP_ERROR = 0.5 * POSITION_UNIT, 0.5 * HEADING_UNIT, 0.5 * MAP_UNIT
EMBEDDED = Path(__file__).resolve().parent.parent / "embedded" / "traffic.npz"
_ARRAYS = (
    "scene_tracks", "track_number", "track_type", "track_start", "track_length", "track_size", "track_first",
    "low", "high", "map_elements", "element_kind", "element_points", "point_low", "point_high", "element_first",
    "scene_signals", "signal_element", "signal_step", "signal_state",
)  # fmt: skip


class Recordings:
    """Scenes of a recordings file, in its order. A `scene.Reader`.

    Raises SceneError when the file is missing, cut short, of another format or of a newer version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header, self._arrays = _load(self.path)
        self.name = str(self.header["name"])
        self.source = str(self.path)
        self.dt = float(self.header["dt"])
        self._table = _decode(self._arrays, self.path)
        self._maps: dict[int, RoadMap] = {}

    @classmethod
    def embedded(cls) -> Recordings:
        """The traffic set that ships with the package."""
        return cls(EMBEDDED)

    def __len__(self) -> int:
        return len(self.header["scenes"])

    def __iter__(self) -> Iterator[Scene | Drop]:
        for i in range(len(self)):
            yield self.scene(i)

    def scene(self, i: int) -> Scene:
        """Scene number i, with its own copies of the states and the map of its road network (shared between scenes)."""
        entry, a = self.header["scenes"][i], self._arrays
        network = int(entry["network"])
        first, last = a["scene_tracks"][i : i + 2]
        signals = slice(*a["scene_signals"][i : i + 2])
        start = int(a["map_elements"][network])
        road = self._map(network)
        return Scene(
            id=str(entry["id"]),
            dt=self.dt,
            split=str(self.header["networks"][network]["split"]),
            tracks=[self._track(j) for j in range(first, last)],
            map=road,
            signals=[
                (road.elements[int(e) - start].id, int(s), SIGNAL_STATES[int(v)])
                for e, s, v in zip(a["signal_element"][signals], a["signal_step"][signals], a["signal_state"][signals])
            ],
            meta={"group": road.id, "kind": str(self.header["networks"][network]["kind"])},
        )

    def _track(self, j: int) -> Track:
        a = self._arrays
        first, last = self._table["rows"][j : j + 2]
        kind = AGENT_TYPES[int(a["track_type"][j])]
        length, width = a["track_size"][j] * SIZE_UNIT
        return Track(
            id=f"{self.header['labels'][int(a['track_number'][j, 0])]}_{int(a['track_number'][j, 1])}",
            type=kind,
            start=int(a["track_start"][j]),
            xyh=self._table["xyh"][first:last].copy(),
            valid=np.ones(last - first, bool),
            size=(round(float(length), 2), round(float(width), 2)),
        )

    def _map(self, network: int) -> RoadMap:
        if network not in self._maps:
            a, ids = self._arrays, self.header["networks"][network]["elements"]
            first, last = a["map_elements"][network : network + 2]
            elements = []
            for name, e in zip(ids, range(first, last)):
                p, q = self._table["points"][e : e + 2]
                kind = MAP_KINDS[int(a["element_kind"][e])]
                elements.append(MapElement(str(name), kind, self._table["xy"][p:q].copy()))
            self._maps[network] = RoadMap(str(self.header["networks"][network]["name"]), elements)
        return self._maps[network]


def _load(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Header and arrays, checked for format, version and completeness."""
    if not path.is_file():
        raise SceneError(
            f"{path}: no such file; expected a recordings file of `python -m seqdiff.tools.record_traffic`"
        )
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error) as error:
        text = f"{path}: not a whole .npz file ({error}); it may be cut short: copy or record it again"
        raise SceneError(text) from error
    try:
        header = json.loads(arrays.pop("header").tobytes().decode())
    except (KeyError, ValueError) as error:
        raise SceneError(f"{path}: an .npz file without a readable header; expected format {FORMAT!r}") from error
    got = (header.get("format"), header.get("version")) if isinstance(header, dict) else (None, None)
    if got != (FORMAT, VERSION):
        raise SceneError(
            f"{path}: format {got[0]!r} version {got[1]!r}; this reader knows {FORMAT!r} version {VERSION}: "
            "record it again or update seqdiff"
        )
    missing = [key for key in _ARRAYS if key not in arrays]
    if missing:
        raise SceneError(f"{path}: arrays missing: {', '.join(missing)}; record the file again")
    return header, arrays


def _decode(a: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Integer codes -> metres and radians of all rows, with the offsets of tracks and elements."""
    rows = np.r_[0, np.cumsum(a["track_length"].astype(np.int64))]
    points = np.r_[0, np.cumsum(a["element_points"].astype(np.int64))]
    if a["low"].shape != (3, rows[-1]) or a["point_low"].shape != (2, points[-1]):
        raise SceneError(
            f"{path}: {a['low'].shape[-1]} rows and {a['point_low'].shape[-1]} map points; the tables of tracks and "
            f"elements expect {rows[-1]} and {points[-1]}: the file is damaged, record it again"
        )
    code = _join(a["low"], a["high"])
    xyh = np.stack([_integrate(c, rows, a["track_first"][:, i], order=2) for i, c in enumerate(code)], axis=1)
    line = _join(a["point_low"], a["point_high"])
    xy = np.stack([_integrate(c, points, a["element_first"][:, i], order=1) for i, c in enumerate(line)], axis=1)
    state = xyh * np.array([POSITION_UNIT, POSITION_UNIT, HEADING_UNIT])
    state[:, 2] = np.arctan2(np.sin(state[:, 2]), np.cos(state[:, 2]))
    return {"rows": rows, "points": points, "xyh": state, "xy": xy * MAP_UNIT}


def _split(code: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Signed codes -> low and high bytes of their zigzag form (small magnitudes have a high byte of 0)."""
    if code.size and np.abs(code).max() >= 2**15:
        raise SceneError(f"{what} jump by {np.abs(code).max()} units in one step; expected less than {2**15}")
    zigzag = ((code << 1) ^ (code >> 63)).astype(np.uint16)
    return (zigzag & 255).astype(np.uint8), (zigzag >> 8).astype(np.uint8)


def _join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    zigzag = low.astype(np.int64) | (high.astype(np.int64) << 8)
    return (zigzag >> 1) ^ -(zigzag & 1)


def _differences(values: np.ndarray, offsets: np.ndarray, order: int) -> np.ndarray:
    """Differences in time of given order within each part, as if it had been at rest at its first value before."""
    out = values.copy()
    starts = offsets[:-1]
    for k in range(order):
        previous = np.r_[0, out[:-1]]
        previous[starts] = values[starts] if k == 0 else 0
        out = out - previous
    return out


def _integrate(code: np.ndarray, offsets: np.ndarray, first: np.ndarray, order: int) -> np.ndarray:
    """Inverse of `_differences`, `first` being each part's first value."""
    out, lengths = code, np.diff(offsets)
    for _ in range(order):
        total = np.cumsum(out)
        before = np.r_[0, total][offsets[:-1]]
        out = total - np.repeat(before, lengths)
    return out + np.repeat(first.astype(np.int64), lengths)


def write_recordings(path: str | Path, name: str, scenes: Sequence[Scene], meta: dict[str, str | int | float]) -> Path:
    """Write scenes without holes as one recordings file, whole or not at all; equal scenes give equal bytes.

    Track ids end in `_<number>`; scenes of one network share one RoadMap object; `meta` says how it was made.
    Raises SceneError for what the format cannot hold: holes, a missing map or size, several dt, another form of id.
    """
    path = Path(path)
    if not scenes or len({s.dt for s in scenes}) != 1:
        steps = sorted({s.dt for s in scenes})
        raise SceneError(f"{len(scenes)} scenes with time steps {steps}; expected scenes of one dt")
    networks: dict[int, RoadMap] = {}
    splits: dict[int, tuple[str, str]] = {}
    for scene in scenes:
        if scene.map is None:
            raise SceneError(f"scene {scene.id}: no map; a recordings file holds scenes with a map")
        networks.setdefault(id(scene.map), scene.map)
        splits[id(scene.map)] = (scene.split, str(scene.meta.get("kind", "")))
    order = {key: i for i, key in enumerate(networks)}
    labels = sorted({t.id.rpartition("_")[0] for s in scenes for t in s.tracks})
    arrays = _code_tracks(scenes, labels)
    arrays |= _code_maps(list(networks.values()))
    arrays |= _code_signals(scenes, order, arrays["map_elements"])
    header = {
        "format": FORMAT, "version": VERSION, "name": name, "dt": scenes[0].dt,
        "units": {"position": POSITION_UNIT, "heading": HEADING_UNIT, "map": MAP_UNIT, "size": SIZE_UNIT},
        "labels": labels, "meta": meta,
        "networks": [
            {"name": m.id, "split": splits[key][0], "kind": splits[key][1], "elements": [e.id for e in m.elements]}
            for key, m in networks.items()
        ],
        "scenes": [{"id": s.id, "network": order[id(s.map)]} for s in scenes],
    }  # fmt: skip
    arrays["header"] = np.frombuffer(json.dumps(header, separators=(",", ":")).encode(), np.uint8)
    part = path.with_name(f".{path.name}.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for key, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{key}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(entry, buffer.getvalue(), compresslevel=9)
    os.replace(part, path)
    return path


def _code_tracks(scenes: Sequence[Scene], labels: list[str]) -> dict[str, np.ndarray]:
    tracks = [t for s in scenes for t in s.tracks]
    for scene in scenes:
        for t in scene.tracks:
            if not t.valid.all() or t.size is None or not t.id.rpartition("_")[2].isdecimal():
                raise SceneError(f"scene {scene.id}, track {t.id}: expected no holes, a size and an id like car_12")
    rows = np.r_[0, np.cumsum([len(t.xyh) for t in tracks])]
    xyh = np.concatenate([t.xyh for t in tracks])
    turn = np.concatenate([np.unwrap(t.xyh[:, 2]) for t in tracks])
    units = np.stack([xyh[:, 0] / POSITION_UNIT, xyh[:, 1] / POSITION_UNIT, turn / HEADING_UNIT])
    whole = np.rint(units).astype(np.int64)
    low, high = _split(np.stack([_differences(w, rows, 2) for w in whole]), "positions or headings")
    return {
        "scene_tracks": np.r_[0, np.cumsum([len(s.tracks) for s in scenes])].astype(np.int32),
        "track_number": np.array(
            [(labels.index(t.id.rpartition("_")[0]), int(t.id.rpartition("_")[2])) for t in tracks], np.int32
        ),
        "track_type": np.array([AGENT_TYPES.index(t.type) for t in tracks], np.int8),
        "track_start": np.array([t.start for t in tracks], np.int32),
        "track_length": np.diff(rows).astype(np.int32),
        "track_size": np.array([np.rint(np.array(t.size) / SIZE_UNIT) for t in tracks], np.int32),
        "track_first": whole[:, rows[:-1]].T.astype(np.int32),
        "low": low,
        "high": high,
    }


def _code_maps(maps: list[RoadMap]) -> dict[str, np.ndarray]:
    elements = [e for m in maps for e in m.elements]
    offsets = np.r_[0, np.cumsum([len(e.points) for e in elements])]
    whole = np.rint(np.concatenate([e.points for e in elements]).T / MAP_UNIT).astype(np.int64)
    low, high = _split(np.stack([_differences(w, offsets, 1) for w in whole]), "map points")
    return {
        "map_elements": np.r_[0, np.cumsum([len(m.elements) for m in maps])].astype(np.int32),
        "element_kind": np.array([MAP_KINDS.index(e.kind) for e in elements], np.int8),
        "element_points": np.diff(offsets).astype(np.int32),
        "element_first": whole[:, offsets[:-1]].T.astype(np.int32),
        "point_low": low,
        "point_high": high,
    }


def _code_signals(scenes: Sequence[Scene], order: dict[int, int], starts: np.ndarray) -> dict[str, np.ndarray]:
    rows = []
    for scene in scenes:
        assert scene.map is not None
        ids = {e.id: k for k, e in enumerate(scene.map.elements)}
        first = int(starts[order[id(scene.map)]])
        rows += [(first + ids[lane], step, SIGNAL_STATES.index(state)) for lane, step, state in scene.signals]
    table = np.array(rows, np.int32).reshape(-1, 3)
    return {
        "scene_signals": np.r_[0, np.cumsum([len(s.signals) for s in scenes])].astype(np.int32),
        "signal_element": table[:, 0],
        "signal_step": table[:, 1],
        "signal_state": table[:, 2].astype(np.int8),
    }
