"""Map polylines chopped into short pieces of equal point count: the map tokens of a window.

Letters: p pieces, l points a piece (POINTS), m maps. Chopping happens once, when a store is written (or once per opened
store for another piece length), so that a batch only gathers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import shapely

from seqdiff.domains.trajectory.scene import MAP_KINDS, MapElement

POINTS = 10  # points a piece
SEGMENT_M = 10.0  # default length of a piece, metres
RINGS = frozenset({"crosswalk", "drivable_area", "drivable_hole"})
AREAS = frozenset({"drivable_area", "drivable_hole"})


@dataclass
class Pieces:
    """All pieces of a store's maps, in each map's own origin (metres)."""

    points: np.ndarray  # float32 p l 2
    mid: np.ndarray  # float32 p 2: point at half length, what "nearest" is measured from
    kind: np.ndarray  # int8 p: index into MAP_KINDS
    element: np.ndarray  # int32 p: index of the element within its map
    ends: np.ndarray  # int64 m+1: pieces of map m are ends[m]:ends[m+1]


def chop(points: np.ndarray, segment_m: float, closed: bool = False) -> np.ndarray:
    """Cuts one polyline [n, 2] into equal pieces of at most `segment_m` metres; returns float64 [p, l, 2].

    Neighbouring pieces share an end point. A ring (`closed`) is followed round to its first point. A polyline without
    length has no direction and gives no piece.
    """
    if closed:
        points = np.concatenate([points, points[:1]])
    step = np.hypot(*np.diff(points, axis=0).T)
    along = np.concatenate([[0.0], np.cumsum(step)])
    total = along[-1]
    if not total > 0:
        return np.zeros((0, POINTS, 2))
    n = max(1, int(np.ceil(total / segment_m - 1e-6)))
    at = (np.arange(n)[:, None] + np.linspace(0.0, 1.0, POINTS)) * (total / n)
    return np.stack([np.interp(at, along, points[:, 0]), np.interp(at, along, points[:, 1])], axis=-1)


def chop_map(elements: Iterable[MapElement], segment_m: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of one map: points float32 [p, l, 2], middle float32 [p, 2], kind int8 [p], element int32 [p].

    Drivable rings become tokens only on a map that holds nothing else: their outline repeats the lanes' edges.
    """
    elements = list(elements)
    only_areas = all(e.kind in AREAS for e in elements)
    parts, kinds, owners = [], [], []
    for index, element in enumerate(elements):
        if element.kind in AREAS and not only_areas:
            continue
        part = chop(element.points, segment_m, closed=element.kind in RINGS)
        parts.append(part)
        kinds.append(np.full(len(part), MAP_KINDS.index(element.kind), np.int8))
        owners.append(np.full(len(part), index, np.int32))
    if not parts:
        return np.zeros((0, POINTS, 2), "f4"), np.zeros((0, 2), "f4"), np.zeros(0, np.int8), np.zeros(0, np.int32)
    points = np.concatenate(parts)
    middle = points[:, (POINTS - 1) // 2 : POINTS // 2 + 1].mean(axis=1)
    return points.astype("f4"), middle.astype("f4"), np.concatenate(kinds), np.concatenate(owners)


def ring_area(points: np.ndarray) -> Any:
    """What a ring [n, 2] encloses, as a shapely geometry. A ring that crosses itself encloses all that it winds round.

    (The usual repair counts crossings instead and punches a hole where a strip of road overlaps itself.)
    """
    polygon = shapely.Polygon(points)
    if polygon.is_valid:
        return polygon
    line = shapely.node(shapely.LineString(np.concatenate([points, points[:1]])))
    faces = shapely.get_parts(shapely.polygonize(shapely.get_parts(line)))
    inside = [face for face in faces if _winding(points, shapely.get_coordinates(face.representative_point())[0])]
    return shapely.union_all(inside)


def _winding(points: np.ndarray, at: np.ndarray) -> int:
    """How often a ring [n, 2] goes round a point that does not lie on it."""
    angle = np.arctan2(*(points - at).T[::-1])
    turn = np.diff(angle, append=angle[:1])
    return round(float((turn - 2 * np.pi * np.round(turn / (2 * np.pi))).sum() / (2 * np.pi)))
