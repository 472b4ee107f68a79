"""Quality against evaluations of the net and time: teacher's samplers and few-step students, one table and one figure.

    python -m seqdiff.tools.frontier mixture
    python -m seqdiff.tools.frontier traffic --train
    python -m seqdiff.tools.frontier eth_ucy --train --data DIR
    python -m seqdiff.tools.frontier traffic --ckpt TEACHER_RUN --students distill=RUN mean_flow=RUN

`mixture` trains small nets on a law that is known and measures the distance to it. The others measure on recorded scenes, all
on the same windows and seeds; with --train what is missing is trained first, and a stopped training goes on. OUT gets
frontier.json and frontier.html, which opens from disk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from seqdiff.tools import frontier_mixture, frontier_scenes
from seqdiff.tools.reproduce import FOLDS, run, train
from seqdiff.viz.frontier import Line, Panel, figure, write_page

# How the students of --train are trained: further arguments of `seqdiff fit`, beside the set's own.
STUDENTS: dict[str, tuple[str, ...]] = {
    "best_of_k": ("objective=best_of_k", "trainer.max_steps=1500"),
    "distill": ("objective=distill", "trainer.max_steps=1000"),
    "mean_flow": ("objective=mean_flow", "trainer.max_steps=1500"),
}
TARGETS = ((1.0, 1.05), (2.0, 1.02))  # evaluations -> energy score and minJADE relative to the 32-step teacher's
TICKS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
TICKS_MS = (5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


@dataclass(frozen=True)
class SceneSet:
    """A set of recorded scenes. fit: of teacher and students; store: None = --data prepared into OUT/stores; student: further
    arguments of students, which start where their training started."""

    fit: tuple[str, ...]
    store: str | None
    student: tuple[str, ...] = ()


SETS = {
    "traffic": SceneSet(("experiment=traffic", "model.sampler.energy_iterations=0"), "embedded"),
    "eth_ucy": SceneSet(("experiment=eth_ucy",), None, ("model.sampler.shift=1.0",)),
}


def student_arguments(set_name: str, name: str, teacher: Path, store: str) -> tuple[str, ...]:
    """Arguments of `seqdiff fit` for one of STUDENTS."""
    which = SETS[set_name]
    return (*which.fit, f"store={store}", "sampler=flow_map", f"init={teacher}", *which.student, *STUDENTS[name])


def train_missing(args: argparse.Namespace) -> tuple[Path, dict[str, Path]]:
    """Teacher and students, those named on the command line as they are, the others trained into OUT."""
    which = SETS[args.set_name]
    store = which.store or str(args.out / "stores" / args.fold)
    if which.store is None and not Path(store).exists():
        if args.data is None:
            raise SystemExit(f"{args.set_name} --train needs --data DIR, where the data set's files lie")
        run("prepare", f"source=trajdata:eupeds_{args.fold}", f"data_dir={args.data}", f"out={store}")
    teacher = args.ckpt
    if teacher is None:
        train(args.out / "teacher", (*which.fit, f"store={store}"))
        teacher = args.out / "teacher" / "run"
    students = dict(args.students)
    for name in STUDENTS:
        if name not in students:
            train(args.out / name, student_arguments(args.set_name, name, teacher, store))
            students[name] = args.out / name / "run"
    return teacher, students


# ---- what is shown --------------------------------------------------------------------------------------------------


def mixture_page(found: dict[str, Any]) -> tuple[list[Panel], list[str], list[list[str]], list[str]]:
    """Panels, columns, rows and notes of the mixture."""
    rows, low = found["rows"], found["floor"]
    columns = [
        "method",
        "evaluations",
        "training steps",
        "sliced Wasserstein",
        "energy distance",
        "spread / true",
        "wrong pairs %",
    ]
    cells = [
        [
            r["method"], str(r["evaluations"]), str(r["trained"]), f"{r['sliced_wasserstein']:.4f}", f"{r['energy_distance']:.5f}",
            f"{r['spread_ratio']:.3f}", f"{100 * r['wrong_pairs']:.2f}",
        ] for r in rows
    ]  # fmt: skip
    for name, part in (("true samples", ""), ("64 true samples", "_of_64")):
        pair = [f"{low['sliced_wasserstein' + part]:.4f}", f"{low['energy_distance' + part]:.5f}"]
        cells.append([name, "", "", *pair, "", "" if part else f"{100 * low['wrong_pairs']:.2f}"])
    panels = []
    for key, title in (("sliced_wasserstein", "Sliced Wasserstein distance"), ("energy_distance", "Energy distance")):
        lines = _lines(rows, lambda r: r["evaluations"], lambda r, key=key: max(r[key], low[key]), _is_student)
        panels.append(
            Panel(
                title, "evaluations", "to the true law", lines, (low[key], "two true samples"), log_y=True, ticks=TICKS
            )
        )
    lines = _lines(rows, lambda r: r["evaluations"], lambda r: r["spread_ratio"], _is_student)
    panels.append(
        Panel("Spread", "evaluations", "relative to the law's", lines, (1.0, "two true samples"), ticks=TICKS)
    )
    s = found["setup"]
    notes = [
        f"{s['n']} samples a row. Training steps of {s['batch']} items: {s['teacher']} of the teacher, {s['student']} more of "
        f"students that go on from it, {s['teacher'] + s['student']} of those from nothing.",
        "Distances below the noise of two true samples are drawn at it; the table has them as they are. Energy distances are "
        "unbiased, so that they may be negative.",
        "Wrong pairs: both tokens at modes that never happen together. Learned starts give at most 64 different samples.",
    ]
    return panels, columns, cells, notes


def _is_student(row: dict[str, Any]) -> bool:
    return row["step"] == "flow_map"


def scenes_page(found: dict[str, Any]) -> tuple[list[Panel], list[str], list[list[str]], list[str]]:
    """Panels, columns, rows and notes of recorded scenes."""
    rows = found["rows"]
    columns = [
        "method", "evaluations", "energy score", "ratio", "minJADE", "ratio", "minADE", "ratio", "spread ratio", "collide %",
        "infeasible %", "ms a scene",
    ]  # fmt: skip
    cells = []
    for r in rows:
        pairs = [c for n in ("energy_score", "minJADE", "minADE") for c in (f"{r[n]:.3f}", _interval(r[f"{n}_ratio"]))]
        rates = [f"{100 * r[n]:.2f}" for n in ("collision", "infeasible")]
        cells.append(
            [r["method"], str(r["evaluations"]), *pairs, _interval(r["spread_ratio"]), *rates, f"{r['ms']:.1f}"]
        )
    shown = [r for r in rows if r["method"] != "teacher, other seed"]
    panels, first = [], rows[0]
    name = f"{first['method']} at {first['evaluations']} evaluations"
    level, label = (1.0, name), f"relative to {first['evaluations']} evaluations"
    for key, title in (("energy_score", "Energy score"), ("minJADE", f"minJADE{found['k']}")):
        lines = _lines(shown, lambda r: r["evaluations"], lambda r, k=key: r[f"{k}_ratio"], lambda r: r["student"])
        bands = [(x, 0.9, top) for x, top in TARGETS]
        panels.append(Panel(title, "evaluations", label, lines, level, bands, ticks=TICKS))
    lines = _lines(shown, lambda r: r["ms"], lambda r: r["energy_score_ratio"], lambda r: r["student"])
    panels.append(Panel("Energy score", "ms a scene", label, lines, level, ticks=TICKS_MS))
    lines = _lines(shown, lambda r: r["evaluations"], lambda r: r["spread_ratio"], lambda r: r["student"])
    panels.append(Panel("Spread", "evaluations", label, lines, level, [(x, 0.9, 1.1) for x, _ in TARGETS], ticks=TICKS))
    recorded = ", ".join(f"{100 * v:.2f} % {n}" for n, v in found["recorded"].items())
    notes = [
        f"Split {found['split']}: {found['windows']} windows, {found['agents']} scored agents, {found['k']} samples each; "
        f"{found['windows_without_scored_agents']} windows without a scored agent left out. The recording itself: {recorded}.",
        f"Ratios to {name}, same windows and seeds, with 95 % bootstrap intervals over "
        f"{found['blocks']} blocks of windows (windows that overlap in time are drawn together). Energy guidance off.",
        f"ms: median from one scene to its {found['k']} decoded futures, {found['threads']} thread(s).",
    ]
    return panels, columns, cells, notes


def _interval(ratio: tuple[float, float, float]) -> str:
    return "{:.3f} [{:.2f}, {:.2f}]".format(*ratio)


def _lines(rows: list[dict[str, Any]], x: Any, y: Any, student: Any) -> list[Line]:
    """One line per method; y gives a number, or (number, low, high)."""
    lines = []
    for name in dict.fromkeys(r["method"] for r in rows):
        own = sorted((r for r in rows if r["method"] == name), key=x)
        at = [float(x(r)) for r in own]
        found = [y(r) for r in own]
        if isinstance(found[0], tuple | list):
            between = [(float(low), float(high)) for _, low, high in found]
            lines.append(Line(name, at, [float(v[0]) for v in found], between, student(own[0])))
        else:
            lines.append(Line(name, at, [float(v) for v in found], None, student(own[0])))
    return lines


def show(found: dict[str, Any], out: Path) -> None:
    """Table on screen, frontier.json and frontier.html."""
    mixture = found["set"] == "mixture"
    panels, columns, cells, notes = mixture_page(found) if mixture else scenes_page(found)
    title = f"Quality against evaluations: {found['set']}"
    table = Table(title=title)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True, overflow="fold")
    for row in cells:
        table.add_row(*row)
    console = Console() if sys.stdout.isatty() else Console(width=210)
    console.print(table)
    for note in notes:
        console.print(note)
    out.mkdir(parents=True, exist_ok=True)
    beside = out / ".frontier.json"
    beside.write_text(json.dumps(found, indent=1))
    os.replace(beside, out / "frontier.json")
    print(write_page(figure(panels), columns, cells, notes, title, out / "frontier.html"))


def _named(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected NAME=RUN, for example distill=runs/distill")
    return name, Path(path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set_name", choices=("mixture", *SETS), metavar="SET", help="mixture, traffic or eth_ucy")
    parser.add_argument("--out", type=Path, default=None, help="default: runs/frontier_SET")
    parser.add_argument("--ckpt", type=Path, help="the teacher: a run or checkpoint trained with objective=flow")
    parser.add_argument("--students", type=_named, nargs="+", default=[], metavar="NAME=RUN")
    parser.add_argument("--train", action="store_true", help="train the teacher and students that were not given")
    parser.add_argument("--data", type=Path, help="eth_ucy --train: the data set's files")
    parser.add_argument("--fold", choices=FOLDS, default="zara1", help="eth_ucy --train: the test scene")
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int, default=None, help="only so many windows, evenly spread")
    parser.add_argument("--k", type=int, default=20, help="samples of each window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch, times are measured with")
    parser.add_argument(
        "--steps", type=int, default=None, help="mixture: training steps of the teacher; students take half"
    )
    args = parser.parse_args(argv)
    args.out = args.out or Path("runs") / f"frontier_{args.set_name}"
    if args.set_name != "mixture" and args.ckpt is None and not args.train:
        parser.error("give --ckpt TEACHER_RUN (and --students NAME=RUN ...), or --train to train them")
    return args


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    if args.set_name == "mixture":
        setup = frontier_mixture.Setup()
        if args.steps is not None:
            setup = replace(setup, teacher=args.steps, student=max(1, args.steps // 2))
        found = frontier_mixture.compare(setup)
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        teacher, students = train_missing(args) if args.train else (args.ckpt, dict(args.students))
        found = frontier_scenes.compare(teacher, students, args.split, args.limit, args.k, seed=args.seed)
        found["set"] = args.set_name
    show(found, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
