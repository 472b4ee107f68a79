"""`seqdiff ...`: Hydra composes, LightningCLI validates and runs; the other commands are plain functions.

One grammar for all: group=choice and key=value. The wire between core, domains and pages: with compose.py the only file of the
core that may name Hydra, and the only one that imports what the config names.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import seqdiff
from seqdiff.compose import UsageError, compose, find_object, nearest
from seqdiff.fit import lightning, split_arguments

LIGHTNING = ("fit", "validate", "test")
COMMANDS = ("prepare", "sample", "tune", "evaluate", "review", "bench")

HELP = """usage: seqdiff COMMAND [group=choice] [key=value ...]

Diffusion over sequences: many complete futures in parallel, scored jointly.

  prepare    recorded data to a packed store        seqdiff prepare source=commonroad:DIR out=STORE
  fit        train                                  seqdiff fit domain=trajectory store=STORE trainer.max_steps=2000
  validate   measures on the validation split       seqdiff validate run=RUN
  test       the same on the test split             seqdiff test run=RUN
  sample     draw futures, score them jointly       seqdiff sample ckpt=RUN split=test k=64 steps=4 seed=0 out=DIR
  tune       learn few-step time grids               seqdiff tune ckpt=RUN sampler=dpmpp_2m
  evaluate   table and metrics.json                 seqdiff evaluate samples=DIR
  review     a page to look at the futures          seqdiff review samples=DIR out=review.html
  bench      latency, throughput, memory            seqdiff bench

`seqdiff COMMAND --help` lists what a command takes. `seqdiff fit --print_config` shows all keys;
`seqdiff fit --config RUN/config.yaml run=OTHER` repeats a run; `seqdiff fit run=RUN resume=true` goes on after a stop.
"""


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
        sampler: ddim, heun, dpmpp_2m, ab2, ...; flow_map and consistency for few-step students; default: the checkpoint's.
        grid: times of the steps: uniform, logsnr, karras, or learned (by `seqdiff tune`); default: the checkpoint's.
        noise: gaussian (independent futures), antithetic, sobol, quantised; default: the checkpoint's.
        temperature: scale of the start noise: 1 = the training law, 0 = identical samples.
        guidance: classifier-free weight; 1 = off.
        energy_iterations: steps of descent away from collisions and back onto the road; 0 = off; default: the checkpoint's.
        constraints: a yaml file of wishes (goals, speed limits, who yields, ...), see docs/constraints.md.
        likelihood: fill log_prob, the log-density of every joint future (probability-flow ODE); takes far longer than sampling.
        store: another store than the one trained on.
        batch_size: scenes at a time.
        limit: at most so many scenes, evenly spread over the split.
        windows: other window settings than the model was trained on, e.g. windows.focal=marked windows.scored=marked.
        overwrite: replace an earlier samples folder.
    """

    ckpt: Path
    out: Path
    split: str = "test"
    k: int = 64
    steps: int | None = None
    seed: int = 0
    sampler: str | None = None
    grid: str | None = None
    noise: str | None = None
    temperature: float | None = None
    guidance: float | None = None
    energy_iterations: int | None = None
    constraints: Path | None = None
    likelihood: bool = False
    store: str | None = None
    batch_size: int | None = None
    limit: int | None = None
    windows: dict[str, Any] | None = None
    overwrite: bool = False


def sample_command(r: SampleRequest) -> Path:
    """Run a request. Returns the folder written."""
    from seqdiff.generate import choose_sampler, describe_run, generate

    if r.k < 1:
        raise UsageError(f"k is {r.k}; expected at least 1 future per scene")
    path, task, config, data = _load(r.ckpt, {"store": r.store, "eval_batch_size": r.batch_size}, r.windows)
    _check_split(data, r.split, r.limit)
    sampler = choose_sampler(
        task.sampler,
        step=r.sampler,
        steps=r.steps,
        grid=r.grid,
        noise=r.noise,
        temperature=r.temperature,
        guidance=r.guidance,
        energy_iterations=r.energy_iterations,
    )
    domain = _domain(data.domain)
    wishes = None if r.constraints is None else find_object(domain["constraints"])(r.constraints)
    writer = find_object(domain["writer"])(r.out, overwrite=r.overwrite)
    with writer:
        done = generate(
            task, data, writer, sampler, k=r.k, seed=r.seed, split=r.split, limit=r.limit, constraints=wishes,
            likelihood=r.likelihood,
        )  # fmt: skip
        writer.close(describe_run(task, path, config, sampler, r.k, r.seed) | data.describe(r.split) | done)
    n = done["n_windows"]
    print(f"{n} scenes x {r.k} futures x {sampler.evaluations} evaluations in {done['seconds_sampling']:.1f} s "
          f"({1000 * done['seconds_sampling'] / max(n, 1):.0f} ms a scene), written to {r.out}")  # fmt: skip
    return r.out


@dataclass
class TuneRequest:
    """Learn time grids for few steps: fitted on validation scenes to the model's own fine trajectories, kept in the checkpoint
    for `seqdiff sample ... grid=learned`.

    Args:
        ckpt: a run's folder or a .ckpt file; the grids are written into it.
        sampler: the step they are for: dpmpp_2m, ab2, ddim, ...
        steps: numbers of steps.
        split: of the store.
        k: futures per scene.
        scenes: of each of two batches, one to fit on and one to check on.
        budget: samplings tried for each number of steps.
        seed: of the noise.
        store: another store than the one trained on.
    """

    ckpt: Path
    sampler: str = "dpmpp_2m"
    steps: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
    split: str = "val"
    k: int = 8
    scenes: int = 8
    budget: int = 100
    seed: int = 0
    store: str | None = None


def tune_command(r: TuneRequest) -> Path:
    """Run a request. Returns the checkpoint written."""
    from rich.console import Console
    from rich.table import Table

    from seqdiff.tune import save, tune

    path, task, _, data = _load(r.ckpt, {"store": r.store, "eval_batch_size": r.scenes}, None)
    _check_split(data, r.split, 2 * r.scenes)
    found = tune(task, list(data.eval_batches(r.split, 2 * r.scenes)), r.sampler, r.steps, r.k, r.seed, r.budget)
    save(path, r.sampler, found)
    names = list(found[0].error)
    table = Table(
        title=f"{r.sampler}: distance to 64 steps of heun, scenes not fitted on (data units, root mean square)"
    )
    for name in ("steps", *names, "learned times"):
        table.add_column(name, justify="right")
    for t in found:
        times = " ".join(f"{x:.3g}" for x in t.times)
        table.add_row(str(t.steps), *(f"{t.error_unseen[name]:.4g}" for name in names), times)
    Console(width=140).print(table)
    print(f"kept in {path}: seqdiff sample ckpt={r.ckpt} sampler={r.sampler} grid=learned steps=N ...")
    return path


REQUESTS: dict[str, tuple[type, Callable[[Any], Path]]] = {
    "sample": (SampleRequest, sample_command),
    "tune": (TuneRequest, tune_command),
}


def _load(ckpt: Path, changes: dict[str, Any], windows: dict[str, Any] | None) -> tuple[Path, Any, dict[str, Any], Any]:
    """Checkpoint file, model, config and data module of a run, with some of the data's settings changed."""
    from jsonargparse import ArgumentParser
    from lightning import LightningDataModule

    from seqdiff.checkpoint import find, load_task

    path = find(ckpt)
    task, config = load_task(path)
    section = config["data"]
    section["init_args"] |= {key: value for key, value in changes.items() if value is not None}
    if windows:
        section["init_args"]["windows"] |= windows
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    return path, task, config, parser.instantiate(parser.parse_object({"data": section})).data


def _check_split(data: Any, split: str, limit: int | None) -> None:
    try:
        data.eval_batches(split, limit)
    except KeyError as error:  # no such split
        raise UsageError(str(error.args[0])) from error


def _domain(name: str) -> dict[str, Any]:
    """The functions that a domain's yaml names."""
    return compose([f"domain={name}"])["domain"]


def _domain_of_samples(given: dict[str, str]) -> str:
    if "samples" not in given:
        return "trajectory"
    run = Path(given["samples"]) / "run.json"
    if not run.is_file():
        raise UsageError(f"{given['samples']} holds no run.json: give a folder written by `seqdiff sample`")
    try:
        return str(json.loads(run.read_text())["domain"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{run} is not a run.json of seqdiff: {error}") from error


def _function(command: str, given: dict[str, str]) -> Callable[..., Any]:
    if command == "bench":
        return find_object("seqdiff.tools.bench.bench")
    domain = given.pop("domain", None) or _domain_of_samples(given)
    return find_object(_domain(domain)[command])


def _parser(command: str, given: dict[str, str]) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
    """What a command runs, the parser of its signature, and key -> argparse action."""
    from jsonargparse import ArgumentParser

    function: Callable[..., Any]
    parser = ArgumentParser(prog=f"seqdiff {command}", exit_on_error=False)
    if command in REQUESTS:
        request, function = REQUESTS[command]
        parser.add_class_arguments(request)
    else:
        function = _function(command, given)
        parser.add_function_arguments(function)
    known = {a.dest: a for a in parser._actions if a.dest not in ("help", "config", "print_config")}
    return function, parser, known


def parse(command: str, args: Sequence[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a command and its checked arguments; nothing is run.

    Args:
        args: key=value (or --key value), against the function's signature.

    Raises:
        UsageError: a key or a value that it does not take.
    """
    from jsonargparse import ArgumentError

    overrides, flags = split_arguments(args)
    bad = [o for o in overrides if "=" not in o]
    if bad:
        raise UsageError(f"got {bad[0]!r}; expected key=value, see `seqdiff {command} --help`")
    given = {key.removeprefix("data."): value for key, value in (o.split("=", 1) for o in overrides)}
    inner = {key.removeprefix("windows."): given.pop(key) for key in list(given) if key.startswith("windows.")}
    if inner:
        given["windows"] = json.dumps({key: yaml.safe_load(value) for key, value in inner.items()})
    function, parser, known = _parser(command, given)
    for key in given:
        if key not in known:
            near = nearest(key, known)
            raise UsageError(
                f"seqdiff {command} takes no {key!r}." + (f" Did you mean {near}?" if near else "")
                + f" It takes {', '.join(known)}."
            )  # fmt: skip
    missing = [key for key, action in known.items() if action.required and key not in given]
    if missing and not flags:
        raise UsageError(f"seqdiff {command} needs {' '.join(f'{key}=...' for key in missing)}")
    try:
        values = parser.parse_args([f"--{key}={value}" for key, value in given.items()] + flags)
    except ArgumentError as error:
        raise UsageError(str(error)) from error
    return function, parser.instantiate(values).as_dict()


def plain(command: str, args: Sequence[str]) -> None:
    """Run a command that is a function, or print its help."""
    if "-h" in args or "--help" in args:
        function, _, known = _parser(command, {})
        print(help_text(command, (REQUESTS[command][0] if command in REQUESTS else function).__doc__ or "", known))
        return
    function, named = parse(command, args)
    if command in REQUESTS:
        request, run = REQUESTS[command]
        run(request(**named))
    else:
        function(**named)


def help_text(command: str, doc: str, actions: dict[str, Any]) -> str:
    """Usage, what the command does, and each key with its default and text.

    Args:
        doc: docstring of the function; its first paragraph is shown.
        actions: key -> argparse action.
    """
    width = min(shutil.get_terminal_size((100, 20)).columns, 110)
    needed = [key for key, action in actions.items() if action.required]
    usage = f"usage: seqdiff {command} " + "".join(f"{key}={key.upper()} " for key in needed) + "[key=value ...]"
    first = " ".join(doc.split("\n\n")[0].split())
    lines = [usage, "", *textwrap.wrap(first, width), ""]
    for key, action in actions.items():
        default = action.default
        shown = key.upper() if default is None else "".join(str(default).split()) if not isinstance(default, bool) else (
            str(default).lower())  # fmt: skip
        left = f"  {key}={shown}"
        text = str(action.help or "") + (" (required)" if action.required else "")
        body = textwrap.wrap(text, width - 28)
        if len(left) > 26:
            lines.append(left)
            left = ""
        lines += [f"{left:<28}{body[0] if body else ''}", *(" " * 28 + line for line in body[1:])]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, 2 for something the user can mend, 130 after Ctrl-C."""
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
            lightning(command, rest)
        elif command in COMMANDS:
            plain(command, rest)
        else:
            near = nearest(command, [*LIGHTNING, *COMMANDS])
            raise UsageError(
                f"unknown command {command!r}." + (f" Did you mean {near}?" if near else "") + " See seqdiff --help."
            )
    except KeyboardInterrupt:
        return 130
    except (UsageError, ValueError, FloatingPointError, OSError) as error:
        if os.environ.get("SEQDIFF_TRACEBACK"):
            raise
        print(f"seqdiff {command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
