"""trajdata: for real on ETH/UCY where it is installed; its other data sets on stand-ins of its scenes and maps."""

from __future__ import annotations

import sys
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from seqdiff.domains.trajectory.readers import ethucy, trajdata
from seqdiff.domains.trajectory.readers.ethucy import EthUcyReader
from seqdiff.domains.trajectory.readers.trajdata import TrajdataReader, road_map, signal_changes, tracks_of
from seqdiff.domains.trajectory.readers.trajdata_compat import DATASETS, known, running
from seqdiff.domains.trajectory.scene import Drop, MapElement, RoadMap, Scene, SceneError

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "trajectory" / "eth_ucy"
needs_trajdata = pytest.mark.skipif(find_spec("trajdata") is None, reason="trajdata is not installed (docs/readers.md)")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the ETH/UCY files are not at {DATA}")


class AgentType(IntEnum):
    UNKNOWN = 0
    VEHICLE = 1
    PEDESTRIAN = 2
    BICYCLE = 3
    MOTORCYCLE = 4


class ElementType(IntEnum):
    ROAD_LANE = 1
    ROAD_AREA = 2
    PED_CROSSWALK = 3
    PED_WALKWAY = 4


class Light(IntEnum):
    NO_DATA = -1
    UNKNOWN = 0
    GREEN = 1
    RED = 2


def agent(name: str, kind: AgentType, **extent: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, type=kind, extent=SimpleNamespace(**extent))


def table(rows: list[tuple[object, ...]], columns: tuple[str, ...]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["agent_id", "scene_ts", *columns]).set_index(["agent_id", "scene_ts"])


def test_agents_types_sizes_holes_and_headings() -> None:
    scene = SimpleNamespace(
        dt=0.5,
        agents=[
            agent("ego", AgentType.VEHICLE, length=4.1, width=1.7, height=1.6),
            agent("7", AgentType.PEDESTRIAN, length=0.75, width=0.75, height=1.5),
            agent("8", AgentType.MOTORCYCLE, length=np.nan, width=0.8, height=1.0),
            agent("9", AgentType.UNKNOWN),
            agent("ghost", AgentType.BICYCLE),
        ],
    )
    rows = [
        ("ego", 0, 1.0, 2.0, 0.1),
        ("ego", 1, 1.5, 2.0, 0.2),
        ("ego", 2, np.nan, np.nan, np.nan),
        ("ego", 3, 2.5, 2.0, 0.3),
        ("7", 4, 5.0, 5.0, 3.0),
        ("8", 1, 6.0, 6.0, -1.0),
        ("9", 2, 7.0, 7.0, 0.0),
        ("9", 0, 6.0, 7.0, 0.0),
    ]
    tracks = {t.id: t for t in tracks_of(scene, table(rows, ("x", "y", "heading")), direction=False)}
    assert {k: t.type for k, t in tracks.items()} == {
        "ego": "vehicle", "7": "pedestrian", "8": "motorcycle", "9": "other", "ghost": "bicycle",
    }  # fmt: skip
    assert tracks["ego"].size == (4.1, 1.7)
    assert tracks["7"].size is tracks["8"].size is tracks["9"].size is None  # a guess, not a number, nothing
    assert tracks["ego"].valid.tolist() == [True, True, False, True]
    assert tracks["ego"].xyh[3].tolist() == [2.5, 2.0, 0.3]
    assert (tracks["7"].start, tracks["9"].start) == (4, 0)
    assert tracks["9"].valid.tolist() == [True, False, True]
    assert not tracks["ghost"].valid.any()  # vet drops it by name


def test_boxes_that_change_take_their_median_and_sine_cosine_make_a_heading() -> None:
    scene = SimpleNamespace(dt=0.1, agents=[agent("a", AgentType.VEHICLE), agent("b", AgentType.VEHICLE)])
    columns = ("x", "y", "sin_heading", "cos_heading", "length", "width")
    rows = [("a", k, 0.0, 0.0, 1.0, 0.0, length, 2.0) for k, length in enumerate((4.0, 5.0, 4.4))]
    rows.append(("b", 0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0))  # type: ignore[arg-type]
    a, b = tracks_of(scene, table(rows, columns), direction=False)  # type: ignore[arg-type]
    assert a.size == (4.4, 2.0)
    assert a.xyh[:, 2] == pytest.approx([np.pi / 2] * 3)
    assert b.size is None
    assert b.xyh[0, 2] == pytest.approx(np.pi)


def line(*points: tuple[float, ...]) -> SimpleNamespace:
    return SimpleNamespace(xy=np.array(points, float)[:, :2])


def vector_map() -> SimpleNamespace:
    square = ((0, 0, 0), (9, 0, 0), (9, 9, 0), (0, 9, 0), (0, 0, 0))
    inner = ((2, 2, 0), (4, 2, 0), (4, 4, 0))
    lane = {"center": line((0, 0), (5, 0)), "left_edge": line((0, 2), (5, 2)), "right_edge": None}
    area = {"exterior_polygon": line(*square), "interior_holes": [line(*inner)]}
    elements = [
        SimpleNamespace(id="l1", elem_type=ElementType.ROAD_LANE, **lane),
        SimpleNamespace(id="a1", elem_type=ElementType.ROAD_AREA, **area),
        SimpleNamespace(id="c1", elem_type=ElementType.PED_CROSSWALK, polygon=line(*inner)),
        SimpleNamespace(id="w1", elem_type=ElementType.PED_WALKWAY, polygon=line(*inner)),
    ]
    return SimpleNamespace(map_id="nusc_mini:boston-seaport", iter_elems=lambda: iter(elements))


def test_a_vector_map_becomes_elements_and_walkways_are_counted() -> None:
    road, drops = road_map(vector_map(), "scene-1")
    assert road is not None
    assert road.id == "nusc_mini:boston-seaport"
    assert [(e.id, e.kind, len(e.points)) for e in road.elements] == [
        ("l1", "lane_center", 2),
        ("l1:left", "lane_boundary", 2),
        ("a1", "drivable_area", 4),  # the closing point is not repeated
        ("a1:hole0", "drivable_hole", 3),
        ("c1", "crosswalk", 3),
    ]
    assert [(d.reason, d.detail) for d in drops] == [("map layer without a kind in the store", "1 walkways")]


def test_an_empty_map_is_unknown() -> None:
    assert road_map(SimpleNamespace(map_id="m", iter_elems=lambda: iter([])), "s") == (None, [])


def test_signals_keep_changes_only_and_count_lanes_off_the_map() -> None:
    status = {("l1", k): Light.RED if k < 3 else Light.GREEN for k in range(6)} | {
        ("l2", 0): Light.NO_DATA,
        ("gone", 0): Light.RED,
    }
    road = RoadMap("m", [MapElement(i, "lane_center", np.zeros((2, 2))) for i in ("l1", "l2")])
    changes, drops = signal_changes(status, road, "s")
    assert changes == [("l1", 0, "red"), ("l1", 3, "green"), ("l2", 0, "unknown")]
    assert drops == [Drop("s", "signal of a lane that the map lacks", "gone")]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("nuscenes_mini", "nusc_mini"),
        ("eupeds_zara", "eupeds_zara"),
        ("nuplan_trian", "nuplan_train"),
        ("waymo_training", "waymo_train"),
    ],
)
def test_unknown_data_sets_suggest_the_right_spelling(wrong: str, right: str) -> None:
    with pytest.raises(SceneError, match=rf"no data set '{wrong}'; did you mean trajdata:{right}.*It has eupeds_eth"):
        known(wrong)


@pytest.mark.parametrize("dataset", sorted(DATASETS))
def test_a_missing_data_folder_says_what_belongs_there(dataset: str, tmp_path: Path) -> None:
    with pytest.raises(SceneError) as error:
        TrajdataReader(dataset, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(error.value)
    assert DATASETS[dataset].files in str(error.value)


def test_without_trajdata_the_install_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trajdata", None)
    with (
        pytest.raises(SceneError, match=r"needs trajdata 1\.4\.0.*pip install --no-deps trajdata==1\.4\.0"),
        running("nusc_mini"),
    ):
        pass
    assert "string_" not in np.__dict__


@needs_trajdata
@pytest.mark.parametrize(
    ("dataset", "package", "module"),
    [
        ("nusc_mini", "nuscenes-devkit", "nuscenes"),
        ("waymo_val", "waymo-open-dataset", "tensorflow"),
        ("interaction_multi", "lanelet2", "lanelet2"),
    ],
)
def test_the_package_that_trajdata_itself_lacks_is_named(
    dataset: str, package: str, module: str, tmp_path: Path
) -> None:
    if find_spec(module):
        pytest.skip(f"{module} is installed")
    with pytest.raises(SceneError, match=f"trajdata needs {package}"):
        list(TrajdataReader(dataset, tmp_path))


def test_a_cache_of_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    TrajdataReader("sdd", tmp_path / "a")._claim(tmp_path / "cache")
    TrajdataReader("sdd", tmp_path / "a")._claim(tmp_path / "cache")
    with pytest.raises(SceneError, match=r"holds sdd from .*; choose another cache"):
        TrajdataReader("sdd", tmp_path / "b")._claim(tmp_path / "cache")


def small_folder(root: Path, gap: bool = False) -> Path:
    """Eight little files with rows on both sides of trajdata's own train/val border."""
    from trajdata.dataset_specific.eth_ucy_peds.eupeds_dataset import TRAINVAL_FRAME_SPLITS

    for name in ethucy.FILES:
        border = TRAINVAL_FRAME_SPLITS[name]
        frames = [0, 1, 2, 3 + 2 * gap] + [border + k for k in range(3)]
        rows = [(10 * f, 1 if f < border else 2, 0.5 * f, 1.0) for f in frames] + [(10 * border, 3, 2.0, 2.0)]
        rows.sort(key=lambda r: r[0])
        (root / f"{name}.txt").write_text("".join("\t".join(str(float(v)) for v in r) + "\n" for r in rows))
    return root


@needs_trajdata
def test_a_small_folder_through_trajdata(tmp_path: Path) -> None:
    with running("eupeds_eth"):
        small_folder(tmp_path)
    items = list(TrajdataReader("eupeds_zara1", tmp_path))
    scenes = [s for s in items if isinstance(s, Scene)]
    assert [s.split for s in scenes].count("train") == [s.split for s in scenes].count("val") == 7
    (test,) = (s for s in scenes if s.split == "test")
    assert (test.id, test.dt, test.map) == ("crowds_zara01", 0.4, None)
    assert {t.id: (t.start, len(t.valid), t.size) for t in test.tracks} == {"1": (0, 4, None), "2": (711, 3, None)}
    drops = [d for d in items if isinstance(d, Drop)]
    assert {(d.reason, d.detail) for d in drops} == {("trajdata leaves out a track of one row", "pedestrian 3")}
    assert sorted(d.scene_id for d in drops) == sorted(s.id for s in scenes if s.split != "train")


@needs_trajdata
def test_gaps_that_trajdata_refuses_point_to_the_text_reader(tmp_path: Path) -> None:
    with running("eupeds_eth"):
        small_folder(tmp_path, gap=True)
    with pytest.raises(SceneError, match=r"could not read eupeds_zara1.*missing frames.*source=ethucy:FOLD"):
        list(TrajdataReader("eupeds_zara1", tmp_path))


@pytest.mark.slow
@needs_trajdata
@needs_data
def test_a_fold_through_trajdata_equals_the_text_files() -> None:
    served = list(TrajdataReader("eupeds_zara1", DATA))
    scenes = {s.id: s for s in served if isinstance(s, Scene)}
    raw = {s.id: s for s in EthUcyReader("zara1", DATA) if isinstance(s, Scene)}
    assert {k: s.split for k, s in scenes.items()} == {k: s.split for k, s in raw.items()}
    single = 0
    for name, scene in raw.items():
        theirs = {t.id: t for t in scenes[name].tracks}
        for track in scene.tracks:
            if len(track.valid) == 1:
                single += 1
                assert track.id not in theirs
                continue
            same = theirs.pop(track.id)
            assert same.start == track.start
            assert np.array_equal(same.valid, track.valid)
            assert np.abs(same.xyh - track.xyh).max() <= 1e-6
        assert not theirs
    assert single == sum(isinstance(d, Drop) for d in served) == 5
    assert len(scenes["crowds_zara01"].tracks) == 148
    assert trajdata.SPLIT["mini_val"] == "val"
