"""Recording traffic: the geometry on cases that can be checked by hand, and a small recording with SUMO itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import shapely

from seqdiff.domains.trajectory.readers.recordings import Recordings
from seqdiff.domains.trajectory.scene import MapElement, RoadMap, Scene, Track
from seqdiff.tools import record_traffic, traffic_report
from seqdiff.tools.traffic_map import TrafficMap
from seqdiff.tools.traffic_networks import KINDS, make_network
from seqdiff.tools.traffic_run import OVERHANG, WHEELBASE, follow, smooth, trail, without_jump

needs_sumo = pytest.mark.skipif(
    importlib.util.find_spec("sumo") is None, reason="SUMO is not installed (pip install seqdiff[traffic])"
)


def boxes(front: np.ndarray, angle: float, length: float) -> np.ndarray:
    return trail(follow(front, angle, OVERHANG * length), angle, WHEELBASE * length, (0.5 - OVERHANG) * length)


def test_centre_is_half_a_length_behind_the_bumper_on_a_straight() -> None:
    angle = 2.2
    front = np.arange(0.0, 60.0, 1.0)[:, None] * np.array([np.cos(angle), np.sin(angle)]) + [300.0, -40.0]
    got = boxes(front, angle, 12.0)
    assert np.allclose(got[:, :2], front - 6.0 * np.array([np.cos(angle), np.sin(angle)]), atol=1e-9)
    assert np.allclose(got[:, 2], angle, atol=1e-9)


def test_rear_axle_runs_on_the_circle_of_the_bicycle_model() -> None:
    radius, length = 15.0, 10.0
    t = np.arange(0.0, 8.0, 0.002)
    front = radius * np.stack([np.cos(t), np.sin(t)], 1)
    got = boxes(front, np.pi / 2, length)[-1]
    rear = got[:2] - (WHEELBASE + OVERHANG - 0.5) * length * np.array([np.cos(got[2]), np.sin(got[2])])
    assert np.linalg.norm(rear) == pytest.approx(np.sqrt(radius**2 - (WHEELBASE * length) ** 2), rel=2e-3)
    tangent = np.array([-rear[1], rear[0]]) / np.linalg.norm(rear)
    assert tangent @ [np.cos(got[2]), np.sin(got[2])] == pytest.approx(1.0, abs=1e-4)


def test_who_stands_does_not_drift_or_turn() -> None:
    drive = np.stack([np.minimum(np.arange(300) * 0.5, 40.0), np.full(300, 3.0)], 1)
    got = boxes(smooth(drive, 2.0), 0.0, 5.0)[120:]
    assert np.abs(got - got[0]).max() < 1e-9
    assert np.allclose(got[0], [40.0 - 2.5, 3.0, 0.0], atol=1e-9)


def test_smoothing_keeps_lines_and_short_tracks() -> None:
    line = np.stack([np.arange(50) * 1.3, np.arange(50) * -0.4], 1)
    assert np.allclose(smooth(line, 2.0), line, atol=1e-9)
    for n in (1, 2, 5):
        assert np.allclose(smooth(line[:n], 3.0), line[:n], atol=1e-9)


def test_a_walk_is_cut_where_sumo_moves_it_across_the_road() -> None:
    step = np.arange(100.0)
    table = np.stack([step, 0.14 * step + 20.0 * (step >= 30), np.zeros(100)], 1)
    got = without_jump(table, 1.0, first=10, steps=200)
    assert (got[0, 0], got[-1, 0]) == (30.0, 99.0)
    assert (
        without_jump(table, 1.0, first=0, steps=40)[-1, 0] == 29.0
    )  # of the scene's steps the part before covers more
    assert len(without_jump(table, 30.0, first=0, steps=100)) == 100


def test_box_corners_and_overlaps_by_hand() -> None:
    xyh = np.array([[0.0, 0.0, np.pi / 2], [1.9, 0.0, 0.0], [10.0, 0.0, np.pi / 4], [12.9, 0.0, np.pi / 4]])
    size = np.array([[4.0, 2.0], [2.0, 1.0], [4.0, 2.0], [4.0, 2.0]])
    corners = traffic_report.box_corners(xyh, size)
    assert np.allclose(corners[0], [[-1, 2], [-1, -2], [1, -2], [1, 2]])
    pairs = traffic_report.overlaps(corners, 0.5 * np.linalg.norm(size, axis=1))
    # the first two share 0.1 m; the slanted two are 2.9 / sqrt(2) = 2.05 m apart across their sides, which are 2 m wide
    assert pairs.tolist() == [[0, 1]]


def test_measure_counts_corners_off_the_road_by_hand() -> None:
    ring = np.array([[0.0, 0.0], [100.0, 0.0], [100.0, 10.0], [0.0, 10.0]])
    hole = np.array([[40.0, 4.0], [60.0, 4.0], [60.0, 6.0], [40.0, 6.0]])
    road = RoadMap("r", [MapElement("a", "drivable_area", ring), MapElement("h", "drivable_hole", hole)])
    still = {"half out": [50.0, 10.0, 0.0], "in": [20.0, 5.0, 0.0], "in the hole": [50.0, 5.0, 0.0]}
    tracks = [
        Track(f"car_{k}", "vehicle", 0, np.tile(v, (10, 1)), np.ones(10, bool), (4.0, 1.5))
        for k, v in enumerate(still.values())
    ]
    got = traffic_report.measure(Scene("s", 0.1, "train", tracks, road))
    assert (got["corners"], got["off"], got["states"], got["hit"]) == (24.0, 12.0, 6.0, 0.0)


def test_signals_of_one_light_become_changes_of_its_lanes() -> None:
    road = TrafficMap(RoadMap("r", []), shapely.box(0, 0, 1, 1), {("n", 0): ":n_0_0", ("n", 2): ":n_1_0"})
    got = road.signals([("n", 0, "Grr"), ("n", 40, "yrr"), ("n", 70, "rrg"), ("n", 75, "rGu")])
    assert got == [
        (":n_0_0", 0, "green"), (":n_1_0", 0, "red"), (":n_0_0", 40, "yellow"),
        (":n_0_0", 70, "red"), (":n_1_0", 70, "green"), (":n_1_0", 75, "red"),
    ]  # fmt: skip


def test_whole_networks_go_to_one_split() -> None:
    assert [record_traffic.split_of(i, 10) for i in range(10)] == ["train"] * 7 + ["val"] + ["test"] * 2
    assert [record_traffic.split_of(i, 3) for i in range(3)] == ["train", "val", "test"]
    assert [record_traffic.split_of(i, 2) for i in range(2)] == ["train", "test"]
    assert record_traffic.split_of(0, 1) == "train"
    jobs = record_traffic.plan(KINDS, 10, 2, 60.0, 0)
    assert len({(j.kind, j.index) for j in jobs}) == len(jobs) == 50


def test_networks_differ_and_repeat() -> None:
    for kind in KINDS:
        a, b, c = (make_network(kind, "n", np.random.default_rng(seed)) for seed in (1, 1, 2))
        assert [n.xy for n in a.nodes] == [n.xy for n in b.nodes] != [n.xy for n in c.nodes]
    with pytest.raises(ValueError, match=r"'grids'; expected one of grid"):
        make_network("grids", "n", np.random.default_rng(0))


def test_bad_arguments_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.npz"
    assert record_traffic.main(["--out", str(out), "--kinds", "grid,lane"]) == 2
    assert "expected some of grid, crossing" in capsys.readouterr().err
    assert record_traffic.main(["--out", str(out), "--networks", "0"]) == 2
    assert not out.exists()


@needs_sumo
def test_a_small_recording_repeats_to_the_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for out, workers in zip(files, ("1", "2")):
        args = ["--out", str(out), "--kinds", "curve,crossing", "--networks", "1", "--seconds", "8", "--runs", "1"]
        assert record_traffic.main([*args, "--workers", workers, "--seed", "3"]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "agent-seconds" in capsys.readouterr().out
    reader = Recordings(files[0])
    assert reader.header["meta"]["seed"] == 3 and len(reader) == 2
    for scene in reader:
        assert isinstance(scene, Scene) and len(scene.tracks) > 3
        sums = traffic_report.measure(scene)
        assert float(sums["off"]) <= 0.01 * float(sums["corners"])
        assert np.max(sums["speed"]) < 40.0 and np.max(sums["acceleration"]) < 12.0
        for t in scene.tracks:
            step = np.diff(t.xyh, axis=0)
            moves = np.hypot(step[:, 0], step[:, 1]) > 0.3
            along = np.arctan2(step[:, 1], step[:, 0]) - t.xyh[:-1, 2]
            if t.type != "pedestrian":
                assert np.all(np.cos(along[moves]) > 0.7)  # headings point where it drives
