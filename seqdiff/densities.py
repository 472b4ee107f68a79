"""Log-densities that a trained model gives its samples and the recorded futures, batch by batch: `likelihood=true`."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqdiff.likelihood import Likelihood, log_prob
from seqdiff.types import Cond, Denoiser, as_seeds

TOKENS = 4096  # of all candidates, integrated at once: bounds the memory of the backward passes
DEFAULT = Likelihood(steps=8, trace="rademacher", probes=8)  # the probes' error is far above that of 8 steps


class Scored(NamedTuple):
    """Of one batch, float64, in nats; NaN = unknown.

    log_prob: b k, of the samples. record: b, of the recorded future in the same measure, so that they compare. full: b, of the
    record with what the codec cuts off. rank: b, share of the samples with a lower log_prob than the record. dims: b, latents
    of real tokens. error: b k, standard error of log_prob.
    """

    log_prob: Tensor
    record: Tensor
    full: Tensor
    rank: Tensor
    dims: Tensor
    error: Tensor


def field_of(task: Any, cond: Cond | None) -> tuple[Denoiser, str]:
    """The denoiser whose flow has a density to be asked, and whose it is: "own" of a model trained by its velocity; of a few-step
    student "teacher" if it keeps one, else its "instantaneous field". Without guidance: of the law that was trained.

    Raises:
        ValueError: a student that has neither.
    """
    objective = task.objective
    if not objective.few_step:
        return task.denoiser(cond), "own"
    if objective.teacher is not None:
        return task.denoiser(cond, teacher=True), "teacher"
    if getattr(objective, "instant", 1.0) == 0:
        raise ValueError(
            f"{type(objective).__name__} was trained with instant = 0: it jumps, and has no instantaneous field whose density can "
            "be asked. Train with instant > 0, or leave likelihood=false"
        )
    return task.denoiser(cond), "instantaneous field"


class Densities:
    """Scores batches and sums up the run.

    The measure: where the adapter gives `log_volume`, nats per unit of the data's own coordinates on the codec's range, else
    those of the latents ("latent"). Both are of x0 + sigma_min eps in latents.
    """

    def __init__(self, task: Any, how: Likelihood = DEFAULT, seed: int = 0) -> None:
        if task.objective.prediction == "eps" and math.isinf(how.sigma_max):
            how = replace(how, sigma_max=80.0)
        self.task, self.how, self.seed = task, how, seed
        self.seconds, self.evaluations, self.whose = 0.0, 0, ""
        self.parts: list[Scored] = []
        self.data_dims: list[Tensor] = []

    def add(self, batch: Any, z: Tensor, first_item: int) -> Scored:
        """The samples z (b k n d) and the recorded future of each item, as one more candidate under the same probes.

        A record is scored where all its tokens are known whole; the others are unknown, not imputed.
        """
        begin = time.perf_counter()
        adapter = self.task.adapter
        with torch.inference_mode(False), torch.no_grad():
            cond = adapter.context(batch)
            recorded, weight = adapter.encode(batch)
            denoiser, self.whose = field_of(self.task, cond)
            k = z.shape[1]
            z = torch.cat([z, recorded.to(z)], 1)
            mask = cond.mask.expand(*z.shape[:3])
            seeds = as_seeds(self.seed, len(z), 1, first_item)
            size = max(1, TOKENS // (len(z) * z.shape[2]))
            found = [
                log_prob(
                    denoiser,
                    self.task.objective.path,
                    z[:, i : i + size],
                    mask=mask[:, i : i + size],
                    seeds=seeds,
                    how=self.how,
                )
                for i in range(0, k + 1, size)
            ]
            value = torch.cat([f.log_prob for f in found], 1).cpu()
            volume = adapter.log_volume(batch).cpu()[:, None] if hasattr(adapter, "log_volume") else 0.0
            value = torch.where(torch.isfinite(value), value - volume, torch.nan)
            whole = ((weight > 0) | ~cond.mask[:, 0]).all(-1).cpu()
            record = torch.where(whole, value[:, k], torch.nan)
            rest = adapter.residual_log_density(batch).cpu() if hasattr(adapter, "residual_log_density") else torch.nan
            rank = (value[:, :k] < record[:, None]).double().mean(-1)
            dims = torch.cat([f.dims for f in found], 1)[:, k].cpu()
            error = torch.cat([f.error for f in found], 1)[:, :k].cpu()
        rank = torch.where(torch.isfinite(record), rank, torch.nan)
        out = Scored(value[:, :k], record, record + rest, rank, dims, error)
        self.parts.append(out)
        self.evaluations = found[0].evaluations
        self.seconds += time.perf_counter() - begin
        return out

    def report(self) -> dict[str, Any]:
        """For run.json: whose density, how, in what measure; means in nats a latent dimension, None = unknown."""
        samples, record, full, rank, dims, error = (torch.cat(column) for column in zip(*self.parts))
        known = torch.isfinite(record)

        def mean(x: Tensor) -> float | None:
            some = torch.isfinite(x)
            return float(x[some].mean()) if some.any() else None

        adapter = self.task.adapter
        return {
            **{name: None if value == math.inf else value for name, value in asdict(self.how).items()},
            "field": self.whose,
            "measure": "data units on the codec's range" if hasattr(adapter, "log_volume") else "latent",
            "evaluations": self.evaluations,
            "seconds": self.seconds,
            "not_finite": int((~torch.isfinite(samples)).sum()),
            "samples_per_dim": mean(samples / dims[:, None]),
            "standard_error": mean(error),  # of one sample's log_prob
            "records": {
                "known": int(known.sum()),
                "unknown": int((~known).sum()),
                "per_dim": mean(record / dims),
                "samples_per_dim": mean((samples / dims[:, None])[known]),
                "full": mean(full),
                "rank_fifths": [int(n) for n in torch.histc(rank[known], 5, 0, 1)],
            },
        }
