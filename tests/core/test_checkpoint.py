"""Checkpoints: what they hold, weights only, whole or not at all; stopping, killing and going on."""

from __future__ import annotations

import csv
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from seqdiff import __version__
from seqdiff.checkpoint import CheckpointError, commit, config_of, find, load_task, read, sha256
from seqdiff.cli import main
from seqdiff.run_files import CurveLogger, RunCheckpoint, WholeCheckpointIO, replace_file
from seqdiff.task import Task

ROOT = Path(__file__).resolve().parents[2]


def curve(run: Path) -> dict[int, float]:
    with (run / "metrics.csv").open() as file:
        rows = [(int(r["step"]), float(r["train/loss"])) for r in csv.DictReader(file) if r["train/loss"]]
    assert len({step for step, _ in rows}) == len(rows), "a step stands twice in the curve"
    return dict(rows)


# ---- the file ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_all_that_sampling_needs(tiny_run, tiny_store):
    content = torch.load(tiny_run / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["global_step"] == 6
    head = content["seqdiff"]
    assert head["format"] == 1 and head["version"] == __version__ and head["commit"] == commit()
    config = yaml.safe_load(head["config"])
    written = yaml.safe_load((tiny_run / "config.yaml").read_text())
    assert {k: config[k] for k in ("model", "data", "trainer")} == {k: written[k] for k in ("model", "data", "trainer")}
    assert config["data"]["init_args"]["store"] == str(tiny_store)
    weights = content["state_dict"]
    basis = weights["adapter.codec.basis"]
    torch.testing.assert_close(basis @ basis.T, torch.eye(4), rtol=0, atol=1e-5)  # fitted, orthonormal
    assert bool(weights["adapter.codec.fitted"]) and (weights["adapter.codec.scale"] != 1).any()


def test_sampling_takes_the_averaged_weights(tiny_run):
    content = read(tiny_run / "checkpoints" / "last.ckpt")
    averaged, current = content["state_dict"], content["current_model_state"]
    task, config = load_task(tiny_run / "checkpoints" / "last.ckpt")
    assert not task.training and config["model"]["val_samples"] == 2
    for name, value in task.state_dict().items():
        assert torch.equal(value, averaged[name]), name
    apart = [n for n, v in averaged.items() if not torch.equal(v, current[n])]
    assert "net.output.weight" in apart and "adapter.encoder.size.weight" in apart
    assert not any("codec" in n for n in apart)


def test_find_takes_a_file_or_a_run(tiny_run, tmp_path):
    last = tiny_run / "checkpoints" / "last.ckpt"
    assert find(tiny_run) == find(last) == last
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        find(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no \*.ckpt file under .*before its first checkpoint"):
        find(tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", sha256(last))


class Trap:
    """Pickled code that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_foreign_damaged_and_dangerous_files_are_refused(tiny_run, tmp_path):
    last = tiny_run / "checkpoints" / "last.ckpt"
    bad = tmp_path / "bad.ckpt"
    bad.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read(bad)
    bad.write_text("hello")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read(bad)
    bad.write_bytes(pickle.dumps({"state_dict": {}, "seqdiff": Trap(tmp_path / "sprung")}))
    with pytest.raises(CheckpointError, match="weights only"):
        read(bad)
    torch.save({"state_dict": {}, "seqdiff": Trap(tmp_path / "sprung")}, bad)
    with pytest.raises(CheckpointError, match="weights only"):
        read(bad)
    assert not (tmp_path / "sprung").exists()
    torch.save({"state_dict": {}}, bad)
    with pytest.raises(CheckpointError, match="was not written by seqdiff"):
        read(bad)
    torch.save({"state_dict": {}, "seqdiff": {"format": 99, "config": ""}}, bad)
    with pytest.raises(CheckpointError, match="has format 99; this version of seqdiff reads 1"):
        read(bad)
    torch.save({"state_dict": {}, "seqdiff": {"format": 1, "config": ""}}, bad)
    with pytest.raises(CheckpointError, match="holds no config"):
        config_of(read(bad))
    content = read(last)
    del content["state_dict"]["net.output.weight"]
    torch.save(content, bad)
    with pytest.raises(CheckpointError, match=r"weights and config do not fit(.|\n)*net\.output\.weight"):
        load_task(bad)


def test_a_damaged_checkpoint_is_a_plain_message_on_the_command_line(tiny_run, tmp_path, capsys):
    bad = tmp_path / "bad.ckpt"
    bad.write_bytes((tiny_run / "checkpoints" / "last.ckpt").read_bytes()[:5000])
    assert main(["sample", f"ckpt={bad}", f"out={tmp_path / 'out'}"]) == 2
    err = capsys.readouterr().err
    assert str(bad) in err and "Traceback" not in err and len(err) < 1000 and not (tmp_path / "out").exists()


# ---- whole or not at all -----------------------------------------------------------------------------------------------


def test_a_failure_in_the_middle_of_writing_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "run" / "last.ckpt"
    WholeCheckpointIO().save_checkpoint({"x": torch.ones(3)}, path)

    def broken(number: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        WholeCheckpointIO().save_checkpoint({"x": torch.zeros(3)}, path)
    assert WholeCheckpointIO().load_checkpoint(path)["x"].tolist() == [1, 1, 1]
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


def test_resuming_reads_weights_only(tmp_path):
    torch.save({"x": Trap(tmp_path / "sprung")}, tmp_path / "a.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only"):
        WholeCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert not (tmp_path / "sprung").exists()


def test_replace_file(tmp_path):
    replace_file(tmp_path / "a", b"1")
    replace_file(tmp_path / "a", b"22")
    assert (tmp_path / "a").read_bytes() == b"22" and len(list(tmp_path.iterdir())) == 1


def test_the_curve_goes_on_after_a_cut_line(tmp_path):
    log = CurveLogger(str(tmp_path / "run"))
    for step in range(4):
        log.log_metrics({"train/loss": torch.tensor(1.0 + step), "epoch": 0}, step)
    log.log_metrics({"val/minADE": 7.0}, 3)
    with log.path.open("a") as file:
        file.write("4,0")  # killed while writing
    log = CurveLogger(str(tmp_path / "run"))
    log.keep_before(3)
    log.log_metrics({"train/loss": 40.0, "epoch": 0}, 3)
    log.log_metrics({"lr": 0.5}, 3)
    with log.path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["step"], r["train/loss"]) for r in rows] == [
        ("0", "1.0"),
        ("1", "2.0"),
        ("2", "3.0"),
        ("3", "40.0"),
        ("3", ""),
    ]
    assert rows[-1]["lr"] == "0.5"
    log.keep_before(0)
    assert not log.path.exists()


def test_checkpoint_interval_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="every_n_steps is 0"):
        RunCheckpoint(str(tmp_path), 0)


# ---- stopping and going on ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_args(tiny_args: list[str]) -> list[str]:
    """12 steps in epochs of 5, a checkpoint every 3, a validation every 4."""
    return [*tiny_args, "trainer.max_steps=12", "trainer.val_check_interval=4", "checkpoint_every=3"]


@pytest.fixture(scope="module")
def long_run(long_args: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("long") / "run"
    assert main(["fit", *long_args, f"run={run}"]) == 0
    return run


def stop_at(step: int, how: object, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Task.training_step

    def training_step(self: Task, batch: object, batch_idx: int) -> torch.Tensor:
        if self.global_step == step:
            how()  # type: ignore[operator]
        return real(self, batch, batch_idx)

    monkeypatch.setattr(Task, "training_step", training_step)


class Crash(RuntimeError):
    pass


def crash() -> None:
    raise Crash


SLOW = pytest.mark.slow


# epochs of 5 steps, validation after 4 and 8. A checkpoint in the middle of an epoch; at its end; where one validates
@pytest.mark.parametrize("step, every", [(7, 3), pytest.param(6, 5, marks=SLOW), pytest.param(10, 4, marks=SLOW)])
def test_a_crashed_run_goes_on_with_the_same_curve(step, every, long_args, long_run, tmp_path, monkeypatch):
    run = tmp_path / "run"
    long_args = [*long_args, f"checkpoint_every={every}"]
    with monkeypatch.context() as patch:
        stop_at(step, crash, patch)
        with pytest.raises(Crash):
            main(["fit", *long_args, f"run={run}"])
    assert main(["fit", f"run={run}", "resume=true", "trainer.enable_progress_bar=false"]) == 0
    assert (run / "metrics.csv").read_text() == (long_run / "metrics.csv").read_text()
    a, b = (read(r / "checkpoints" / "last.ckpt") for r in (run, long_run))
    for part in ("state_dict", "current_model_state"):
        assert all(torch.equal(a[part][n], b[part][n]) for n in b[part]), part


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_keeps_it(long_args, long_run, tmp_path, monkeypatch, capsys):
    run, before = tmp_path / "run", signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        stop_at(7, lambda: signal.raise_signal(signal.SIGINT), patch)
        assert main(["fit", *long_args, f"run={run}"]) == 130
    err = capsys.readouterr().err
    assert "stopping after this step" in err and f"seqdiff fit run={run} resume=true" in err
    assert signal.getsignal(signal.SIGINT) == before
    assert read(run / "checkpoints" / "last.ckpt")["global_step"] == 8
    assert load_task(find(run))[0] is not None
    assert main(["fit", f"run={run}", "resume=true"]) == 0
    assert curve(run) == curve(long_run)


def start(args: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "seqdiff.cli", "fit", *args], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_curve(tiny_args, tmp_path):
    """kill -9 in the middle of an epoch, some steps after the last checkpoint."""
    args = [*tiny_args, "trainer.max_steps=200", "trainer.val_check_interval=50", "checkpoint_every=7"]
    run, whole = tmp_path / "run", tmp_path / "whole"
    process = start([*args, f"run={run}"])
    end = time.monotonic() + 240
    while not ((run / "metrics.csv").is_file() and len((run / "metrics.csv").read_text().splitlines()) > 25):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    step = read(run / "checkpoints" / "last.ckpt")["global_step"]
    assert step >= 21 and max(curve(run)) < 199
    again = start([f"run={run}", "resume=true"])
    _, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert main(["fit", *args, f"run={whole}"]) == 0
    got, want = curve(run), curve(whole)
    assert list(got) == list(want) == list(range(200))
    assert max(abs(got[s] - want[s]) for s in want) <= 1e-6


@pytest.mark.slow
def test_a_users_screen_is_clean(tiny_args, tmp_path):
    """One bar, one line a validation, where the run is; no advertisements, no warnings."""
    args = [a for a in tiny_args if "progress" not in a]
    process = start([*args, "trainer.max_steps=6", "trainer.val_check_interval=3", f"run={tmp_path / 'run'}"])
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    text = out + err
    for noise in ("Warning", "warn", "GPU", "TPU", "💡", "Tip", "litlogger", "Epoch", "-2", "Seed set", "stopped:"):
        assert noise not in text, text
    assert "codec fitted on the training split: rows" in text and "step 3: val/minADE" in text and "6/6" in err
    assert f"Next: seqdiff sample ckpt={tmp_path / 'run'} " in text
