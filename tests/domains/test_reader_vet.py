"""Checks that every scene passes on its way into a store, and headings from motion."""

from __future__ import annotations

import numpy as np
import pytest

from seqdiff.domains.trajectory.readers.vet import dense, motion_heading, need, top_speed, vet
from seqdiff.domains.trajectory.scene import Scene, SceneError, Track


def track(name: str, xy: np.ndarray, **given: object) -> Track:
    xyh = np.column_stack([xy, np.zeros(len(xy))])
    return Track(name, "vehicle", 0, xyh, np.ones(len(xy), bool), **given)  # type: ignore[arg-type]


def line(speed: float, n: int = 5, dt: float = 0.1) -> np.ndarray:
    return np.column_stack([np.arange(n) * speed * dt, np.zeros(n)])


def test_heading_is_the_direction_of_motion_and_is_kept_while_standing() -> None:
    xy = np.array([[0, 0], [0, 1], [0, 1], [0, 1.001], [-1, 1.001]], float)
    assert motion_heading(xy, np.ones(5, bool), 0.4) == pytest.approx([0, np.pi / 2, np.pi / 2, np.pi / 2, np.pi])


def test_heading_never_looks_ahead() -> None:
    xy = np.random.default_rng(0).normal(size=(30, 2)).cumsum(0)
    whole = motion_heading(xy, np.ones(30, bool), 0.4)
    for n in range(1, 30):
        assert np.array_equal(motion_heading(xy[:n], np.ones(n, bool), 0.4), whole[:n])


def test_heading_bridges_holes_and_stays_nan_in_them() -> None:
    valid = np.array([True, False, True, True])
    heading = motion_heading(np.array([[0, 0], [9, 9], [2, 2], [2, 3]], float), valid, 0.4)
    assert np.isnan(heading[1])
    assert heading[valid] == pytest.approx([0, np.pi / 4, np.pi / 2])


def test_missing_steps_become_holes() -> None:
    start, xyh, valid = dense(np.array([3, 4, 7]), np.arange(9.0).reshape(3, 3))
    assert start == 3
    assert valid.tolist() == [True, True, False, False, True]
    assert np.isnan(xyh[2:4]).all()
    assert xyh[4].tolist() == [6, 7, 8]


def test_speed_over_a_hole_counts_its_length() -> None:
    holed = Track(
        "a", "vehicle", 0, np.array([[0, 0, 0], [np.nan] * 3, [4, 0, 0]], float), np.array([True, False, True])
    )
    assert top_speed(holed, 0.1) == pytest.approx(20.0)


def test_a_sound_scene_comes_back_as_it_is() -> None:
    scene = Scene("s", 0.1, "train", [track("a", line(10)), track("b", line(99))])
    kept, drops = vet(scene)
    assert kept is scene
    assert drops == []


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (track("x", line(150)), "faster than 100 m/s"),
        (track("x", np.array([[0, 0], [np.nan, 0]])), "NaN or infinity in a valid row"),
        (track("x", np.array([[0, 0], [np.inf, 0]])), "NaN or infinity in a valid row"),
        (track("x", line(1), size=(0.0, 2.0)), "size that is not positive"),
        (Track("x", "tram", 0, np.zeros((2, 3)), np.ones(2, bool)), "unknown agent type"),
        (Track("x", "bus", 0, np.full((2, 3), np.nan), np.zeros(2, bool)), "track without a valid row"),
    ],
)
def test_one_unsound_track_is_dropped_by_name(bad: Track, reason: str) -> None:
    kept, drops = vet(Scene("s", 0.1, "train", [track("a", line(10)), bad, track("b", line(12))]))
    assert kept is not None
    assert [t.id for t in kept.tracks] == ["a", "b"]
    assert [d.reason for d in drops] == [reason]
    assert "x" in drops[0].detail


def test_both_tracks_of_a_duplicate_id_are_dropped() -> None:
    kept, drops = vet(Scene("s", 0.1, "train", [track("a", line(1)), track("b", line(2)), track("a", line(3))]))
    assert kept is not None
    assert [t.id for t in kept.tracks] == ["b"]
    assert [d.reason for d in drops] == ["duplicate track id"] * 2


def test_wrong_units_are_an_error_not_a_drop() -> None:
    millimetres = [track(str(k), 1000 * line(10 + k)) for k in range(4)]
    with pytest.raises(SceneError, match=r"4 of 4 tracks move faster than 100 m/s.*metres.*dt = 0.1"):
        vet(Scene("s", 0.1, "train", millimetres))


@pytest.mark.parametrize("dt", [0.0, -0.1, float("nan"), float("inf")])
def test_dt_must_be_a_positive_number(dt: float) -> None:
    with pytest.raises(SceneError, match="expected a positive number of seconds"):
        vet(Scene("s", dt, "train", [track("a", line(1))]))


def test_an_empty_scene_is_a_named_drop() -> None:
    kept, drops = vet(Scene("s", 0.1, "train", []))
    assert kept is None
    assert [d.reason for d in drops] == ["scene without tracks"]


def test_a_missing_package_is_named_with_the_line_that_installs_it() -> None:
    with pytest.raises(SceneError, match=r"some: needs a package.*nowhere_at_all.*pip install nowhere"):
        need("nowhere_at_all", "some:", "pip install nowhere")
