"""Record the embedded traffic set with SUMO: `python -m seqdiff.tools.record_traffic --out FILE.npz --seed 0`.

Random road networks of five kinds, several runs of traffic on each, one scene a run at 10 Hz. Whole networks go to one
split, so that the roads of "val" and "test" were never trained on. The same command, seed and SUMO give the same bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tqdm import tqdm

from seqdiff.domains.trajectory.readers.recordings import write_recordings
from seqdiff.domains.trajectory.scene import Scene
from seqdiff.tools.traffic_map import read_map
from seqdiff.tools.traffic_networks import KINDS, make_network
from seqdiff.tools.traffic_report import summarise
from seqdiff.tools.traffic_run import DT, SumoError, build_network, simulate

# seconds until traffic is in flow
WARM_S = {"grid": 70.0, "crossing": 50.0, "roundabout": 50.0, "motorway": 60.0, "curve": 70.0}


@dataclass(frozen=True)
class Job:
    """One network and its runs."""

    kind: str
    index: int
    split: str
    runs: int
    seconds: float
    seed: int


def split_of(index: int, count: int) -> str:
    """Split of network `index` of `count` of one kind: 70 % train, 10 % val, 20 % test or near it."""
    test = 0 if count == 1 else max(1, round(0.2 * count))
    val = 0 if count < 3 else max(1, round(0.1 * count))
    if index < count - test - val:
        return "train"
    return "val" if index < count - test else "test"


def plan(kinds: Sequence[str], networks: int, runs: int, seconds: float, seed: int) -> list[Job]:
    """All networks to record, in the order of the file."""
    unknown = [k for k in kinds if k not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds {list(kinds)}; expected some of {', '.join(KINDS)}")
    if networks < 1 or runs < 1 or seconds < 1.0:
        raise ValueError(f"networks {networks}, runs {runs}, seconds {seconds}; expected at least 1 of each")
    return [Job(k, i, split_of(i, networks), runs, seconds, seed) for k in kinds for i in range(networks)]


def record(job: Job) -> tuple[list[Scene], dict[str, int]]:
    """Scenes of one network, and SUMO's own counts of teleports, collisions and emergency braking."""
    kind = KINDS.index(job.kind)
    name = f"{job.kind}_{job.index:02d}"
    network = make_network(job.kind, name, np.random.default_rng([job.seed, kind, job.index]))
    scenes: list[Scene] = []
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        net = build_network(network, Path(folder))
        road = read_map(net, name, network.kerb)
        for run in range(job.runs):
            seed = int(np.random.SeedSequence([job.seed, kind, job.index, run + 1]).generate_state(1)[0] >> 1)
            result = simulate(network, net, Path(folder), WARM_S[job.kind], job.seconds, seed)
            for key, value in result.statistics.items():
                counts[key] = counts.get(key, 0) + value
            scenes.append(
                Scene(
                    id=f"{name}_run{run}",
                    dt=DT,
                    split=job.split,
                    tracks=result.tracks,
                    map=road.road,
                    signals=road.signals(result.signals),
                    meta={"group": name, "kind": job.kind},
                )
            )
    return scenes, counts


def record_all(jobs: Sequence[Job], workers: int) -> tuple[list[Scene], dict[str, int]]:
    """Record every job, several at a time; the order and the content do not depend on `workers`."""
    scenes: list[Scene] = []
    counts: dict[str, int] = {}
    bar = tqdm(total=len(jobs), desc="record", unit="network", file=sys.stderr)
    with ProcessPoolExecutor(max_workers=workers) as pool:
        for part, extra in pool.map(record, jobs):
            scenes += part
            for key, value in extra.items():
                counts[key] = counts.get(key, 0) + value
            bar.update()
    bar.close()
    return scenes, counts


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m seqdiff.tools.record_traffic", description=__doc__)
    out.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--kinds", default=",".join(KINDS), help="kinds of network, comma-separated (default: all)")
    out.add_argument("--networks", type=int, default=12, help="networks of each kind (default: 12)")
    out.add_argument("--runs", type=int, default=2, help="runs of each network, one scene each (default: 2)")
    out.add_argument("--seconds", type=float, default=60.0, help="length of a scene (default: 60)")
    out.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="networks recorded at a time")
    out.add_argument("--tiny", action="store_true", help="two networks of each kind, one run of 10 s: a quick check")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    networks, runs, seconds = (2, 1, 10.0) if args.tiny else (args.networks, args.runs, args.seconds)
    began = time.monotonic()
    try:
        jobs = plan([k for k in args.kinds.split(",") if k], networks, runs, seconds, args.seed)
        scenes, counts = record_all(jobs, args.workers)
    except (SumoError, ValueError) as error:
        print(f"record_traffic: {error}", file=sys.stderr)
        return 2
    meta = {"seed": args.seed, "networks": networks, "runs": runs, "seconds": seconds, "kinds": args.kinds}
    meta["sumo"] = version("eclipse-sumo")
    write_recordings(args.out, "embedded-traffic", scenes, meta)
    print(summarise(scenes))
    print("counted: " + ", ".join(f"{value} {key}" for key, value in counts.items()))
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB, {len(scenes)} scenes, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
