"""Any data set that trajdata 1.4.0 reads (ETH/UCY, SDD, nuScenes, nuPlan, Lyft, Waymo, INTERACTION) -> scenes.

trajdata's own cache is built once (its preprocessing, its split), then each scene's rows are read out whole; nothing of
it is needed in training. Ivanovic et al., "trajdata: A Unified Interface to Multiple Human Trajectory Datasets", 2023.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from seqdiff.domains.trajectory.readers import ethucy
from seqdiff.domains.trajectory.readers.trajdata_compat import known, running
from seqdiff.domains.trajectory.readers.vet import dense, motion_heading
from seqdiff.domains.trajectory.scene import Drop, MapElement, RoadMap, Scene, SceneError, Track

AGENT_TYPE = {
    "UNKNOWN": "other",
    "VEHICLE": "vehicle",
    "PEDESTRIAN": "pedestrian",
    "BICYCLE": "bicycle",
    "MOTORCYCLE": "motorcycle",
}
SIGNAL = {"GREEN": "green", "RED": "red", "UNKNOWN": "unknown", "NO_DATA": "unknown"}
SPLIT = {f"{p}{s}": s for s in ("train", "val", "test") for p in ("", "mini_")} | {
    f"{s}_loo": s for s in ("train", "val", "test")
}
GUESSED_EXTENT = (0.75, 0.75, 1.5)  # what trajdata writes for pedestrians whose size nobody measured
LAYERS = {"incl_road_lanes": True, "incl_road_areas": True, "incl_ped_crosswalks": True, "incl_ped_walkways": True}


class TrajdataReader:
    """Scenes of one trajdata data set.

    dataset: trajdata's name, e.g. "eupeds_zara1" (its leave-one-out parts), "nusc_mini", "waymo_val".
    data_dir: where its raw files lie. cache: a folder for trajdata's cache to keep; None = a temporary one.
    desired_dt: seconds a step if other than the data set's (an integer ratio, by trajdata's interpolation).
    """

    def __init__(
        self, dataset: str, data_dir: Path, cache: Path | None = None, desired_dt: float | None = None
    ) -> None:
        self.entry, self.dataset, self.desired_dt = known(dataset), dataset, desired_dt
        self.name, self.source, self.cache = dataset, f"trajdata:{dataset}", cache
        self.data_dir = Path(data_dir).expanduser()
        if not self.data_dir.exists():
            raise SceneError(f"data_dir={data_dir} does not exist; trajdata reads {dataset} from {self.entry.files}")
        self.peds = dataset.startswith("eupeds_")
        if self.peds:
            self.data_dir = ethucy.find_all_data(self.data_dir)
            self.parts = ethucy.fold_parts(dataset.removeprefix("eupeds_"))
        self._last_map: tuple[str, RoadMap | None] | None = None
        self._count: int | None = len(self.parts) if self.peds else None

    def __len__(self) -> int:
        """Number of scenes; 0 until the data set is opened, except for ETH/UCY, which is known beforehand."""
        return self._count or 0

    def __iter__(self) -> Iterator[Scene | Drop]:
        raw = {file: ethucy.read_rows(self.data_dir / f"{file}.txt") for file in ethucy.FILES} if self.peds else {}
        with ExitStack() as stack:
            td = stack.enter_context(running(self.dataset))
            folder = self.cache or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seqdiff-trajdata-")))
            self._claim(folder)
            data = self._open(td, folder)
            self._count = data.num_scenes()
            for scene in data.scenes():
                yield from self._read(td, data, scene, raw)

    def _claim(self, folder: Path) -> None:
        """trajdata's cache goes by data set name alone: refuse one that was built from another folder."""
        folder.mkdir(parents=True, exist_ok=True)
        mark, here = folder / f"{self.dataset}.data_dir", str(self.data_dir.resolve())
        if mark.exists() and mark.read_text() != here:
            raise SceneError(
                f"cache={folder} holds {self.dataset} from {mark.read_text()}, not {here}; choose another cache"
            )
        mark.write_text(here)

    def _open(self, td: ModuleType, folder: Path) -> Any:
        tags = [f"{self.dataset}-{s}_loo" for s in ("train", "val", "test")] if self.peds else [self.dataset]
        try:
            return td.UnifiedDataset(
                desired_data=tags,
                centric="scene",
                desired_dt=self.desired_dt,
                data_dirs={self.dataset: str(self.data_dir)},
                cache_location=str(folder),
                require_map_cache=self.entry.has_map,
            )
        except (ValueError, KeyError, OSError) as error:
            gap = "; source=ethucy:FOLD reads the same files and keeps gaps as holes" if self.peds else ""
            raise SceneError(
                f"trajdata could not read {self.dataset} from {self.data_dir}: {error!r}; "
                f"expected {self.entry.files}{gap}"
            ) from error

    def _read(self, td: ModuleType, data: Any, scene: Any, raw: dict[str, ethucy.Rows]) -> Iterator[Scene | Drop]:
        cache = data.cache_class(data.cache_path, scene)
        tracks = list(tracks_of(scene, cache.scene_data_df, direction=self.peds or self.dataset == "sdd"))
        road: RoadMap | None = None
        drops: list[Drop] = []
        meta: dict[str, str | int | float | bool] = {"location": str(scene.location)}
        if self.entry.has_map:
            road, drops = self._map_of(td, data.cache_path, scene)
        if self.peds:
            file = scene.name.removesuffix("_train").removesuffix("_val")
            meta |= ethucy.scene_meta(file)
            drops = left_out(scene, tracks, raw[file])
        status = cache.get_traffic_light_status_dict() if cache.is_traffic_light_data_cached() else {}
        signals, more = signal_changes(status, road, scene.name)
        drops += more
        yield from drops
        yield Scene(
            scene.name, float(scene.dt), SPLIT.get(scene.data_split, scene.data_split), tracks, road, signals, meta
        )

    def _map_of(self, td: ModuleType, cache_path: Path, scene: Any) -> tuple[RoadMap | None, list[Drop]]:
        """A place's map, turned into ours once for all its scenes in a row (city maps are large)."""
        map_id = f"{scene.env_name}:{scene.location}"
        if self._last_map is not None and self._last_map[0] == map_id:
            return self._last_map[1], []
        road, drops = road_map(td.MapAPI(cache_path).get_map(map_id, **LAYERS), scene.name)
        self._last_map = (map_id, road)
        return road, drops


def tracks_of(scene: Any, frame: Any, direction: bool) -> Iterator[Track]:
    """Tracks of a trajdata scene from its table (index agent_id, scene_ts; columns x, y, heading or its sine, cosine).

    direction=True: the data set has no headings (trajdata fills them by differences, for a track's first row from the
    future), so the direction of motion is taken by our rule.
    """
    names = frame.index.get_level_values(0).to_numpy().astype(str)
    steps = frame.index.get_level_values(1).to_numpy().astype(np.int64)
    if "heading" in frame.columns:
        heading = frame["heading"].to_numpy(dtype=float)
    else:
        heading = np.arctan2(frame["sin_heading"].to_numpy(dtype=float), frame["cos_heading"].to_numpy(dtype=float))
    xyh = np.column_stack([frame["x"].to_numpy(dtype=float), frame["y"].to_numpy(dtype=float), heading])
    boxes = frame[["length", "width"]].to_numpy(dtype=float) if "length" in frame.columns else None
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows_of.setdefault(name, []).append(row)
    for agent in scene.agents:
        rows = np.asarray(rows_of.get(str(agent.name), []), np.int64)
        rows = rows[np.isfinite(xyh[rows, :2]).all(1)]  # trajdata writes NaN rows where an agent was not seen
        if not len(rows):
            yield Track(str(agent.name), AGENT_TYPE[agent.type.name], 0, np.full((1, 3), np.nan), np.zeros(1, bool))
            continue
        rows = rows[np.argsort(steps[rows], kind="stable")]
        start, states, valid = dense(steps[rows], xyh[rows])
        if direction:
            states[:, 2] = motion_heading(states[:, :2], valid, scene.dt)
        yield Track(str(agent.name), AGENT_TYPE[agent.type.name], start, states, valid, _size(agent, boxes, rows))


def _size(agent: Any, boxes: np.ndarray | None, rows: np.ndarray) -> tuple[float, float] | None:
    extent = agent.extent
    if hasattr(extent, "length"):
        fixed = (extent.length, extent.width, extent.height)
        return (
            None if fixed == GUESSED_EXTENT or not all(np.isfinite(fixed[:2])) else (float(fixed[0]), float(fixed[1]))
        )
    if boxes is None:
        return None
    seen = boxes[rows][(np.isfinite(boxes[rows]) & (boxes[rows] > 0)).all(1)]
    return (float(np.median(seen[:, 0])), float(np.median(seen[:, 1]))) if len(seen) else None


def left_out(scene: Any, tracks: list[Track], rows: ethucy.Rows) -> list[Drop]:
    """Pedestrians of the raw file that trajdata leaves out of a scene (those with one row), one Drop each."""
    step = (rows.frame - rows.frame.min()) // ethucy.ROW_STEP
    if scene.name.endswith("_train"):
        step_range = (0, scene.length_timesteps)
    else:
        step_range = (int(step.max()) + 1 - scene.length_timesteps, int(step.max()) + 1)
    part = rows.agent[(step >= step_range[0]) & (step < step_range[1])]
    have = {t.id for t in tracks}
    ids, counts = np.unique(part, return_counts=True)
    return [
        Drop(
            scene.name,
            "trajdata leaves out a track of one row" if c == 1 else "trajdata left out a track",
            f"pedestrian {i}",
        )
        for i, c in zip(ids, counts)
        if str(i) not in have
    ]


def road_map(vector_map: Any, scene_id: str) -> tuple[RoadMap | None, list[Drop]]:
    """trajdata's vector map -> RoadMap; None where it holds nothing. Walkways have no kind in a store: counted."""
    elements, walkways = [], 0
    for elem in vector_map.iter_elems():
        kind = elem.elem_type.name
        if kind == "ROAD_LANE":
            elements.append(MapElement(str(elem.id), "lane_center", _xy(elem.center)))
            for side in ("left", "right"):
                if (edge := getattr(elem, f"{side}_edge")) is not None:
                    elements.append(MapElement(f"{elem.id}:{side}", "lane_boundary", _xy(edge)))
        elif kind == "ROAD_AREA":
            elements.append(MapElement(str(elem.id), "drivable_area", _ring(elem.exterior_polygon)))
            for n, hole in enumerate(elem.interior_holes):
                elements.append(MapElement(f"{elem.id}:hole{n}", "drivable_hole", _ring(hole)))
        elif kind == "PED_CROSSWALK":
            elements.append(MapElement(str(elem.id), "crosswalk", _ring(elem.polygon)))
        else:
            walkways += 1
    drops = [Drop(scene_id, "map layer without a kind in the store", f"{walkways} walkways")] if walkways else []
    return (RoadMap(str(vector_map.map_id), elements) if elements else None), drops


def _xy(line: Any) -> np.ndarray:
    return np.array(line.xy, dtype=float)


def _ring(line: Any) -> np.ndarray:
    points = _xy(line)
    return points[:-1] if len(points) > 1 and np.array_equal(points[0], points[-1]) else points


def signal_changes(
    status: dict[tuple[Any, int], Any], road: RoadMap | None, scene_id: str
) -> tuple[list[tuple[str, int, str]], list[Drop]]:
    """trajdata's state of every lane at every step -> changes only: (lane id, step from which it holds, state).

    Signals of lanes that the map does not hold are counted, one Drop a lane.
    """
    lanes = {e.id for e in road.elements if e.kind == "lane_center"} if road else set()
    unknown = sorted({str(lane) for lane, _ in status} - lanes)
    changes: list[tuple[str, int, str]] = []
    last: dict[str, str] = {}
    for (lane, step), value in sorted(status.items(), key=lambda kv: (str(kv[0][0]), kv[0][1])):
        state = SIGNAL[value.name]
        if str(lane) in lanes and last.get(str(lane)) != state:
            changes.append((str(lane), int(step), state))
            last[str(lane)] = state
    return changes, [Drop(scene_id, "signal of a lane that the map lacks", lane) for lane in unknown]
