"""CommonRoad XML scenarios with commonroad-io -> scenes. Althoff et al., "CommonRoad: Composable benchmarks", IV 2017.

Positions are the shape's centre, orientations counter-clockwise from x, both as the files have them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from tqdm import tqdm

from seqdiff.domains.trajectory.readers.overlap import overlap_groups, split_groups
from seqdiff.domains.trajectory.readers.vet import dense, need
from seqdiff.domains.trajectory.scene import Drop, MapElement, RoadMap, Scene, SceneError, Track

ALTERED = "optimized towards criticality"  # in a scenario's source: its motion was changed by an optimiser
GAP = 0.1  # m; narrower gaps between the polygons of neighbouring lanes are drawing errors and are closed
AGENT_TYPE = {
    "car": "vehicle",
    "taxi": "vehicle",
    "priorityVehicle": "vehicle",
    "parkedVehicle": "vehicle",
    "truck": "truck",
    "bus": "bus",
    "bicycle": "bicycle",
    "pedestrian": "pedestrian",
    "motorcycle": "motorcycle",
}


class CommonRoadReader:
    """Scenarios of one XML file or of a folder.

    All are parsed first, since scenarios cut from one recording overlap in time without saying so: groups that share
    recorded moments (overlap.py) are found and dealt whole to train, val and test, for each road by itself. meta has
    the group.
    altered: also take scenarios whose source says that they were optimised towards criticality.
    """

    name = "commonroad"

    def __init__(
        self, path: Path, fractions: tuple[float, float, float] = (0.7, 0.1, 0.2), seed: int = 0, altered: bool = False
    ) -> None:
        self.path, self.fractions, self.seed, self.altered = Path(path), fractions, seed, altered
        self.source = f"commonroad:{self.path.name}"
        if not self.path.exists():
            raise SceneError(f"commonroad:{path} does not exist; expected a CommonRoad XML file or a folder of them")
        self.files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.xml"))
        if not self.files:
            raise SceneError(f"commonroad:{path} holds no *.xml; expected CommonRoad scenarios")
        need("commonroad.common.file_reader", "commonroad:", "pip install '.[commonroad]'")

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Scene | Drop]:
        scenes = []
        for file in tqdm(self.files, desc="parsing CommonRoad XML", unit=" files", mininterval=1.0, leave=False):
            for item in read_scenario(file, self.altered):
                if isinstance(item, Scene):
                    scenes.append(item)
                else:
                    yield item
        groups = overlap_groups(scenes)
        roads = [str(s.meta["road"]) for s in scenes]
        weight = [float(sum(t.valid.sum() for t in s.tracks)) for s in scenes]
        splits = split_groups(groups, roads, weight, self.fractions, self.seed)
        for scene, split, group in zip(scenes, splits, groups):
            yield replace(scene, split=split, meta={**scene.meta, "group": group})


def read_scenario(file: Path, altered: bool = False) -> list[Scene | Drop]:
    """The scene of one file (split still empty) and what was left out of it. A file that can't be read gives a Drop."""
    from commonroad.common.file_reader import CommonRoadFileReader

    try:
        scenario, _ = CommonRoadFileReader(str(file)).open()
    except Exception as error:  # commonroad-io raises whatever its parsers do
        return [Drop(file.stem, "scenario file that cannot be read", f"{file}: {type(error).__name__}: {error}")]
    name = str(scenario.scenario_id)
    origin = str(getattr(scenario.file_information, "source", None) or "")
    if ALTERED in origin and not altered:
        return [Drop(name, f"altered scenario ({ALTERED})", file.name)]
    out: list[Scene | Drop] = []
    tracks = []
    steps = 1
    for obstacle in scenario.dynamic_obstacles:
        item = dynamic_track(obstacle, name)
        if isinstance(item, Track):
            tracks.append(item)
            steps = max(steps, item.start + len(item.valid))
        else:
            out.append(item)
    for obstacle in scenario.static_obstacles:
        xyh = _rows([obstacle.initial_state], obstacle.obstacle_shape)
        tracks.append(
            Track(
                _id(obstacle),
                _type(obstacle),
                0,
                np.repeat(xyh, steps, 0),
                np.ones(steps, bool),
                _size(obstacle.obstacle_shape),
            )
        )
    road = str(scenario.scenario_id.map_name)
    meta: dict[str, str | int | float | bool] = {"road": road, "source": origin}
    return [*out, Scene(name, float(scenario.dt), "", tracks, read_map(scenario.lanelet_network, road), meta=meta)]


def dynamic_track(obstacle: Any, scene_id: str) -> Track | Drop:
    """Initial state and trajectory (if any) of a moving obstacle; a Drop where they aren't recorded or not exact."""
    trajectory = getattr(obstacle.prediction, "trajectory", None)
    if obstacle.prediction is not None and trajectory is None:
        return Drop(scene_id, "obstacle with predicted occupancies, not a recorded trajectory", _id(obstacle))
    states = [obstacle.initial_state, *(trajectory.state_list if trajectory else [])]
    try:
        steps = np.array([int(s.time_step) for s in states])
        xyh = _rows(states, obstacle.obstacle_shape)
    except (TypeError, ValueError, AttributeError) as error:
        return Drop(scene_id, "obstacle with uncertain states", f"{_id(obstacle)}: {error}")
    back = np.flatnonzero(np.diff(steps) <= 0)
    if len(back):
        return Drop(
            scene_id, "time goes back or repeats", f"{_id(obstacle)}: step {steps[back[0] + 1]} after {steps[back[0]]}"
        )
    start, xyh, valid = dense(steps, xyh)
    return Track(_id(obstacle), _type(obstacle), start, xyh, valid, _size(obstacle.obstacle_shape))


def _id(obstacle: Any) -> str:
    return str(obstacle.obstacle_id)


def _type(obstacle: Any) -> str:
    return AGENT_TYPE.get(obstacle.obstacle_type.value, "other")


def _rows(states: list[Any], shape: Any) -> np.ndarray:
    """x, y, heading [T, 3] of the shape's centre (a rectangle may have its reference point shifted along its axis)."""
    xyh = np.array([[*s.position, s.orientation] for s in states], dtype=float)
    shift = float(getattr(shape, "origin_x_shift", 0.0) or 0.0)
    xyh[:, 0] -= shift * np.cos(xyh[:, 2])
    xyh[:, 1] -= shift * np.sin(xyh[:, 2])
    return xyh


def _size(shape: Any) -> tuple[float, float] | None:
    if hasattr(shape, "length") and hasattr(shape, "width"):
        return float(shape.length), float(shape.width)
    if hasattr(shape, "radius"):
        return 2 * float(shape.radius), 2 * float(shape.radius)
    return None


def read_map(network: Any, road: str) -> RoadMap | None:
    """Lane centre lines, lane boundaries, crosswalks, and the drivable area as the union of the lanes' polygons.

    The map's id carries a hash of its content, so that scenarios of one road share it. None where there is no lanelet.
    """
    elements, polygons = [], []
    for lane in network.lanelets:
        left, right = np.asarray(lane.left_vertices, float), np.asarray(lane.right_vertices, float)
        kinds = {k.value for k in lane.lanelet_type}
        ring = np.vstack([left, right[::-1]])
        if "crosswalk" in kinds:
            elements.append(MapElement(str(lane.lanelet_id), "crosswalk", ring))
            continue
        elements.append(MapElement(str(lane.lanelet_id), "lane_center", np.asarray(lane.center_vertices, float)))
        elements.append(MapElement(f"{lane.lanelet_id}:left", "lane_boundary", left))
        elements.append(MapElement(f"{lane.lanelet_id}:right", "lane_boundary", right))
        if not kinds & {"sidewalk", "bicycleLane"}:
            polygons.append(shapely.make_valid(shapely.Polygon(ring)))
    if not elements:
        return None
    elements += drivable(polygons)
    digest = hashlib.sha256()
    for e in elements:
        digest.update(f"{e.id} {e.kind} ".encode() + np.ascontiguousarray(e.points).tobytes())
    return RoadMap(f"{road}-{digest.hexdigest()[:12]}", elements)


def drivable(polygons: list[Any]) -> list[MapElement]:
    """Rings of the union of `polygons`, gaps narrower than GAP closed: outer rings and holes."""
    swollen = shapely.union_all([p.buffer(GAP / 2, join_style="mitre") for p in polygons])
    area = swollen.buffer(-GAP / 2, join_style="mitre").simplify(GAP / 10)
    elements = []
    for n, part in enumerate(getattr(area, "geoms", [area])):
        if part.is_empty:
            continue
        elements.append(MapElement(f"drivable{n}", "drivable_area", np.asarray(part.exterior.coords)[:-1]))
        for k, hole in enumerate(part.interiors):
            elements.append(MapElement(f"drivable{n}:hole{k}", "drivable_hole", np.asarray(hole.coords)[:-1]))
    return elements
