"""Latency, throughput, share of the machine's matmul peak and memory of sampling; what the shared context saves."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.task import Task


def random_scene(agents: int, history: int, horizon: int, segments: int, dt: float) -> SceneBatch:
    """One scene with `agents` moving agents and `segments` map pieces; what is in it does not change the time."""
    g = torch.Generator().manual_seed(0)
    start = (torch.rand(1, agents, 1, 2, generator=g) - 0.5) * 150
    speed = torch.rand(1, agents, 1, 1, generator=g) * 15
    heading = (torch.rand(1, agents, 1, 1, generator=g) - 0.5) * 6
    t = torch.arange(-(history - 1), horizon + 1).view(1, 1, -1, 1) * dt
    xy = start + speed * t * torch.cat([torch.cos(heading), torch.sin(heading)], -1)
    xyh = torch.cat([xy, heading.expand(1, agents, len(t[0, 0]), 1)], -1)
    lane = (torch.rand(1, segments, 1, 2, generator=g) - 0.5) * 150
    yes = torch.ones(1, agents, dtype=torch.bool)
    return SceneBatch(
        hist=xyh[:, :, :history], hist_valid=yes[..., None].expand(1, agents, history),
        fut=xyh[:, :, history:], fut_valid=yes[..., None].expand(1, agents, horizon),
        mask=yes, scored=yes, type=torch.zeros(1, agents, dtype=torch.int64),
        size=torch.tensor([4.6, 1.9]).expand(1, agents, 2), size_known=yes,
        seg=lane + torch.cumsum(torch.rand(1, segments, 10, 2, generator=g), 2),
        seg_mask=torch.ones(1, segments, dtype=torch.bool), seg_kind=torch.zeros(1, segments, dtype=torch.int64),
        seg_signal=torch.zeros(1, segments, dtype=torch.int64), map_known=torch.ones(1, dtype=torch.bool),
        origin=torch.zeros(1, 2, dtype=torch.float64), scene_id=["random"], t0=[0],
        agent_id=[[str(i) for i in range(agents)]], focal=torch.zeros(1, dtype=torch.int64),
        left_out=torch.zeros(1, dtype=torch.int64), drivable=[None], dt=dt,
    )  # fmt: skip


def build(overrides: list[str]) -> tuple[Task, dict[str, Any]]:
    """An untrained model of a config; its time is a trained one's."""
    from jsonargparse import ArgumentParser

    from seqdiff.cli import compose

    config = compose(overrides)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Task, "model")
    return parser.instantiate(parser.parse_object({"model": config["model"]})).model.eval(), config


def median_ms(function: Callable[[], Any], repeats: int) -> float:
    """Median wall time of a call, ms, after two that do not count."""
    times = []
    for i in range(repeats + 2):
        begin = time.perf_counter()
        function()
        if i > 1:
            times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


def matmul_peak(threads: int) -> float:
    """GFLOP/s of a 2048^3 float32 product on this machine, best of 5."""
    a = torch.randn(2048, 2048)
    best = min(median_ms(lambda: a @ a, 1) for _ in range(5))
    return 2 * 2048**3 / best / 1e6


def bench(
    agents: int = 32,
    k: int = 64,
    steps: int = 4,
    threads: int = 2,
    repeats: int = 15,
    ckpt: Path | None = None,
    precision: str = "fp32",
) -> dict[str, float]:
    """Time of k joint futures of one scene: context, noise, steps and decoding included.

    Args:
        agents: agents of the scene.
        k: joint futures.
        steps: sampling steps (dpmpp_2m: one evaluation each).
        threads: of torch.
        repeats: the median of so many is printed.
        ckpt: a run or checkpoint; default: the untrained default model, which takes the same time.
        precision: fp32, or bf16 (faster only on processors with matrix units for it).
    """
    from seqdiff.checkpoint import find, load_task

    torch.set_num_threads(threads)
    task, config = load_task(find(ckpt)) if ckpt else build([])
    a = task.adapter
    segments = int(config["data"]["init_args"]["windows"]["max_segments"])
    batch = random_scene(agents, a.history, a.horizon, max(segments, 1), a.dt)

    def run(k: int, steps: int, batch: SceneBatch = batch) -> torch.Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            draw = task.draw(batch, k=k, seed=0, sampler=replace(task.sampler, step="dpmpp_2m", steps=steps))
            return task.adapter.decode(draw.z.float(), batch)

    whole = median_ms(lambda: run(k, steps), repeats)
    with FlopCounterMode(display=False) as counter:
        run(k, steps)
    flops = counter.get_total_flops()
    peak = matmul_peak(threads)
    alone = median_ms(lambda: run(1, steps), repeats)
    one, eight = median_ms(lambda: run(k, 1), repeats), median_ms(lambda: run(k, 8), repeats)
    encode = median_ms(lambda: _context(task, batch), repeats)
    out = {
        "median_ms": whole,
        "agent_futures_per_s": 1000 * k * agents / whole,
        "context_ms": encode,
        "gflop": flops / 1e9,
        "gflop_per_s": flops / whole / 1e6,
        "peak_gflop_per_s": peak,
        "share_of_peak": flops / whole / 1e6 / peak,
        f"{k}_samples_against_{k}_times_one": whole / (k * alone),
        "eight_steps_against_one": eight / one,
        "parameters": float(sum(p.numel() for p in task.parameters())),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    _print(
        out,
        f"{k} joint futures x {agents} agents x {a.horizon * a.dt:g} s, {steps} steps, {threads} threads, {precision}",
    )
    return out


def _context(task: Task, batch: SceneBatch) -> None:
    with torch.inference_mode():
        task.net.prepare(task.adapter.context(batch))


def _print(values: dict[str, float], title: str) -> None:
    table = Table(title=title, show_header=False)
    for name, value in values.items():
        table.add_row(name.replace("_", " "), f"{value:,.3g}" if value < 100 else f"{value:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    bench()
