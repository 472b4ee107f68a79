"""SUMO's network as a road map: lane centre lines, drivable area, crosswalks; and signals per lane.

The drivable area is what a driver sees as road: lanes, those inside junctions, the ground between, a shoulder beside,
with inner corners rounded like a kerb. Pavements do not belong to it.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import shapely
from shapely.geometry import LineString, MultiPolygon, Polygon
from shapely.geometry.base import BaseGeometry

from seqdiff.domains.trajectory.scene import MapElement, RoadMap

SHOULDER = 0.5  # metres beside the outer lanes
GRID = 0.01  # metres, the file's unit of map points
NIB = 1.6  # metres, half the width of slivers of junction ground that are left out
MIN_HOLE = 12.0  # m^2; smaller islands are painted, not built
TOLERANCE = 0.02  # metres, simplification of rings and lines
MIN_LANE = 0.05  # metres; netconvert joins straight edges by inner lanes of no length, which are not lanes
LONGEST = 100.0  # metres between two points of a ring or a line
LIGHTS = {
    "g": "green",
    "G": "green",
    "y": "yellow",
    "Y": "yellow",
    "r": "red",
    "u": "red",
    "s": "red",
    "o": "none",
    "O": "none",
}


@dataclass
class TrafficMap:
    road: RoadMap
    drivable: BaseGeometry
    controlled: dict[tuple[str, int], str]  # (traffic light, its link) -> lane_center element id

    def signals(self, changes: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
        """State strings of whole traffic lights -> changes of each controlled lane, by step and lane."""
        out: list[tuple[str, int, str]] = []
        last: dict[str, str] = {}
        for light, step, states in changes:
            for link, letter in enumerate(states):
                lane, state = self.controlled.get((light, link)), LIGHTS.get(letter, "unknown")
                if lane is not None and last.get(lane) != state:
                    last[lane] = state
                    out.append((lane, step, state))
        return out


def _points(text: str) -> np.ndarray:
    return np.array([[float(v) for v in p.split(",")[:2]] for p in text.split()])


def _strip(points: np.ndarray, half: float, square: bool) -> BaseGeometry:
    return LineString(points).buffer(half, cap_style="square" if square else "flat", join_style="round", quad_segs=4)


def _walks_only(lane: ET.Element) -> bool:
    return lane.attrib.get("allow", "").split() == ["pedestrian"]


def read_map(net: Path, name: str, kerb: float) -> TrafficMap:
    """The map of a SUMO network file; element ids are SUMO's lane ids, rings are named area_i and hole_i.

    kerb: metres, the radius of inner corners.
    """
    root = ET.parse(net).getroot()
    elements, strips, pavements, crosswalks = [], [], [], []
    for edge in root.iter("edge"):
        function = edge.attrib.get("function", "normal")
        for lane in edge.iter("lane"):
            points, width = _points(lane.attrib["shape"]), float(lane.attrib.get("width", 3.2))
            if function == "crossing":
                ring = LineString(points).buffer(width / 2, cap_style="flat")
                crosswalks.append(MapElement(lane.attrib["id"], "crosswalk", np.array(ring.exterior.coords)[:-1]))
                strips.append(ring)
            elif function == "walkingarea":
                pavements.append(Polygon(points).buffer(0))
            elif not _walks_only(lane) and LineString(points).length > MIN_LANE:
                line = shapely.segmentize(shapely.simplify(LineString(points), TOLERANCE), LONGEST)
                elements.append(MapElement(lane.attrib["id"], "lane_center", np.array(line.coords)))
                strips.append(_strip(points, width / 2 + SHOULDER, function == "internal"))
    junctions = [
        Polygon(_points(j.attrib["shape"])).buffer(0)
        for j in root.iter("junction")
        if j.attrib["type"] not in ("internal", "dead_end") and len(j.attrib.get("shape", "").split()) > 2
    ]
    drivable = _drivable(strips, junctions, pavements, kerb)
    elements += crosswalks + _rings(drivable)
    return TrafficMap(RoadMap(name, elements), drivable, _controlled(root))


def _drivable(
    strips: list[BaseGeometry], junctions: list[BaseGeometry], pavements: list[BaseGeometry], kerb: float
) -> BaseGeometry:
    ground = shapely.union_all(junctions).difference(shapely.union_all(pavements))
    ground = ground.buffer(-NIB).buffer(NIB + SHOULDER)  # without the slivers between a pavement and its crossing
    area = shapely.union_all([*strips, ground])
    area = area.buffer(kerb, quad_segs=6).buffer(-kerb, quad_segs=6)
    area = shapely.segmentize(shapely.simplify(shapely.union_all([area, *strips]), TOLERANCE), LONGEST)
    area = shapely.set_precision(area, GRID)  # rounding afterwards could make a ring cross itself
    parts = area.geoms if isinstance(area, MultiPolygon) else [area]
    return MultiPolygon([Polygon(p.exterior, [h for h in p.interiors if Polygon(h).area >= MIN_HOLE]) for p in parts])


def _rings(area: BaseGeometry) -> list[MapElement]:
    areas: list[MapElement] = []
    holes: list[MapElement] = []
    for part in area.geoms:
        areas.append(MapElement(f"area_{len(areas)}", "drivable_area", np.array(part.exterior.coords)[:-1]))
        for hole in part.interiors:
            holes.append(MapElement(f"hole_{len(holes)}", "drivable_hole", np.array(hole.coords)[:-1]))
    return areas + holes


def _controlled(root: ET.Element) -> dict[tuple[str, int], str]:
    """The lane inside the junction that each link of a traffic light lets into; crossings are left out."""
    lanes = {}
    for c in root.iter("connection"):
        if "tl" in c.attrib and c.attrib.get("via") and not c.attrib["from"].startswith(":"):
            lanes[c.attrib["tl"], int(c.attrib["linkIndex"])] = c.attrib["via"]
    return lanes
