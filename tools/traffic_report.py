"""What a recording is like: counts, share of box corners off the road, box collisions, and how the agents move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import shapely
from shapely.geometry import Polygon
from shapely.geometry.base import BaseGeometry

from seqdiff.domains.trajectory.scene import AGENT_TYPES, Scene

CHECK_EVERY = 5  # steps between two checks of corners and collisions


def box_corners(xyh: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Corners of oriented boxes, counter-clockwise. xyh [N, 3], size (length, width) [N, 2] -> [N, 4, 2]"""
    c, s = np.cos(xyh[:, 2]), np.sin(xyh[:, 2])
    along, across = np.stack([c, s], 1), np.stack([-s, c], 1)
    signs = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]]) * 0.5
    out = xyh[:, None, :2] + signs[None, :, :1] * (size[:, :1] * along)[:, None]
    return out + signs[None, :, 1:] * (size[:, 1:] * across)[:, None]


def drivable_of(scene: Scene) -> BaseGeometry:
    """Union of a scene's drivable_area rings less its drivable_hole rings."""
    assert scene.map is not None
    area, holes = (
        shapely.union_all([Polygon(e.points) for e in scene.map.elements if e.kind == kind])
        for kind in ("drivable_area", "drivable_hole")
    )
    return area.difference(holes)


def overlaps(corners: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Pairs of boxes that overlap (separating axis theorem). corners [N, 4, 2], half diagonals [N] -> indices [P, 2]"""
    n = len(corners)
    centre = corners.mean(1)
    i, j = np.triu_indices(n, 1)
    near = np.linalg.norm(centre[i] - centre[j], axis=1) < reach[i] + reach[j]
    i, j = i[near], j[near]
    apart = np.zeros(len(i), bool)
    for own in (i, j):
        for edge in (0, 1):
            axis = corners[own, edge + 1] - corners[own, edge]
            a, b = (np.einsum("pkc,pc->pk", corners[k], axis) for k in (i, j))
            apart |= (a.max(1) < b.min(1)) | (b.max(1) < a.min(1))
    return np.stack([i[~apart], j[~apart]], axis=1)


def measure(scene: Scene) -> dict[str, float | np.ndarray]:
    """Sums of one scene for `summarise`: corners, corners off the road, states, states in collision, motion samples."""
    steps = max(t.start + len(t.xyh) for t in scene.tracks)
    area = drivable_of(scene)
    shapely.prepare(area)
    sums: dict[str, float | np.ndarray] = defaultdict(float)
    hit_tracks: set[int] = set()
    for step in range(0, steps, CHECK_EVERY):
        live = [k for k, t in enumerate(scene.tracks) if t.start <= step < t.start + len(t.xyh)]
        if not live:
            continue
        here = [scene.tracks[k] for k in live]
        size = np.array([t.size for t in here])
        corners = box_corners(np.array([t.xyh[step - t.start] for t in here]), size)
        rides = np.array([t.type != "pedestrian" for t in here])
        on = shapely.contains_xy(area, corners[rides].reshape(-1, 2))
        hit = np.unique(overlaps(corners, 0.5 * np.linalg.norm(size, axis=1)))
        hit_tracks |= {live[k] for k in hit}
        sums["corners"] += on.size
        sums["off"] += float((~on).sum())
        sums["states"] += len(here)
        sums["hit"] += float(len(hit))
    sums["tracks"], sums["hit_tracks"] = len(scene.tracks), len(hit_tracks)
    sums |= _motion(scene)
    return sums


def _motion(scene: Scene) -> dict[str, np.ndarray]:
    """Speed, acceleration, yaw rate, sideways speed and jerk of vehicles by finite differences, pooled."""
    pools: dict[str, list[np.ndarray]] = defaultdict(list)
    for t in scene.tracks:
        if t.type == "pedestrian" or len(t.xyh) < 5:
            continue
        d = np.diff(t.xyh[:, :2], axis=0) / scene.dt
        middle = t.xyh[:-1, 2] + 0.5 * (turn := np.diff(np.unwrap(t.xyh[:, 2])))
        forward = d[:, 0] * np.cos(middle) + d[:, 1] * np.sin(middle)
        pools["speed"].append(np.hypot(d[:, 0], d[:, 1]))
        pools["sideways"].append(np.abs(-d[:, 0] * np.sin(middle) + d[:, 1] * np.cos(middle)))
        pools["acceleration"].append(np.abs(np.diff(forward)) / scene.dt)
        pools["lateral_acceleration"].append(np.abs(forward * turn) / scene.dt)
        pools["yaw_rate"].append(np.abs(turn) / scene.dt)
        pools["jerk"].append(np.abs(np.diff(forward, 2)) / scene.dt**2)
        pools["backwards"].append(np.maximum(-forward, 0.0))
    return {key: np.concatenate(v) for key, v in pools.items()}


def summarise(scenes: Sequence[Scene]) -> str:
    """The report as text: one row a kind of network, then the agent-seconds by type and split."""
    groups: dict[str, list[Scene]] = defaultdict(list)
    for s in scenes:
        groups[str(s.meta.get("kind", "all"))].append(s)
    columns = ("networks", "scenes", "agents", "agent-s", "off-road", "collision", "agents hit")
    head = f"{'kind':<11}" + "".join(f"{c:>11}" for c in columns)
    motion = ("speed", "acceleration", "jerk", "yaw_rate", "lateral_acceleration", "sideways", "backwards")
    titles = "".join(f"{m.replace('lateral', 'lat'):>18}" for m in motion)
    lines, tails = [head], [f"{'99.9th percentile':<18}{titles}"]
    for kind, members in groups.items():
        parts = [measure(s) for s in members]
        keys = ("corners", "off", "states", "hit", "tracks", "hit_tracks")
        total = {k: sum(float(p[k]) for p in parts) for k in keys}
        seconds = sum(len(t.xyh) * s.dt for s in members for t in s.tracks)
        lines.append(
            f"{kind:<11}{len({s.map.id for s in members if s.map}):>11}{len(members):>11}{total['tracks']:>11.0f}"
            f"{seconds:>11.0f}{total['off'] / total['corners']:>11.3%}{total['hit'] / total['states']:>11.3%}"
            f"{total['hit_tracks'] / total['tracks']:>11.2%}"
        )
        values = [np.quantile(np.concatenate([p[m] for p in parts]), 0.999) for m in motion]
        tails.append(f"{kind:<18}" + "".join(f"{v:>18.3f}" for v in values))
    return "\n".join([*lines, "", *tails, "", counts(scenes)])


def counts(scenes: Sequence[Scene]) -> str:
    """Agent-seconds by type and split."""
    splits = sorted({s.split for s in scenes})
    table = {(t, s): 0.0 for t in AGENT_TYPES for s in splits}
    for scene in scenes:
        for t in scene.tracks:
            table[t.type, scene.split] += len(t.xyh) * scene.dt
    lines = [f"{'agent-seconds':<14}" + "".join(f"{s:>10}" for s in splits) + f"{'all':>10}"]
    for kind in AGENT_TYPES:
        row = [table[kind, s] for s in splits]
        if sum(row):
            lines.append(f"{kind:<14}" + "".join(f"{v:>10.0f}" for v in row) + f"{sum(row):>10.0f}")
    sums = [sum(table[t, s] for t in AGENT_TYPES) for s in splits]
    return "\n".join([*lines, f"{'all':<14}" + "".join(f"{v:>10.0f}" for v in sums) + f"{sum(sums):>10.0f}"])
