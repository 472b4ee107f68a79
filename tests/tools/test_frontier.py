"""The frontier tool: distances with values worked by hand, intervals, pages, and each command on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from seqdiff.checkpoint import KEY, header
from seqdiff.compose import compose
from seqdiff.domains.trajectory.data import TrajectoryData
from seqdiff.domains.trajectory.scene import Scene, Track
from seqdiff.domains.trajectory.store import StoreWriter
from seqdiff.domains.trajectory.windows import WindowSpec
from seqdiff.objectives import FlowMatching
from seqdiff.students import BestOfK, MeanFlow
from seqdiff.testing import energy_distance
from seqdiff.tools import frontier, frontier_mixture, frontier_scenes
from seqdiff.tools.bench import build
from seqdiff.tools.frontier_mixture import Setup, law, pairs, sliced_wasserstein, wrong_pairs
from seqdiff.viz.frontier import Line, Panel, figure, write_page

SMALL = Setup(teacher=2, student=1, batch=4, width=16, depth=1, n=64, pairs=2)


# ---- distances ---------------------------------------------------------------------------------------------------------


def test_sliced_wasserstein_of_two_points_and_of_a_shift():
    # one axis: sorted points 0, 2 and 1, 5 are 1 and 3 apart, whatever the order they come in
    x, y = torch.tensor([[2.0], [0.0]]), torch.tensor([[1.0], [5.0]])
    assert sliced_wasserstein(x, y) == pytest.approx(2.0)
    # a shift by v moves every projection by |v . u|, whose mean over directions in the plane is 2 |v| / pi
    cloud = torch.randn(50, 2, dtype=torch.float64)
    moved = sliced_wasserstein(cloud, cloud + torch.tensor([3.0, 4.0]), directions=20_000)
    assert moved == pytest.approx(10 / math.pi, rel=0.01)
    assert sliced_wasserstein(cloud, cloud[torch.randperm(50)]) == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="expected two of the same N d"):
        sliced_wasserstein(cloud, cloud[:-1])


def test_energy_distance_of_four_points():
    # |X - Y|: 1, 3, 1, 1 -> mean 1.5; |X - X'| = 2, |Y - Y'| = 2: 2 x 1.5 - 2 - 2 (unbiased, so it may be negative)
    assert energy_distance(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])) == pytest.approx(-1.0)
    # two far points against two far points 10 away: all pairs 10 +- 0
    x = torch.zeros(3, 2)
    assert energy_distance(x, x + torch.tensor([6.0, 8.0])) == pytest.approx(20.0)


def test_the_law_keeps_its_pairs_and_a_shuffle_of_the_second_tokens_does_not():
    x = law().sample((4000,), torch.Generator().manual_seed(0)).float()
    assert wrong_pairs(x) == 0  # modes are 9 standard deviations apart
    mixed = torch.cat([x[:, :2], x[torch.randperm(4000), 2:]], -1)
    p = pairs()
    expected = float((torch.outer(p.sum(1), p.sum(0)) * (p == 0)).sum())  # both marginals alone
    assert wrong_pairs(mixed) == pytest.approx(expected, abs=0.03)


def test_the_noise_floor_of_the_energy_distance_is_that_of_two_samples():
    # E of the energy distance between n points drawn from 64 fixed ones and the law is E|X - X'| / 64
    low = frontier_mixture.floor(Setup(n=512, pairs=4))
    x = law().sample((512,), torch.Generator().manual_seed(3))
    assert low["energy_distance_of_64"] == pytest.approx(float(torch.pdist(x).mean()) / 64, rel=0.3)
    assert 0 < low["energy_distance"] < 0.3 * low["energy_distance_of_64"]
    assert 0 < low["sliced_wasserstein"] < low["sliced_wasserstein_of_64"]


# ---- intervals ---------------------------------------------------------------------------------------------------------


def test_ratio_is_paired_weighted_and_leaves_out_what_is_unknown():
    reference = np.array([1.0, 2.0, 3.0, np.nan, 5.0])
    block = np.arange(5)
    assert frontier_scenes.ratio(1.1 * reference, reference, block) == pytest.approx((1.1, 1.1, 1.1))
    value = np.array([2.0, 2.0, 3.0, 7.0, np.nan])
    weight = np.array([3.0, 1.0, 1.0, 9.0, 9.0])
    assert frontier_scenes.ratio(value, reference, block, weight)[0] == pytest.approx((6 + 2 + 3) / (3 + 2 + 3))


def test_interval_is_the_normal_one_and_wider_where_windows_overlap():
    rng = np.random.default_rng(0)
    reference = np.ones(400)
    value = 1 + 0.2 * rng.standard_normal(400)
    _, low, high = frontier_scenes.ratio(value, reference, np.arange(400))
    assert high - low == pytest.approx(2 * 1.96 * value.std() / 20, rel=0.08)
    again = np.repeat(value[:100], 4)  # the same hundred windows four times: no more evidence than a hundred
    one = frontier_scenes.ratio(value[:100], reference[:100], np.arange(100))
    four = frontier_scenes.ratio(again, reference, np.repeat(np.arange(100), 4))
    assert four == pytest.approx(one)


def test_steps_spend_no_more_than_the_evaluations():
    assert [frontier_mixture._steps_within("heun", n) for n in (1, 2, 4, 8, 32)] == [1, 1, 2, 4, 16]
    assert [frontier_mixture._steps_within("ddim", n) for n in (1, 2, 32)] == [1, 2, 32]


# ---- training and pages ------------------------------------------------------------------------------------------------


def test_students_of_the_command_line_are_settings_that_exist():
    for name, set_name in zip(frontier.STUDENTS, (*frontier.SETS, *frontier.SETS)):
        config = compose(list(frontier.student_arguments(set_name, name, Path("teacher"), "embedded")))
        assert config["model"]["sampler"]["step"] == "flow_map"
        assert config["model"]["sampler"]["energy_iterations"] == 0
        assert config["model"]["objective"]["class_path"].startswith("seqdiff.students.")


def test_mixture_trains_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    few = [
        s
        for s in frontier_mixture.STUDENTS
        if "learned" in s.name or s.name in ("distilled", "mean flow, from nothing")
    ]
    monkeypatch.setattr(frontier_mixture, "STUDENT_EVALUATIONS", (1, 2))
    monkeypatch.setattr(frontier_mixture, "TEACHER_EVALUATIONS", (1, 4))
    found = frontier_mixture.compare(SMALL, tuple(few))
    assert {r["method"] for r in found["rows"] if r["step"] == "flow_map"} == {s.name for s in few}
    assert {(r["step"], r["evaluations"]) for r in found["rows"]} >= {
        ("heun", 1),
        ("heun", 3),
        ("ddim", 4),
        ("flow_map", 2),
    }
    assert all(math.isfinite(r["sliced_wasserstein"]) and r["spread_ratio"] > 0 for r in found["rows"])
    frontier.show(found, tmp_path)
    assert json.loads((tmp_path / "frontier.json").read_text())["rows"] == found["rows"]
    page = (tmp_path / "frontier.html").read_text()
    assert "<script src=" not in page and "true samples" in page and "dataset.ready" in page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["frontier.html", "frontier.json"]
    assert "wrong pairs" in capsys.readouterr().out


def test_learned_starts_are_drawn_by_their_masses():
    objective = BestOfK(k=2, starts=3)
    net = frontier_mixture.new_net(SMALL)
    objective.attach(net)
    with torch.no_grad():
        objective.mass.copy_(torch.tensor([0.0, math.log(3.0), -100.0]))
    x = frontier_mixture.draw(net, objective, "flow_map", 1, 4000)
    values, counts = x.unique(dim=0, return_counts=True)
    assert len(values) == 2 and sorted((counts / 4000).tolist()) == pytest.approx([0.25, 0.75], abs=0.03)


def test_page_escapes_names_and_has_the_table(tmp_path: Path):
    lines = [Line("<b>x", [1.0, 2.0], [1.2, 1.1], [(1.1, 1.3), (1.0, 1.2)]), Line("y", [1.0], [2.0], solid=False)]
    fig = figure([Panel("a", "n", "q", lines, (1.0, "level"), [(1.0, 0.95, 1.05)])])
    assert list(fig.data[-2].error_y.arrayminus) == pytest.approx([0.1, 0.1])
    assert fig.layout.xaxis.type == "log"
    out = write_page(fig, ["method"], [["<b>x"]], ["a < b"], "t", tmp_path / "p.html")
    body = out.read_text().split("</script>")[-1]
    assert "<td>&lt;b&gt;x</td>" in body and "a &lt; b" in body and "<b>x" not in body
    with pytest.raises(ValueError, match="no panel"):
        figure([])


# ---- recorded scenes ---------------------------------------------------------------------------------------------------

TINY = [
    "windows.history_s=0.4", "windows.horizon_s=1.0", "windows.stride_s=0.5", "windows.max_agents=8", "windows.max_segments=4",
    "data.init_args.eval_batch_size=4", "model.adapter.init_args.latent_dim=4", "model.adapter.init_args.ctx_dim=16",
    "model.adapter.init_args.layers=1", "model.adapter.init_args.heads=2", "model.adapter.init_args.pair_dim=4",
    "model.net.init_args.width=16", "model.net.init_args.depth=1", "model.net.init_args.heads=2", "model.net.init_args.pair_dim=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("frontier") / "store"
    rng = np.random.default_rng(0)
    with StoreWriter(out, "lanes", "made up") as writer:
        for n, split in enumerate(["train", "test"]):
            tracks = []
            for i in range(3):
                x = -20 + rng.uniform(3, 12) * 0.1 * np.arange(40)
                xyh = np.column_stack([x, np.full(40, 4.0 * i), np.zeros(40)])
                tracks.append(Track(f"{n}_{i}", "vehicle", 0, xyh, np.ones(40, bool), (4.5, 1.9)))
            writer.add(Scene(f"scene{n}", 0.1, split, tracks, None))
    return out


def save(store: Path, out: Path, *more: str) -> Path:
    """An untrained model as a checkpoint."""
    task, config = build([f"store={store}", *TINY, *more])
    data = config["data"]["init_args"]
    task.adapter.fit(TrajectoryData(**{**data, "windows": WindowSpec(**data["windows"])}))
    with torch.no_grad():
        for p in task.net.parameters():
            p.add_(0.05 * torch.randn_like(p))
    torch.save({KEY: header(yaml.safe_dump(config)), "state_dict": task.state_dict()}, out)
    return out


@pytest.fixture(scope="module")
def models(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Teacher and student."""
    at = tmp_path_factory.mktemp("models")
    teacher = save(store, at / "teacher.ckpt")
    return teacher, save(store, at / "student.ckpt", "objective=mean_flow", "sampler=flow_map")


def test_scenes_are_measured_on_the_same_windows_and_seeds(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(frontier_scenes, "EVALUATIONS", (1, 2))
    monkeypatch.setattr(frontier_scenes, "REFERENCE", ("dpmpp_2m", 3))
    monkeypatch.setattr(frontier_scenes, "TEACHER_STEPS", ("ddim", "dpmpp_2m"))
    monkeypatch.setattr(frontier_scenes, "ROUNDS", 50)
    monkeypatch.setattr(frontier_scenes, "TIMED_SCENES", 1)
    teacher, student = models
    args = ["traffic", "--ckpt", str(teacher), "--students", f"mean_flow={student}", "--out", str(tmp_path / "out")]
    assert frontier.main([*args, "--split", "test", "--limit", "4", "--k", "4"]) == 0
    found = json.loads((tmp_path / "out" / "frontier.json").read_text())
    rows = {(r["method"], r["evaluations"]): r for r in found["rows"]}
    assert set(rows) == {
        ("teacher, dpmpp_2m", 3), ("teacher, other seed", 3), ("teacher, ddim", 1), ("teacher, ddim", 2), ("teacher, ddim", 3),
        ("teacher, dpmpp_2m", 1), ("teacher, dpmpp_2m", 2), ("mean_flow", 1), ("mean_flow", 2),
    }  # fmt: skip
    assert rows["teacher, dpmpp_2m", 3]["energy_score_ratio"] == [1, 1, 1]
    assert rows["teacher, other seed", 3]["energy_score_ratio"][0] != 1
    # in one step both are the same update with the same noise
    assert rows["teacher, ddim", 1]["energy_score"] == pytest.approx(
        rows["teacher, dpmpp_2m", 1]["energy_score"], rel=1e-6
    )
    assert found["recorded"] == {"collision": 0, "infeasible": 0}  # three lanes apart, at constant speeds
    assert found["windows"] == 4 and found["agents"] == 12 and found["blocks"] >= 2
    assert all(r["ms"] > 0 and 0 <= r["collision"] <= 1 for r in found["rows"])
    page = (tmp_path / "out" / "frontier.html").read_text()
    assert "95 % bootstrap" in page and "infeasible" in capsys.readouterr().out


def changed(ckpt: Path, out: Path, change, **more: torch.Tensor) -> Path:
    """A checkpoint with another config, and further weights."""
    content = torch.load(ckpt, weights_only=True)
    config = yaml.safe_load(content[KEY]["config"])
    change(config)
    torch.save({KEY: header(yaml.safe_dump(config)), "state_dict": content["state_dict"] | more}, out)
    return out


def test_what_cannot_be_compared_is_refused(models: tuple[Path, Path], tmp_path: Path, capsys):
    def longer(config):
        config["data"]["init_args"]["windows"]["stride_s"] = 1.0

    def learned(config):
        config["model"]["objective"] = {"class_path": "seqdiff.students.BestOfK", "init_args": {"starts": 8}}

    teacher, student = models
    other = changed(student, tmp_path / "other.ckpt", longer)
    weights = {"objective.mass": torch.zeros(8), "objective.start": torch.zeros(8, 4)}
    starts = changed(student, tmp_path / "starts.ckpt", learned, **weights)
    for path, why in ((teacher, "no few-step student"), (other, "other windows"), (starts, "learned starts")):
        with pytest.raises(ValueError, match=why):
            frontier_scenes.load(teacher, {"s": path})
    for args in (["traffic"], ["traffic", "--ckpt", "a", "--students", "nameless"]):
        with pytest.raises(SystemExit):
            frontier.main(args)
    assert "NAME=RUN" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--data"):
        frontier.main(["eth_ucy", "--train", "--out", str(tmp_path / "none")])


def test_objectives_of_the_mixture_are_those_of_the_library():
    made = [type(s.make()) for s in frontier_mixture.STUDENTS]
    assert MeanFlow in made and BestOfK in made and FlowMatching not in made
