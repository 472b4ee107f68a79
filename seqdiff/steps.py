"""Sampling steps as pure functions with explicit memory, and the table STEPS with each one's claim.

A step takes z at time t to z at time s < t:

    step(denoiser, path, z, t, s, memory, seeds) -> (z_s, x0, memory)

`memory` starts as None for each run and is returned, never kept. Times are Python floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from seqdiff.path import Path
from seqdiff.types import Denoiser, FlowMap


class StepOut(NamedTuple):
    z: Tensor
    x0: Tensor
    memory: Any


Step = Callable[[Denoiser, Path, Tensor, float, float, Any, Tensor | None], StepOut]


def _exponential(path: Path, z: Tensor, x0: Tensor, t: float, s: float) -> Tensor:
    """z_s if x0 stayed constant from t to s (Lu et al. 2022b, DPM-Solver++, equation 8). DDIM when x0 is E[x0 | z_t]."""
    ratio = path.sigma(s) / path.sigma(t)
    return ratio * z + (path.alpha(s) - ratio * path.alpha(t)) * x0


def ddim(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """DDIM with eta = 0 (Song et al. 2021, equation 12). Order 1, one evaluation."""
    x0 = denoiser(z, t)
    return StepOut(_exponential(path, z, x0, t, s), x0, None)


def heun(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """Heun's method on the flow ODE dz/dt = v (Karras et al. 2022, algorithm 1, in flow time). Order 2, two evaluations.

    The step that ends at s = 0 has one evaluation: v at t = 0 would divide by sigma = 0.
    """

    def velocity(z: Tensor, x0: Tensor, t: float) -> Tensor:
        return path.velocity(x0, path.to_eps(x0, z, t), t)

    x0 = denoiser(z, t)
    if s == 0:
        return StepOut(_exponential(path, z, x0, t, s), x0, None)
    v = velocity(z, x0, t)
    z1 = z + (s - t) * v
    x1 = denoiser(z1, s)
    return StepOut(z + (s - t) * 0.5 * (v + velocity(z1, x1, s)), x1, None)


def dpmpp_2m(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """DPM-Solver++ 2M (Lu et al. 2022b, algorithm 2). Order 2, one evaluation; memory = (log-SNR, x0) of the step before.

    First and last steps are of order 1: the first has no past, and a step to sigma = 0 has an infinite log-SNR width. So
    has the step after a start at alpha(1) = 0, whose extrapolation weight is the limit h -> inf of h / (2 h_before) = 0.
    """
    x0 = denoiser(z, t)
    lam_t, lam_s = path.log_snr(t), path.log_snr(s)
    best = x0
    if memory is not None and s > 0:
        lam_before, x_before = memory
        h, h_before = lam_s - lam_t, lam_t - lam_before
        if math.isfinite(h) and math.isfinite(h_before):
            best = x0 + (0.5 * h / h_before) * (x0 - x_before)
    return StepOut(_exponential(path, z, best, t, s), x0, (lam_t, x0))


def ab2(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """Adams-Bashforth 2 on dz/dt = v with variable steps (Hairer, Norsett & Wanner 1993, equation III.5.4). Order 2, one
    evaluation; memory = (t, v) of the step before. The first step is Euler's; unlike dpmpp_2m the second step after pure
    noise and the last one are of order 2 already, which counts when there are four in all.
    """
    x0 = denoiser(z, t)
    v = path.velocity(x0, path.to_eps(x0, z, t), t)
    slope = v
    if memory is not None:
        before, v_before = memory
        slope = v + 0.5 * (s - t) / (t - before) * (v - v_before)
    return StepOut(z + (s - t) * slope, x0, (t, v))


def flow_map(
    model: FlowMap, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """A student's own jump from t to s (Boffi et al. 2024; mean flow, Geng et al. 2025a, equation 12). One evaluation; its x0
    is the end point that the jump points to, z_s itself at s = 0."""
    end = model(z, t, s)
    if s == 0:
        return StepOut(end, end, None)
    ratio = path.sigma(s) / path.sigma(t)
    return StepOut(end, (end - ratio * z) / (path.alpha(s) - ratio * path.alpha(t)), None)


@dataclass(frozen=True)
class Claim:
    """What a step promises; the tests hold it to that."""

    step: Step
    order: int  # global order of convergence on the probability-flow ODE
    evaluations: int  # denoiser calls a step; the last step of a two-stage method has one
    stochastic: bool = False


STEPS: dict[str, Claim] = {
    "ddim": Claim(ddim, order=1, evaluations=1),
    "heun": Claim(heun, order=2, evaluations=2),
    "dpmpp_2m": Claim(dpmpp_2m, order=2, evaluations=1),
    "ab2": Claim(ab2, order=2, evaluations=1),
}

FLOW_MAP_STEPS: tuple[Step, ...] = (flow_map,)  # type: ignore[assignment]


def find_step(name: str) -> Claim:
    """The claim by name.

    Raises:
        ValueError: no such step; the text lists those there are.
    """
    if name not in STEPS:
        raise ValueError(f"unknown sampler {name!r}; one of {', '.join(STEPS)}")
    return STEPS[name]
