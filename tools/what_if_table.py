"""The table of `python -m seqdiff.tools.what_if --table`: how often automatic wishes are met, and what that costs."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from seqdiff.checkpoint import find, load_task
from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.constraints import Constraints, parse_constraints
from seqdiff.domains.trajectory.data import TrajectoryData
from seqdiff.domains.trajectory.energies import ON_ROAD, energies, of_types
from seqdiff.domains.trajectory.metrics import energy_score
from seqdiff.domains.trajectory.wish_energies import conflicts

SLOWER = 0.8  # of a car's mean speed in the unguided futures, as its limit
MOVES = 15.0  # metres that a car must go in the mean future to be wished at


def automatic(x: Tensor, batch: SceneBatch) -> list[dict[str, Any]]:
    """Wishes for one scene from its unguided futures x [1, k, a, t, 3], each for another motor vehicle: that the one whose
    futures end most widely apart ends where its most outlying future does; that the fastest other one keeps to 80 % of its mean
    speed; that of two whose ways cross in a future, the first to come waits for the other."""
    where = {"scene_id": batch.scene_id[0], "t0": int(batch.t0[0])}
    ids, free = batch.agent_id[0], (of_types(batch, ON_ROAD) & batch.mask)[0]
    ends = x[0, :, :, -1, :2]
    apart = (ends - ends.mean(0)).norm(dim=-1)  # k a
    gone = (ends.mean(0) - batch.hist[0, :, -1, :2]).norm(dim=-1)
    free = free & (gone > MOVES)
    out: list[dict[str, Any]] = []
    pair = _crossing(x[0], batch, free)
    if pair is not None:
        out.append({"kind": "yields", **where, "agent": ids[pair[0]], "to": ids[pair[1]]})
        free[list(pair)] = False
    if bool(free.any()):
        j = int(torch.where(free, apart.mean(0), -1.0).argmax())
        to = x[0, int(apart[:, j].argmax()), j, -1, :2].double() + batch.origin[0]
        seconds = x.shape[3] * batch.dt
        out.append({"kind": "goal", **where, "agent": ids[j], "x": float(to[0]), "y": float(to[1]), "at_s": seconds})
        free[j] = False
    if bool(free.any()):
        way = torch.diff(x[0, ..., :2], dim=2).norm(dim=-1).sum(-1).mean(0)  # a
        j = int(torch.where(free, way, -1.0).argmax())
        out.append({
            "kind": "speed_limit", **where, "agent": ids[j], "mps": SLOWER * float(way[j]) / ((x.shape[3] - 1) * batch.dt)
        })  # fmt: skip
    return out


def _crossing(x: Tensor, batch: SceneBatch, free: Tensor) -> tuple[int, int] | None:
    """(first to come, the other) of two agents whose ways cross at an angle in some future, the earliest such."""
    every = max(1, round(0.4 / batch.dt))
    few = x[:4, :, every - 1 :: every]
    who = free.nonzero()[:, 0].tolist()
    disc = of_types(batch, ())[0]
    for k in range(len(few)):
        for n, i in enumerate(who):
            for j in who[n + 1 :]:
                hit = conflicts(few[k : k + 1, i], few[k : k + 1, j], batch.size[0, [i, j]], disc[[i, j]], 0.0)[0]
                at = hit.nonzero()
                if not len(at):
                    continue
                angle = few[k, i, at[:, 0], 2] - few[k, j, at[:, 1], 2]
                lag = at[:, 1] - at[:, 0]
                if bool((angle.sin().abs() > 0.5).all()) and bool((lag > 1).all() or (lag < -1).all()):
                    return (i, j) if int(lag[0]) > 0 else (j, i)
    return None


def measure(x: Tensor, batch: SceneBatch, wishes: Constraints) -> dict[str, float]:
    """Shares met, rates and the joint energy score of futures [1, k, a, t, 3]."""
    out = {name: float(v.mean()) for name, v in wishes.satisfied(x, batch).items()}
    out |= {name: float(v.mean()) for name, v in energies(x, batch).items()}
    p = torch.full(x.shape[:2], 1 / x.shape[1], dtype=torch.float64)
    count = batch.scored & batch.mask & batch.fut_valid.all(-1)
    out["energy_score"] = float(energy_score(x.double(), batch.fut.double(), batch.fut_valid, count, p)[0])
    return out


def table(args: argparse.Namespace, data: TrajectoryData) -> list[dict[str, Any]]:
    """Draw each scene before and after its wishes at 4 and 8 steps, print the means, write OUT/table.json."""
    task, _ = load_task(find(args.ckpt))
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    asked = 0
    batches = data.eval_batches(args.split, args.limit)
    for n, batch in enumerate(tqdm(batches, total=batches.n_items, desc="scenes", unit="scene")):
        wishes: Constraints | None = None
        for steps in (4, 8):
            plain = replace(task.sampler, steps=steps)

            def draw(sampler: Any, constraints: Constraints | None, n: int = n, batch: SceneBatch = batch) -> Tensor:
                with torch.no_grad():
                    got = task.draw(
                        batch, k=args.k, seed=args.seed, first_item=n, sampler=sampler, constraints=constraints
                    )
                    return task.adapter.decode(got.z, batch)

            before = draw(plain, None)
            if wishes is None:
                made = automatic(before, batch)
                if not made:
                    break
                wishes, asked = parse_constraints(made, "automatic"), asked + 1
            rows.setdefault((steps, "before"), []).append(measure(before, batch, wishes))
            rows.setdefault((steps, "after"), []).append(measure(draw(plain, wishes), batch, wishes))
    return _show(args, rows, asked)


def _show(
    args: argparse.Namespace, rows: dict[tuple[int, str], list[dict[str, float]]], asked: int
) -> list[dict[str, Any]]:
    names = {
        "satisfied_goal": "goal %", "satisfied_speed_limit": "speed limit %", "satisfied_yields": "yields %",
        "energy_score": "energy score", "collision": "collide %", "off_road": "off road %", "infeasible": "infeasible %",
    }  # fmt: skip
    out: list[dict[str, Any]] = []
    shown = Table(title=f"{asked} scenes of {args.limit} with a wish, {args.k} futures")
    for name in ("steps", "", *names.values()):
        shown.add_column(name, justify="right")
    for (steps, side), values in sorted(rows.items(), key=lambda r: (r[0][0], r[0][1] == "after")):
        row: dict[str, Any] = {"steps": steps, "side": side}
        cells = []
        for name in names:
            known = np.array([v.get(name, np.nan) for v in values])
            known = known[np.isfinite(known)]
            row[name], row[f"{name}_n"] = (float(known.mean()) if len(known) else None), len(known)
            scale = 1 if name == "energy_score" else 100
            count = f" ({len(known)})" if name.startswith("satisfied") else ""
            cells.append("unknown" if not len(known) else f"{scale * known.mean():.2f}{count}")
        out.append(row)
        shown.add_row(str(steps), side, *cells)
    Console(width=140).print(shown)
    args.out.mkdir(parents=True, exist_ok=True)
    beside = args.out / ".table.json.partial"
    beside.write_text(json.dumps(out, indent=1, allow_nan=False))
    os.replace(beside, args.out / "table.json")
    return out
