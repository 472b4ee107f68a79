"""The recordings file: what goes in comes out within the stated rounding, and a damaged file says what is wrong."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from seqdiff.domains.trajectory.readers.recordings import (
    EMBEDDED,
    HEADING_ERROR,
    MAP_ERROR,
    POSITION_ERROR,
    Recordings,
    write_recordings,
)
from seqdiff.domains.trajectory.scene import MapElement, RoadMap, Scene, SceneError, Track


def wrapped(angle: np.ndarray) -> np.ndarray:
    return np.arctan2(np.sin(angle), np.cos(angle))


def make_scenes() -> list[Scene]:
    """Two networks, three scenes: tracks far from the origin that turn through pi, a standing one, one of one row."""
    rng = np.random.default_rng(3)
    scenes = []
    for network, split in ((0, "train"), (1, "test")):
        lane = MapElement(":n_0_0", "lane_center", rng.uniform(-120, 120, (5, 2)) + 4000.0)
        area = MapElement("area_0", "drivable_area", np.array([[0.0, 0.0], [90.0, 0.0], [90.0, 50.0]]))
        road = RoadMap(f"grid_{network}", [area, lane])
        for run in range(2 - network):
            s = np.linspace(0.0, 9.0, 91)
            turning = np.stack([5e3 + 20 * np.cos(s), -3e3 + 20 * np.sin(s), wrapped(s + np.pi / 2)], 1)
            fast = np.stack([30.0 * s, 0.1 * s, np.full(91, -0.003)], 1)
            still = np.tile(rng.uniform(-50, 50, 3), (40, 1))
            still[:, 2] = 3.1
            tracks = []
            paths = {"vehicle": turning, "truck": fast, "bicycle": still, "pedestrian": still[:1]}
            for k, (kind, xyh) in enumerate(paths.items()):
                tracks.append(Track(f"{kind}_{k + 7}", kind, k, xyh, np.ones(len(xyh), bool), (4.21 + k, 1.8)))
            signals = [(":n_0_0", 0, "red"), (":n_0_0", 30, "green")] if run == 0 else []
            scenes.append(Scene(f"s{network}{run}", 0.1, split, tracks, road, signals, {"kind": "grid"}))
    return scenes


def rewrite(path: Path, out: Path, change: dict[str, np.ndarray | None]) -> Path:
    with np.load(path, allow_pickle=False) as file:
        arrays = {k: file[k] for k in file.files} | change
    np.savez(out, **{k: v for k, v in arrays.items() if v is not None})
    return out


def test_round_trip_within_the_stated_rounding(tmp_path: Path) -> None:
    scenes = make_scenes()
    reader = Recordings(write_recordings(tmp_path / "t.npz", "tiny", scenes, {"seed": 0}))
    assert (reader.name, len(reader), reader.dt) == ("tiny", 3, 0.1)
    for scene, got in zip(scenes, reader, strict=True):
        assert isinstance(got, Scene) and scene.map is not None and got.map is not None
        assert (got.id, got.split, got.dt, got.signals) == (scene.id, scene.split, scene.dt, scene.signals)
        assert got.meta == {"group": scene.map.id, "kind": "grid"}
        for a, b in zip(scene.tracks, got.tracks, strict=True):
            assert (b.id, b.type, b.start, b.size) == (a.id, a.type, a.start, a.size)
            assert b.valid.all() and b.xyh.dtype == np.float64
            assert np.abs(a.xyh[:, :2] - b.xyh[:, :2]).max() <= POSITION_ERROR + 1e-9
            assert np.abs(wrapped(a.xyh[:, 2] - b.xyh[:, 2])).max() <= HEADING_ERROR + 1e-9
        for e, f in zip(scene.map.elements, got.map.elements, strict=True):
            assert (e.id, e.kind) == (f.id, f.kind)
            assert np.abs(e.points - f.points).max() <= MAP_ERROR + 1e-9


def test_rounding_does_not_grow_along_a_track(tmp_path: Path) -> None:
    t = np.arange(6000) * 0.1
    xyh = np.stack([13.337 * t, 50 * np.sin(t / 7), wrapped(0.2 * t)], 1)
    base = make_scenes()[0]
    scene = Scene("long", 0.1, "train", [Track("car_1", "vehicle", 0, xyh, np.ones(6000, bool), (4.0, 2.0))], base.map)
    got = Recordings(write_recordings(tmp_path / "t.npz", "long", [scene], {})).scene(0).tracks[0].xyh
    assert np.abs(got[-100:, :2] - xyh[-100:, :2]).max() <= POSITION_ERROR + 1e-9
    assert np.abs(wrapped(got[:, 2] - xyh[:, 2])).max() <= HEADING_ERROR + 1e-9
    assert np.abs(got[:, 2]).max() <= np.pi


def test_equal_scenes_give_equal_bytes_and_maps_are_shared(tmp_path: Path) -> None:
    a = write_recordings(tmp_path / "a.npz", "x", make_scenes(), {"seed": 0})
    b = write_recordings(tmp_path / "b.npz", "x", make_scenes(), {"seed": 0})
    assert a.read_bytes() == b.read_bytes()
    reader = Recordings(a)
    assert reader.scene(0).map is reader.scene(1).map
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_caller_may_change_what_it_got(tmp_path: Path) -> None:
    reader = Recordings(write_recordings(tmp_path / "a.npz", "x", make_scenes(), {}))
    before = reader.scene(0).tracks[0].xyh.copy()
    reader.scene(0).tracks[0].xyh[:] = 0.0
    assert np.array_equal(reader.scene(0).tracks[0].xyh, before)


def test_a_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(SceneError, match=r"no such file.*record_traffic"):
        Recordings(tmp_path / "none.npz")


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: float) -> None:
    whole = write_recordings(tmp_path / "a.npz", "x", make_scenes(), {}).read_bytes()
    path = tmp_path / "cut.npz"
    path.write_bytes(whole[: int(keep if keep > 1 else keep * len(whole))])
    with pytest.raises(SceneError, match="cut short"):
        Recordings(path)


def test_flipped_bytes_are_refused(tmp_path: Path) -> None:
    path = write_recordings(tmp_path / "a.npz", "x", make_scenes(), {})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        at = file.getinfo("low.npy").header_offset + 60
    data[at : at + 8] = bytes(255 - v for v in data[at : at + 8])
    path.write_bytes(bytes(data))
    with pytest.raises(SceneError, match="not a whole"):
        Recordings(path)


def test_another_format_or_version_is_refused(tmp_path: Path) -> None:
    path = write_recordings(tmp_path / "a.npz", "x", make_scenes(), {})
    with np.load(path, allow_pickle=False) as file:
        header = json.loads(file["header"].tobytes())
    for change, message in (({"version": 9}, "version 9"), ({"format": "other"}, "format 'other'")):
        text = np.frombuffer(json.dumps(header | change).encode(), np.uint8)
        with pytest.raises(SceneError, match=message):
            Recordings(rewrite(path, tmp_path / "b.npz", {"header": text}))
    with pytest.raises(SceneError, match="without a readable header"):
        Recordings(rewrite(path, tmp_path / "c.npz", {"header": None}))
    with pytest.raises(SceneError, match="arrays missing: low"):
        Recordings(rewrite(path, tmp_path / "d.npz", {"low": None}))
    with pytest.raises(SceneError, match="the file is damaged"):
        Recordings(rewrite(path, tmp_path / "e.npz", {"low": np.zeros((3, 5), np.uint8)}))


def test_pickled_objects_are_never_read(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    np.savez(path, header=np.array([{"format": "seqdiff-recordings"}], dtype=object))
    with pytest.raises(SceneError, match="not a whole"):
        Recordings(path)


def test_what_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    def changed(**values: object) -> list[Scene]:
        scenes = make_scenes()
        for key, value in values.items():
            setattr(scenes[0] if key in ("map", "dt") else scenes[0].tracks[0], key, value)
        return scenes

    hole = np.ones(91, bool)
    hole[4] = False
    jump = make_scenes()[0].tracks[0].xyh
    jump[50:, 0] += 500.0
    for scenes, message in (
        ([], "0 scenes"),
        (changed(dt=0.2), "scenes of one dt"),
        (changed(map=None), "no map"),
        (changed(valid=hole), "expected no holes"),
        (changed(size=None), "a size"),
        (changed(id="car"), "an id like car_12"),
        (changed(xyh=jump), "jump by"),
    ):
        with pytest.raises(SceneError, match=message):
            write_recordings(tmp_path / "a.npz", "x", scenes, {})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def embedded() -> Recordings:
    return Recordings.embedded()


@pytest.mark.skipif(not EMBEDDED.is_file(), reason="the embedded traffic file is not in this checkout")
class TestEmbedded:
    def test_what_the_package_ships(self, embedded: Recordings) -> None:
        reader = embedded
        assert EMBEDDED.stat().st_size <= 8e6 and reader.dt == 0.1
        kinds: dict[str, set[str]] = {}
        for network in reader.header["networks"]:
            kinds.setdefault(network["split"], set()).add(network["kind"])
        assert kinds["train"] == {"grid", "crossing", "roundabout", "motorway", "curve"}
        assert kinds["train"] == kinds["val"] == kinds["test"]
        names = [network["name"] for network in reader.header["networks"]]
        assert len(set(names)) == len(names) and len(names) >= 30
        seconds = float(reader._arrays["track_length"].sum()) * reader.dt
        assert seconds >= 40_000

    def test_states_are_sane(self, embedded: Recordings) -> None:
        scene = embedded.scene(0)
        assert scene.map is not None and {e.kind for e in scene.map.elements} >= {"lane_center", "drivable_area"}
        lanes = {e.id for e in scene.map.elements if e.kind == "lane_center"}
        assert scene.signals and {lane for lane, _, _ in scene.signals} <= lanes
        for t in scene.tracks:
            assert np.isfinite(t.xyh).all() and t.start >= 0
            assert np.all(np.linalg.norm(np.diff(t.xyh[:, :2], axis=0), axis=1) < 5.0)
