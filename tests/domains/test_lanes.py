"""Ways through a map made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from seqdiff.domains.trajectory.lanes import LaneGraph, turning
from seqdiff.domains.trajectory.scene import MapElement, RoadMap

ANGLE = np.linspace(0, np.pi / 2, 30)


def road() -> RoadMap:
    """A lane 30 m east to (0, 0); from there straight on, or a left curve of radius 10 m and on to the north."""
    curve = np.stack([10 * np.sin(ANGLE), 10 - 10 * np.cos(ANGLE)], 1)
    lanes = {
        "in": [[-30.0, 0], [0, 0]], "on": [[0.0, 0], [60, 0]], "left": curve, "north": [[10.0, 10], [10, 60]],
        "back": [[0.0, 3], [-30, 3]],
    }  # fmt: skip
    return RoadMap("m", [MapElement(name, "lane_center", np.array(p)) for name, p in lanes.items()])


def test_routes_and_where_they_turn() -> None:
    routes = LaneGraph(road()).routes(np.array([-20.0, 0.4]), 0.0, 50.0)
    assert {r.lanes for r in routes} == {("in", "on"), ("in", "left", "north")}
    found = {r.lanes[1]: turning(r, 1.05, 6.0) for r in routes}
    assert found["on"] is None
    assert found["left"] is not None
    point, heading, way = found["left"]
    # 20 m straight, an arc of 10 m x 1.05 rad, 6 m more: 5.2 m of them on the arc, whose end is at 15.7 m
    assert way == pytest.approx(20 + 10.5 + 6, abs=1.0)
    assert heading == pytest.approx(np.pi / 2, abs=0.06) and point == pytest.approx([10.0, 10.8], abs=1.0)
    assert all(turning(r, -1.05, 6.0) is None for r in routes)


def test_no_lane_no_route() -> None:
    graph = LaneGraph(road())
    assert graph.routes(np.array([-20.0, 40.0]), 0.0, 50.0) == []
    assert [r.lanes for r in graph.routes(np.array([-10.0, 2.8]), np.pi, 10.0)] == [("back",)]
    assert LaneGraph(RoadMap("empty", [])).routes(np.zeros(2), 0.0, 10.0) == []
