"""evaluate: the table of a small made-up store, against values worked by hand; what does not match is refused."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from seqdiff.domains.trajectory.evaluate import evaluate
from seqdiff.domains.trajectory.evaluate_table import reduce, show
from seqdiff.domains.trajectory.io import RUN_KEYS, SampleError, SampleWriter
from seqdiff.domains.trajectory.scene import MapElement, RoadMap, Scene, Track
from seqdiff.domains.trajectory.store import Store, StoreWriter
from seqdiff.domains.trajectory.windows import WindowDataset, WindowSpec
from seqdiff.score import score_samples

SPEC = WindowSpec(history_s=1.0, horizon_s=2.0, stride_s=1.0, max_segments=0)
H, T, N = 11, 20, 41
CORNER = np.array([500_000.0, 5_400_000.0])


def car(name: str, y: float, speed: float, kind: str = "vehicle", bend: float = 0.0, n: int = N) -> Track:
    t = np.arange(n) * 0.1
    xyh = np.stack([CORNER[0] + speed * t + bend * t**2, np.full(n, CORNER[1] + y), np.zeros(n)], 1)
    return Track(name, kind, 0, xyh, np.ones(n, bool), (4.0, 2.0) if kind == "vehicle" else None)


def road() -> RoadMap:
    box = CORNER + np.array([[-50.0, -5.0], [200.0, -5.0], [200.0, 15.0], [-50.0, 15.0]])
    return RoadMap("road", [MapElement("d", "drivable_area", box)])


def make_store(out: Path, mapped: bool = True, kind: str = "vehicle", train: bool = True) -> Store:
    with StoreWriter(out, "made up", "test") as w:
        for i, split in enumerate(("train", "test", "test")[0 if train else 1 :]):
            tracks = [
                car("a", 0.0, 8.0 + i, kind, bend=0.5),
                car("b", 5.0, 6.0, kind),
                car("gone", 10.0, 5.0, kind, n=25),
            ]
            w.add(Scene(f"{split}{i}", 0.1, split, tracks, road() if mapped else None))
    return Store(out)


def sample(store: Store, out: Path, k: int, draw, **run) -> Path:
    """Samples of every test window: draw(batch) -> [b, k, a, t, 3]."""
    data = WindowDataset(store, SPEC, "test")
    with SampleWriter(out) as w:
        for i in range(len(data)):
            batch = data.batch([i])
            futures = draw(batch)
            w.add(batch, futures, score_samples(futures[..., :2], batch.mask, k=min(k, 3)))
        told = {"path": str(store.path), "content_hash": store.content_hash, "name": "made up"}
        info = {key: None for key in RUN_KEYS} | {"store": told, "split": "test", "windows": asdict(SPEC)}
        w.close(info | {"n_samples": k, "dt": 0.1, "steps": 4, "seed": 7, "evaluations": 4, "sampler": "made up"} | run)
    return out


def truth(batch) -> torch.Tensor:
    """The recording, and straight on for the road user that leaves."""
    step = torch.arange(1, T + 1)[:, None] * torch.tensor([0.5, 0.0, 0.0])
    straight = batch.hist[:, :, -1:] + step
    return torch.where(batch.fut_valid[..., None], batch.fut, straight)


def offsets(*metres: float):
    def draw(batch) -> torch.Tensor:
        return truth(batch)[:, None] + torch.tensor(metres)[None, :, None, None, None] * torch.tensor([0.0, 1.0, 0.0])

    return draw


def row(out: dict, key: str) -> dict:
    return next(r for r in out["rows"] if r["key"] == key)


@pytest.fixture
def store(tmp_path) -> Store:
    return make_store(tmp_path / "store")


def test_values_by_hand(tmp_path, store, capsys):
    out = evaluate(sample(store, tmp_path / "s", 3, offsets(3.0, 1.0, -4.0)), k=[3])
    head, m = out["header"], row(out, "model_3")
    # t0 = 10, 20 in both test scenes; a and b are recorded over the horizon, the third one is not scored
    assert (head["n_windows"], head["n_agents"], head["agents"]) == (4, 8, {"vehicle": 8})
    assert (head["split"], head["dt"], head["n_samples"], head["steps"], head["seed"]) == ("test", 0.1, 3, 4, 7)
    for name in ("minADE", "minFDE", "minJADE", "minJFDE"):
        assert m[name] == pytest.approx(1.0, abs=1e-6)
    assert m["MR"] == 0 and m["joint_MR"] == 0
    assert m["brier_minJFDE"] == pytest.approx(1 + (2 / 3) ** 2, abs=1e-6)
    assert m["energy_score"] == pytest.approx(8 / 3 - (2 + 5 + 7) / 9, abs=1e-6)
    assert m["spread"] == pytest.approx(14 / 3, abs=1e-5) and m["modes"] == 2
    assert row(out, "constant_velocity")["minJADE"] > 0
    assert row(out, "recording")["collision"] == 0 and row(out, "recording")["off_road"] == 0
    assert "minADE" not in row(out, "recording")
    assert m["off_road"] == 0  # at -4 m the car at y = 0 has two corners on the road's edge, which is inside
    text = capsys.readouterr().out  # 80 columns wide, and nothing is cut off
    assert "N = 8 agents in 4 windows" in text and "…" not in text
    lines = [line for line in text.splitlines() if line.startswith("model")]
    assert lines[0].split()[1:] == ["3", "1.000", "1.000", "0.000", "1.000", "1.000", "0.000"]
    assert lines[1].split()[1:4] == ["3", "1.444", "1.111"]
    assert "recording itself" in text


def test_metrics_json_is_written_whole(tmp_path, store):
    path = sample(store, tmp_path / "s", 3, offsets(3.0, 1.0, -4.0))
    evaluate(path, k=[2], quiet=True)
    assert sorted(p.name for p in path.iterdir()) == ["metrics.json", "run.json", "samples.parquet", "scores.parquet"]
    read = json.loads((path / "metrics.json").read_text())
    assert read["format"] == "seqdiff-metrics" and len(read["windows"]) == 4
    assert read["windows"][0]["model_3"]["minJADE"] == pytest.approx(1.0, abs=1e-6)
    assert (
        read["windows"][0]["model_2"]["minJADE"] == pytest.approx(1.0, abs=1e-6) and read["rows"][0]["key"] == "model_2"
    )
    assert [w["t0"] for w in read["windows"]] == [10, 20, 10, 20]


def test_worlds_are_chosen_without_the_truth(tmp_path, store):
    """Two far samples of four stand for the others: near the truth is one that is not a medoid."""
    out = evaluate(sample(store, tmp_path / "s", 5, offsets(4.0, 4.1, 4.2, 0.0, -9.0)), k=[1], fit=False, quiet=True)
    assert row(out, "model_5")["minJADE"] == pytest.approx(0, abs=1e-6)
    assert row(out, "model_1")["minJADE"] == pytest.approx(4.0, abs=1e-6)
    assert row(out, "model_1")["brier_minJFDE"] == pytest.approx(4.0, abs=1e-6)


def test_floors_know_constant_speed(tmp_path, store):
    out = evaluate(sample(store, tmp_path / "s", 2, offsets(0.0, 1.0)), k=[2], quiet=True)
    cv = row(out, "constant_velocity")
    # b drives at constant speed; a gains bend * t^2 on the last step's velocity: ahead by 0.5 t^2 + 0.05 t
    t = np.arange(1, T + 1) * 0.1
    assert cv["minADE"] == pytest.approx((0.5 * t**2 + 0.05 * t).mean() / 2, abs=2e-3)
    assert cv["minJFDE"] == pytest.approx((0.5 * 4 + 0.1) / 2, abs=4e-3)
    assert any("on 2 of 2 windows of split train, never on these" in n for n in out["notes"])


def test_no_map_is_unknown_and_no_train_split_is_said(tmp_path):
    store = make_store(tmp_path / "store", mapped=False, train=False)
    out = evaluate(sample(store, tmp_path / "s", 2, offsets(0.0, 1.0)), quiet=True)
    assert all(r["off_road"] is None for r in out["rows"])
    assert any("no train split" in n for n in out["notes"]) and any("K = 6 was left out" in n for n in out["notes"])
    screen = io.StringIO()
    show(out, Console(file=screen, width=250))
    table = screen.getvalue().split("note:")[0]
    assert table.count("unknown") == len(out["rows"])
    other = make_store(tmp_path / "other", mapped=False)
    again = evaluate(tmp_path / "s", k=[2], train_store=other.path, quiet=True)
    assert any(r["key"].startswith("constant_turn_rate_2") for r in again["rows"])


def test_pedestrians_have_their_own_collision_rate(tmp_path):
    store = make_store(tmp_path / "store", mapped=False, kind="pedestrian")

    def meet(batch) -> torch.Tensor:
        out = truth(batch)[:, None].repeat(1, 2, 1, 1, 1)
        out[0, 1] = out[0, 1, :1]  # in the second sample all walk in one place
        return out

    out = evaluate(sample(store, tmp_path / "s", 2, meet), k=[2], fit=False, quiet=True)
    assert row(out, "model_2")["CR_mean"] == 0.5 and row(out, "recording")["CR_mean"] == 0
    assert row(out, "model_2")["off_road"] is None


def test_collapse_is_warned_about(tmp_path, store):
    out = evaluate(sample(store, tmp_path / "s", 3, offsets(1.0, 1.0, 1.0)), k=[3], fit=False, quiet=True)
    assert len(out["warnings"]) == 1 and "in 4 of 4 windows the 3 samples" in out["warnings"][0]
    assert row(out, "model_3")["modes"] == 1


def test_agents_are_matched_by_name(tmp_path, store):
    def swapped(batch) -> torch.Tensor:
        order = list(reversed(range(len(batch.agent_id[0]))))
        batch.agent_id[0] = [batch.agent_id[0][i] for i in order]
        return truth(batch)[:, None][:, :, order]

    out = evaluate(sample(store, tmp_path / "s", 1, swapped), fit=False, quiet=True)
    assert row(out, "model_1")["minJADE"] == pytest.approx(0, abs=1e-6)


def test_another_store_is_refused(tmp_path, store):
    path = sample(store, tmp_path / "s", 2, offsets(0.0, 1.0))
    other = make_store(tmp_path / "other", mapped=False)
    with pytest.raises(SampleError, match="pass the store they were drawn from"):
        evaluate(path, store=other.path)
    with pytest.raises(SampleError, match="there is no store at"):
        evaluate(path, store=tmp_path / "nowhere")
    moved = tmp_path / "moved"
    store.path.rename(moved)
    assert evaluate(path, store=moved, fit=False, quiet=True)["header"]["n_windows"] == 4


def test_other_agents_are_refused(tmp_path, store):
    def renamed(batch) -> torch.Tensor:
        batch.agent_id[0][0] = "stranger"
        return truth(batch)[:, None]

    with pytest.raises(SampleError, match="stranger"):
        evaluate(sample(store, tmp_path / "s", 1, renamed), fit=False)


def test_part_of_a_split_is_said(tmp_path, store):
    data = WindowDataset(store, SPEC, "test")
    path = tmp_path / "part"
    with SampleWriter(path) as w:
        batch = data.batch([2])
        futures = truth(batch)[:, None]
        w.add(batch, futures, score_samples(futures[..., :2], batch.mask))
        told = {"path": str(store.path), "content_hash": store.content_hash, "name": "made up"}
        info = {key: None for key in RUN_KEYS} | {"store": told, "split": "test", "windows": asdict(SPEC)}
        w.close(info | {"n_samples": 1, "dt": 0.1})
    out = evaluate(path, fit=False, quiet=True)
    assert "samples cover 1 of the 4 windows of split test" in out["notes"]


def test_means_over_agents_and_windows():
    v = {
        "n_agents": np.array([1.0, 3.0, 0.0]),
        "minADE": np.array([4.0, 0.0, np.nan]),
        "minJADE": np.array([4.0, 1.0, np.nan]),
        "off_road": np.zeros(3),
        "off_road_of": np.zeros(3),
        "infeasible": np.array([1.0, 0.0, 0.0]),
        "infeasible_of": np.array([10.0, 30.0, 0.0]),
    }
    assert reduce(v) == {"minADE": 1.0, "minJADE": 2.5, "off_road": None, "infeasible": 0.025}
    v["minJADE"][1] = np.nan  # a NaN among windows that count stays
    assert np.isnan(reduce(v)["minJADE"])


def test_windows_with_few_scored_agents_can_be_left_out(tmp_path):
    with StoreWriter(tmp_path / "store", "made up", "test") as w:
        for name, cars in (("one", [car("a", 0.0, 8.0)]), ("two", [car("a", 0.0, 8.0), car("b", 5.0, 6.0)])):
            w.add(Scene(name, 0.1, "test", cars, road()))
    path = sample(Store(tmp_path / "store"), tmp_path / "s", 1, lambda batch: truth(batch)[:, None])
    every, two = (evaluate(path, fit=False, quiet=True, min_agents=n) for n in (1, 2))
    assert (every["header"]["n_windows"], every["header"]["n_agents"]) == (4, 6)
    assert (two["header"]["n_windows"], two["header"]["n_agents"]) == (2, 4)
    assert two["header"]["agents"] == {"vehicle": 4}
    assert {w["scene_id"] for w in two["windows"]} == {"two"}
    assert "2 windows with fewer than 2 scored agents are in no mean" in two["notes"]


def test_worlds_stand_for_the_masses_of_the_samples(tmp_path, store):
    """Of offsets 0, 5, 6 m one world is the medoid: 5 m where all weigh alike, 0 m where that one weighs most."""
    out = {}
    for name, mass in (("even", [1 / 3] * 3), ("tilted", [0.98, 0.01, 0.01])):
        data, path = WindowDataset(store, SPEC, "test"), tmp_path / name
        with SampleWriter(path) as w:
            for i in range(len(data)):
                batch = data.batch([i])
                futures, weight = offsets(0.0, 5.0, 6.0)(batch), torch.tensor([mass], dtype=torch.float64)
                w.add(batch, futures, score_samples(futures[..., :2], batch.mask, k=3, mass=weight) | {"mass": weight})
            told = {"path": str(store.path), "content_hash": store.content_hash, "name": "made up"}
            info = {key: None for key in RUN_KEYS} | {"store": told, "split": "test", "windows": asdict(SPEC)}
            w.close(info | {"n_samples": 3, "dt": 0.1})
        out[name] = row(evaluate(path, k=1, fit=False, quiet=True), "model_1")["minJADE"]
    assert out["even"] == pytest.approx(5.0, abs=1e-3) and out["tilted"] == pytest.approx(0.0, abs=1e-3)
