"""What if this car turns left? Futures of a scene before and after wishes, on one page; or a table over many scenes.

    python -m seqdiff.tools.what_if --ckpt RUN --out what_if                      # picks a car before a junction
    python -m seqdiff.tools.what_if --ckpt RUN --scene crossing_11_run0 --t0 280 --agent car_26 --turn left
    python -m seqdiff.tools.what_if --ckpt RUN --constraints wishes.yaml --scene S --t0 20
    python -m seqdiff.tools.what_if --ckpt RUN --table --limit 30                 # satisfaction and what it costs

Writes OUT/before and OUT/after (samples folders, the same noise) and OUT/what_if.html. The wish is a goal, with the heading
there, where the map's lanes have turned; OUT/wishes.yaml holds it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from seqdiff.checkpoint import find, load_task
from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.constraints import Constraints, read_constraints
from seqdiff.domains.trajectory.data import EvalBatches, TrajectoryData
from seqdiff.domains.trajectory.energies import ON_ROAD, energies
from seqdiff.domains.trajectory.evaluate import aligned
from seqdiff.domains.trajectory.io import NUMBERS, SampleWriter, read_samples
from seqdiff.domains.trajectory.kinematics import velocity
from seqdiff.domains.trajectory.lanes import LaneGraph, turning
from seqdiff.domains.trajectory.scene import AGENT_TYPES
from seqdiff.domains.trajectory.windows import WindowSpec
from seqdiff.generate import choose_sampler, describe_run, generate
from seqdiff.tools.what_if_table import table
from seqdiff.viz.review import review

TURNS = {"left": 1.0, "right": -1.0}
TURNED = 1.05  # radians after which a route counts as having turned
BEYOND = 6.0  # metres past that place where the goal lies
PUSH = 1.0  # m/s^2 that the goal's distance may ask for
SHARE = math.pi / 4  # radians by which a future's last heading must have changed to count as turned


@dataclass(frozen=True)
class Case:
    """A car that could turn."""

    scene_id: str
    t0: int
    agent: str
    x: float  # world frame
    y: float
    heading: float
    way: float  # metres along the lanes to the goal

    def wishes(self) -> list[dict[str, Any]]:
        """The wish as plain data, for the yaml."""
        return [
            {
                "kind": "goal", "scene_id": self.scene_id, "t0": self.t0, "agent": self.agent, "x": round(self.x, 2),
                "y": round(self.y, 2), "heading": round(self.heading, 3),
            }
        ]  # fmt: skip


class Chosen:
    """Some windows of a data module, in the form that `generate` takes."""

    def __init__(self, data: TrajectoryData, split: str, windows: list[tuple[str, int]]) -> None:
        self.data, self.split = data, split
        found = data.dataset(split)
        self.index = np.array([found.find(*window) for window in windows], np.int64)

    def eval_batches(self, split: str, limit: int | None) -> EvalBatches:
        return EvalBatches(self.data.dataset(split), self.index, self.data.eval_batch_size)

    def describe(self, split: str) -> dict[str, Any]:
        return self.data.describe(split)


def find_case(data: TrajectoryData, batch: SceneBatch, sign: float, agent: str | None = None) -> Case | None:
    """The car of a window (or `agent`) that could turn to that side within the horizon; of several the one that moves fastest
    among those that also have another way and were not recorded to turn so."""
    store = data.store
    scene = store.scene_index(batch.scene_id[0])
    road = store.map(scene)
    if road is None:
        return None
    graph = LaneGraph(road)
    shift = batch.origin[0].numpy() - store.origin(scene)
    speed = velocity(batch.hist, batch.hist_valid, batch.dt)[0].norm(dim=-1)
    seconds = batch.fut.shape[2] * batch.dt
    best: tuple[float, Case] | None = None
    for j, name in enumerate(batch.agent_id[0]):
        if agent not in (None, name) or AGENT_TYPES[int(batch.type[0, j])] not in ON_ROAD:
            continue
        pose, v = batch.hist[0, j, -1], float(speed[j])
        routes = graph.routes(pose[:2].numpy() + shift, float(pose[2]), 70.0)
        ways = [found for r in routes if (found := turning(r, sign * TURNED, BEYOND)) is not None]
        ways = [w for w in ways if w[2] <= v * seconds + 0.5 * PUSH * seconds**2]
        did = float(turn(batch.fut[0, j, -1, 2], pose[2])) * sign > SHARE / 2
        if not ways or (agent is None and (did or len(ways) == len(routes) or v < 2)):
            continue
        point, heading, way = min(ways, key=lambda w: w[2])
        x, y = point + store.origin(scene)
        case = Case(batch.scene_id[0], int(batch.t0[0]), name, float(x), float(y), heading, way)
        if best is None or v > best[0]:
            best = (v, case)
    return None if best is None else best[1]


def turn(heading: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Change of heading, wrapped."""
    d = heading - before
    return torch.atan2(d.sin(), d.cos())


def choose(data: TrajectoryData, args: argparse.Namespace) -> Case:
    """As asked, or the first window of the split, evenly spread, with a car that could turn."""
    found = data.dataset(args.split)
    sign = TURNS[args.turn]
    if args.scene is not None:
        windows = [found.find(args.scene, args.t0)]
    else:
        windows = np.linspace(0, len(found) - 1, min(len(found), 60)).round().astype(int).tolist()
    for w in windows:
        case = find_case(data, found.batch([w]), sign, args.agent)
        if case is not None:
            return case
    who = f"agent {args.agent!r}" if args.agent else "no car"
    raise SystemExit(
        f"{who}: no lane of the map turns {args.turn} within reach in {len(windows)} windows of split {args.split}; name another "
        "--scene, --t0 and --agent, or give --constraints FILE"
    )


def draw_both(args: argparse.Namespace, data: TrajectoryData, window: tuple[str, int], wishes: Constraints) -> None:
    """OUT/before and OUT/after, from the same noise; the guidance against collisions and leaving the road is in both."""
    path = find(args.ckpt)
    task, config = load_task(path)
    chosen = Chosen(data, args.split, [window])
    sampler = choose_sampler(task.sampler, steps=args.steps)
    for name, constraints in (("before", None), ("after", wishes)):
        with SampleWriter(args.out / name, overwrite=True) as writer:
            done = generate(
                task, chosen, writer, sampler, k=args.k, seed=args.seed, split=args.split, constraints=constraints
            )
            writer.close(
                describe_run(task, path, config, sampler, args.k, args.seed) | chosen.describe(args.split) | done
            )


def numbers(args: argparse.Namespace, data: TrajectoryData, window: tuple[str, int], wishes: Constraints,
            agent: str | None) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of the comparison: name, before, after, unit."""
    batch = data.dataset(args.split).batch([data.dataset(args.split).find(*window)])
    both = [aligned([read_samples(args.out / name).window(*window)], batch)[0].float() for name in ("before", "after")]
    rows: list[dict[str, Any]] = []

    def add(name: str, values: list[float], unit: str = "%") -> None:
        shown = [None if math.isnan(v) else v for v in values]
        rows.append({"name": name, "before": shown[0], "after": shown[1], "unit": unit})

    j = batch.agent_id[0].index(agent) if agent is not None else -1
    if j >= 0:
        turns = [turn(x[0, :, j, -1, 2], batch.hist[0, j, -1, 2]) * TURNS[args.turn] for x in both]
        add(f"{agent} turns {args.turn}", [float((t > SHARE).float().mean()) * 100 for t in turns])
    met = [wishes.satisfied(x, batch) for x in both]
    for name in met[0]:
        add(f"{name.removeprefix('satisfied_').replace('_', ' ')} met", [float(m[name].mean()) * 100 for m in met])
    wrong = [energies(x, batch) for x in both]
    for name, label in (
        ("collision", "agents that collide"),
        ("off_road", "off the road"),
        ("infeasible", "infeasible"),
    ):
        add(label, [float(e[name].mean()) * 100 for e in wrong])
    moved = (both[1] - both[0])[0, ..., :2].norm(dim=-1).mean((0, 2))
    others = batch.mask[0].clone()
    if j >= 0:
        others[j] = False
        rows.append({"name": f"{agent} moved by", "before": None, "after": float(moved[j]), "unit": "m"})
    if others.any():
        rows.append({"name": "others moved by", "before": None, "after": float(moved[others].mean()), "unit": "m"})
        most = int(torch.where(others, moved, -1.0).argmax())
        label = f"most, {batch.agent_id[0][most]}"
        rows.append({"name": label, "before": None, "after": float(moved[most]), "unit": "m"})
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The rows on the screen."""
    out = Table(title=title)
    for name in ("", "before", "after"):
        out.add_column(name, justify="left" if not name else "right")
    for row in rows:
        cells = ["" if row[side] is None else f"{row[side]:.2f} {row['unit']}" for side in ("before", "after")]
        out.add_row(row["name"], *cells)
    Console(width=120).print(out)


def example(args: argparse.Namespace, data: TrajectoryData) -> Path:
    """Wish, both samples folders, numbers, page."""
    args.out.mkdir(parents=True, exist_ok=True)
    agent = args.agent
    if args.constraints is not None:
        if args.scene is None:
            raise SystemExit("--constraints needs --scene and --t0: which window to draw")
        wishes, window = read_constraints(args.constraints), (args.scene, args.t0)
    else:
        case = choose(data, args)
        agent, window = case.agent, (case.scene_id, case.t0)
        file = args.out / "wishes.yaml"
        file.write_text(yaml.safe_dump(case.wishes(), sort_keys=False))
        wishes = read_constraints(file)
        print(f"{case.scene_id} at t0 {case.t0}: {agent} is to turn {args.turn}, {case.way:.0f} m along its lanes")
    draw_both(args, data, window, wishes)
    rows = numbers(args, data, window, wishes, agent)
    show(rows, f"{window[0]} at t0 {window[1]}, {args.k} futures, {args.steps or 'the model’s'} steps")
    file = args.out / "after" / NUMBERS
    beside = file.with_suffix(".partial")
    beside.write_text(json.dumps(rows, indent=1, allow_nan=False))
    os.replace(beside, file)
    return review(args.out / "after", args.out / "what_if.html", compare=args.out / "before")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", type=Path, required=True, help="a run's folder or a .ckpt file")
    parser.add_argument("--out", type=Path, default=Path("what_if"))
    parser.add_argument("--store", default=None, help="default: the one the model was trained on")
    parser.add_argument("--split", default="test")
    parser.add_argument("--scene", help="scene id; default: one is picked")
    parser.add_argument("--t0", type=int, help="scene step of the present, with --scene")
    parser.add_argument("--agent", help="who is to turn; default: one is picked")
    parser.add_argument("--turn", choices=tuple(TURNS), default="left")
    parser.add_argument("--constraints", type=Path, help="wishes of your own instead of a turn")
    parser.add_argument("-k", type=int, default=32, help="futures")
    parser.add_argument("--steps", type=int, default=None, help="of the sampler; default: the model's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="many scenes instead of one, with automatic wishes")
    parser.add_argument("--limit", type=int, default=30, help="scenes of the table")
    args = parser.parse_args(argv)
    if (args.scene is None) != (args.t0 is None):
        parser.error("--scene and --t0 go together")
    if args.agent is not None and args.scene is None:
        parser.error("--agent needs --scene and --t0")
    _, config = load_task(find(args.ckpt))
    section = config["data"]["init_args"]
    data = TrajectoryData(args.store or section["store"], WindowSpec(**section["windows"]), eval_batch_size=1)
    if args.table:
        table(args, data)
    else:
        print(example(args, data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
