"""The command line: help, refusals with the nearest spelling, --print_config, replay, runs in use, the whole way to a page."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import pytest
import yaml

from seqdiff.cli import COMMANDS, LIGHTNING, main
from seqdiff.compose import UsageError, compose, nearest
from seqdiff.fit import split_arguments


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said on stderr; exit code 2 and no traceback."""
    capsys.readouterr()
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err and out == ""
    return err


def curve(run: Path) -> list[tuple[int, float]]:
    """Step and loss of each step of a run."""
    with (run / "metrics.csv").open() as file:
        return [(int(r["step"]), float(r["train/loss"])) for r in csv.DictReader(file) if r["train/loss"]]


# ---- help --------------------------------------------------------------------------------------------------------------


def test_help_names_every_command(capsys):
    for args in ([], ["--help"], ["help"]):
        assert main(args) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {command} " in text for command in (*LIGHTNING, *COMMANDS))
        assert max(map(len, text.splitlines())) <= 130
    assert main(["--version"]) == 0 and re.fullmatch(r"seqdiff \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_explains_every_key_in_the_grammar_one_types(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: seqdiff {command} ") and lines[0].endswith("[key=value ...]")
    assert lines[2].strip(), "what the command does"
    keys = [i for i, line in enumerate(lines) if re.match(r"  \w+=", line)]
    assert len(keys) >= 6
    for i in keys:
        text = lines[i][28:].strip() if len(lines[i]) > 28 else lines[i + 1].strip()
        assert len(text.removesuffix("(required)")) > 4, f"{command}: no text for {lines[i]!r}"
    assert max(map(len, lines)) <= 100 and not any("--" in line for line in lines)


@pytest.mark.parametrize("command", LIGHTNING)
def test_help_of_fit_validate_test(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: seqdiff {command} ") and "run=FOLDER" in text
    if command == "fit":
        assert re.search(r"model +dit_m, dit_s", text) and "resume=true" in text


# ---- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, said",
    [
        (["smaple"], ["unknown command 'smaple'", "Did you mean sample?"]),
        (["fit", "trainer.max_step=3"], ["trainer.max_step", "Did you mean trainer.max_steps"]),
        (["fit", "batch_size=3"], ["batch_size", "data.init_args.batch_size"]),
        (["fit", "windows.horizn_s=3"], ["windows.horizon_s"]),
        (["fit", "model=dit_x"], ["dit_x", "dit_s"]),
        (["fit", "trainer.max_steps"], ["key=value"]),
        (["fit", "windows.horizon_s=2.05"], ["2.05 s is not a whole number of steps of dt"]),
        (["fit", "run=nowhere", "resume=true"], ["no nowhere/checkpoints/last.ckpt"]),
        (["fit", "--config", "nowhere.yaml"], ["there is no nowhere.yaml"]),
        (["test"], ["seqdiff test needs run="]),
        (["validate", "run=nowhere"], ["no checkpoint at nowhere"]),
        (["sample", "ckpt=a", "ouy=b"], ["takes no 'ouy'", "Did you mean out?"]),
        (["sample", "ckpt=a"], ["seqdiff sample needs out="]),
        (["sample", "ckpt=a", "out=b", "k=many"], ["seqdiff sample", "k", "many"]),
        (["sample", "ckpt=a", "out=b", "k=0"], ["k is 0"]),
        (["sample", "ckpt=nowhere", "out=b"], ["no checkpoint at nowhere"]),
        (["evaluate", "samples=nowhere"], ["nowhere holds no run.json"]),
        (["prepare", "source=embeded", "out=x"], ["unknown kind 'embeded'", "did you mean embedded"]),
        (["bench", "agent=3"], ["Did you mean agents?"]),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_with_the_nearest_spelling(args, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = refused(args, capsys)
    for text in said:
        assert text in err, err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override, said",
    [
        ("trainer.max_steps=many", ["trainer.max_steps", "many"]),
        ("model.optimizer.lr=fast", ["lr", "fast"]),
        ("model.net.init_args.width=30", ["width 30"]),
        ("model.sampler.step=eulr", ["euler"]),
    ],
)
def test_a_wrong_type_or_value_is_refused_before_anything_is_written(override, said, tiny_args, capsys, tmp_path):
    err = refused(["fit", *tiny_args, f"run={tmp_path / 'run'}", override], capsys)
    for text in said:
        assert text in err, err
    assert "/tmp/tmp" not in err and len(err.splitlines()) <= 14
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_nearest_spelling():
    words = ["trainer.max_steps", "data.init_args.batch_size", "run"]
    assert nearest("batch_size", words) == "data.init_args.batch_size"
    assert nearest("trainer.maxsteps", words) == "trainer.max_steps"
    assert nearest("zzz", words) == ""


def test_flags_and_their_values_are_told_from_overrides():
    got = split_arguments(["a=1", "--config", "x.yaml", "b=2", "--print_config", "c=3", "--seed_everything=1", "d=4"])
    assert got == (["a=1", "b=2", "c=3", "d=4"], ["--config", "x.yaml", "--print_config", "--seed_everything=1"])


# ---- composing ---------------------------------------------------------------------------------------------------------


def test_a_key_that_only_the_class_knows_is_taken():
    config = compose(["data.init_args.splits={val: test}", "trainer.accumulate_grad_batches=2"])
    assert config["data"]["init_args"]["splits"] == {"val": "test"}
    assert config["trainer"]["accumulate_grad_batches"] == 2
    with pytest.raises(UsageError, match="unknown key"):
        compose(["data.init_args.nothing=1"])


def test_frames_follow_from_seconds():
    adapter = compose(["dt=0.4", "windows.history_s=2.8", "windows.horizon_s=4.8"])["model"]["adapter"]["init_args"]
    assert (adapter["history"], adapter["horizon"]) == (8, 12)  # the 8 and 12 rows of ETH/UCY
    net = compose(["model=dit_m"])["model"]["net"]["init_args"]
    assert net["width"] == 256 and net["latent_dim"] == adapter["latent_dim"]


def test_print_config_prints_the_whole_plain_config(tiny_args, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SOME_TOKEN", "do-not-print-me")
    with pytest.raises(SystemExit) as stop:
        main(["fit", *tiny_args, f"run={tmp_path / 'r'}", "trainer.max_steps=7", "--print_config"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    config = yaml.safe_load(text)
    assert config["trainer"]["max_steps"] == 7 and config["model"]["adapter"]["init_args"]["horizon"] == 10
    assert "/tmp/tmp" not in text and "do-not-print-me" not in text and "${" not in text and "config" not in config
    assert not (tmp_path / "r").exists()


# ---- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_holds_config_curve_and_checkpoint(tiny_run):
    assert sorted(p.name for p in tiny_run.iterdir()) == ["checkpoints", "config.yaml", "metrics.csv"]
    assert [p.name for p in (tiny_run / "checkpoints").iterdir()] == ["last.ckpt"]
    assert [step for step, _ in curve(tiny_run)] == list(range(6))
    config = yaml.safe_load((tiny_run / "config.yaml").read_text())
    assert config["ckpt_path"] is None and config["data"]["init_args"]["batch_size"] == 4


@pytest.mark.slow
def test_the_same_command_gives_the_same_curve_and_another_seed_another(tiny_run, tiny_args, tmp_path):
    rest = ["trainer.max_steps=6", "trainer.val_check_interval=3", "checkpoint_every=4"]
    assert main(["fit", *tiny_args, *rest, f"run={tmp_path / 'same'}"]) == 0
    assert (tmp_path / "same" / "metrics.csv").read_bytes() == (tiny_run / "metrics.csv").read_bytes()
    assert main(["fit", *tiny_args, *rest, f"run={tmp_path / 'other'}", "seed_everything=1"]) == 0
    assert curve(tmp_path / "other") != curve(tiny_run)


def test_a_written_config_replays_bit_for_bit_into_another_folder(tiny_run, tmp_path, capsys):
    before = {p: p.read_bytes() for p in tiny_run.rglob("*") if p.is_file()}
    new = tmp_path / "again"
    assert main(["fit", "--config", str(tiny_run / "config.yaml"), f"run={new}"]) == 0
    assert (new / "metrics.csv").read_bytes() == (tiny_run / "metrics.csv").read_bytes()
    assert (new / "config.yaml").read_text() == (tiny_run / "config.yaml").read_text().replace(str(tiny_run), str(new))
    assert {p: p.read_bytes() for p in tiny_run.rglob("*") if p.is_file()} == before
    err = refused(["fit", "--config", str(tiny_run / "config.yaml")], capsys)
    assert f"{tiny_run} already holds a run" in err
    err = refused(["fit", f"--config={tiny_run / 'config.yaml'}", f"run={tmp_path / 'b'}", "model=dit_m"], capsys)
    assert "no group can be chosen" in err
    err = refused(
        ["fit", f"--config={tiny_run / 'config.yaml'}", f"run={tmp_path / 'b'}", "trainer.max_step=1"], capsys
    )
    assert "Did you mean trainer.max_steps" in err


def test_a_folder_in_use_is_refused(tiny_run, tiny_args, capsys):
    err = refused(["fit", *tiny_args, f"run={tiny_run}"], capsys)
    assert "already holds a run" in err and "resume=true" in err
    err = refused(["fit", *tiny_args, f"run={tiny_run}", "resume=true", "model.optimizer.lr=0.5"], capsys)
    assert "model.optimizer.lr is 0.001 in the run and 0.5 now" in err


@pytest.mark.slow
def test_a_run_goes_on_and_keeps_its_curve(tiny_run, tiny_args, tmp_path):
    args = ["fit", *tiny_args, "trainer.val_check_interval=3", "checkpoint_every=4", f"run={tmp_path / 'r'}"]
    assert main([*args, "trainer.max_steps=6"]) == 0
    first = curve(tmp_path / "r")
    assert main([*args, "trainer.max_steps=8", "resume=true"]) == 0
    assert curve(tmp_path / "r")[:6] == first and [s for s, _ in curve(tmp_path / "r")] == list(range(8))
    written = yaml.safe_load((tmp_path / "r" / "config.yaml").read_text())
    assert written["trainer"]["max_steps"] == 8 and written["ckpt_path"] is None  # it replays the whole run


def test_validate_and_test_measure_a_run_and_write_nothing(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {p: p.read_bytes() for p in tiny_run.rglob("*") if p.is_file()}
    assert main(["validate", f"run={tiny_run}"]) == 0
    out = capsys.readouterr().out
    with (tiny_run / "metrics.csv").open() as file:
        last = [row for row in csv.DictReader(file) if row["val/minADE"]][-1]
    assert f"{float(last['val/minADE']):.6f}"[:7] in out  # the weights kept are those that the last validation measured
    assert main(["test", f"run={tiny_run / 'checkpoints' / 'last.ckpt'}"]) == 0
    assert "test/minADE" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in tiny_run.rglob("*") if p.is_file()} == before and not list(tmp_path.iterdir())


# ---- the whole way -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_from_recordings_to_a_page(tiny_args, tmp_path, capsys):
    """prepare -> fit -> sample -> evaluate -> review, each through `seqdiff`."""
    raw = tmp_path / "raw"
    rows = [f"{10 * t}\t{a}\t{0.5 * t + a}\t{2 * a + math.sin(t / 3 + a):.3f}" for t in range(40) for a in range(1, 5)]
    for name in ("biwi_eth", "biwi_hotel", "crowds_zara01", "crowds_zara02", "crowds_zara03", "students001", "students003",
                 "uni_examples"):  # fmt: skip
        for file in (f"all_data/{name}", f"train/{name}_train", f"val/{name}_val"):
            (raw / file).parent.mkdir(parents=True, exist_ok=True)
            (raw / f"{file}.txt").write_text("\n".join(rows) + "\n")
    store, run, samples, page = (tmp_path / n for n in ("store", "run", "samples", "review.html"))
    assert main(["prepare", "source=ethucy:zara1", f"data_dir={tmp_path / 'raw'}", f"out={store}"]) == 0
    tiny = [a for a in tiny_args if not a.startswith(("store=", "windows."))]
    seconds = ["dt=0.4", "windows.history_s=2.8", "windows.horizon_s=4.8", "windows.stride_s=0.4", "windows.focal=all",
               "windows.radius_m=null", "windows.max_segments=0", "data.init_args.train_stride_s=0.4"]  # fmt: skip
    assert main(["fit", *tiny, *seconds, f"store={store}", f"run={run}", "trainer.max_steps=3"]) == 0
    assert main(["sample", f"ckpt={run}", "split=test", "k=6", "steps=2", "limit=4", f"out={samples}"]) == 0
    assert main(["evaluate", f"samples={samples}", "k=3"]) == 0
    metrics = json.loads((samples / "metrics.json").read_text())
    assert {row["k"] for row in metrics["rows"]} >= {3, 6}
    assert main(["review", f"samples={samples}", f"out={page}"]) == 0
    assert page.stat().st_size > 10_000 and "minJADE" in page.read_text(encoding="utf-8")
    err = refused(["sample", f"ckpt={run}", "split=tset", f"out={tmp_path / 'x'}"], capsys)
    assert "no split 'tset'" in err and not (tmp_path / "x").exists()
