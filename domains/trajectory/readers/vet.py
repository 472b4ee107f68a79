"""Checks and small geometry that readers share: a scene enters the store sound, or its faults are counted by name."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from dataclasses import replace

import numpy as np

from seqdiff.domains.trajectory.scene import AGENT_TYPES, MAX_SPEED, Drop, Scene, SceneError, Track

STILL_SPEED = 0.1  # m/s; below it a direction of motion is annotation noise


def need(module: str, reader: str, install: str) -> None:
    """SceneError with the line to install where `module` can't be imported: asked before any file is read."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise SceneError(f"{reader} needs a package that is not installed ({error}): {install}") from error


def motion_heading(xy: np.ndarray, valid: np.ndarray, dt: float) -> np.ndarray:
    """Heading [T] of an agent without a recorded one: the direction from its last known position to the present one.

    xy [T, 2] metres, valid bool [T]. Standing still (slower than STILL_SPEED) keeps the last heading. Row t depends on
    rows up to t only, so a forecast's input never holds the future; the price is that rows before the first movement
    have no direction and get 0. Rows that are not valid are NaN.
    """
    heading = np.full(len(xy), np.nan)
    rows = np.flatnonzero(valid)
    if not len(rows):
        return heading
    step = np.diff(xy[rows], axis=0)
    moving = np.hypot(step[:, 0], step[:, 1]) > STILL_SPEED * dt * np.diff(rows)
    direction = np.concatenate([[0.0], np.arctan2(step[:, 1], step[:, 0])])
    last_moving = np.maximum.accumulate(np.where(np.concatenate([[True], moving]), np.arange(len(rows)), 0))
    heading[rows] = direction[last_moving]
    return heading


def dense(steps: np.ndarray, xyh: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Rows at increasing `steps` [N] -> (start, xyh [T, 3], valid [T]); missing steps become holes (NaN, False)."""
    start, n = int(steps[0]), int(steps[-1] - steps[0]) + 1
    out = np.full((n, 3), np.nan)
    valid = np.zeros(n, bool)
    at = np.asarray(steps, np.int64) - start
    out[at], valid[at] = xyh, True
    return start, out, valid


def top_speed(track: Track, dt: float) -> float:
    """Largest speed in m/s between neighbouring valid rows (holes bridged by their length); 0 for a single row."""
    rows = np.flatnonzero(track.valid)
    if len(rows) < 2:
        return 0.0
    step = np.diff(track.xyh[rows, :2], axis=0)
    return float((np.hypot(step[:, 0], step[:, 1]) / (np.diff(rows) * dt)).max())


def track_fault(track: Track, dt: float) -> tuple[str, str] | None:
    """(reason, detail) why a track can't enter the store, or None."""
    if track.type not in AGENT_TYPES:
        return "unknown agent type", f"{track.id}: {track.type!r}, expected one of {', '.join(AGENT_TYPES)}"
    if track.xyh.shape != (len(track.valid), 3):
        return "rows and validity differ in length", f"{track.id}: {track.xyh.shape} against {track.valid.shape}"
    if not track.valid.any():
        return "track without a valid row", track.id
    bad = np.flatnonzero(track.valid & ~np.isfinite(track.xyh).all(1))
    if len(bad):
        return (
            "NaN or infinity in a valid row",
            f"{track.id}: step {track.start + bad[0]}, {track.xyh[bad[0]].tolist()}",
        )
    speed = top_speed(track, dt)
    if speed > MAX_SPEED:
        return f"faster than {MAX_SPEED:g} m/s", f"{track.id}: {speed:.0f} m/s"
    if track.size is not None and not all(math.isfinite(s) and s > 0 for s in track.size):
        return "size that is not positive", f"{track.id}: {track.size}"
    return None


def vet(scene: Scene) -> tuple[Scene | None, list[Drop]]:
    """A scene with its unsound tracks taken out, or None where nothing is left; with it what was taken out and why.

    Raises SceneError where most tracks break the speed limit: that is a wrong unit, not a wrong track.
    """
    if not (math.isfinite(scene.dt) and scene.dt > 0):
        raise SceneError(f"scene {scene.id}: dt is {scene.dt}, expected a positive number of seconds a step")
    names = Counter(t.id for t in scene.tracks)
    kept, drops = [], []
    for track in scene.tracks:
        fault = track_fault(track, scene.dt)
        if fault is None and names[track.id] > 1:
            fault = "duplicate track id", f"{track.id} stands {names[track.id]} times"
        if fault is None:
            kept.append(track)
        else:
            drops.append(Drop(scene.id, *fault))
    fast = sum("faster than" in d.reason for d in drops)
    if fast > 1 and fast > len(scene.tracks) / 2:
        worst = max(top_speed(t, scene.dt) for t in scene.tracks if t.valid.any())
        raise SceneError(
            f"scene {scene.id}: {fast} of {len(scene.tracks)} tracks move faster than {MAX_SPEED:g} m/s "
            f"(up to {worst:.0f}): "
            f"expected metres and a dt in seconds (got dt = {scene.dt:g}); convert the positions or correct dt"
        )
    if not kept:
        return None, [*drops, Drop(scene.id, "scene without tracks", f"{len(scene.tracks)} tracks came in")]
    return (scene if not drops else replace(scene, tracks=kept)), drops
