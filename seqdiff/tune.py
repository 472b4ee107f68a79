"""Learned few-step time grids of a trained model: fitted to its own fine trajectories, saved in its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from seqdiff import checkpoint
from seqdiff.grid import fixed_grids, learn_grid
from seqdiff.path import time_grid
from seqdiff.steps import find_step
from seqdiff.task import Sampler, Task


@dataclass(frozen=True)
class Tuned:
    """Root mean square distance of the end points to those of fine steps, in data units, for each grid of one number of steps."""

    steps: int
    times: list[float]
    error: dict[str, float]  # of the fixed grids and "learned", on the batch it was fitted to
    error_unseen: dict[str, float]  # the same on another batch


class EndPoints:
    """End points of one batch from the same noise, for any step and times: b k n d in data units, padding 0."""

    def __init__(self, task: Task, batch: Any, sampler: Sampler, k: int, seed: int) -> None:
        self.again, self.start = task.sampling(batch, k=k, seed=seed, sampler=sampler)
        with torch.no_grad():
            cond = task.adapter.context(batch)
        self.unit = cond.mask[..., None].double() * (1.0 if cond.scale is None else cond.scale[:, None].double())

    def __call__(self, times: Sequence[float], step: str | None = None) -> Tensor:
        again = replace(self.again, times=times, step=find_step(step).step if step else self.again.step)
        return again.run(self.start).z.double() * self.unit


def tune(
    task: Task, batches: Sequence[Any], step: str, steps: Sequence[int], k: int = 8, seed: int = 0, budget: int = 100
) -> list[Tuned]:
    """Fit a grid for each number of steps on the first batch, and measure it on the second one.

    Args:
        step: of seqdiff.steps.STEPS, on the model's own field; a student's jumps have no error that a grid could lower.
        k: samples per item.
        budget: runs for each number of steps.

    Raises:
        ValueError: a step that draws noise or takes a student's jumps; fewer than two batches.
    """
    claim = find_step(step)
    if claim.stochastic or claim.student:
        why = "takes a student's jumps" if claim.student else "draws noise"
        raise ValueError(f"{step} {why}: a grid is learned for ODE steps, e.g. dpmpp_2m")
    if len(batches) < 2:
        raise ValueError(
            f"got {len(batches)} batches; one to fit on and one to check on are needed: lower the batch size"
        )
    # what is learned is the solver's grid: guides are left out
    sampler = replace(task.sampler, step=step, grid="uniform", times=None, guidance=1.0, energy_iterations=0)
    runs = [EndPoints(task, batch, sampler, k, seed + i) for i, batch in enumerate(batches[:2])]
    path, t_max = task.objective.path, sampler.t_max
    fine = time_grid(path, 64, "uniform", sampler.shift, t_max)
    references = [run(fine, "heun") for run in runs]
    out = []
    with tqdm(steps, desc="learning grids", unit="grid") as bar:
        for n in bar:
            grids = fixed_grids(path, n, fine[0])
            grids["as set"] = time_grid(path, n, "uniform", sampler.shift, t_max)
            learned = learn_grid(runs[0], references[0], n, path=path, t_max=fine[0], budget=budget, progress=False)
            grids["learned"] = learned
            seen, unseen = (
                {name: float((run(times) - reference).square().mean().sqrt()) for name, times in grids.items()}
                for run, reference in zip(runs, references, strict=True)
            )
            out.append(Tuned(n, learned, seen, unseen))
    return out


def save(path: Path, step: str, found: Sequence[Tuned]) -> None:
    """Write the grids into the checkpoint, beside those of other steps and numbers of steps; whole or not at all."""
    content = checkpoint.read(path)
    grids = content[checkpoint.KEY].setdefault("grids", {})
    grids.setdefault(step, {}).update({t.steps: [float(x) for x in t.times] for t in found})
    beside = path.with_suffix(".part")  # not found as a checkpoint if the write is cut off
    torch.save(content, beside)
    os.replace(beside, path)
