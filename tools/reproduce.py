"""The tables of the README from nothing: prepare, fit, sample, evaluate, one row per scene set.

    python -m seqdiff.tools.reproduce traffic
    python -m seqdiff.tools.reproduce eth_ucy --data DIR --folds zara1 zara2 hotel
    python -m seqdiff.tools.reproduce ngsim --data DIR
    python -m seqdiff.tools.reproduce av2 --data DIR --ckpt RUN

Each part that is already there is kept, so that a stopped run goes on; OUT/table.json holds the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from seqdiff.cli import main as seqdiff
from seqdiff.domains.trajectory.evaluate import evaluate

FOLDS = ("eth", "hotel", "univ", "zara1", "zara2")


@dataclass(frozen=True)
class Job:
    """One row: where its store comes from, how it is trained, what is measured."""

    name: str
    store: str  # a folder, or embedded
    prepare: tuple[str, ...]  # arguments of `seqdiff prepare`, empty for embedded
    fit: tuple[str, ...]
    k: int
    limit: int | None = None
    worlds: tuple[int, ...] = (6, 20)
    min_agents: tuple[int, ...] = (1,)
    sample: tuple[str, ...] = ()  # further arguments of `seqdiff sample`
    first: tuple[str, ...] = ()  # `seqdiff fit` of an earlier training, from which `fit` goes on


def run(*args: str) -> None:
    """A seqdiff command; stops at the first that fails."""
    print("$ seqdiff " + " ".join(args), flush=True)
    code = seqdiff(list(args))
    if code:
        raise SystemExit(code)


def train(folder: Path, fit: tuple[str, ...]) -> None:
    """`seqdiff fit` into folder/run, once; goes on where a stopped one was."""
    done = folder / "trained.json"
    if done.exists():
        return
    begin = time.time()
    resume = (folder / "run" / "checkpoints" / "last.ckpt").exists()
    run("fit", *fit, f"run={folder / 'run'}", *(["resume=true"] if resume else []))
    done.write_text(json.dumps({"minutes": (time.time() - begin) / 60, "resumed": resume}))


def work(job: Job, out: Path, steps: int, ckpt: Path | None) -> list[dict[str, Any]]:
    """Carry out what is missing of a job; returns its tables, one for each window rule."""
    folder = out / job.name
    if job.prepare and not Path(job.store).exists():
        run("prepare", *job.prepare, f"out={job.store}")
    trained = folder / "run"
    if ckpt is None and job.first:
        train(folder / "first", job.first)
    if ckpt is None:
        start = (f"init={folder / 'first' / 'run'}",) if job.first else ()
        train(folder, (*job.fit, f"store={job.store}", *start))
    samples = folder / f"samples_k{job.k}_steps{steps}"
    if not samples.exists():
        limit = [f"limit={job.limit}"] if job.limit else []
        source = [f"ckpt={ckpt or trained}", f"out={samples}", f"store={job.store}"]
        run("sample", *source, "split=test", f"k={job.k}", f"steps={steps}", "seed=0", *limit, *job.sample)
    tables = []
    for least in sorted(job.min_agents, reverse=True):
        print(f"\n{job.name}: windows with at least {least} scored agents", flush=True)
        tables.append({"job": job.name, "min_agents": least} | evaluate(samples, k=list(job.worlds), min_agents=least))
    run("review", f"samples={samples}", f"out={folder / 'review.html'}")
    return tables


def jobs(args: argparse.Namespace) -> list[Job]:
    """The jobs of a set."""
    stores = args.out / "stores"
    more = tuple(args.set)
    if args.set_name == "traffic":
        return [Job("traffic", "embedded", (), ("experiment=traffic", *more), k=64, limit=args.limit)]
    if args.data is None:
        raise SystemExit(f"{args.set_name} needs --data DIR, where the data set's files lie")
    if args.set_name == "eth_ucy":
        return [
            Job(
                fold, str(stores / fold), (f"source=trajdata:eupeds_{fold}", f"data_dir={args.data}"),
                ("experiment=eth_ucy", *more), k=20, worlds=(20,), min_agents=(1, 2),
            )
            for fold in args.folds
        ]  # fmt: skip
    if args.set_name == "ngsim":
        source = (f"source=commonroad:{args.data}",)
        own = ("experiment=ngsim_fine", *more)
        first = ("experiment=ngsim", "store=embedded")
        return [Job("ngsim", str(stores / "ngsim"), source, own, k=64, first=first)]
    if args.ckpt is None:
        raise SystemExit("av2 is shown with a model trained elsewhere: give --ckpt RUN (see README)")
    marked = ("windows.focal=marked", "windows.scored=marked", "windows.radius_m=150")
    return [Job("av2", str(stores / "av2"), (f"source=av2:{args.data}",), (), k=64, sample=marked)]


def show(tables: list[dict[str, Any]]) -> None:
    """All rows with their floors, beside N."""
    table = Table(title="metres; K samples; N agents (windows)")
    for name in (
        "set",
        "rule",
        "row",
        "K",
        "minADE/minFDE",
        "minJADE/minJFDE",
        "energy",
        "collide %",
        "off road %",
        "N",
    ):
        table.add_column(name, no_wrap=True)
    for t in tables:
        h = t["header"]
        for row in t["rows"]:
            pairs = [
                "" if row.get(a) is None else f"{row[a]:.3f}/{row[b]:.3f}"
                for a, b in (("minADE", "minFDE"), ("minJADE", "minJFDE"))
            ]
            score = row.get("energy_score")
            rates = ["unknown" if row.get(r) is None else f"{100 * row[r]:.2f}" for r in ("collision", "off_road")]
            table.add_row(
                t["job"], f">= {t['min_agents']}", row["name"], str(row["k"]), *pairs,
                "" if score is None else f"{score:.3f}", *rates, f"{h['n_agents']} ({h['n_windows']})",
            )  # fmt: skip
    Console(width=160).print(table)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set_name", choices=("traffic", "eth_ucy", "ngsim", "av2"), metavar="SET")
    parser.add_argument("--data", type=Path, help="the data set's files")
    parser.add_argument("--out", type=Path, default=None, help="default: runs/SET")
    parser.add_argument("--folds", nargs="+", choices=FOLDS, default=list(FOLDS), help="ETH/UCY test scenes")
    parser.add_argument("--ckpt", type=Path, help="sample from this run instead of training")
    parser.add_argument("--steps", type=int, default=4, help="evaluations of the net per future")
    parser.add_argument("--limit", type=int, default=None, help="only so many test windows, evenly spread")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of seqdiff fit")
    args = parser.parse_args(argv)
    args.out = args.out or Path("runs") / args.set_name
    args.out.mkdir(parents=True, exist_ok=True)
    tables = [table for job in jobs(args) for table in work(job, args.out, args.steps, args.ckpt)]
    show(tables)
    beside = args.out / ".table.json"
    beside.write_text(json.dumps(tables, indent=1))
    os.replace(beside, args.out / "table.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
