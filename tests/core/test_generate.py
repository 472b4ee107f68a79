"""`seqdiff sample` on a tiny run: the same call is bit-equal, batches agree, bad models leave nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from seqdiff.checkpoint import commit, find, read, sha256
from seqdiff.cli import main
from seqdiff.domains.trajectory.io import read_samples
from seqdiff.domains.trajectory.store import Store
from seqdiff.generate import choose_sampler
from seqdiff.task import Sampler


@pytest.fixture
def draw(tiny_run: Path, tmp_path: Path):
    def call(name: str, *args: str, code: int = 0) -> Path:
        assert main(["sample", f"ckpt={tiny_run}", f"out={tmp_path / name}", *args]) == code
        return tmp_path / name

    return call


@pytest.fixture(scope="module")
def base(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 futures of every test window, batches of 4 windows."""
    out = tmp_path_factory.mktemp("base") / "samples"
    assert main(["sample", f"ckpt={tiny_run}", f"out={out}", "k=4"]) == 0
    return out


def futures(folder: Path) -> np.ndarray:
    """x, y, heading of all windows, samples, agents and steps, float64."""
    return np.concatenate([w.xyh.reshape(-1, 3) for w in read_samples(folder).windows()])


def test_the_same_call_is_bit_equal_and_another_seed_is_not(base, draw):
    a, b, c = base, draw("b", "k=4"), draw("c", "k=4", "seed=1")
    for name in ("samples.parquet", "scores.parquet"):
        assert pq.read_table(a / name).equals(pq.read_table(b / name)), name
    assert not np.array_equal(futures(a), futures(c))


def test_any_batch_split_agrees(base, draw):
    a, b = futures(draw("a", "k=4", "batch_size=1")), futures(base)
    scale = np.abs(a[:, :2] - a[:, :2].mean(0)).max()
    assert np.abs(a[:, :2] - b[:, :2]).max() <= 1e-5 * scale
    assert np.abs((a[:, 2] - b[:, 2] + np.pi) % (2 * np.pi) - np.pi).max() <= 1e-5


def test_fewer_samples_are_the_first_of_more(base, draw):
    few, many = (list(read_samples(folder).windows()) for folder in (draw("few", "k=2"), base))
    for a, b in zip(few, many, strict=True):
        assert (a.scene_id, a.t0) == (b.scene_id, b.t0) and b.xyh.shape[0] == 4
        assert np.abs(a.xyh - b.xyh[:2]).max() < 1e-4


def test_temperature_zero_gives_identical_samples_and_one_does_not(base, draw):
    cold, warm = (list(read_samples(folder).windows()) for folder in (draw("c", "k=3", "temperature=0"), base))
    assert all((w.xyh == w.xyh[:1]).all() for w in cold)
    assert all(np.ptp(w.xyh, axis=0).max() > 1e-3 for w in warm)


def test_limit_spreads_over_the_split(base, draw):
    whole = [(w.scene_id, w.t0) for w in read_samples(base).windows()]
    some = [(w.scene_id, w.t0) for w in read_samples(draw("some", "k=2", "limit=3")).windows()]
    assert len(whole) > 5 and some == [whole[0], whole[(len(whole) - 1) // 2], whole[-1]]


def test_run_json_says_how_to_draw_the_same_again(draw, tiny_run, tiny_store):
    out = draw("a", "k=5", "steps=3", "sampler=heun", "seed=7", "split=val", "temperature=0.9")
    run = json.loads((out / "run.json").read_text())
    last = find(tiny_run)
    want = {
        "format": "seqdiff-samples", "version": 1, "domain": "trajectory", "split": "val", "seed": 7, "n_samples": 5,
        "steps": 3, "evaluations": 5, "sampler": "heun", "temperature": 0.9, "guidance": 1.0, "dt": 0.1, "commit": commit(),
        "checkpoint": {"path": str(last), "sha256": sha256(last)},
    }  # fmt: skip
    assert {k: run[k] for k in want} == want
    store = Store(tiny_store)
    assert run["store"] == {"path": str(tiny_store), "content_hash": store.content_hash, "name": "lanes"}
    windows = list(read_samples(out).windows())
    assert run["n_windows"] == len(windows) > 0
    assert {w.scene_id for w in windows} == {store.scene_ids[i] for i in store.scenes("val")}
    assert all(w.xyh.shape[0] == 5 and w.xyh.shape[2:] == (10, 3) for w in windows)
    assert run["windows"]["horizon_s"] == 1.0 and run["config"]["model"]["val_samples"] == 2
    assert run["parameters"] > 1000 and run["seconds"] >= run["seconds_sampling"] > 0


def test_probabilities_of_a_window_sum_to_one(base):
    rows = pq.read_table(base / "scores.parquet").to_pandas()
    total = rows.groupby(["scene_id", "t0"])["probability"].sum()
    assert len(total) > 0 and np.allclose(total, 1, atol=1e-6)
    assert {"collision", "off_road", "infeasible"} <= set(rows.columns) and rows["off_road"].notna().all()


def test_a_model_that_diverged_leaves_nothing_behind(tiny_run, tmp_path, capsys):
    content = read(find(tiny_run))
    content["state_dict"]["net.output.bias"][:] = float("nan")
    torch.save(content, tmp_path / "nan.ckpt")
    out = tmp_path / "out"
    assert main(["sample", f"ckpt={tmp_path / 'nan.ckpt'}", f"out={out}", "k=2"]) == 2
    assert "are not finite: the model diverged in training" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["nan.ckpt"]


def test_an_earlier_folder_is_kept_unless_asked(draw, capsys):
    out = draw("a", "k=2", "limit=1")
    before = (out / "samples.parquet").read_bytes()
    draw("a", "k=3", "limit=1", code=2)
    assert "overwrite=" in capsys.readouterr().err and (out / "samples.parquet").read_bytes() == before
    draw("a", "k=3", "limit=1", "overwrite=true")
    assert json.loads((out / "run.json").read_text())["n_samples"] == 3


@pytest.mark.parametrize(
    "args, said",
    [
        (["split=tset"], "no split 'tset'"),
        (["limit=0"], "limit is 0"),
        (["sampler=dpm"], "dpm"),
        (["guidance=2"], "never saw a dropped context"),
        (["seed=-1"], "seed is -1"),
        (["store=nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_refused(args, said, draw, tmp_path, capsys):
    draw("x", "k=2", *args, code=2)
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_choose_sampler_changes_what_is_given():
    base = Sampler("heun", steps=8)
    assert choose_sampler(base, steps=2, step=None) == Sampler("heun", steps=2)
    assert [Sampler("heun", steps=n).evaluations for n in (1, 2, 8)] == [1, 3, 15]
    assert [Sampler("dpmpp_2m", steps=n).evaluations for n in (1, 4)] == [1, 4]


@pytest.mark.slow
def test_likelihood_fills_log_prob_and_scores_the_record(base, draw, tiny_run, tiny_store):
    """The columns are those of Densities, whatever the batches; the futures are those drawn without."""
    from seqdiff.checkpoint import load_task
    from seqdiff.densities import Densities
    from seqdiff.domains.trajectory.data import TrajectoryData
    from seqdiff.domains.trajectory.evaluate_table import likelihood_note
    from seqdiff.domains.trajectory.windows import WindowSpec

    a = draw("a", "k=2", "limit=3", "likelihood=true")
    b = draw("b", "k=2", "limit=3", "likelihood=true", "batch_size=1")
    plain = draw("plain", "k=2", "limit=3")
    assert np.array_equal(futures(a), futures(plain))
    rows, again = (pq.read_table(folder / "scores.parquet").to_pandas() for folder in (a, b))
    assert rows["log_prob"].notna().all() and (rows["log_prob"].nunique() == len(rows))
    assert np.allclose(rows["log_prob"], again["log_prob"], rtol=1e-5)
    assert (rows.groupby(["scene_id", "t0"])["record_log_prob"].nunique() == 1).all()
    task, config = load_task(find(tiny_run))
    data = TrajectoryData(str(tiny_store), WindowSpec(**config["data"]["init_args"]["windows"]))
    batch = next(iter(data.eval_batches("test", 3)))
    with torch.no_grad():
        found = Densities(task).add(batch, task.draw(batch, k=2, seed=0).z, 0)
    assert np.allclose(found.log_prob.flatten(), rows["log_prob"], rtol=1e-5)
    assert np.allclose(found.record, rows["record_log_prob"][::2], rtol=1e-5)
    # a density in metres is the latent one less the log-determinant; the record's full one has the residual on top
    whole = task.adapter.residual_log_density(batch)
    torch.testing.assert_close(found.full, found.record + whole)
    run = json.loads((a / "run.json").read_text())["likelihood"]
    assert (
        run["field"] == "own"
        and run["trace"] == "rademacher"
        and run["evaluations"] == 32
        and run["standard_error"] > 0
    )
    assert run["records"]["known"] == 3 and sum(run["records"]["rank_fifths"]) == 3
    assert run["samples_per_dim"] == pytest.approx((found.log_prob / found.dims[:, None]).mean().item(), rel=1e-5)
    assert "recorded futures given the scene" in likelihood_note(run)
    assert "likelihood" not in json.loads((plain / "run.json").read_text())
