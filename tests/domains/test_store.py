"""The packed store: what goes in comes out, bad scenes are refused by name, the folder appears whole or not at all."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqdiff.domains.trajectory.pieces import chop, chop_map, ring_area
from seqdiff.domains.trajectory.scene import Drop, MapElement, RoadMap, Scene, SceneError, Track
from seqdiff.domains.trajectory.store import Store, StoreError, StoreWriter

ORIGIN = np.array([412345.25, 5432109.5])  # a UTM-like frame, where float32 would lose decimetres


def car(name: str, start: int = 0, n: int = 20, v: float = 10.0, y: float = 0.0) -> Track:
    t = np.arange(n) * 0.1
    xyh = np.stack([ORIGIN[0] + v * t, np.full(n, ORIGIN[1] + y), np.full(n, 0.25)], axis=1)
    return Track(name, "vehicle", start, xyh, np.ones(n, bool), (4.5, 1.8))


def road(name: str = "town") -> RoadMap:
    line = ORIGIN + np.array([[0.0, 0.0], [25.0, 0.0]])
    box = ORIGIN + np.array([[-5.0, -5.0], [45.0, -5.0], [45.0, 5.0], [-5.0, 5.0]])
    hole = ORIGIN + np.array([[0.0, 2.0], [10.0, 2.0], [10.0, 4.0], [0.0, 4.0]])
    elements = [("l1", "lane_center", line), ("l2", "lane_center", line + 3), ("b1", "lane_boundary", line + 1)]
    rings = [("d1", "drivable_area", box), ("h1", "drivable_hole", hole)]
    return RoadMap(name, [MapElement(*e) for e in elements + rings])


def scene(name: str = "s0", **changes: object) -> Scene:
    holed = car("b", start=5, n=10, y=3.0)
    holed.valid[4:6] = False
    holed.xyh[4:6] = np.nan
    made = Scene(name, 0.1, "train", [car("a"), replace(holed, type="bus", size=None, scored=True)], road())
    return replace(made, **changes)  # type: ignore[arg-type]


def write(out: Path, *scenes: Scene) -> Store:
    with StoreWriter(out, "test", "made up") as writer:
        for one in scenes:
            writer.add(one)
    return Store(out)


def test_round_trip(tmp_path: Path) -> None:
    given = scene(signals=[("l1", 3, "red"), ("l1", 8, "green"), ("l2", 6, "yellow")], meta={"group": "g1"})
    s = write(tmp_path / "s", given, scene("s1", split="val", map=None))
    assert (s.dt, s.n_scenes, s.scene_ids, s.splits) == (0.1, 2, ["s0", "s1"], ["train", "val"])
    assert s.scene_index("s1") == 1 and s.split_of(1) == "val" and s.scenes("train").tolist() == [0]
    assert s.n_steps(0) == 20 and s.meta(0) == {"group": "g1"} and s.meta(1) == {}

    table = s.tracks(0)
    assert table.id == ["a", "b"] and table.type.tolist() == [0, 5]
    assert table.start.tolist() == [0, 5] and table.length.tolist() == [20, 10]
    assert table.scored.tolist() == [False, True] and not table.focal.any()
    np.testing.assert_array_equal(table.size, np.array([[4.5, 1.8], [np.nan, np.nan]], np.float32))

    xyh, valid = s.states(0, -3, 30)  # 3 steps before the recording and 7 after
    assert xyh.shape == (2, 30, 3) and xyh.dtype == np.float32 and s.origin(0).dtype == np.float64
    assert np.flatnonzero(valid[0]).tolist() == list(range(3, 23))
    assert np.flatnonzero(valid[1]).tolist() == [8, 9, 10, 11, 14, 15, 16, 17]
    assert (xyh[~valid] == 0).all()
    world = xyh[..., :2].astype(np.float64) + s.origin(0)
    np.testing.assert_allclose(world[0, 3:23], given.tracks[0].xyh[:, :2], atol=1e-5)
    np.testing.assert_allclose(xyh[0, 3:23, 2], 0.25)
    np.testing.assert_allclose(world[1, valid[1]], given.tracks[1].xyh[given.tracks[1].valid, :2], atol=1e-5)

    assert s.signals(0, 2) == {"l1": "unknown", "l2": "unknown"}
    assert s.signals(0, 7) == {"l1": "red", "l2": "yellow"} and s.signals(0, 8)["l1"] == "green"
    assert s.signals(1, 5) == {} and s.map(1) is None and s.drivable(1) is None


def test_states_beyond_the_ends_of_a_tiny_store(tmp_path: Path) -> None:
    s = write(tmp_path / "s", scene(tracks=[car("a", n=3)], map=None))
    xyh, valid = s.states(0, -10, 50)  # longer than all rows of the store together
    assert np.flatnonzero(valid[0]).tolist() == [10, 11, 12]
    np.testing.assert_allclose(xyh[0, 10:13, 0] + s.origin(0)[0], ORIGIN[0] + np.array([0.0, 1.0, 2.0]), atol=1e-5)


def test_a_shared_map_is_stored_once_and_follows_each_scene(tmp_path: Path) -> None:
    far = scene("s1", tracks=[car("a", y=40.0)])
    s = write(tmp_path / "s", scene(), far, scene("s2", map=road("other")))
    assert s.manifest["counts"]["train"]["maps"] == 2 and len(s.arrays["map_origin"]) == 2
    assert s.origin(0)[1] != s.origin(1)[1]
    for i in range(3):
        found = s.map(i)
        assert found is not None and found.id == ("other" if i == 2 else "town")
        for got, want in zip(found.elements, road().elements):
            assert (got.id, got.kind) == (want.id, want.kind)
            np.testing.assert_allclose(got.points + s.origin(i), want.points, atol=1e-5)
    area = s.drivable(1)
    assert area.area == pytest.approx(50 * 10 - 10 * 2, abs=1e-2)
    assert area.bounds[0] + s.origin(1)[0] == pytest.approx(ORIGIN[0] - 5, abs=1e-4)
    changed = road()
    changed.elements[0].points[0] += 1.0
    with StoreWriter(tmp_path / "t", "test", "made up") as writer:
        writer.add(scene())
        with pytest.raises(SceneError, match=r"'s1'.*'town' differs.*different ids"):
            writer.add(scene("s1", map=changed))


def test_manifest_counts_and_hash(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "a", "test", "made up") as writer:
        assert writer.add(scene())
        assert not writer.add(scene("empty", tracks=[car("a", n=1)]))
        never = replace(car("never"), valid=np.zeros(20, bool))
        assert writer.add(scene("s1", tracks=[car("a"), never]))
        for k in range(7):
            writer.drop(Drop(f"x{k}", "altered", "row 3"))
    s = Store(tmp_path / "a")
    count = s.manifest["counts"]["train"]
    assert count["scenes"] == 2 and count["tracks"] == {"vehicle": 2, "bus": 1} and count["scored_tracks"] == 1
    assert count["agent_seconds"] == {"vehicle": 4.0, "bus": 0.8}
    dropped = {d["reason"]: d for d in s.manifest["dropped"]}
    assert dropped["altered"]["count"] == 7 and dropped["altered"]["examples"] == [f"x{k}: row 3" for k in range(5)]
    assert dropped["scene without a track of two valid rows"]["examples"] == ["empty: 1 tracks"]
    assert dropped["track without a valid row"]["examples"] == ["s1: track 'never'"]

    same, moved = write(tmp_path / "b", scene(), scene("s1", tracks=[car("a")])), scene()
    assert same.content_hash == s.content_hash  # what was dropped is no content
    moved.tracks[0].xyh[3, 0] += 0.01
    assert write(tmp_path / "c", moved, scene("s1", tracks=[car("a")])).content_hash != s.content_hash


def spoil(change: Callable[[Scene], object]) -> Scene:
    made = scene()
    change(made)
    return made


BAD: dict[str, tuple[Callable[[Scene], object], str]] = {
    "type": (
        lambda s: setattr(s.tracks[0], "type", "pedestrain"),
        "'s0', track 'a', step 0.*mean 'pedestrian'",
    ),
    "duplicate": (lambda s: setattr(s.tracks[1], "id", "a"), "'s0', track 'a', step 5: this id is already taken"),
    "shape": (lambda s: setattr(s.tracks[0], "valid", np.ones(3, bool)), r"'a'.*xyh \(20, 3\) and valid \(3,\)"),
    "nan": (lambda s: s.tracks[0].xyh.__setitem__((7, 0), np.nan), "'a', step 7: position is not finite"),
    "heading": (lambda s: s.tracks[1].xyh.__setitem__((2, 2), np.inf), "'b', step 7: heading is not finite"),
    "speed": (lambda s: s.tracks[0].xyh.__setitem__((slice(9, None), 0), 0.0), "'a', step 9: moves at .*metres"),
    "feet over a hole": (lambda s: s.tracks[1].xyh.__setitem__((slice(6, None), 1), 0.0), "'b', step 11: moves at"),
    "start": (lambda s: setattr(s.tracks[0], "start", -1), "starts at step -1"),
    "size": (lambda s: setattr(s.tracks[0], "size", (4.5, 0.0)), r"size is \(4.5, 0.0\)"),
    "dt": (lambda s: setattr(s, "dt", 0.0), "dt is 0.0"),
    "split": (lambda s: setattr(s, "split", ""), "split is ''"),
    "kind": (lambda s: setattr(s.map.elements[0], "kind", "lane_centre"), "'l1': map kind.*'lane_center'"),  # type: ignore[union-attr]
    "points": (lambda s: setattr(s.map.elements[3], "points", np.zeros((2, 2))), r"'d1': got points \(2, 2\)"),  # type: ignore[union-attr]
    "element": (lambda s: setattr(s.map.elements[1], "id", "l1"), "two lane_center elements have this id"),  # type: ignore[union-attr]
    "signal lane": (lambda s: s.signals.append(("b1", 0, "red")), "signal of 'b1', step 0: the map has no lane_center"),
    "signal state": (lambda s: s.signals.append(("l1", 0, "amber")), "signal state 'amber' is unknown"),
    "focal": (lambda s: [setattr(t, "focal", True) for t in s.tracks], "2 tracks are marked focal"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_scenes_are_refused_by_name(case: str, tmp_path: Path) -> None:
    change, message = BAD[case]
    with StoreWriter(tmp_path / "s", "test", "made up") as writer:
        with pytest.raises(SceneError, match=message):
            writer.add(spoil(change))
        writer.add(scene("good"))  # the writer stays usable, nothing of the bad scene is left in it
    assert Store(tmp_path / "s").scene_ids == ["good"]


def test_one_dt_and_one_scene_of_each_id(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", "test", "made up") as writer:
        writer.add(scene())
        with pytest.raises(SceneError, match=r"'s1': dt is 0.4 s, the store's is 0.1 s.*resample"):
            writer.add(scene("s1", dt=0.4))
        with pytest.raises(SceneError, match="already in the store"):
            writer.add(scene())


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "s"
    with pytest.raises(RuntimeError, match="reader broke"), StoreWriter(out, "test", "made up") as writer:
        writer.add(scene())
        raise RuntimeError("reader broke")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SceneError, match=r"no scene was added \(altered: 1\)"), StoreWriter(out, "t", "m") as writer:
        writer.drop(Drop("x", "altered"))
    assert list(tmp_path.iterdir()) == []

    first = write(out, scene())
    with pytest.raises(FileExistsError, match="overwrite=True"):
        StoreWriter(out, "test", "made up")
    with pytest.raises(RuntimeError, match="again"), StoreWriter(out, "t", "m", overwrite=True):
        raise RuntimeError("again")
    assert Store(out).content_hash == first.content_hash
    with StoreWriter(out, "test", "made up", overwrite=True) as writer:
        writer.add(scene("new"))
    assert Store(out).scene_ids == ["new"] and list(tmp_path.iterdir()) == [out]
    with pytest.raises(RuntimeError, match="closed already"):
        writer.close()

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="no store to replace"):
        StoreWriter(tmp_path / "mine", "test", "made up", overwrite=True)


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not there.*seqdiff prepare"):
        Store(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"has no manifest.json"):
        Store(tmp_path)
    out = write(tmp_path / "s", scene()).path
    manifest = json.loads((out / "manifest.json").read_text())
    with pytest.raises(KeyError, match=r"no split 'dev'.*train"):
        Store(out).scenes("dev")
    with pytest.raises(KeyError, match="no scene 'x'"):
        Store(out).scene_index("x")

    def given(**changes: object) -> Path:
        (out / "manifest.json").write_text(json.dumps({**manifest, **changes}))
        return out

    with pytest.raises(StoreError, match="version 99, this seqdiff reads version 1"):
        Store(given(version=99))
    with pytest.raises(StoreError, match="says format 'zarr'"):
        Store(given(format="zarr"))
    with pytest.raises(StoreError, match="does not list state"):
        Store(given(arrays={k: v for k, v in manifest["arrays"].items() if k != "state"}))
    (out / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="not JSON"):
        Store(out)
    given()
    whole = (out / "state.npy").read_bytes()
    (out / "state.npy").write_bytes(whole[:-4])
    with pytest.raises(StoreError, match=rf"state.npy has {len(whole) - 4} bytes, the manifest says {len(whole)}"):
        Store(out)
    (out / "state.npy").write_bytes(b"x" * len(whole))
    with pytest.raises(StoreError, match=r"not a .npy file|holds"):
        Store(out)
    (out / "state.npy").unlink()
    with pytest.raises(StoreError, match=r"state.npy is missing"):
        Store(out)


def test_a_store_pickles_as_its_path(tmp_path: Path) -> None:
    s = write(tmp_path / "s", scene())
    packed = pickle.dumps(s)
    again = pickle.loads(packed)
    assert len(packed) < 500 and again.content_hash == s.content_hash and pickle.loads(packed) is again


def test_chop_cuts_equal_pieces() -> None:
    pieces = chop(np.array([[0.0, 0.0], [5.0, 0.0], [5.0, 20.0]]), 10.0)
    assert pieces.shape == (3, 10, 2)  # 25 m in pieces of 8.33 m
    np.testing.assert_allclose(pieces[0, 0], [0, 0])
    np.testing.assert_allclose(pieces[-1, -1], [5, 20])
    np.testing.assert_allclose(pieces[:-1, -1], pieces[1:, 0])
    np.testing.assert_allclose(pieces[1, 0], [5, 25 / 3 - 5])
    assert len(chop(np.array([[0.0, 0.0], [10.0, 0.0]]), 10.0)) == 1
    assert len(chop(np.zeros((2, 2)), 10.0)) == 0
    square = np.array([[0.0, 0.0], [10.0, 0.0], [10.0, 10.0], [0.0, 10.0]])
    np.testing.assert_allclose(chop(square, 10.0, closed=True)[-1, -1], [0, 0])
    # drivable rings are tokens only where there is nothing else
    area = MapElement("d", "drivable_area", square)
    assert len(chop_map([area], 10.0)[0]) == 4
    points, middle, kind, element = chop_map([area, MapElement("l", "lane_center", square[:2])], 10.0)
    assert len(points) == 1 and kind.tolist() == [0] and element.tolist() == [1]
    np.testing.assert_allclose(middle, [[5, 0]], atol=1e-6)


def test_other_piece_lengths_are_chopped_on_demand(tmp_path: Path) -> None:
    s = write(tmp_path / "s", scene(), scene("s1", map=road("other")))
    assert np.diff(s.pieces(10.0).ends).tolist() == [9, 9]  # three lines of 25 m
    other = s.pieces(5.0)
    assert np.diff(other.ends).tolist() == [15, 15] and other is s.pieces(5.0)


def test_a_ring_that_crosses_itself_encloses_what_it_winds_round(tmp_path: Path) -> None:
    bow = np.array([[0.0, 0.0], [2.0, 2.0], [2.0, 0.0], [0.0, 2.0]])
    assert ring_area(bow).area == pytest.approx(2.0)
    twice = np.array([[0, 0], [4, 0], [4, 4], [0, 4], [0, 0], [2, 0], [2, 2], [0, 2.0]])  # goes round one corner twice
    assert ring_area(twice).area == pytest.approx(16.0)
    ring = MapElement("d", "drivable_area", ORIGIN + bow)
    s = write(tmp_path / "s", scene(map=RoadMap("m", [ring])))
    assert s.drivable(0).area == pytest.approx(2.0, abs=1e-3)
    assert [(r["count"], r["examples"]) for r in s.manifest["repaired"]] == [(1, ["m: d"])]
