"""A crossing made up for the tests of the review page: no file, no model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from shapely.geometry import Polygon, box
from shapely.ops import unary_union

from seqdiff.domains.trajectory.scene import MapElement
from seqdiff.viz.scene_view import Event, SceneView

TYPES = ("vehicle", "vehicle", "truck", "bus", "bicycle", "pedestrian", "motorcycle", "vehicle")
SIZES = {
    "vehicle": (4.7, 1.9),
    "truck": (9.0, 2.5),
    "bus": (12.0, 2.6),
    "bicycle": (1.8, 0.6),
    "pedestrian": (0.5, 0.5),
    "motorcycle": (2.1, 0.8),
    "other": (2, 1),
}


def rollout(
    start: np.ndarray, speed: np.ndarray, turn: np.ndarray, accel: np.ndarray, steps: int, dt: float
) -> np.ndarray:
    """Constant turn rate and acceleration: start [..., 3] -> [..., steps, 3]."""
    s = np.arange(1, steps + 1) * dt
    v = np.maximum(speed[..., None] + accel[..., None] * s, 0.0)
    h = start[..., 2, None] + np.cumsum(turn[..., None] * v * dt * 0.08, -1)
    return np.stack(
        [
            start[..., 0, None] + np.cumsum(v * np.cos(h) * dt, -1),
            start[..., 1, None] + np.cumsum(v * np.sin(h) * dt, -1),
            h,
        ],
        -1,
    )


def crossing_map() -> tuple[list[MapElement], Polygon]:
    elements, roads = [], []
    for name, angle in (("ew", 0.0), ("ns", np.pi / 2)):
        turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        for lane, y in enumerate((-5.25, -1.75, 1.75, 5.25)):
            line = np.stack([np.linspace(-110, -9, 30), np.full(30, y)], 1)
            for side, points in (("in", line), ("out", line * [-1, 1])):
                elements.append(
                    MapElement(
                        f"{name}-{lane}-{side}", "lane_center", (points if side == "in" else points[::-1])[::-1] @ turn
                    )
                )
        for y in (-3.5, 0.0, 3.5):
            for x in (-1, 1):
                elements.append(
                    MapElement(f"{name}-b{y}{x}", "lane_boundary", np.array([[110.0 * x, y], [11.0 * x, y]]) @ turn)
                )
        for x in (-12, 12):
            elements.append(
                MapElement(
                    f"{name}-c{x}",
                    "crosswalk",
                    np.array([[x - 1.5, -7], [x + 1.5, -7], [x + 1.5, 7], [x - 1.5, 7]]) @ turn,
                )
            )
        roads.append(Polygon(np.array([[-110, -7], [110, -7], [110, 7], [-110, 7]]) @ turn))
    return elements, unary_union(roads).buffer(4).buffer(-4).difference(box(60, -1, 70, 1))


def make_view(
    scene_id: str = "crossing-7",
    k: int = 64,
    a: int = 32,
    t: int = 60,
    seed: int = 0,
    with_map: bool = True,
    with_truth: bool = True,
) -> SceneView:
    """Agents on the arms of a crossing; each future turns and accelerates in its own way, all drawn from one seed."""
    rng = np.random.default_rng(seed)
    dt, h = 0.1, 21
    types = [TYPES[i % len(TYPES)] for i in range(a)]
    arm = rng.integers(0, 4, a)
    heading = arm * np.pi / 2
    back, side = rng.uniform(14, 75, a), rng.choice([-5.25, -1.75], a)
    xy = np.stack(
        [-back * np.cos(heading) - side * np.sin(heading), -back * np.sin(heading) + side * np.cos(heading)], 1
    )
    speed = np.array([1.4 if x == "pedestrian" else rng.uniform(4, 12) for x in types])
    now = np.concatenate([xy, heading[:, None]], 1)
    shift = np.arange(1 - h, 1) * dt
    past = np.stack(
        [
            xy[:, :1] + speed[:, None] * np.cos(heading)[:, None] * shift,
            xy[:, 1:] + speed[:, None] * np.sin(heading)[:, None] * shift,
            np.repeat(heading[:, None], h, 1),
        ],
        -1,
    )
    past[a // 2, :5] = np.nan
    mode = rng.choice([-0.09, 0.0, 0.0, 0.09], (k, a))
    futures = rollout(
        np.broadcast_to(now, (k, a, 3)),
        np.broadcast_to(speed, (k, a)),
        mode * 6 + rng.normal(0, 0.05, (k, a)),
        rng.normal(0, 0.8, (k, a)),
        t,
        dt,
    )
    truth = rollout(now, speed, rng.choice([0.0, 0.0, 0.3], a), rng.normal(0, 0.5, a), t, dt)
    if a > 3:
        truth[3, t // 2 :] = np.nan
    weight = rng.gamma(0.7, size=k)
    elements, drivable = crossing_map()
    size = np.array([SIZES[x] for x in types], float)
    events = [[Event("collision", 0, 1, 10 + j % 5, 14 + j % 5)] if a > 1 and j % 3 == 0 else [] for j in range(k)]
    if with_map:
        events[1].append(Event("off_road", a - 1, -1, 30, t))
    scores = {
        "probability": weight / weight.sum(),
        "log_prob": rng.normal(-40, 8, k),
        "cluster": rng.integers(0, 6, k).astype(float),
        "collision": np.maximum(0, rng.normal(-0.1, 0.1, k)),
        "off_road": np.maximum(0, rng.normal(0, 0.05, k)) if with_map else np.full(k, np.nan),
        "infeasible": np.zeros(k),
    }
    signals = [("ew-0-in", -20, "green"), ("ew-1-in", -20, "green"), ("ns-2-in", -20, "red"), ("ew-0-in", 20, "yellow")]
    return SceneView(
        scene_id=scene_id,
        t0=40 + seed,
        dt=dt,
        agent_id=[f"veh_{i}" for i in range(a)],
        agent_type=types,
        size=size,
        size_known=np.arange(a) < a - 1,
        scored=np.arange(a) != 3,
        past=past,
        futures=futures,
        truth=truth if with_truth else None,
        scores=scores,
        origin=(431250.5, 5411004.25),
        focal=0,
        map=elements if with_map else None,
        drivable=drivable if with_map else None,
        signals=signals if with_map else [],
        events=events,
        truth_events=[],
        truth_scores={"collision": 0.0, "off_road": 0.0 if with_map else np.nan},
        off_road_known=with_map,
    )


@pytest.fixture(name="make_view", scope="session")
def make_view_fixture() -> Callable[..., SceneView]:
    return make_view
