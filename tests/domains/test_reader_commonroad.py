"""CommonRoad XML: small scenarios written here, overlapping ones and their split, and the real NGSIM files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from seqdiff.domains.trajectory.readers.commonroad import CommonRoadReader, read_scenario
from seqdiff.domains.trajectory.readers.overlap import overlap_groups, shared_motion, shared_positions, split_groups
from seqdiff.domains.trajectory.scene import Drop, Scene, SceneError, Track

needs_reader = pytest.mark.skipif(find_spec("commonroad") is None, reason="commonroad-io is not installed")
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "trajectory" / "ngsim_commonroad"
real = pytest.mark.skipif(not DATA.is_dir(), reason=f"the NGSIM scenarios are not at {DATA}")


def points(xy: list[tuple[float, float]]) -> str:
    return "".join(f"<point><x>{x}</x><y>{y}</y></point>" for x, y in xy)


def lanelet(number: int, low: float, high: float) -> str:
    left, right = points([(0, high), (50, high)]), points([(0, low), (50, low)])
    return f'<lanelet id="{number}"><leftBound>{left}</leftBound><rightBound>{right}</rightBound></lanelet>'


def state(tag: str, step: int, x: float, y: float = 2.0, heading: float = 0.1) -> str:
    rest = "<acceleration><exact>0</exact></acceleration>" if tag == "initialState" else ""
    return (
        f"<{tag}><position>{points([(x, y)])}</position><orientation><exact>{heading}</exact></orientation>"
        f"<time><exact>{step}</exact></time><velocity><exact>5</exact></velocity>{rest}</{tag}>"
    )


def obstacle(number: int, kind: str, steps: list[int], role: str = "dynamic", x: float = 0.0) -> str:
    shape = "<shape><rectangle><length>4.5</length><width>1.9</width></rectangle></shape>"
    body = state("initialState", steps[0], x + 0.5 * steps[0])
    if len(steps) > 1:
        body += "<trajectory>" + "".join(state("state", k, x + 0.5 * k) for k in steps[1:]) + "</trajectory>"
    return f'<obstacle id="{number}"><role>{role}</role><type>{kind}</type>{shape}{body}</obstacle>'


def write(folder: Path, name: str, obstacles: list[str], origin: str = "NGSIM", lanes: str | None = None) -> Path:
    lanes = lanelet(901, 0, 4) + lanelet(902, 4.05, 8) if lanes is None else lanes
    place = "<rectangle><length>4</length><width>2</width><center><x>9</x><y>2</y></center></rectangle>"
    goal = f"<goalState><position>{place}</position>{between(3)}</goalState>"
    slip = "<yawRate><exact>0</exact></yawRate><slipAngle><exact>0</exact></slipAngle></initialState>"
    start = state("initialState", 0, 1).replace("</initialState>", slip)
    task = f'<planningProblem id="999">{start}{goal}</planningProblem>'
    head = (
        f'<commonRoad timeStepSize="0.1" commonRoadVersion="2018b" author="" affiliation="" source="{origin}" '
        f'tags="urban" benchmarkID="{name}" date="2019-06-16">'
    )
    path = folder / f"{name}.xml"
    path.write_text(f'<?xml version="1.0" encoding="utf-8"?>{head}{lanes}{"".join(obstacles)}{task}</commonRoad>')
    return path


def between(step: int) -> str:
    return f"<time><intervalStart>{step}</intervalStart><intervalEnd>{step + 1}</intervalEnd></time>"


@needs_reader
def test_a_small_scenario(tmp_path: Path) -> None:
    obstacles = [
        obstacle(1, "car", [0, 1, 2, 3]),
        obstacle(2, "truck", [1, 2, 5], x=9.0),
        obstacle(3, "parkedVehicle", [0], role="static", x=30.0),
        obstacle(4, "pedestrian", [0], x=20.0),
    ]
    (scene,) = read_scenario(write(tmp_path, "USA_Test-1_1_T-1", obstacles))
    assert isinstance(scene, Scene)
    assert (scene.id, scene.dt, scene.meta["road"], scene.meta["source"]) == ("USA_Test-1_1_T-1", 0.1, "Test", "NGSIM")
    tracks = {t.id: t for t in scene.tracks}
    assert {k: (t.type, t.start, len(t.valid)) for k, t in tracks.items()} == {
        "1": ("vehicle", 0, 4),
        "2": ("truck", 1, 5),
        "3": ("vehicle", 0, 6),  # standing there all the time
        "4": ("pedestrian", 0, 1),
    }
    assert all(t.size == (4.5, 1.9) for t in scene.tracks)
    assert tracks["2"].valid.tolist() == [True, True, False, False, True]
    assert tracks["2"].xyh[4] == pytest.approx([11.5, 2.0, 0.1])
    assert scene.map is not None
    kinds = [e.kind for e in scene.map.elements]
    assert (kinds.count("lane_center"), kinds.count("lane_boundary"), kinds.count("drivable_hole")) == (2, 4, 0)
    (area,) = (e for e in scene.map.elements if e.kind == "drivable_area")  # the 5 cm gap between the lanes is closed
    assert (area.points.min(0), area.points.max(0)) == (
        pytest.approx([0, 0], abs=0.01),
        pytest.approx([50, 8], abs=0.01),
    )


@needs_reader
def test_altered_broken_and_empty_scenarios_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "USA_Test-1_1_T-1", [obstacle(1, "car", [0, 1, 2])])
    write(tmp_path, "USA_Test-1_2_T-1", [obstacle(1, "car", [0, 1])], origin="NGSIM, optimized towards criticality")
    write(tmp_path, "USA_Test-1_3_T-1", [obstacle(1, "car", [0, 2, 1]), obstacle(2, "bus", [0, 1], x=7.0)])
    cut = write(tmp_path, "USA_Test-1_4_T-1", [obstacle(1, "car", [0, 1, 2])])
    cut.write_text(cut.read_text()[: cut.stat().st_size // 2])
    (tmp_path / "USA_Test-1_5_T-1.xml").write_text("<note>nothing</note>")
    items = list(CommonRoadReader(tmp_path, (1.0, 0.0, 0.0)))
    drops = {d.scene_id: d.reason for d in items if isinstance(d, Drop)}
    assert drops == {
        "USA_Test-1_2_T-1": "altered scenario (optimized towards criticality)",
        "USA_Test-1_3_T-1": "time goes back or repeats",
        "USA_Test-1_4_T-1": "scenario file that cannot be read",
        "USA_Test-1_5_T-1": "scenario file that cannot be read",
    }
    scenes = {s.id: s for s in items if isinstance(s, Scene)}
    assert {k: (len(s.tracks), s.split) for k, s in scenes.items()} == {
        "USA_Test-1_1_T-1": (1, "train"),
        "USA_Test-1_3_T-1": (1, "train"),
    }
    assert len(list(CommonRoadReader(tmp_path / "USA_Test-1_2_T-1.xml", altered=True))) == 1


@needs_reader
def test_a_shifted_reference_point_is_moved_to_the_centre(tmp_path: Path) -> None:
    body = obstacle(1, "car", [0, 1]).replace("</rectangle>", "<originXShift>-1.5</originXShift></rectangle>", 1)
    (scene,) = read_scenario(write(tmp_path, "USA_Test-1_1_T-1", [body]))
    assert isinstance(scene, Scene)
    assert scene.tracks[0].xyh[0] == pytest.approx([1.5 * np.cos(0.1), 2.0 + 1.5 * np.sin(0.1), 0.1])


@needs_reader
def test_folders_without_scenarios(tmp_path: Path) -> None:
    with pytest.raises(SceneError, match="does not exist"):
        CommonRoadReader(tmp_path / "nowhere")
    with pytest.raises(SceneError, match=r"holds no \*\.xml"):
        CommonRoadReader(tmp_path)


def drive(seed: int, n: int = 60) -> np.ndarray:
    speed = 5 + np.random.default_rng(seed).normal(size=n).cumsum() * 0.4
    return np.column_stack([np.cumsum(speed * 0.1), 0.3 * np.sin(np.arange(n) / 5)])


def scene(name: str, *paths: np.ndarray) -> Scene:
    tracks = [
        Track(str(k), "vehicle", 0, np.column_stack([xy, np.zeros(len(xy))]), np.ones(len(xy), bool))
        for k, xy in enumerate(paths)
    ]
    return Scene(name, 0.1, "", tracks)


def test_overlap_is_seen_in_place_and_in_a_shifted_frame_but_not_in_even_motion() -> None:
    a, even = drive(0), np.column_stack([np.arange(60) * 0.5, np.zeros(60)])
    scenes = [
        scene("whole", a[:40], even),
        scene("later part, same frame", a[25:]),
        scene("later part, another origin", np.round(a[10:50] + [31.337, -8.123], 4)),
        scene("another drive", drive(1) + [0, 900.0]),
        scene("even motion elsewhere", even + [0, 500.0]),
        scene("that drive again", drive(1)[:30] + [1000.0, 0]),
    ]
    assert shared_positions(scenes) == {(0, 1): 15}
    motion = shared_motion(scenes)
    assert set(motion) == {(0, 1), (0, 2), (1, 2), (3, 5)}
    assert motion[0, 1] == 5  # 15 shared rows hold 5 pieces of 10 steps
    assert overlap_groups(scenes) == [0, 0, 0, 1, 2, 1]


def test_the_split_keeps_groups_whole_and_shares_every_road() -> None:
    rng = np.random.default_rng(0)
    groups = np.sort(rng.integers(0, 60, 200)).tolist()
    roads = ["A" if g % 3 else "B" for g in groups]
    weight = rng.uniform(1, 5, 200).tolist()
    split = split_groups(groups, roads, weight, (0.7, 0.1, 0.2), seed=3)
    assert len({(g, s) for g, s in zip(groups, split)}) == len(set(groups))
    for road in "AB":
        total = sum(w for w, r in zip(weight, roads) if r == road)
        for name, share in (("train", 0.7), ("val", 0.1), ("test", 0.2)):
            got = sum(w for w, r, s in zip(weight, roads, split) if (r, s) == (road, name)) / total
            assert got == pytest.approx(share, abs=0.06)
    assert split == split_groups(groups, roads, weight, (0.7, 0.1, 0.2), seed=3)
    assert split != split_groups(groups, roads, weight, (0.7, 0.1, 0.2), seed=4)
    assert set(split_groups(groups, roads, weight, (0.0, 0.0, 1.0), seed=3)) == {"test"}
    with pytest.raises(SceneError, match="expected three shares"):
        split_groups(groups, roads, weight, (0.7, 0.7, 0.2), seed=3)


@needs_reader
@real
def test_one_real_scenario() -> None:
    (got,) = read_scenario(DATA / "USA_Lanker-1_18_T-1.xml")
    assert isinstance(got, Scene)
    assert (len(got.tracks), got.dt, got.meta["road"]) == (26, 0.1, "Lanker")
    assert got.map is not None
    assert sum(e.kind == "lane_center" for e in got.map.elements) == 91
    occupancies = read_scenario(DATA / "USA_US101-1_1_S-1.xml")
    assert [d.reason for d in occupancies if isinstance(d, Drop)] == [
        "obstacle with predicted occupancies, not a recorded trajectory"
    ] * 2


@needs_reader
@real
@pytest.mark.slow
def test_all_of_ngsim() -> None:
    items = list(CommonRoadReader(DATA))
    scenes = [s for s in items if isinstance(s, Scene)]
    assert len(scenes) == 100
    assert sum("altered" in d.reason for d in items if isinstance(d, Drop)) == 4
    assert sum(c >= 20 for c in shared_positions(scenes).values()) == 35  # the pairs that data/README counts
    part = {s.id: s.split for s in scenes}
    motion = shared_motion(scenes)
    assert sum(c >= 10 for c in motion.values()) == 95  # most overlaps are in frames with another origin
    assert all(part[scenes[i].id] == part[scenes[j].id] for (i, j), c in motion.items() if c >= 10)
    assert {(s.meta["road"], s.split) for s in scenes} == {
        (r, p) for r in ("Lanker", "US101") for p in ("train", "val", "test")
    }
