"""How fast a store feeds training, and what an index of millions of windows costs in memory.

    python -m seqdiff.tools.bench_data STORE [--split train] [--batch-size 64] [--stride-s 0.1] [--repeats 5]
    python -m seqdiff.tools.bench_data embedded
    python -m seqdiff.tools.bench_data --synthetic 2000000      # a made-up store of that many windows

One process, one thread. "wall" is what a run sees; "cpu" counts only this process and is steadier on a shared machine.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from seqdiff.domains.trajectory.data import embedded_store
from seqdiff.domains.trajectory.scene import Scene, Track
from seqdiff.domains.trajectory.store import Store, StoreWriter
from seqdiff.domains.trajectory.windows import Vary, WindowDataset, WindowSpec


@dataclass
class Speed:
    """Windows a second, one number a repeat."""

    wall: list[float]
    cpu: list[float]

    def __str__(self) -> str:
        spread = f"median of {len(self.wall)}, {min(self.wall):,.0f} to {max(self.wall):,.0f}"
        wall, cpu = statistics.median(self.wall), statistics.median(self.cpu)
        return f"{wall:,.0f} windows/s wall ({spread}), {cpu:,.0f} windows/s of CPU time"


def measure(data: WindowDataset, batch_size: int, repeats: int = 5, seconds: float = 1.0) -> Speed:
    """Random batches of `batch_size` windows for about `seconds` of CPU time a repeat, after one that warms up."""
    draw = np.random.default_rng(0)
    speed = Speed([], [])
    for _ in tqdm(range(repeats + 1), desc=f"batches of {batch_size}", delay=2, leave=False):
        done, wall, cpu = 0, time.perf_counter(), time.process_time()
        while time.process_time() - cpu < seconds:
            data.batch(draw.integers(0, len(data), batch_size))
            done += batch_size
        speed.wall.append(done / (time.perf_counter() - wall))
        speed.cpu.append(done / (time.process_time() - cpu))
    return Speed(speed.wall[1:], speed.cpu[1:])


def own_memory() -> float:
    """Anonymous memory of this process in MiB: mapped files, which the system takes back at need, are not in it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    if found is None:
        raise RuntimeError("/proc/self/status tells no RssAnon; memory can be measured on Linux only")
    return int(found.group(1)) / 1024


def synthetic_store(out: Path, windows: int, spec: WindowSpec, stride_s: float) -> Store:
    """A made-up store with about `windows` windows: long scenes with a dozen short tracks at a time, no map."""
    dt, steps, alive, length = 0.1, 20_000, 12, 400
    h, t = spec.frames(dt)
    per_scene = (steps - h - t) // round(stride_s / dt) + 1
    draw = np.random.default_rng(0)
    with StoreWriter(out, "synthetic", "tools/bench_data.py") as writer:
        for k in tqdm(
            range(-(-windows // per_scene)), desc="writing a made-up store", unit="scene", delay=2, leave=False
        ):
            tracks = []
            for lane in range(alive):
                edges = [0, *range((lane + 1) * length // alive, steps, length), steps]  # they do not end together
                for start, n in zip(edges, np.diff(edges)):
                    along = 8.0 * dt * np.arange(n) + draw.uniform(-50, 50)
                    xyh = np.column_stack([along, np.full(n, 3.5 * lane), np.zeros(n)])
                    tracks.append(Track(f"{lane}_{start}", "vehicle", start, xyh, np.ones(n, bool), (4.5, 1.8)))
            writer.add(Scene(f"scene{k}", dt, "train", tracks))
    return Store(out)


def report(store: Store, spec: WindowSpec, split: str, stride_s: float, how: dict[str, Any]) -> None:
    """Prints size, time and memory of the index, and windows a second. `how`: arguments of `measure`."""
    batch_size = how["batch_size"]
    rows, size = len(store.arrays["valid"]), sum(a["bytes"] for a in store.manifest["arrays"].values()) / 2**20
    print(f"{store}: {rows:,} rows, {size:,.0f} MiB on disk")
    before, began = own_memory(), time.perf_counter()
    data = WindowDataset(store, spec, split, Vary(stride_s=stride_s))
    seconds, grown = time.perf_counter() - began, own_memory() - before
    print(
        f"{len(data):,} windows of {split} (every {stride_s:g} s) indexed in {seconds:.1f} s; memory +{grown:,.0f} MiB"
    )
    batch = data.batch(np.random.default_rng(1).integers(0, len(data), batch_size))
    h, t = batch.hist.shape[2], batch.fut.shape[2]
    print(
        f"batches of {batch_size}: {h} + {t} frames, {float(batch.mask.sum(1).float().mean()):.1f} agents a window "
        f"(padded to {batch.mask.shape[1]}), {float(batch.seg_mask.sum(1).float().mean()):.0f} map tokens"
    )
    print(measure(data, **how))
    print(f"memory after that +{own_memory() - before:,.0f} MiB")


def main(argv: list[str] | None = None) -> None:
    """Command line, see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", help="folder of a packed store, or `embedded`")
    parser.add_argument("--synthetic", type=int, metavar="WINDOWS", help="measure a made-up store of that many windows")
    parser.add_argument("--split", default="train")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--stride-s", type=float, help="seconds between two t0; one step of the store if not given")
    parser.add_argument("--history-s", type=float, default=2.0)
    parser.add_argument("--horizon-s", type=float, default=6.0)
    parser.add_argument("--focal", choices=("one", "all"), default="one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of CPU time for each repeat")
    given = parser.parse_args(argv)
    if (given.store is None) == (given.synthetic is None):
        parser.error("name a store (or `embedded`), or give --synthetic WINDOWS; one of the two")
    torch.set_num_threads(1)
    radius = 80.0 if given.focal == "one" else None
    spec = WindowSpec(given.history_s, given.horizon_s, focal=given.focal, radius_m=radius)
    rest = {"batch_size": given.batch_size, "repeats": given.repeats, "seconds": given.seconds}
    if given.synthetic is not None:
        stride = given.stride_s or 0.1
        with tempfile.TemporaryDirectory() as folder:
            report(synthetic_store(Path(folder) / "s", given.synthetic, spec, stride), spec, "train", stride, rest)
    else:
        store = Store(embedded_store() if given.store == "embedded" else given.store)
        report(store, spec, given.split, given.stride_s or store.dt, rest)


if __name__ == "__main__":
    main()
