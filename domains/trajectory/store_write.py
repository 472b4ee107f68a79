"""Writes a packed store: scenes stream to flat .npy files, the manifest comes last, all of it appears or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import shapely

from seqdiff.domains.trajectory.pieces import POINTS, SEGMENT_M, chop_map
from seqdiff.domains.trajectory.scene import (
    AGENT_TYPES,
    MAP_KINDS,
    SIGNAL_STATES,
    Drop,
    RoadMap,
    Scene,
    SceneError,
    Track,
)
from seqdiff.domains.trajectory.scene_check import check_scene

FORMAT = "seqdiff-trajectory-store"
VERSION = 1
UNITS = {"position": "m", "heading": "rad, counter-clockwise from x", "time": "s", "size": "m"}
EXAMPLES = 5  # drops named in the manifest for each reason

# name: (dtype, shape of one row). `*_ends` hold n + 1 offsets: entry i owns rows ends[i]:ends[i + 1].
COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "scene_split": ("<i2", ()),
    "scene_steps": ("<i4", ()),
    "scene_origin": ("<f8", (2,)),
    "scene_map": ("<i4", ()),  # -1 = no map recorded
    "scene_track_ends": ("<i8", ()),
    "scene_signal_ends": ("<i8", ()),
    "track_type": ("|i1", ()),
    "track_size": ("<f4", (2,)),
    "track_start": ("<i4", ()),
    "track_scored": ("|b1", ()),
    "track_focal": ("|b1", ()),
    "track_row_ends": ("<i8", ()),
    "state": ("<f4", (3,)),  # x, y, heading relative to scene_origin; 0 where not valid
    "valid": ("|b1", ()),
    "run_back": ("<u2", ()),  # valid rows in one piece up to and with this row (65535 = that or more)
    "run_ahead": ("<u2", ()),  # valid rows in one piece after this row
    "map_origin": ("<f8", (2,)),
    "map_element_ends": ("<i8", ()),
    "map_piece_ends": ("<i8", ()),
    "element_kind": ("|i1", ()),
    "element_point_ends": ("<i8", ()),
    "point": ("<f4", (2,)),  # relative to map_origin
    "piece": ("<f4", (POINTS, 2)),
    "piece_mid": ("<f4", (2,)),
    "piece_kind": ("|i1", ()),
    "piece_element": ("<i4", ()),
    "signal_element": ("<i4", ()),  # index within the scene's map
    "signal_step": ("<i4", ()),
    "signal_state": ("|i1", ()),
}
TEXTS = ("scene_id", "scene_meta", "track_id", "map_id", "element_id")  # UTF-8 in NAME_text, offsets in NAME_ends
for _text in TEXTS:
    COLUMNS[f"{_text}_text"] = ("|u1", ())
    COLUMNS[f"{_text}_ends"] = ("<i8", ())


class _Column:
    """One .npy file that grows by rows; the header is written again with the final length at the end."""

    def __init__(self, path: Path, dtype: str, tail: tuple[int, ...]) -> None:
        self.dtype, self.tail, self.rows, self.path = np.dtype(dtype), tail, 0, path
        self.digest = hashlib.sha256()
        self.file = path.open("wb")
        self._header()

    def _header(self) -> None:
        head = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.tail)}
        np.lib.format.write_array_header_1_0(self.file, head)

    def append(self, rows: Any) -> None:
        array = np.ascontiguousarray(rows, self.dtype).reshape(-1, *self.tail)
        data = array.tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.rows += len(array)

    def close(self) -> dict[str, Any]:
        length = self.file.tell()
        self.file.seek(0)
        self._header()  # numpy pads the header so that a longer first axis keeps its length
        head = self.file.tell()
        self.file.close()
        row_bytes = self.dtype.itemsize * int(np.prod(self.tail, dtype=np.int64))
        if length != head + self.rows * row_bytes:
            raise OSError(f"{self.path}: {length} bytes, expected {head + self.rows * row_bytes}; is the disk full?")
        shape = [self.rows, *self.tail]
        return {"dtype": self.dtype.str, "shape": shape, "bytes": length, "sha256": self.digest.hexdigest()}


def _runs(valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Valid rows in one piece up to and with each row, and after each row, of one track [T]."""
    index = np.arange(len(valid))
    back = index - np.maximum.accumulate(np.where(valid, -1, index))
    onward = index - np.maximum.accumulate(np.where(valid[::-1], -1, index))
    ahead = np.append(onward[::-1][1:], 0)
    return np.minimum(back, 65535), np.minimum(ahead, 65535)


class StoreWriter:
    """Packs scenes into the folder `out`. Use it as a context manager: an error inside leaves nothing behind.

    name, source: go to the manifest. overwrite: replace a store that is already at `out` (anything else there is
    refused). segment_m: length of the map pieces that are chopped in advance, metres.
    """

    def __init__(
        self, out: Path | str, name: str, source: str, overwrite: bool = False, segment_m: float = SEGMENT_M
    ) -> None:
        self.out, self.name, self.source, self.segment_m = Path(out), name, source, float(segment_m)
        self.overwrite = overwrite
        if not self.segment_m > 0:
            raise ValueError(f"segment_m is {segment_m}; expected metres above 0, e.g. {SEGMENT_M:g}")
        self._refuse_existing()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._part = self.out.parent / f".{self.out.name}.{os.getpid()}.part"
        shutil.rmtree(self._part, ignore_errors=True)
        self._part.mkdir()
        self._columns = {k: _Column(self._part / f"{k}.npy", d, tail) for k, (d, tail) in COLUMNS.items()}
        self._ends = {k: 0 for k in COLUMNS if k.endswith("_ends")}
        for column in self._ends:
            self._columns[column].append([0])
        self.dt: float | None = None
        self._splits: list[str] = []
        self._counts: dict[str, dict[str, Any]] = {}
        self._split_maps: dict[str, set[int]] = {}
        self._drops: dict[str, dict[str, Any]] = {}
        self._scene_ids: set[str] = set()
        self._maps: dict[str, tuple[int, bytes]] = {}
        self._repaired: dict[str, dict[str, Any]] = {}
        self._open = True

    def _refuse_existing(self) -> None:
        if not self.out.exists():
            return
        if not self.overwrite:
            raise FileExistsError(f"{self.out} exists already; write another `out`, or overwrite=True to replace it")
        if not (self.out / "manifest.json").is_file():
            raise FileExistsError(f"{self.out} has no manifest.json, so it is no store to replace; write another `out`")

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.close()

    def abort(self) -> None:
        """Throws away what was written so far; `out` stays as it was."""
        if self._open:
            self._open = False
            for column in self._columns.values():
                column.file.close()
            shutil.rmtree(self._part, ignore_errors=True)

    def add(self, scene: Scene) -> bool:
        """Checks and packs one scene. False: it holds no track of two valid rows and was counted as dropped.

        Raises SceneError naming scene, track and step; the writer stays usable, so a caller may drop the scene instead.
        """
        check_scene(scene)
        if self.dt is not None and abs(scene.dt - self.dt) > 1e-6 * self.dt:
            raise SceneError(
                f"scene {scene.id!r}: dt is {scene.dt:g} s, the store's is {self.dt:g} s; one store has one dt: "
                "resample in the reader or write a store for each dt"
            )
        if scene.id in self._scene_ids:
            raise SceneError(f"scene {scene.id!r}: this id is already in the store; add the file or map name to it")
        if max((int(t.valid.sum()) for t in scene.tracks), default=0) < 2:
            self.drop(Drop(scene.id, "scene without a track of two valid rows", f"{len(scene.tracks)} tracks"))
            return False
        self._check_same_map(scene)
        tracks = []
        for track in scene.tracks:
            if track.valid.any():
                tracks.append(track)
            else:
                self.drop(Drop(scene.id, "track without a valid row", f"track {track.id!r}"))
        self.dt = scene.dt if self.dt is None else self.dt
        self._scene_ids.add(scene.id)
        self._put_scene(scene, tracks)
        return True

    def drop(self, drop: Drop) -> None:
        """Counts something that was left out; the first few of each reason are named in the manifest."""
        _count(self._drops, drop.reason, f"{drop.scene_id}: {drop.detail}" if drop.detail else drop.scene_id)

    def _put(self, column: str, rows: Any) -> None:
        self._columns[column].append(rows)

    def _put_ends(self, column: str, lengths: Any) -> None:
        ends = self._ends[column] + np.cumsum(np.asarray(lengths, np.int64))
        if len(ends):
            self._ends[column] = int(ends[-1])
            self._put(column, ends)

    def _put_texts(self, name: str, texts: Iterable[str]) -> None:
        coded = [t.encode() for t in texts]
        self._put(f"{name}_text", np.frombuffer(b"".join(coded), np.uint8))
        self._put_ends(f"{name}_ends", [len(c) for c in coded])

    def _put_scene(self, scene: Scene, tracks: list[Track]) -> None:
        valid = np.concatenate([t.valid for t in tracks])
        xyh = np.where(valid[:, None], np.concatenate([t.xyh for t in tracks]).astype(np.float64), 0.0)
        origin = np.round(xyh[valid, :2].mean(axis=0))  # whole metres: exact in any frame
        xyh[valid, :2] -= origin
        runs = [_runs(t.valid) for t in tracks]
        self._put("state", xyh)
        self._put("valid", valid)
        self._put("run_back", np.concatenate([r[0] for r in runs]))
        self._put("run_ahead", np.concatenate([r[1] for r in runs]))
        self._put("track_type", [AGENT_TYPES.index(t.type) for t in tracks])
        self._put("track_size", [t.size or (np.nan, np.nan) for t in tracks])
        self._put("track_start", [t.start for t in tracks])
        self._put("track_scored", [t.scored for t in tracks])
        self._put("track_focal", [t.focal for t in tracks])
        self._put_ends("track_row_ends", [len(t.valid) for t in tracks])
        self._put_texts("track_id", [t.id for t in tracks])
        if scene.split not in self._splits:
            self._splits.append(scene.split)
        self._put("scene_split", [self._splits.index(scene.split)])
        self._put("scene_steps", [max(t.start + len(t.valid) for t in scene.tracks)])
        self._put("scene_origin", origin)
        self._put("scene_map", [-1 if scene.map is None else self._put_map(scene.map)])
        self._put_ends("scene_track_ends", [len(tracks)])
        self._put_texts("scene_id", [scene.id])
        self._put_texts("scene_meta", [json.dumps(scene.meta, sort_keys=True)])
        self._put_signals(scene)
        self._tally(scene, tracks)

    def _put_signals(self, scene: Scene) -> None:
        index = {e.id: k for k, e in enumerate(scene.map.elements) if e.kind == "lane_center"} if scene.map else {}
        rows = sorted((index[element], step, SIGNAL_STATES.index(state)) for element, step, state in scene.signals)
        for k, column in enumerate(("signal_element", "signal_step", "signal_state")):
            self._put(column, [row[k] for row in rows])
        self._put_ends("scene_signal_ends", [len(rows)])

    def _tally(self, scene: Scene, tracks: list[Track]) -> None:
        zero = {"scenes": 0, "steps": 0, "tracks": {}, "agent_steps": {}, "scored_tracks": 0, "maps": 0}
        count = self._counts.setdefault(scene.split, zero)
        count["scenes"] += 1
        count["steps"] += max(t.start + len(t.valid) for t in tracks)
        for track in tracks:
            count["tracks"][track.type] = count["tracks"].get(track.type, 0) + 1
            count["agent_steps"][track.type] = count["agent_steps"].get(track.type, 0) + int(track.valid.sum())
            count["scored_tracks"] += int(track.scored)
        if scene.map is not None:
            self._split_maps.setdefault(scene.split, set()).add(self._maps[scene.map.id][0])

    def _check_same_map(self, scene: Scene) -> None:
        if scene.map is None:
            return
        known = self._maps.get(scene.map.id)
        if known is not None and known[1] != _map_digest(scene.map):
            raise SceneError(
                f"scene {scene.id!r}: its map {scene.map.id!r} differs from the map of this id that is already stored; "
                "a map is stored once, so give different maps different ids"
            )

    def _put_map(self, road: RoadMap) -> int:
        if road.id in self._maps:
            return self._maps[road.id][0]
        index = len(self._maps)
        self._maps[road.id] = (index, _map_digest(road))
        corners = np.concatenate([e.points for e in road.elements] or [np.zeros((1, 2))])
        origin = np.round((corners.min(axis=0) + corners.max(axis=0)) / 2)
        self._put("map_origin", origin)
        self._put_texts("map_id", [road.id])
        self._put_texts("element_id", [e.id for e in road.elements])
        self._put("element_kind", [MAP_KINDS.index(e.kind) for e in road.elements])
        self._put_ends("element_point_ends", [len(e.points) for e in road.elements])
        self._put_ends("map_element_ends", [len(road.elements)])
        if road.elements:
            self._put("point", corners - origin)
        for element in road.elements:
            if element.kind.startswith("drivable") and not shapely.Polygon(element.points).is_valid:
                reason = "drivable ring that crosses itself: all that it winds round is taken"
                _count(self._repaired, reason, f"{road.id}: {element.id}")
        moved = [type(e)(e.id, e.kind, e.points - origin) for e in road.elements]
        pieces = chop_map(moved, self.segment_m)
        for column, rows in zip(("piece", "piece_mid", "piece_kind", "piece_element"), pieces):
            self._put(column, rows)
        self._put_ends("map_piece_ends", [len(pieces[0])])
        return index

    def close(self) -> Path:
        """Writes the manifest and moves the folder into place. Refuses a store without a single scene."""
        if not self._open:
            raise RuntimeError(f"the writer of {self.out} is closed already; make another StoreWriter")
        if not self._scene_ids:
            self.abort()
            why = "; ".join(f"{r}: {d['count']}" for r, d in self._drops.items()) or "the source gave no scene"
            raise SceneError(f"{self.out}: no scene was added ({why}); nothing was written")
        try:
            arrays = {name: column.close() for name, column in self._columns.items()}
            text = json.dumps(self._manifest(arrays), indent=1, ensure_ascii=False)
            (self._part / "manifest.json").write_text(text + "\n", encoding="utf-8")
            self._move()
        except BaseException:
            self.abort()
            raise
        self._open = False
        return self.out

    def _manifest(self, arrays: dict[str, dict[str, Any]]) -> dict[str, Any]:
        for split, count in self._counts.items():
            steps = count.pop("agent_steps")
            count["agent_seconds"] = {k: round(n * float(self.dt or 0), 6) for k, n in steps.items()}
            count["maps"] = len(self._split_maps.get(split, ()))
        digest = hashlib.sha256(f"{FORMAT} {VERSION} {self.dt!r} {self._splits!r}\n".encode())
        for key in sorted(arrays):
            digest.update(f"{key} {arrays[key]['dtype']} {arrays[key]['shape']} {arrays[key]['sha256']}\n".encode())
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "source": self.source,
            "dt": self.dt,
            "units": UNITS,
            "splits": self._splits,
            "agent_types": list(AGENT_TYPES),
            "map_kinds": list(MAP_KINDS),
            "signal_states": list(SIGNAL_STATES),
            "segment_m": self.segment_m,
            "counts": self._counts,
            "dropped": list(self._drops.values()),
            "repaired": list(self._repaired.values()),
            "content_hash": digest.hexdigest(),
            "arrays": arrays,
        }

    def _move(self) -> None:
        self._refuse_existing()
        if not self.out.exists():
            os.replace(self._part, self.out)
            return
        old = self.out.parent / f".{self.out.name}.{os.getpid()}.old"
        os.replace(self.out, old)
        try:
            os.replace(self._part, self.out)
        except BaseException:
            os.replace(old, self.out)
            raise
        shutil.rmtree(old)


def _count(table: dict[str, dict[str, Any]], reason: str, example: str) -> None:
    entry = table.setdefault(reason, {"reason": reason, "count": 0, "examples": []})
    entry["count"] += 1
    if len(entry["examples"]) < EXAMPLES:
        entry["examples"].append(example)


def _map_digest(road: RoadMap) -> bytes:
    digest = hashlib.sha256()
    for element in road.elements:
        digest.update(f"{element.id}\0{element.kind}\0{len(element.points)}\0".encode())
        digest.update(np.ascontiguousarray(element.points, np.float64).tobytes())
    return digest.digest()
