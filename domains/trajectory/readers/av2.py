"""Argoverse 2 motion forecasting: scenario_*.parquet with its log_map_archive_*.json -> scenes.

Wilson et al., "Argoverse 2: Next Generation Datasets for Self-Driving Perception and Forecasting", 2021. The av2
package gives the schema and the map classes; tables are read column-wise, since its own loader makes one object a row.
Positions are box centres in the city frame; sizes are not recorded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from seqdiff.domains.trajectory.readers.vet import dense, need
from seqdiff.domains.trajectory.scene import Drop, MapElement, RoadMap, Scene, SceneError, Track

INSTALL = "pip install '.[av2]' && pip install --no-deps av2"
DT = 0.1
SPLITS = ("train", "val", "test")
# static, background, construction, riderless_bicycle and unknown stay, as obstacles of type "other"; meta counts them
AGENT_TYPE = {
    "vehicle": "vehicle",
    "pedestrian": "pedestrian",
    "motorcyclist": "motorcycle",
    "cyclist": "bicycle",
    "bus": "bus",
}
SCORED, FOCAL = 2, 3  # av2's TrackCategory
COLUMNS = {
    "track_id": "string",
    "object_type": "string",
    "object_category": "int64",
    "timestep": "int64",
    "position_x": "float64",
    "position_y": "float64",
    "heading": "float64",
    "scenario_id": "string",
    "start_timestamp": "float64",
    "end_timestamp": "float64",
    "num_timestamps": "int64",
    "focal_track_id": "string",
    "city": "string",
}


class Av2Reader:
    """Every scenario below `path` (one scenario's folder, a split's folder, or the whole data set).

    split: the split of scenarios whose parent folder isn't train, val or test.
    """

    name = "argoverse2"

    def __init__(self, path: Path, split: str = "test") -> None:
        self.path, self.split, self.source = Path(path), split, f"av2:{Path(path).name}"
        if not self.path.exists():
            raise SceneError(f"av2:{path} does not exist; expected a folder with scenario_*.parquet below it")
        self.files = sorted(self.path.rglob("scenario_*.parquet"))
        if not self.files:
            raise SceneError(
                f"av2:{path} holds no scenario_*.parquet; expected an Argoverse 2 motion-forecasting folder"
            )
        need("av2.map.lane_segment", "av2:", INSTALL)

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Scene | Drop]:
        for file in self.files:
            name = file.stem.removeprefix("scenario_")
            try:
                yield from self._read(file, name)
            except SceneError as error:
                yield Drop(name, "scenario file that cannot be read", str(error))

    def _read(self, file: Path, name: str) -> Iterator[Scene | Drop]:
        table = read_table(file)
        found = [p for p in (file.parent.name, file.parent.parent.name) if p in SPLITS]
        tracks, kinds = tracks_of(table, file)
        road: RoadMap | None = None
        drops: list[Drop] = []
        map_file = file.parent / f"log_map_archive_{name}.json"
        if map_file.exists():
            road = read_map(map_file)
        else:
            drops = [Drop(name, "scene without its map file (kept, map unknown)", map_file.name)]
        meta: dict[str, str | int | float | bool] = {"city": str(table["city"][0])}
        meta |= {f"av2_{k}": n for k, n in sorted(kinds.items()) if k not in AGENT_TYPE}
        yield from drops
        yield Scene(name, DT, found[0] if found else self.split, tracks, road, meta=meta)


def read_table(file: Path) -> dict[str, np.ndarray]:
    """The columns of one scenario [N rows]. SceneError where it is cut off, lacks columns, or has another time step."""
    try:
        read = pyarrow.parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise SceneError(f"{file}: not a whole parquet file ({error})") from error
    missing = [c for c in COLUMNS if c not in read.column_names]
    if missing:
        raise SceneError(f"{file}: lacks the columns {', '.join(missing)}; expected Argoverse 2's scenario schema")
    if not read.num_rows:
        raise SceneError(f"{file}: no rows")
    try:
        table = {c: read.column(c).cast(t).to_numpy(zero_copy_only=False) for c, t in COLUMNS.items()}
    except pyarrow.ArrowException as error:
        raise SceneError(f"{file}: a column has another type than Argoverse 2's ({error})") from error
    steps = int(table["num_timestamps"][0])
    dt = (table["end_timestamp"][0] - table["start_timestamp"][0]) / max(steps - 1, 1) / 1e9
    if steps > 1 and abs(dt - DT) > 0.02 * DT:
        raise SceneError(f"{file}: a step is {dt:.4g} s by its time stamps, expected {DT} s")
    if table["timestep"].min() < 0 or table["timestep"].max() >= steps:
        raise SceneError(
            f"{file}: time steps {table['timestep'].min()}..{table['timestep'].max()}, expected 0..{steps - 1}"
        )
    return table


def tracks_of(table: dict[str, np.ndarray], file: Path) -> tuple[list[Track], Counter[str]]:
    """Tracks in the file's order, and how many of each of Argoverse's own types came in."""
    from av2.datasets.motion_forecasting.data_schema import ObjectType, TrackCategory

    known = {t.value for t in ObjectType}
    categories = {c.value for c in TrackCategory}
    names, first = np.unique(table["track_id"], return_index=True)
    tracks, kinds = [], Counter[str]()
    for name in names[np.argsort(first)]:
        rows = np.flatnonzero(table["track_id"] == name)
        steps = table["timestep"][rows]
        if (np.diff(steps) <= 0).any():
            at = rows[1:][np.diff(steps) <= 0][0]
            raise SceneError(
                f"{file}: track {name}, row {at}: time step {table['timestep'][at]} repeats or goes back; "
                "expected each track's steps in order, once"
            )
        kind, category = str(table["object_type"][rows[0]]), int(table["object_category"][rows[0]])
        if kind not in known or category not in categories:
            raise SceneError(
                f"{file}: track {name} has type {kind!r}, category {category}; expected {', '.join(sorted(known))}"
            )
        kinds[kind] += 1
        xyh = np.column_stack([table[c][rows] for c in ("position_x", "position_y", "heading")])
        start, states, valid = dense(steps, xyh)
        focal = category == FOCAL
        tracks.append(
            Track(
                str(name),
                AGENT_TYPE.get(kind, "other"),
                start,
                states,
                valid,
                scored=focal or category == SCORED,
                focal=focal,
            )
        )
    wanted = str(table["focal_track_id"][0])
    if [t.id for t in tracks if t.focal] != [wanted]:
        raise SceneError(
            f"{file}: focal_track_id is {wanted}, but the focal tracks are {[t.id for t in tracks if t.focal]}"
        )
    return tracks, kinds


def read_map(file: Path) -> RoadMap:
    """Lane centre lines (av2's midpoints of the two boundaries), lane boundaries, crosswalks, drivable areas."""
    from av2.geometry.interpolate import NUM_CENTERLINE_INTERP_PTS, compute_midpoint_line
    from av2.map.drivable_area import DrivableArea
    from av2.map.lane_segment import LaneSegment
    from av2.map.pedestrian_crossing import PedestrianCrossing

    elements = []
    try:
        archive = json.loads(file.read_text())
        lanes = [LaneSegment.from_dict(v) for v in archive["lane_segments"].values()]
        areas = [DrivableArea.from_dict(v) for v in archive["drivable_areas"].values()]
        crossings = [PedestrianCrossing.from_dict(v) for v in archive["pedestrian_crossings"].values()]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SceneError(f"{file}: not a whole Argoverse 2 map ({error!r}); download it again") from error
    for lane in lanes:
        left, right = lane.left_lane_boundary.xyz, lane.right_lane_boundary.xyz
        centre, _ = compute_midpoint_line(left, right, NUM_CENTERLINE_INTERP_PTS)
        elements.append(MapElement(f"{lane.id}", "lane_center", centre[:, :2]))
        elements.append(MapElement(f"{lane.id}:left", "lane_boundary", left[:, :2]))
        elements.append(MapElement(f"{lane.id}:right", "lane_boundary", right[:, :2]))
    elements += [MapElement(f"{a.id}", "drivable_area", a.xyz[:-1, :2]) for a in areas]
    elements += [MapElement(f"{c.id}", "crosswalk", c.polygon[:-1, :2]) for c in crossings]
    return RoadMap(file.stem.removeprefix("log_map_archive_"), elements)
