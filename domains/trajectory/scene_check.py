"""What a scene must satisfy before it is packed. Every refusal names scene, track and step, and says what to do."""

from __future__ import annotations

import difflib
import math

import numpy as np

from seqdiff.domains.trajectory.pieces import RINGS
from seqdiff.domains.trajectory.scene import (
    AGENT_TYPES,
    MAP_KINDS,
    MAX_SPEED,
    SIGNAL_STATES,
    RoadMap,
    Scene,
    SceneError,
    Track,
)

MAX_STEPS = 2**31 - 2**17  # scene steps are int32 and windows look beyond the last one
MAX_ELEMENTS = 2**21  # a signal's key has 21 bits for its element


def check_scene(scene: Scene) -> None:
    """Raises SceneError for anything that a store cannot hold as it stands. Changes nothing."""
    where = f"scene {scene.id!r}"
    if not isinstance(scene.id, str) or not scene.id:
        raise SceneError(f"{where}: the id must be a non-empty text; give each scene a name of its own")
    if not isinstance(scene.split, str) or not scene.split:
        raise SceneError(f"{where}: split is {scene.split!r}; write 'train', 'val', 'test' or the data set's own name")
    if not (math.isfinite(scene.dt) and scene.dt > 0):
        raise SceneError(f"{where}: dt is {scene.dt!r}; write the seconds between two steps, e.g. 0.1")
    seen: set[str] = set()
    for track in scene.tracks:
        if track.id in seen:
            raise SceneError(
                f"{where}, track {track.id!r}, step {track.start}: this id is already taken in the scene; "
                "join the rows of one agent to one Track, or number the agents apart"
            )
        seen.add(track.id)
        check_track(track, scene.dt, f"{where}, track {track.id!r}")
    focal = [t.id for t in scene.tracks if t.focal]
    if len(focal) > 1:
        raise SceneError(f"{where}: {len(focal)} tracks are marked focal ({', '.join(focal[:5])}); mark one at most")
    if scene.map is not None:
        check_map(scene.map, where)
    _check_signals(scene, where)


def _one_of(value: str, allowed: tuple[str, ...], where: str, what: str) -> None:
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "map it to one of these in the reader"
    raise SceneError(f"{where}: {what} {value!r} is unknown; expected one of {', '.join(allowed)}; {hint}")


def check_track(track: Track, dt: float, where: str) -> None:
    """Shapes, finite rows, sizes and speeds of one track. `where` names it in the error."""
    _one_of(track.type, AGENT_TYPES, f"{where}, step {track.start}", "agent type")
    xyh, valid = track.xyh, track.valid
    if xyh.ndim != 2 or xyh.shape[1] != 3 or valid.shape != xyh.shape[:1] or valid.dtype != bool or len(xyh) == 0:
        raise SceneError(
            f"{where}, step {track.start}: got xyh {xyh.shape} and valid {valid.shape} of {valid.dtype}; "
            "expected xyh [T, 3] (x, y, heading) and valid [T] of bool with T at least 1"
        )
    if track.start < 0 or track.start + len(xyh) > MAX_STEPS:
        raise SceneError(f"{where}: starts at step {track.start}; steps count from the scene's first one, which is 0")
    bad = valid & ~np.isfinite(xyh).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        what = "heading" if np.isfinite(xyh[row, :2]).all() else "position"
        raise SceneError(
            f"{where}, step {track.start + row}: {what} is not finite in a valid row (x, y, heading = {_row(xyh[row])})"
            "; set valid to False there, or fill in the heading from the motion"
        )
    if track.size is not None and not (len(track.size) == 2 and all(math.isfinite(v) and v > 0 for v in track.size)):
        raise SceneError(f"{where}: size is {track.size!r}; expected (length, width) in metres above 0, or None")
    _check_speed(track, dt, where)


def _row(row: np.ndarray) -> str:
    return ", ".join(f"{v:.6g}" for v in row)


def _check_speed(track: Track, dt: float, where: str) -> None:
    rows = np.flatnonzero(track.valid)
    if len(rows) < 2:
        return
    xy = track.xyh[rows, :2]
    speed = np.hypot(*np.diff(xy, axis=0).T) / (np.diff(rows) * dt)
    at = int(np.argmax(speed))
    if speed[at] > MAX_SPEED:
        raise SceneError(
            f"{where}, step {track.start + int(rows[at + 1])}: moves at {speed[at]:.1f} m/s (from {_row(xy[at])} to "
            f"{_row(xy[at + 1])} in {(rows[at + 1] - rows[at]) * dt:.3g} s), expected at most {MAX_SPEED:g}; check "
            "that positions are metres (not feet, pixels or degrees), that dt is right, and that one id is one agent"
        )


def check_map(road: RoadMap, where: str) -> None:
    """Kinds, shapes and ids of a map's elements."""
    if len(road.elements) >= MAX_ELEMENTS:
        raise SceneError(
            f"{where}, map {road.id!r}: {len(road.elements)} elements, at most {MAX_ELEMENTS}; cut the map"
        )
    seen: set[tuple[str, str]] = set()
    for element in road.elements:
        here = f"{where}, map {road.id!r}, element {element.id!r}"
        _one_of(element.kind, MAP_KINDS, here, "map kind")
        least = 3 if element.kind in RINGS else 2
        points = element.points
        if points.ndim != 2 or points.shape[1] != 2 or len(points) < least or not np.isfinite(points).all():
            raise SceneError(
                f"{here}: got points {points.shape}"
                f"{'' if np.isfinite(points).all() else ' with values that are not finite'}; "
                f"expected finite [P, 2] with P at least {least} for {element.kind}"
            )
        if (element.kind, element.id) in seen:
            raise SceneError(f"{here}: two {element.kind} elements have this id; number them apart")
        seen.add((element.kind, element.id))


def _check_signals(scene: Scene, where: str) -> None:
    if not scene.signals:
        return
    lanes = {e.id for e in scene.map.elements if e.kind == "lane_center"} if scene.map else set()
    taken: set[tuple[str, int]] = set()
    for element, step, state in scene.signals:
        here = f"{where}, signal of {element!r}, step {step}"
        _one_of(state, SIGNAL_STATES, here, "signal state")
        if element not in lanes:
            raise SceneError(f"{here}: the map has no lane_center of this id; name the lane that the signal controls")
        if not 0 <= step < MAX_STEPS:
            raise SceneError(f"{here}: steps count from the scene's first one, which is 0")
        if (element, step) in taken:
            raise SceneError(f"{here}: two states at one step; keep the one that holds")
        taken.add((element, step))
