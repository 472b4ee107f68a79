"""From a checkpoint to sample files: draw k futures of every item of a split, decode, score, write."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from seqdiff import checkpoint
from seqdiff.densities import Densities
from seqdiff.score import score_samples
from seqdiff.task import Sampler, Task


def generate(
    task: Task,
    data: Any,
    writer: Any,
    sampler: Sampler,
    *,
    k: int,
    seed: int,
    split: str,
    limit: int | None = None,
    constraints: Any = None,
    likelihood: bool = False,
) -> dict[str, Any]:
    """Draw, score and write; the domain's data module and writer do what is the domain's.

    Args:
        data: gives `eval_batches(split, limit)` (an iterable with a length in items) and `describe(split)`.
        writer: gives `add(batch, sample, scores)`.
        k: samples per item.
        limit: only the first so many items, evenly spread over the split.
        constraints: the user's wishes, as the domain's reader gives them.
        likelihood: also the log-density of each sample (log_prob) and of the recorded future (record_log_prob, the same for all
            samples of an item), see seqdiff.densities.

    Returns:
        what happened, for run.json: counts, seconds of sampling alone, seconds in all.
    """
    start, drawing, items = time.perf_counter(), 0.0, 0
    energy: list[torch.Tensor] = []
    met = None if constraints is None else constraints.measure()
    densities = Densities(task, seed=seed) if likelihood else None
    batches = data.eval_batches(split, limit)
    with tqdm(total=batches.n_items, unit="scene", desc=f"sampling {k} futures in {sampler.steps} steps") as bar:
        for batch in batches:
            n = len(batch.scene_id)
            with torch.no_grad():
                begin = time.perf_counter()
                draw = task.draw(batch, k=k, seed=seed, first_item=items, sampler=sampler, constraints=constraints)
                sample = task.adapter.decode(draw.z, batch)
                drawing += time.perf_counter() - begin
                if draw.energy is not None:
                    energy.append(torch.stack(draw.energy))
                if not torch.isfinite(sample).all():
                    raise FloatingPointError(
                        f"samples of items {items} to {items + n - 1} are not finite: the model diverged in training, or "
                        "temperature or guidance is far too high"
                    )
                energies = task.adapter.score(sample, batch)
                mass = task.adapter.mass(energies, batch)
                where, valid = task.adapter.coordinates(sample, batch)
                scores = score_samples(where, valid, mass=mass)
                scores |= {"mass": mass} | energies | ({} if met is None else met.add(sample, batch))
                if densities is not None:
                    found = densities.add(batch, draw.z, items)
                    scores |= {"log_prob": found.log_prob, "record_log_prob": found.record[:, None].expand(n, k)}
            writer.add(batch, sample, scores)
            items += n
            bar.update(n)
    done: dict[str, Any] = {"n_windows": items, "seconds": time.perf_counter() - start, "seconds_sampling": drawing}
    if met is not None:
        done["constraints"] = met.report()
    if densities is not None:
        done["likelihood"] = densities.report()
    return done | _energies(energy)


def _energies(parts: list[torch.Tensor]) -> dict[str, float]:
    """What energy guidance did. parts: 2 b k each, before and after."""
    if not parts:
        return {}
    before, after = torch.cat(parts, 1)
    had = before > 0
    return {
        "energy_before": float(before.mean()),
        "energy_after": float(after.mean()),
        "energy_lowered_share": float((after < before)[had].double().mean()) if had.any() else 1.0,
    }


def describe_run(task: Task, ckpt: Path, config: dict[str, Any], sampler: Sampler, k: int, seed: int) -> dict[str, Any]:
    """The part of run.json that any domain shares."""
    return {
        "checkpoint": {"path": str(ckpt), "sha256": checkpoint.sha256(ckpt)},
        "commit": checkpoint.commit(),
        "seed": seed,
        "n_samples": k,
        "steps": sampler.steps,
        "evaluations": sampler.evaluations,
        "sampler": sampler.step,
        "times": task.times(sampler),
        "noise": sampler.noise,
        "temperature": sampler.temperature,
        "guidance": sampler.guidance,
        "energy_iterations": sampler.energy_iterations,
        "parameters": sum(p.numel() for p in task.parameters()),
        "config": config,
    }


def choose_sampler(default: Sampler, **changes: Any) -> Sampler:
    """The checkpoint's sampler with those settings changed that are not None."""
    return replace(default, **{name: value for name, value in changes.items() if value is not None})
