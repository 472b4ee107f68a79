"""`seqdiff fit | validate | test`: a composed or a written config, handed to LightningCLI, which checks, builds and runs."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from seqdiff.compose import GROUPS, UsageError, compose, group_choices, leaves, nearest, trainer_keys

PLAIN = ("seed_everything", "trainer", "model", "data", "ckpt_path")  # what LightningCLI takes of the composed config
FIT_KEYS = {
    "store=STORE": "a folder written by `seqdiff prepare`; default: the traffic that ships with the package",
    "run=FOLDER": "where the run is written; default: runs/ and the time",
    "resume=true": "go on from the last checkpoint of run=FOLDER, with that run's own config",
    "trainer.max_steps=2000": "length of the training; the learning rate decays over it",
    "trainer.precision=bf16-mixed": "any of Lightning's Trainer arguments",
    "checkpoint_every=250": "steps between two checkpoints",
    "windows.horizon_s=6.0": "seconds of future; history_s, stride_s, radius_m, max_agents likewise",
    "data.init_args.batch_size=16": "scenes a step",
    "model.optimizer.lr=1e-3": "peak learning rate",
    "model.sampler.steps=4": "sampling steps in validation and by default in `seqdiff sample`",
    "seed_everything=0": "of the weights, the order of the windows and the noise",
}


def split_arguments(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra overrides and LightningCLI flags. What follows a bare --flag is its value."""
    overrides: list[str] = []
    flags: list[str] = []
    value = False
    for a in args:
        if a.startswith("-"):
            flags.append(a)
            value = "=" not in a and a not in ("--help", "-h") and not a.startswith("--print_config")
        elif value:
            flags.append(a)
            value = False
        else:
            overrides.append(a)
    return overrides, flags


def lightning(command: str, args: Sequence[str]) -> None:
    """Run fit, validate or test.

    Raises:
        UsageError: what was written cannot be run.
    """
    overrides, flags = split_arguments(args)
    if "--help" in flags or "-h" in flags:
        print(help_text(command))
        return
    printing = any(f.startswith("--print_config") for f in flags)
    flags, written = _config_flag(flags)
    if written is not None:
        config, more = _replayed(written, overrides, printing)
    elif command == "fit":
        config, more = _composed(overrides, printing)
    else:
        config, more = _measured(command, overrides)
    run_lightning(command, {name: config[name] for name in PLAIN if name in config}, more + flags)


# ---- which config ------------------------------------------------------------------------------------------------------


def _composed(overrides: list[str], printing: bool) -> tuple[dict[str, Any], list[str]]:
    """A new run of a composed config, or one that goes on."""
    given = _given(overrides)
    if given.get("resume", "false").lower() in ("true", "1", "yes"):
        return _resumed(overrides, given)
    config = compose(overrides)
    if not printing:
        _refuse_used(Path(config["run"]))
    return config, []


def _resumed(overrides: list[str], given: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The run's own config and its last checkpoint. The command may be repeated as it was, or say run= alone; only trainer.*
    may differ."""
    if "run" not in given:
        raise UsageError("resume=true needs run=FOLDER, the folder of the run that goes on")
    run = Path(given["run"])
    last, written = run / "checkpoints" / "last.ckpt", run / "config.yaml"
    if not last.is_file() or not written.is_file():
        missing = last if not last.is_file() else written
        raise UsageError(f"resume=true, but there is no {missing}: set run= to the folder of a run that was stopped")
    config = _read(written)
    trainer = {key: value for key, value in given.items() if key.startswith("trainer.")}
    if set(given) - set(trainer) - {"run", "resume"}:
        asked = compose(overrides)
        changed = [
            f"{key} is {_at(config, key)!r} in the run and {value!r} now"
            for key, value in _values({name: asked[name] for name in ("model", "data", "seed_everything")}).items()
            if _at(config, key) != value
        ]
        if changed:
            raise UsageError(
                f"resume=true goes on with the config of {run}, but {'; '.join(changed[:3])}"
                + (f" (and {len(changed) - 3} more)" if len(changed) > 3 else "")
                + f". Write `seqdiff fit run={run} resume=true`, or start a new run with another run="
            )
    return config | {"ckpt_path": str(last)}, _as_flags(config, trainer, f"{written} holds")


def _replayed(written: Path, overrides: list[str], printing: bool) -> tuple[dict[str, Any], list[str]]:
    """A written config.yaml, run again into run=FOLDER; other key=value change keys of the file."""
    config = _read(written) | {"ckpt_path": None}
    given = _given(overrides)
    old = str(config["trainer"].get("default_root_dir") or written.parent)
    run = given.pop("run", old)
    config["trainer"] = _moved(config["trainer"], old, run)
    if not printing:
        _refuse_used(Path(run))
    return config, _as_flags(config, given, f"{written} holds")


def _measured(command: str, overrides: list[str]) -> tuple[dict[str, Any], list[str]]:
    """validate and test start from the config in the checkpoint; other key=value change it."""
    from seqdiff.checkpoint import config_of, find, read

    given = _given(overrides)
    if "run" not in given:
        raise UsageError(f"seqdiff {command} needs run=FOLDER (or run=FILE.ckpt): the run whose weights are measured")
    path = find(Path(given.pop("run")))
    config = config_of(read(path)) | {"ckpt_path": str(path)}
    config["trainer"] |= {"logger": False, "callbacks": None}
    if "store" in given:
        given["data.init_args.store"] = given.pop("store")
    return config, _as_flags(config, given, "the run's config holds")


def _given(overrides: list[str]) -> dict[str, str]:
    bad = [o for o in overrides if "=" not in o]
    if bad:
        raise UsageError(f"got {bad[0]!r}; expected key=value, group=choice or a --flag")
    return dict(o.split("=", 1) for o in overrides)


def _as_flags(config: dict[str, Any], given: dict[str, str], where: str) -> list[str]:
    known = dict.fromkeys([*leaves(config), *trainer_keys()])
    for key in given:
        if key in GROUPS:
            raise UsageError(f"{key}={given[key]}: {where} a whole config already, so that no group can be chosen")
        if key not in known:
            near = nearest(key, known)
            raise UsageError(f"{where} no key {key!r}." + (f" Did you mean {near}?" if near else ""))
    return [f"--{key}={value}" for key, value in given.items()]


def _config_flag(flags: list[str]) -> tuple[list[str], Path | None]:
    """The flags without --config, and its value."""
    rest, value, i = [], None, 0
    while i < len(flags):
        if flags[i] == "--config" and i + 1 < len(flags):
            value, i = flags[i + 1], i + 1
        elif flags[i].startswith("--config="):
            value = flags[i].split("=", 1)[1]
        else:
            rest.append(flags[i])
        i += 1
    return rest, None if value is None else Path(value)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"there is no {path}: give the config.yaml in the folder of a run")
    try:
        config = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not yaml: {error}") from error
    if not isinstance(config, dict) or not {"model", "data", "trainer"} <= set(config):
        raise UsageError(f"{path} is not the config.yaml of a run: it lacks model, data or trainer")
    return config


def _moved(node: Any, old: str, new: str) -> Any:
    """The config with paths in the old run's folder put in the new one."""
    if isinstance(node, dict):
        return {key: _moved(value, old, new) for key, value in node.items()}
    if isinstance(node, list):
        return [_moved(value, old, new) for value in node]
    if isinstance(node, str) and (node == old or node.startswith(old + "/")):
        return new + node[len(old) :]
    return node


def _values(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists are values."""
    if not isinstance(node, dict):
        return {prefix.removesuffix("."): node}
    return {k: v for name, value in node.items() for k, v in _values(value, f"{prefix}{name}.").items()}


def _at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def _refuse_used(run: Path) -> None:
    """A run's folder is used once, or resumed on purpose."""
    last = run / "checkpoints" / "last.ckpt"
    if last.exists() and "LOCAL_RANK" not in os.environ:
        raise UsageError(f"{run} already holds a run: choose another run=, or write resume=true to go on from {last}")


# ---- Lightning ---------------------------------------------------------------------------------------------------------


def run_lightning(command: str, config: dict[str, Any], flags: list[str]) -> None:
    """Hand a plain config to LightningCLI.

    Args:
        command: fit, validate or test.
        config: the keys of PLAIN.
        flags: LightningCLI's, which change the config.

    Raises:
        UsageError: a key or a type that the classes do not take.
    """
    from jsonargparse import ArgumentError

    from seqdiff.lightning_cli import CLI, SaveFitConfig
    from seqdiff.screen import quiet
    from seqdiff.task import Task

    strict = {"exit_on_error": False}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        quiet()
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        try:
            CLI(
                Task, args=[command, "--config", str(path), *flags], subclass_mode_data=True,
                save_config_callback=SaveFitConfig, save_config_kwargs={"overwrite": True},
                trainer_defaults={"enable_model_summary": False}, parser_kwargs=strict | {command: strict},
            )  # fmt: skip
        except ArgumentError as error:
            raise UsageError(_shorter(str(error), str(path))) from error
        except SystemExit as stop:  # how Lightning ends after Ctrl-C
            if stop.code == 1:
                raise KeyboardInterrupt from stop
            raise


def _shorter(text: str, path: str) -> str:
    """jsonargparse's message without the temporary file's name."""
    lines = [line for line in text.replace(path, "the config").splitlines() if line.strip()]
    return "\n".join(lines[:12]) + ("\n..." if len(lines) > 12 else "")


def next_steps(run: Path, step: int, finished: bool) -> str:
    """What to do with a run that ended."""
    name = shlex.quote(str(run))
    if finished:
        return f"run: {run}, {step} steps. Next: seqdiff sample ckpt={name} split=test k=64 steps=4 out={name}/samples"
    last = run / "checkpoints" / "last.ckpt"
    if not last.is_file():
        return f"stopped at step {step}, before the first checkpoint; {run} holds no weights"
    return (
        f"stopped; {last} is whole. Go on: seqdiff fit run={name} resume=true. "
        f"Or use it as it is: seqdiff sample ckpt={name} split=test out={name}/samples"
    )


def help_text(command: str) -> str:
    """Of fit, validate and test."""
    if command != "fit":
        split, stage = ("validation", "val") if command == "validate" else ("test", "test")
        return "\n".join(
            [
                f"usage: seqdiff {command} run=FOLDER [key=value ...]",
                "",
                f"Measures of samples from the averaged weights of a run, on its {split} split.",
                "",
                "  run=FOLDER                     a run's folder, or a .ckpt file (required)",
                "  store=STORE                    another store than the one trained on",
                f"  trainer.limit_{stage}_batches=50   so many batches only",
                "  data.init_args.KEY=VALUE       any other key of the run's config.yaml",
            ]
        )
    lines = ["usage: seqdiff fit [group=choice] [key=value ...] [--flags of LightningCLI]", "", "choices:"]
    lines += [f"  {group:<11} {', '.join(names)}" for group, names in group_choices().items()]
    lines += ["", "keys most often set:"]
    lines += [f"  {key:<28} {text}" for key, text in FIT_KEYS.items()]
    lines += [
        "",
        "All keys with their values: seqdiff fit --print_config",
        "The run writes RUN/config.yaml, RUN/metrics.csv and RUN/checkpoints/last.ckpt.",
        "The same run again, elsewhere: seqdiff fit --config RUN/config.yaml run=OTHER",
        "After a kill or Ctrl-C: seqdiff fit run=RUN resume=true",
    ]
    return "\n".join(lines)


def report_end(run: Path, step: int, finished: bool) -> None:
    """Print `next_steps` on stderr, below the bar."""
    print(next_steps(run, step, finished), file=sys.stderr)
