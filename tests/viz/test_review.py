"""From a samples folder and a store to the page: order, marks by hand, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from seqdiff.domains.trajectory.energies import energies
from seqdiff.domains.trajectory.io import SampleWriter
from seqdiff.domains.trajectory.scene import MapElement, RoadMap, Scene, Track
from seqdiff.domains.trajectory.store import Store, StoreWriter
from seqdiff.domains.trajectory.windows import WindowDataset, WindowSpec
from seqdiff.viz.events import runs
from seqdiff.viz.load import Source, make_view
from seqdiff.viz.review import review, review_report
from seqdiff.viz.scene_view import Event

SPEC = WindowSpec(history_s=1.0, horizon_s=2.0, stride_s=10.0, radius_m=None, focal="all")
ROAD = np.array([[-100.0, -5], [200, -5], [200, 5], [-100, 5]]) + [1000.0, 2000]
K = 3


def two_cars(scene_id: str, with_map: bool) -> Scene:
    """10 m apart on one line, both at 5 m/s, boxes of 4 x 2 m, 0.1 s a step, 31 steps: t0 = 10."""
    steps = np.arange(31)
    tracks = []
    for name, x0 in (("rear", 0.0), ("front", 10.0)):
        xyh = np.stack([1000 + x0 + 0.5 * steps, np.full(31, 2000.0), np.zeros(31)], 1)
        tracks.append(Track(name, "vehicle", 0, xyh, np.ones(31, bool), (4.0, 2.0)))
    lanes = [MapElement("lane", "lane_center", ROAD[:2] + [0, 5.0]), MapElement("area", "drivable_area", ROAD)]
    lanes.append(MapElement("far", "lane_center", ROAD[:2] + [5000.0, 0]))
    signals = [("lane", 0, "green"), ("lane", 15, "red")] if with_map else []
    return Scene(scene_id, 0.1, "test", tracks, RoadMap("m", lanes) if with_map else None, signals)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store and samples. Future 0 is the truth, in 1 the rear car runs into the front one, in 2 it leaves the road."""
    base = tmp_path_factory.mktemp("review")
    with StoreWriter(base / "store", "two-cars", "made up") as w:
        for scene_id, with_map in (("good", True), ("bad", True), ("nomap", False)):
            w.add(two_cars(scene_id, with_map))
    store = Store(base / "store")
    data = WindowDataset(store, SPEC, "test")
    with SampleWriter(base / "samples") as out:
        for i in range(len(data)):
            batch = data.batch([i])
            futures = batch.fut[:, None].repeat(1, K, 1, 1, 1)
            rear = batch.agent_id[0].index("rear")
            futures[0, 1, rear, :, 0] += torch.arange(1, 21) * 0.5  # 10 m/s: gap of 6 m closes after 12 steps
            futures[0, 2, rear, :, 1] += torch.arange(1, 21) * 0.5  # side at y = 1 + 0.5 s leaves 5 after 8 steps
            if batch.scene_id[0] == "bad":
                futures[..., 0] += 3.0
            p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
            scores = {"probability": p, "cluster": torch.tensor([[0, 1, 2]]), **energies(futures, batch)}
            out.add(batch, futures, scores)
        out.close(run(base / "store", store))
    return base


def run(path: Path, store: Store) -> dict:
    return {
        "store": {"path": str(path), "content_hash": store.content_hash, "name": "two-cars"}, "split": "test",
        "windows": asdict(SPEC), "checkpoint": {"path": "run/last.ckpt", "sha256": "abcdef0123456789"}, "commit": None,
        "seed": 7, "n_samples": K, "steps": 4, "evaluations": 4, "sampler": "dpmpp_2m", "temperature": 1.0, "dt": 0.1,
        "seconds": 1.0, "config": {},
    }  # fmt: skip


def test_marks_say_who_where_and_when(folder: Path) -> None:
    view = next(Source(folder / "samples").views([("good", 10)]))
    rear, front = view.agent_id.index("rear"), view.agent_id.index("front")
    assert view.events is not None and view.off_road_known
    assert view.events[0] == [] and view.truth_events == []
    pair = sorted((rear, front))
    # centres 10 - 0.5 s apart, boxes 4 m long: overlap strictly below 4 m, from step 13 on
    assert view.events[1] == [Event("collision", pair[0], pair[1], 13, 20)]
    # corners at y = 1 + 0.5 s: the road's edge at 5 is still road, outside from step 9 on
    assert view.events[2] == [Event("off_road", rear, -1, 9, 20)]
    assert view.scores["collision"].tolist() == [0.0, 1.0, 0.0]


def test_the_records_density_is_on_the_row_of_the_truth_and_no_energy(folder: Path) -> None:
    source = Source(folder / "samples")
    (window,) = [w for w in source.samples.windows() if w.scene_id == "good"]
    scores = dict(window.scores) | {"log_prob": np.array([1.0, 2.0, 3.0]), "record_log_prob": np.full(K, -4.5)}
    view = make_view(window._replace(scores=scores), source.batch(window))
    assert "record_log_prob" not in view.scores and view.truth_scores == {"log_prob": -4.5}
    unknown = window._replace(scores=scores | {"record_log_prob": np.full(K, np.nan)})
    assert make_view(unknown, source.batch(window)).truth_scores == {}


def test_view_holds_truth_past_map_and_signals(folder: Path) -> None:
    view = next(Source(folder / "samples").views([("good", 10)]))
    rear = view.agent_id.index("rear")
    assert view.truth is not None and view.truth.shape == (2, 20, 3) and view.past.shape == (2, 11, 3)
    world = view.truth[rear, 0, :2] + view.origin
    assert np.allclose(world, [1005.5, 2000.0], atol=1e-3)
    assert np.allclose(view.futures[0], view.truth, atol=1e-4)
    assert view.map is not None and [e.id for e in view.map] == ["lane", "area"] and view.map_left_out == 1
    assert np.allclose(view.map[0].points[0] + view.origin, [900.0, 2000.0], atol=1e-3)
    assert view.signals == [("lane", -10, "green"), ("lane", 5, "red")]
    assert view.size.tolist() == [[4.0, 2.0]] * 2 and view.size_known.all()


def test_without_a_map_off_road_is_unknown(folder: Path) -> None:
    view = next(Source(folder / "samples").views([("nomap", 10)]))
    assert view.map is None and view.drivable is None and not view.off_road_known
    assert view.events is not None and view.events[2] == [] and len(view.events[1]) == 1


def test_worst_first_and_limit(folder: Path, tmp_path: Path) -> None:
    report = review_report(folder / "samples", tmp_path / "p.html", None, 2, "minJADE", None, 10.0)
    assert report.shown == [("bad", 10), ("good", 10)]
    text = (tmp_path / "p.html").read_text()
    data = json.loads(text.split('id="page-data">')[1].split("</script>")[0])
    assert data["scenes_note"] == "2 of 3, worst minJADE first" and data["sort"] == "minJADE" and data["sort_down"]
    assert data["scenes"][0]["row"]["minJADE"] == pytest.approx(3.0, abs=1e-4)
    assert data["scenes"][1]["row"]["minJADE"] == pytest.approx(0.0, abs=1e-4)
    head = {label: value for label, value, _ in data["head"]}
    assert (
        head["steps"] == "4"
        and head["seed"] == "7"
        and head["checkpoint"] == "abcdef01"
        and head["store"] == "two-cars"
    )


def test_named_scenes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = review(folder / "samples", tmp_path / "sub" / "p.html", scenes=["nomap@10", "good"])
    assert out == tmp_path / "sub" / "p.html" and out.stat().st_size < 10e6
    assert "2 scenes" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no samples of 'gone'"):
        review(folder / "samples", out, scenes=["gone"])
    with pytest.raises(ValueError, match=r"rank_by='badness'.*minJADE"):
        review(folder / "samples", out, rank_by="badness")
    with pytest.raises(ValueError, match="max_scenes is 0"):
        review(folder / "samples", out, max_scenes=0)


def test_other_stores_are_refused(folder: Path, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "other", "other", "made up") as w:
        w.add(two_cars("good", False))
    with pytest.raises(ValueError, match="content hash"):
        review(folder / "samples", tmp_path / "p.html", store=tmp_path / "other")
    with pytest.raises(ValueError, match="there is no store at"):
        review(folder / "samples", tmp_path / "p.html", store=tmp_path / "gone")
    assert not (tmp_path / "p.html").exists()


def test_moved_store_is_found_beside_or_given(folder: Path, tmp_path: Path) -> None:
    for name in ("samples", "store"):
        shutil.copytree(folder / name, tmp_path / "elsewhere" / name)
    file = tmp_path / "elsewhere" / "samples" / "run.json"
    file.write_text(
        json.dumps(
            {**json.loads(file.read_text()), "store": {**json.loads(file.read_text())["store"], "path": "/gone/store"}}
        )
    )
    assert review(file.parent, tmp_path / "p.html").is_file()


def test_metrics_beside_the_samples_come_along(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "samples", tmp_path / "samples")
    rows = [{"key": "model_3", "name": "model", "k": 3, "minJADE": 1.5, "off_road": None, "modes": 2.0}]
    found = {
        "format": "seqdiff-metrics",
        "header": {"n_windows": 3, "n_agents": 6},
        "rows": rows,
        "warnings": ["collapse"],
    }
    (tmp_path / "samples" / "metrics.json").write_text(json.dumps(found))
    text = review(tmp_path / "samples", tmp_path / "p.html").read_text()
    data = json.loads(text.split('id="page-data">')[1].split("</script>")[0])
    assert data["metrics"]["title"] == "3 windows, 6 agents" and "collapse" in data["notes"]
    assert data["metrics"]["rows"][0]["minJADE"] == 1.5 and data["metrics"]["rows"][0]["off_road"] is None
    (tmp_path / "samples" / "metrics.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="seqdiff evaluate"):
        review(tmp_path / "samples", tmp_path / "p.html")


def test_runs() -> None:
    assert runs(np.array([1, 2, 3, 7, 9, 10])) == [(1, 3), (7, 7), (9, 10)]
    assert runs(np.array([], int)) == []
