"""Teacher and students on recorded scenes: quality and time of each at its evaluations, on the same windows and seeds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from seqdiff.checkpoint import find, load_task
from seqdiff.domains.trajectory import metrics
from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.data import TrajectoryData
from seqdiff.domains.trajectory.energies import collisions, infeasible
from seqdiff.steps import find_step
from seqdiff.task import Sampler, Task

TEACHER_STEPS = ("ddim", "heun", "dpmpp_2m", "ab2", "unipc_2")
EVALUATIONS = (1, 2, 4, 8)
REFERENCE = ("dpmpp_2m", 32)  # what all others are compared with
ALSO_LONG = ("ddim",)  # measured at 32 evaluations too
RATIOS = ("energy_score", "minJADE", "minADE", "spread")
PER_AGENT = ("minADE", "minFDE", "collision")  # means over agents; all others over windows
ROUNDS = 2000  # of the bootstrap
TIMED_SCENES = 16


@dataclass(frozen=True)
class Method:
    """One row: a model with a sampler. seed: added to the run's own."""

    name: str
    task: Task
    sampler: Sampler
    student: bool
    seed: int = 0

    @property
    def evaluations(self) -> int:
        return find_step(self.sampler.step).total(self.sampler.steps)


def load(teacher: Path, students: dict[str, Path]) -> tuple[Task, dict[str, Task], dict[str, Any]]:
    """Models and the teacher's config.

    Raises:
        ValueError: a student that sees other windows than the teacher, or cannot jump.
    """
    task, config = load_task(find(teacher))
    windows = config["data"]["init_args"]["windows"]
    found = {}
    for name, path in students.items():
        student, own = load_task(find(path))
        if own["data"]["init_args"]["windows"] != windows:
            raise ValueError(
                f"student {name} at {path} was trained on other windows than the teacher: compare like with like"
            )
        if not student.objective.few_step:
            raise ValueError(
                f"{name} at {path} is no few-step student: train with objective=distill, mean_flow or best_of_k"
            )
        if student.objective.learned_starts:
            raise ValueError(
                f"{name} at {path} has learned starts with masses of their own; i.i.d. samples are compared here"
            )
        found[name] = student
    return task, found, config


def methods(teacher: Task, students: dict[str, Task]) -> list[Method]:
    """The reference first, then itself with another seed (what sampling noise alone changes), then all others."""
    plain = replace(teacher.sampler, energy_iterations=0, grid="uniform")
    step, steps = REFERENCE
    best = replace(plain, step=step, steps=steps)
    found = [Method(f"teacher, {step}", teacher, best, False), Method("teacher, other seed", teacher, best, False, 1)]
    for step in TEACHER_STEPS:
        counts = sorted({_steps_within(step, n) for n in EVALUATIONS} | ({steps} if step in ALSO_LONG else set()))
        found += [Method(f"teacher, {step}", teacher, replace(plain, step=step, steps=n), False) for n in counts]
    for step, learned in teacher.grids.items():
        own = replace(plain, step=step, grid="learned")
        found += [
            Method(f"teacher, {step}, learned grid", teacher, replace(own, steps=n), False) for n in sorted(learned)
        ]
    for name, task in students.items():
        own = replace(task.sampler, energy_iterations=0, grid="uniform", step="flow_map")
        found += [Method(name, task, replace(own, steps=n), True) for n in EVALUATIONS]
    return found


def _steps_within(step: str, evaluations: int) -> int:
    steps = 1
    while find_step(step).total(steps + 1) <= evaluations:
        steps += 1
    return steps


# ---- one batch ------------------------------------------------------------------------------------------------------


def futures(method: Method, batch: SceneBatch, k: int, seed: int, first_item: int) -> Tensor:
    """Noise to decoded futures, b k a t 3."""
    draw = method.task.draw(batch, k=k, seed=seed + method.seed, first_item=first_item, sampler=method.sampler)
    return method.task.adapter.decode(draw.z, batch)


def measure(sample: Tensor, batch: SceneBatch, task: Task) -> dict[str, np.ndarray]:
    """Every measure, one float64 per window; NaN where no agent is scored."""
    count = batch.scored & batch.mask & batch.fut_valid[..., -1]
    look = count[..., None] & batch.fut_valid
    values = dict(task.adapter.validate(sample, batch))
    values |= {"spread": metrics.spread(sample, look), "n_agents": count.sum(-1)} | rates(sample, batch)
    none = ~count.any(-1)
    return {n: v.double().masked_fill(none & (n != "n_agents"), torch.nan).numpy() for n, v in values.items()}


def rates(sample: Tensor, batch: SceneBatch) -> dict[str, Tensor]:
    """What is wrong with samples as driving, over the recorded steps as in `seqdiff evaluate`, b each: share of the scored agents
    that collide, share of (agent, step) beyond a limit."""
    count = batch.scored & batch.mask & batch.fut_valid[..., -1]
    hit = collisions(sample, batch, batch.fut_valid).hit.any(-1).double()
    broken = infeasible(sample, batch, batch.fut_valid).per_sample()
    return {"collision": metrics.world_mean(hit, count).mean(-1), "infeasible": broken.mean(-1)}


# ---- all windows ----------------------------------------------------------------------------------------------------


def run(
    found: Sequence[Method], data: TrajectoryData, split: str, limit: int | None, k: int, seed: int
) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray], np.ndarray]:
    """Each method's measures on every window, the recording's own rates, and the block that a window belongs to: windows of a
    recording that overlap in time are no independent evidence, and are resampled together."""
    parts: list[list[dict[str, np.ndarray]]] = [[] for _ in found]
    blocks: dict[tuple[str, int], int] = {}
    block: list[int] = []
    own: list[dict[str, np.ndarray]] = []
    batches = data.eval_batches(split, limit)
    with torch.no_grad(), tqdm(total=batches.n_items * len(found), desc="measuring", unit="scene") as bar:
        done = 0
        for batch in batches:
            length = batch.hist.shape[2] + batch.fut.shape[2]
            block += [blocks.setdefault((s, t0 // length), len(blocks)) for s, t0 in zip(batch.scene_id, batch.t0)]
            for part, method in zip(parts, found, strict=True):
                sample = futures(method, batch, k, seed, done)
                if not torch.isfinite(sample).all():
                    raise FloatingPointError(
                        f"{method.name} in {method.sampler.steps} steps gave samples that are not finite"
                    )
                part.append(measure(sample, batch, method.task))
                bar.update(len(batch.scene_id))
            own.append({n: v.numpy() for n, v in rates(batch.fut[:, None], batch).items()})
            done += len(batch.scene_id)
    values = [{n: np.concatenate([p[n] for p in part]) for n in part[0]} for part in parts]
    return values, {n: np.concatenate([p[n] for p in own]) for n in own[0]}, np.array(block)


def timings(found: Sequence[Method], data: TrajectoryData, split: str, k: int, scenes: int) -> list[float]:
    """Median milliseconds from a batch of one scene to its k decoded futures, of each method; by turns, so that a busy
    moment of the machine meets all of them."""
    single = TrajectoryData(data.where, data.windows, eval_batch_size=1, splits=data.splits)
    batches = list(single.eval_batches(split, scenes))
    spent: list[list[float]] = [[] for _ in found]
    with torch.no_grad():
        for i, batch in enumerate(tqdm([batches[0], *batches], desc="timing", unit="scene", delay=2)):
            for times, method in zip(spent, found, strict=True):
                begin = time.perf_counter()
                futures(method, batch, k, 0, 0)
                if i:  # the first round warms up
                    times.append(time.perf_counter() - begin)
    return [1000 * statistics.median(times) for times in spent]


# ---- from windows to rows -------------------------------------------------------------------------------------------


def ratio(
    value: np.ndarray, reference: np.ndarray, block: np.ndarray, weight: np.ndarray | None = None, seed: int = 0
) -> tuple[float, float, float]:
    """mean(value) / mean(reference) over windows, with the 95 % interval of a bootstrap that draws blocks of windows with
    replacement and keeps the pairs (Efron & Tibshirani 1993, chapter 13). weight: of each window, none = 1; windows where
    either is NaN take no part."""
    w = np.ones_like(value) if weight is None else weight
    ok = np.isfinite(value) & np.isfinite(reference)
    _, index = np.unique(block[ok], return_inverse=True)
    size = int(index.max()) + 1
    top = np.bincount(index, (value * w)[ok], size)
    bottom = np.bincount(index, (reference * w)[ok], size)
    counts = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), ROUNDS)
    low, high = np.quantile((counts @ top) / (counts @ bottom), [0.025, 0.975])
    return float(top.sum() / bottom.sum()), float(low), float(high)


def rows(
    found: Sequence[Method], values: Sequence[dict[str, np.ndarray]], block: np.ndarray, ms: Sequence[float]
) -> list[dict[str, Any]]:
    """One row per method: means over windows (minADE over agents), ratios to the first one with their intervals."""
    first, table = values[0], []
    agents = first["n_agents"]
    for method, own, spent in zip(found, values, ms, strict=True):
        row: dict[str, Any] = {
            "method": method.name, "student": method.student, "step": method.sampler.step, "steps": method.sampler.steps,
            "evaluations": method.evaluations, "ms": spent,
        }  # fmt: skip
        for name, value in own.items():
            if name == "n_agents":
                continue
            by_agent = agents if name in PER_AGENT else np.ones_like(agents)
            row[name] = _mean(value, by_agent)
            if name in RATIOS:
                row[f"{name}_ratio"] = ratio(value, first[name], block, by_agent)
        table.append(row)
    return table


def _mean(value: np.ndarray, weight: np.ndarray) -> float:
    """Over what is known."""
    ok = np.isfinite(value)
    return float((value * weight)[ok].sum() / weight[ok].sum())


def compare(
    teacher: Path, students: dict[str, Path], split: str, limit: int | None, k: int, seed: int = 0
) -> dict[str, Any]:
    """Measure everything.

    Args:
        teacher: run or checkpoint of a model trained with objective=flow.
        students: name -> run.
        split, limit, k, seed: windows and samples.
    """
    task, others, config = load(teacher, students)
    data = TrajectoryData(**{**config["data"]["init_args"], "windows": _spec(config)})
    found = methods(task, others)
    values, recorded, block = run(found, data, split, limit, k, seed)
    agents = values[0]["n_agents"]
    return {
        "teacher": str(teacher), "students": {n: str(p) for n, p in students.items()}, "split": split, "k": k, "seed": seed,
        "windows": int((agents > 0).sum()), "windows_without_scored_agents": int((agents == 0).sum()),
        "agents": int(agents.sum()), "blocks": int(block.max()) + 1, "threads": torch.get_num_threads(),
        "recorded": {n: _mean(v, agents if n in PER_AGENT else np.ones_like(agents)) for n, v in recorded.items()},
        "rows": rows(found, values, block, timings(found, data, split, k, TIMED_SCENES)),
    }  # fmt: skip


def _spec(config: dict[str, Any]) -> Any:
    from seqdiff.domains.trajectory.windows import WindowSpec

    return WindowSpec(**config["data"]["init_args"]["windows"])
