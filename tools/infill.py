"""What knowing some road users' futures does for the forecast of the others: nothing given, given by replacement alone, and
given to a net that was trained with known parts.

    python -m seqdiff.tools.infill --ckpt RUN [--plain RUN] [--limit 40] [--steps 4 8]

RUN was trained with model.net.init_args.inputs=[known] and model.objective.init_args.known=0.3. Of every window the
scored road user
that moves most is given its recorded future, or with --half every second one in the order of how far they move; the
measures are
those of the other scored ones, the same in every row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from seqdiff.checkpoint import find, load_task
from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.data import TrajectoryData
from seqdiff.domains.trajectory.windows import WindowSpec
from seqdiff.task import Task


def chosen(batch: SceneBatch, half: bool) -> tuple[Tensor, Tensor]:
    """Who is given, bool b a: the scored agent that goes farthest, or every second one by distance; and whether a scored one
    is left (b)."""
    gone = (batch.fut[:, :, -1, :2] - batch.hist[:, :, -1, :2]).norm(dim=-1)
    rank = torch.where(batch.scored, gone, -1.0).argsort(dim=1, descending=True).argsort(dim=1)
    given = batch.scored & ((rank % 2 == 0) if half else (rank == 0))
    return given, (batch.scored & ~given).any(1)


def of_others(
    task: Task, batch: SceneBatch, way: str, steps: int, k: int, first: int, half: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Measures of the other scored agents (b each), and the largest difference of the given latents from what was given.

    way: of giving: "nothing", "replacement" (the net is not told) or "trained" (it is). half: see `chosen`.
    """
    at, ok = chosen(batch, half)
    z0, _ = task.adapter.encode(batch)
    mask = at[:, None, :, None].expand_as(z0)
    inputs = task.net.inputs
    if way == "replacement":
        task.net.inputs = ()
    sampler = replace(task.sampler, steps=steps, energy_iterations=0)
    known = None if way == "nothing" else (z0, mask)
    draw = task.draw(batch, k=k, seed=0, first_item=first, sampler=sampler, known=known)
    task.net.inputs = inputs
    others = replace(batch, scored=batch.scored & ~at)
    out = task.adapter.validate(task.adapter.decode(draw.z, batch), others)
    off = torch.zeros(()) if known is None else ((draw.z - z0) * mask).abs().max()
    return {name: value[ok] for name, value in out.items()}, off


def rows(task: Task, batches: Sequence[Any], steps: Sequence[int], k: int, half: bool = False) -> list[dict[str, Any]]:
    """One row for each number of steps and way of giving."""
    ways = ["nothing", "replacement", *(["trained"] if "known" in task.net.inputs else [])]
    table = []
    with torch.no_grad(), tqdm(total=len(steps) * len(ways) * len(batches), unit="batch", desc="infilling") as bar:
        for n in steps:
            for way in ways:
                found: dict[str, list[Tensor]] = {}
                off, first = 0.0, 0
                for batch in batches:
                    measured, worst = of_others(task, batch, way, n, k, first, half)
                    first += batch.n_scenes
                    off = max(off, float(worst))
                    for name, value in measured.items():
                        found.setdefault(name, []).append(value)
                    bar.update()
                mean = {name: float(torch.cat(values).mean()) for name, values in found.items()}
                table.append({"steps": n, "given": way, "n": len(torch.cat(found["minJADE"])), "off": off} | mean)
    return table


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, required=True, help="a run trained with known parts")
    parser.add_argument("--plain", type=Path, help="a run trained without, for comparison")
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int, default=40, help="windows, evenly spread over the split")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--half", action="store_true", help="give every second road user, not one")
    args = parser.parse_args(argv)
    shown = Table(title=f"forecast of the others when {'every second' if args.half else 'one'} future is given; metres")
    for name in ("model", "steps", "given", "energy score", "minJADE", "minADE", "off by", "N"):
        shown.add_column(name)
    for label, path in (("with known parts", args.ckpt), ("without", args.plain)):
        if path is None:
            continue
        task, config = load_task(find(path))
        init = config["data"]["init_args"]
        data = TrajectoryData(init["store"], WindowSpec(**init["windows"]), eval_batch_size=8)
        batches = list(data.eval_batches(args.split, args.limit))
        for r in rows(task, batches, args.steps, args.k, args.half):
            numbers = [f"{r[name]:.3f}" for name in ("energy_score", "minJADE", "minADE")]
            shown.add_row(label, str(r["steps"]), r["given"], *numbers, f"{r['off']:.1g}", str(r["n"]))
    Console(width=120).print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
