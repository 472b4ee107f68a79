"""`seqdiff ...`: Hydra composes, LightningCLI validates and runs; the other commands are plain functions.

One grammar for all: group=choice and key=value. The wire between core, domains and pages: the only file of the core that may
name Hydra, and that imports what the config names.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

import seqdiff
from seqdiff.checkpoint import CheckpointError

LIGHTNING = ("fit", "validate", "test")
PLAIN = ("seed_everything", "trainer", "model", "data", "ckpt_path")  # what LightningCLI takes of the composed config

HELP = """usage: seqdiff COMMAND [group=choice] [key=value ...]

Diffusion over sequences: many complete futures in parallel, scored jointly.

  prepare    recorded data to a packed store        seqdiff prepare source=commonroad:DIR out=STORE
  fit        train                                  seqdiff fit domain=trajectory store=STORE trainer.max_steps=2000
  validate   measures on the validation split       seqdiff validate run=RUN
  test       the same on the test split             seqdiff test run=RUN
  sample     draw futures, score them jointly       seqdiff sample ckpt=RUN split=test k=64 steps=4 seed=0 out=DIR
  evaluate   table and metrics.json                 seqdiff evaluate samples=DIR
  review     a page to look at the futures          seqdiff review samples=DIR out=review.html
  bench      latency, throughput, memory            seqdiff bench

`seqdiff COMMAND --help` lists what a command takes. fit, validate and test also take LightningCLI's --flags, for example
--print_config, or --config of an earlier run's config.yaml.
"""


GROUPS = ("domain", "model", "objective", "sampler", "trainer", "experiment")
COMMANDS = ("prepare", "sample", "evaluate", "review", "bench")
FIT_KEYS = {
    "store=STORE": "a folder written by `seqdiff prepare`; default: the traffic that ships with the package",
    "run=FOLDER": "where the run is written; default: runs/ and the time",
    "resume=true": "go on from the run's last checkpoint",
    "trainer.max_steps=2000": "length of the training; the learning rate decays over it",
    "trainer.precision=bf16-mixed": "any of Lightning's Trainer arguments",
    "windows.horizon_s=6.0": "seconds of future; history_s, stride_s, radius_m, max_agents likewise",
    "data.init_args.batch_size=16": "scenes a step",
    "model.optimizer.lr=1e-3": "peak learning rate",
    "model.sampler.steps=4": "sampling steps in validation and by default in `seqdiff sample`",
}


class UsageError(Exception):
    """Something the user wrote that cannot be run; printed without a traceback."""


# ---- composing ---------------------------------------------------------------------------------------------------------


def _resolvers() -> None:
    from omegaconf import OmegaConf

    def frames(seconds: float, dt: float, extra: int) -> int:
        n = round(float(seconds) / float(dt))
        if abs(n * float(dt) - float(seconds)) > 1e-6 * max(1.0, float(seconds)):
            raise UsageError(f"{seconds} s is not a whole number of steps of dt = {dt} s; change windows.* or dt")
        return n + int(extra)

    def stamp(_: str = "") -> str:  # through the environment, so that DDP's re-run of the command finds the same folder
        return os.environ.setdefault("SEQDIFF_RUN_STAMP", datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))

    OmegaConf.register_new_resolver("frames", frames, replace=True)
    OmegaConf.register_new_resolver("run_stamp", stamp, replace=True)


def _leaves(node: Any, prefix: str = "") -> list[str]:
    """Dotted keys of a composed config, and those that the signature behind each class_path would also take."""
    keys: list[str] = []
    if not isinstance(node, dict):
        return keys
    for name, value in node.items():
        keys.append(prefix + name)
        keys += _leaves(value, prefix + name + ".")
    if "class_path" in node:
        try:
            known = inspect.signature(find_object(node["class_path"]).__init__).parameters
        except UsageError:
            known = {}  # type: ignore[assignment]
        keys += [f"{prefix}init_args.{name}" for name in known if name not in ("self", "kwargs")]
    return keys


def _trainer_keys() -> list[str]:
    from lightning import Trainer

    return ["trainer." + name for name in inspect.signature(Trainer.__init__).parameters if name != "self"]


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved config.

    Args:
        overrides: Hydra's. A key that the config does not list but the class behind it takes may be set without a "+".

    Raises:
        UsageError: an unknown key or choice; the text suggests the nearest one.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _resolvers()
    choices = [o for o in overrides if o.split("=", 1)[0] in GROUPS]
    rest = [o for o in overrides if o not in choices]
    try:
        with initialize_config_module("seqdiff.configs", version_base="1.3"):
            base = OmegaConf.to_container(hydra_compose("config", overrides=list(choices)), resolve=False)
            known = dict.fromkeys([*_leaves(base), *_trainer_keys()])
            forced = [_checked(o, known) for o in rest]
            config = hydra_compose("config", overrides=[*choices, *forced])
        out = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_first_lines(error)) from error
    assert isinstance(out, dict)
    return {str(key): value for key, value in out.items()}


def _first_lines(error: Exception) -> str:
    text = str(error).strip()
    return text if len(text) < 1500 else text[:1500] + " ..."


def _checked(override: str, known: dict[str, None]) -> str:
    """The override, forced in where the class takes a key that the config does not list."""
    if override[0] in "+~":
        return override
    if "=" not in override:
        raise UsageError(f"got {override!r}; expected key=value, group=choice or a --flag")
    key = override.split("=", 1)[0]
    if key in known:
        return "++" + override
    near = nearest(key, known)
    raise UsageError(
        f"unknown key {key!r}."
        + (f" Did you mean {near}?" if near else " See `seqdiff fit --print_config` for all keys.")
    )


def nearest(word: str, words: Any) -> str:
    """The closest known words, for error texts; whole keys first, then by their last part."""
    words = list(words)
    close = difflib.get_close_matches(word, words, n=2, cutoff=0.75)
    last = word.rsplit(".", 1)[-1]
    if not close:
        close = [w for w in words if w.rsplit(".", 1)[-1] == last][:2]
    if not close:
        ends = {w.rsplit(".", 1)[-1]: w for w in words}
        close = [ends[e] for e in difflib.get_close_matches(last, list(ends), n=2, cutoff=0.75)]
    return " or ".join(close)


def find_object(path: str) -> Any:
    """The class or function named by a dotted path.

    Raises:
        UsageError: there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot import {path}: {error}") from error


# ---- fit, validate, test -----------------------------------------------------------------------------------------------


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


def _lightning(command: str, args: Sequence[str]) -> None:
    overrides, flags = split_arguments(args)
    if "--help" in flags or "-h" in flags:
        print(_fit_help(command))
        return
    printing = any(f.startswith("--print_config") for f in flags)
    if any(f == "--config" or f.startswith("--config=") for f in flags):  # an earlier run's written config, replayed
        flags += [f"--{o}" for o in overrides]
        config: dict[str, Any] = {}
    elif command == "fit":
        config = compose(overrides)
        _check_run(config, printing)
    else:
        config, more = _config_of_run(command, overrides)
        flags = more + flags
    _run_lightning(command, {name: config[name] for name in PLAIN if name in config}, flags)


def _check_run(config: dict[str, Any], printing: bool) -> None:
    """A run's folder is used once, or resumed on purpose."""
    last = Path(config["run"]) / "checkpoints" / "last.ckpt"
    if config["resume"]:
        if not last.is_file():
            raise UsageError(f"resume=true, but there is no {last}: set run= to the folder of the killed run")
        config["ckpt_path"] = str(last)
    elif last.exists() and not printing and "LOCAL_RANK" not in os.environ:
        raise UsageError(
            f"{config['run']} already holds a run: choose another run=, or write resume=true to go on from {last}"
        )


def _config_of_run(command: str, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """validate and test start from the config that the run wrote; other key=value are passed on as flags."""
    from seqdiff.checkpoint import config_of, find, read

    given = dict(o.split("=", 1) for o in overrides if "=" in o)
    if "run" not in given:
        raise UsageError(f"seqdiff {command} needs run=FOLDER (or run=FILE.ckpt): the run whose weights are measured")
    path = find(Path(given.pop("run")))
    config = config_of(read(path)) | {"ckpt_path": str(path)}
    config["trainer"] |= {"logger": False, "callbacks": None}
    return config, [f"--{key}={value}" for key, value in given.items()]


def _run_lightning(command: str, config: dict[str, Any], flags: list[str]) -> None:
    import lightning as L
    from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

    from seqdiff.task import Task

    class CLI(LightningCLI):
        def parse_arguments(
            self, parser: Any, args: Any
        ) -> None:  # the stock one warns about sys.argv, which DDP re-runs
            self.config = parser.parse_args(args)

        def before_fit(self) -> None:
            self._dump_config()
            self.model.config_text = yaml.safe_dump(self.config_dump, sort_keys=False)

    class SaveFitConfig(SaveConfigCallback):
        def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            if stage == "fit":
                super().setup(trainer, pl_module, stage)

    args = [command]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*Checkpoint directory.*exists and is not empty.*")
        if config:
            path = Path(folder) / "config.yaml"
            path.write_text(yaml.safe_dump(config, sort_keys=False))
            args += ["--config", str(path)]
        CLI(
            Task, args=args + flags, subclass_mode_data=True, save_config_callback=SaveFitConfig,
            save_config_kwargs={"overwrite": True}, trainer_defaults={"enable_model_summary": False},
        )  # fmt: skip


def _fit_help(command: str) -> str:
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    lines = [f"usage: seqdiff {command} " + ("[group=choice] [key=value ...] [--flags of LightningCLI]" if command == "fit"
             else "run=FOLDER [data.init_args.KEY=VALUE ...]"), ""]  # fmt: skip
    if command != "fit":
        lines += [
            "Measures of samples from the averaged weights of a run, on its "
            + ("validation" if command == "validate" else "test")
            + " split."
        ]
        return "\n".join(lines)
    with initialize_config_module("seqdiff.configs", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        lines += ["choices:"]
        lines += [f"  {g:<11} {', '.join(loader.get_group_options(g))}" for g in GROUPS]
    lines += ["", "keys most often set:"]
    lines += [f"  {key:<28} {text}" for key, text in FIT_KEYS.items()]
    lines += ["", "All keys with their values: seqdiff fit --print_config. The run writes RUN/config.yaml, RUN/metrics.csv and",
              "RUN/checkpoints/last.ckpt; `seqdiff fit --config RUN/config.yaml` replays it."]  # fmt: skip
    return "\n".join(lines)


# ---- the other commands ------------------------------------------------------------------------------------------------


@dataclass
class SampleRequest:
    """Draw k joint futures of every scene of a split, score each as a whole, write samples.parquet, scores.parquet, run.json.

    Args:
        ckpt: a run's folder or a .ckpt file.
        out: folder to write; appears whole or not at all.
        split: of the store.
        k: futures per scene.
        steps: sampling steps; default: the checkpoint's.
        seed: the same seed gives bit-equal noise, whatever the batch size.
        sampler: ddim, heun, dpmpp_2m; default: the checkpoint's.
        temperature: scale of the start noise: 1 = the training law, 0 = identical samples.
        guidance: classifier-free weight; 1 = off.
        store: another store than the one trained on.
        batch_size: scenes at a time.
        limit: at most so many scenes, evenly spread over the split.
        overwrite: replace an earlier samples folder.
    """

    ckpt: Path
    out: Path
    split: str = "test"
    k: int = 64
    steps: int | None = None
    seed: int = 0
    sampler: str | None = None
    temperature: float | None = None
    guidance: float | None = None
    store: str | None = None
    batch_size: int | None = None
    limit: int | None = None
    overwrite: bool = False


def sample_command(r: SampleRequest) -> Path:
    """Run a request. Returns the folder written."""
    from jsonargparse import ArgumentParser
    from lightning import LightningDataModule

    from seqdiff.checkpoint import find, load_task
    from seqdiff.generate import choose_sampler, describe_run, generate
    from seqdiff.steps import find_step

    if r.k < 1:
        raise UsageError(f"k is {r.k}; expected at least 1 future per scene")
    path = find(r.ckpt)
    task, config = load_task(path)
    section = config["data"]
    changes = {"store": r.store, "eval_batch_size": r.batch_size}
    section["init_args"] |= {key: value for key, value in changes.items() if value is not None}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    data = parser.instantiate(parser.parse_object({"data": section})).data
    sampler = choose_sampler(
        task.sampler, step=r.sampler, steps=r.steps, temperature=r.temperature, guidance=r.guidance
    )
    find_step(sampler.step)
    writer = find_object(_domain(data.domain)["writer"])(r.out, overwrite=r.overwrite)
    with writer:
        done = generate(task, data, writer, sampler, k=r.k, seed=r.seed, split=r.split, limit=r.limit)
        writer.close(describe_run(task, path, config, sampler, r.k, r.seed) | data.describe(r.split) | done)
    n = done["n_windows"]
    print(f"{n} scenes x {r.k} futures x {sampler.evaluations} evaluations in {done['seconds_sampling']:.1f} s "
          f"({1000 * done['seconds_sampling'] / max(n, 1):.0f} ms a scene), written to {r.out}")  # fmt: skip
    return r.out


def _domain(name: str) -> dict[str, Any]:
    """The functions that a domain's yaml names."""
    return compose([f"domain={name}"])["domain"]


def _domain_of_samples(args: dict[str, str]) -> str:
    if "samples" not in args:
        return "trajectory"
    run = Path(args["samples"]) / "run.json"
    if not run.is_file():
        raise UsageError(f"{args['samples']} holds no run.json: give a folder written by `seqdiff sample`")
    try:
        return str(json.loads(run.read_text())["domain"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{run} is not a run.json of seqdiff: {error}") from error


def _plain(command: str, args: Sequence[str]) -> Any:
    """A command that is a function: key=value (or --key value) against its signature."""
    from jsonargparse import ArgumentError, ArgumentParser

    overrides, flags = split_arguments(args)
    bad = [o for o in overrides if "=" not in o]
    if bad:
        raise UsageError(f"got {bad[0]!r}; expected key=value, see `seqdiff {command} --help`")
    given = {k.removeprefix("data."): v for k, v in (o.split("=", 1) for o in overrides)}
    domain = given.pop("domain", None) or _domain_of_samples(given)
    function: Callable[..., Any]
    if command == "sample":
        function = sample_command
    elif command == "bench":
        function = find_object("seqdiff.tools.bench.bench")
    else:
        function = find_object(_domain(domain)[command])
    parser = ArgumentParser(prog=f"seqdiff {command}", exit_on_error=False)
    request = SampleRequest if command == "sample" else None
    if request is not None:
        parser.add_class_arguments(request)
    else:
        parser.add_function_arguments(function)
    known = [action.dest for action in parser._actions if action.dest not in ("help", "config", "print_config")]
    if "-h" in flags or "--help" in flags:
        parser.print_help()
        return None
    for key in given:
        if key not in known:
            near = nearest(key, known)
            raise UsageError(
                f"seqdiff {command} takes no {key!r}." + (f" Did you mean {near}?" if near else "")
                + f" It takes {', '.join(known)}."
            )  # fmt: skip
    try:
        values = parser.parse_args([f"--{k}={v}" for k, v in given.items()] + flags)
    except ArgumentError as error:
        raise UsageError(f"seqdiff {command}: {error}") from error
    named = parser.instantiate(values).as_dict()
    return function(SampleRequest(**named)) if request is not None else function(**named)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, or 2 for something the user can mend."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if args[0] == "--version":
        print(f"seqdiff {seqdiff.__version__}")
        return 0
    command, rest = args[0], args[1:]
    try:
        if command in LIGHTNING:
            _lightning(command, rest)
        elif command in COMMANDS:
            _plain(command, rest)
        else:
            near = nearest(command, [*LIGHTNING, *COMMANDS])
            raise UsageError(
                f"unknown command {command!r}." + (f" Did you mean {near}?" if near else "") + " See seqdiff --help."
            )
    except (UsageError, CheckpointError, ValueError, FileExistsError, FileNotFoundError) as error:
        if os.environ.get("SEQDIFF_TRACEBACK"):
            raise
        print(f"seqdiff {command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
