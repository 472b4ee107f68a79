"""Argoverse 2: a small scenario written here, its damaged copies, and the real one where it is at hand."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from seqdiff.domains.trajectory.readers.av2 import Av2Reader
from seqdiff.domains.trajectory.scene import Drop, Scene, SceneError

if find_spec("av2") is None:
    pytest.skip("av2 is not installed", allow_module_level=True)
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "trajectory" / "av2"
real = pytest.mark.skipif(not DATA.is_dir(), reason=f"the Argoverse 2 scenario is not at {DATA}")
AGENTS = [
    ("AV", "vehicle", 1),
    ("11", "cyclist", 3),
    ("12", "static", 0),
    ("13", "bus", 2),
    ("14", "riderless_bicycle", 0),
]


def columns() -> dict[str, list[Any]]:
    rows = [(name, kind, cat, t) for name, kind, cat in AGENTS for t in range(6) if not (name == "13" and t in (2, 3))]
    n = len(rows)
    return {
        "observed": [True] * n,
        "track_id": [r[0] for r in rows],
        "object_type": [r[1] for r in rows],
        "object_category": [r[2] for r in rows],
        "timestep": [r[3] for r in rows],
        "position_x": [-400.0 + r[3] for r in rows],
        "position_y": [1300.0] * n,
        "heading": [0.5] * n,
        "velocity_x": [10.0] * n,
        "velocity_y": [0.0] * n,
        "scenario_id": ["s1"] * n,
        "start_timestamp": [3.0e17] * n,
        "end_timestamp": [3.0e17 + 5e8] * n,
        "num_timestamps": [6] * n,
        "focal_track_id": ["11"] * n,
        "city": ["austin"] * n,
    }


def write(root: Path, table: dict[str, list[Any]] | None = None, name: str = "s1", split: str = "val") -> Path:
    folder = root / split / name
    folder.mkdir(parents=True)
    pq.write_table(pa.table(table or columns()), folder / f"scenario_{name}.parquet")
    line = [{"x": 0.0, "y": y, "z": 0.0} for y in (0.0, 10.0)]
    shifted = [{**p, "x": 4.0} for p in line]
    lane = {
        "id": 5, "is_intersection": False, "lane_type": "VEHICLE",
        "left_lane_boundary": line, "right_lane_boundary": shifted,
        "left_lane_mark_type": "NONE", "right_lane_mark_type": "SOLID_WHITE", "predecessors": [], "successors": [],
        "left_neighbor_id": None, "right_neighbor_id": None,
    }  # fmt: skip
    area = {"id": 6, "area_boundary": [*line, shifted[1], shifted[0]]}
    walk = {"id": 7, "edge1": line, "edge2": shifted}
    archive = {"lane_segments": {"5": lane}, "drivable_areas": {"6": area}, "pedestrian_crossings": {"7": walk}}
    (folder / f"log_map_archive_{name}.json").write_text(json.dumps(archive))
    return folder


def test_a_small_scenario(tmp_path: Path) -> None:
    write(tmp_path)
    (scene,) = Av2Reader(tmp_path)
    assert isinstance(scene, Scene)
    assert (scene.id, scene.dt, scene.split) == ("s1", 0.1, "val")
    assert {t.id: (t.type, t.scored, t.focal, t.size) for t in scene.tracks} == {
        "AV": ("vehicle", False, False, None),
        "11": ("bicycle", True, True, None),
        "12": ("other", False, False, None),
        "13": ("bus", True, False, None),
        "14": ("other", False, False, None),
    }
    bus = scene.tracks[3]
    assert bus.valid.tolist() == [True, True, False, False, True, True]
    assert bus.xyh[4].tolist() == [-396.0, 1300.0, 0.5]
    assert {k: v for k, v in scene.meta.items() if k.startswith("av2_")} == {
        "av2_static": 1,
        "av2_riderless_bicycle": 1,
    }
    assert scene.map is not None
    kinds = {e.kind: e for e in scene.map.elements}
    assert sorted(kinds) == ["crosswalk", "drivable_area", "lane_boundary", "lane_center"]
    assert kinds["lane_center"].points[[0, -1]].tolist() == [[2, 0], [2, 10]]  # midway between the boundaries
    assert kinds["crosswalk"].points.tolist() == [[0, 0], [0, 10], [4, 10], [4, 0]]
    assert len(kinds["drivable_area"].points) == 4


def test_the_split_is_the_folder_or_the_argument(tmp_path: Path) -> None:
    folder = write(tmp_path, split="somewhere")
    assert [s.split for s in Av2Reader(folder, "train") if isinstance(s, Scene)] == ["train"]
    write(tmp_path, name="s2", split="train")
    assert [s.split for s in Av2Reader(tmp_path) if isinstance(s, Scene)] == ["test", "train"]


def changed(**new: Any) -> dict[str, list[Any]]:
    table = columns()
    for column, value in new.items():
        if value is None:
            del table[column]
        elif isinstance(value, tuple):
            table[column][value[0]] = value[1]
        else:
            table[column] = [value] * len(table[column])
    return table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (changed(heading=None, position_x=None), r"lacks the columns position_x, heading"),
        (changed(timestep=(3, 1)), r"track AV, row 3: time step 1 repeats or goes back"),
        (changed(timestep=(5, 77)), r"time steps 0\.\.77, expected 0\.\.5"),
        (changed(end_timestamp=3.0e17 + 1e9), r"a step is 0\.2 s by its time stamps, expected 0\.1 s"),
        (changed(object_type="tank"), r"type 'tank'.*expected background"),
        (changed(focal_track_id="99"), r"focal_track_id is 99, but the focal tracks are \['11'\]"),
        (changed(position_x="west"), r"another type"),
        ({k: [] for k in columns()}, r"no rows|another type"),
    ],
)
def test_bad_scenarios_are_counted_by_name(tmp_path: Path, table: dict[str, list[Any]], message: str) -> None:
    folder = tmp_path / "val" / "bad"
    folder.mkdir(parents=True)
    pq.write_table(pa.table(table), folder / "scenario_bad.parquet")
    write(tmp_path)
    drop, scene = sorted(Av2Reader(tmp_path), key=lambda i: isinstance(i, Scene))
    assert isinstance(drop, Drop)
    assert isinstance(scene, Scene)
    assert (drop.scene_id, drop.reason) == ("bad", "scenario file that cannot be read")
    with pytest.raises(SceneError, match=message):
        raise SceneError(drop.detail)


@pytest.mark.parametrize("file", ["scenario_s1.parquet", "log_map_archive_s1.json"])
def test_truncated_files_are_counted_by_name(tmp_path: Path, file: str) -> None:
    path = write(tmp_path) / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (drop,) = Av2Reader(tmp_path)
    assert isinstance(drop, Drop)
    assert file in drop.detail
    assert "not a whole" in drop.detail


def test_a_missing_map_is_unknown_and_said(tmp_path: Path) -> None:
    (write(tmp_path) / "log_map_archive_s1.json").unlink()
    drop, scene = Av2Reader(tmp_path)
    assert isinstance(drop, Drop)
    assert drop.reason == "scene without its map file (kept, map unknown)"
    assert isinstance(scene, Scene)
    assert scene.map is None


def test_folders_without_scenarios(tmp_path: Path) -> None:
    with pytest.raises(SceneError, match="does not exist"):
        Av2Reader(tmp_path / "nowhere")
    with pytest.raises(SceneError, match=r"holds no scenario_\*\.parquet"):
        Av2Reader(tmp_path)


@real
def test_the_real_scenario_equals_the_av2_package() -> None:
    from av2.datasets.motion_forecasting.scenario_serialization import load_argoverse_scenario_parquet

    (scene,) = Av2Reader(DATA)
    assert isinstance(scene, Scene)
    assert len(scene.tracks) == 58
    assert scene.map is not None
    assert sum(e.kind == "lane_center" for e in scene.map.elements) == 71
    theirs = {t.track_id: t for t in load_argoverse_scenario_parquet(next(DATA.rglob("scenario_*.parquet"))).tracks}
    assert [t.id for t in scene.tracks if t.focal] == ["138951"]
    assert sorted(t.id for t in scene.tracks if t.scored) == sorted(
        k for k, t in theirs.items() if t.category.value >= 2
    )
    for track in scene.tracks:
        states = theirs[track.id].object_states
        assert [s.timestep for s in states] == (track.start + np.flatnonzero(track.valid)).tolist()
        assert np.array_equal(track.xyh[track.valid], [[*s.position, s.heading] for s in states])
