"""Sampling steps that reuse earlier evaluations. Their memory holds what they need of the past and starts as None.

How many evaluations there are to extrapolate from follows from the memory, so that any number of steps works. Next to the ends
an interval may be infinite in log-SNR (alpha(1) = 0, sigma(0) = 0): the methods in log-SNR leave such points out, and their
order falls there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from seqdiff.noise import fresh_noise
from seqdiff.path import Path
from seqdiff.singlestep import StepOut, exponential, slope
from seqdiff.types import Denoiser


def quadrature(nodes: Sequence[float], moments: Sequence[float]) -> list[float]:
    """Weights w with sum_j w_j nodes_j^k = moments_k: what integrates the polynomial through the nodes exactly."""
    rows = np.vander(np.asarray(nodes, float), increasing=True).T
    return [float(w) for w in np.linalg.solve(rows, np.asarray(moments, float))]


def exponential_moments(h: float, count: int) -> list[float]:
    """integral over u from 0 to h of e^(u - h) (u / h)^k du for k < count: sums of positive terms, so that small h loses
    no digits (the closed forms subtract nearly equal numbers)."""
    if h > 30:
        out = [-math.expm1(-h)]
        for k in range(1, count):
            out.append(1 - k / h * out[-1])
        return out
    out = []
    for k in range(count):
        term, total = 1.0, 0.0
        for m in range(150):
            total += term / (k + m + 1)
            term *= h / (m + 1)
        out.append(h * math.exp(-h) * total)
    return out


def _weighted(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    total = weights[0] * values[0]
    for w, value in zip(weights[1:], values[1:], strict=True):
        total = total + w * value
    return total


def dpmpp_2m(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """DPM-Solver++ 2M (Lu et al. 2022b, algorithm 2). Order 2, one evaluation; memory = (log-SNR, x0) of the step before.

    First and last steps are of order 1: the first has no past, and a step to sigma = 0 has an infinite log-SNR width. So
    has the step after a start at alpha(1) = 0, whose extrapolation weight is the limit h -> inf of h / (2 h_before) = 0.
    """
    x0 = denoiser(z, t)
    lam = path.log_snr(t)
    best = _extrapolate(path, x0, lam, s, memory)
    return StepOut(exponential(path, z, best, t, s), x0, (lam, x0))


def _extrapolate(path: Path, x0: Tensor, lam: float, s: float, before: tuple[float, Tensor] | None) -> Tensor:
    """x0 at the middle of the step in log-SNR, by the line through the last two evaluations; x0 itself where there is none."""
    h = path.log_snr(s) - lam
    if before is None or not (math.isfinite(h) and math.isfinite(before[0])):
        return x0
    return x0 + (0.5 * h / (lam - before[0])) * (x0 - before[1])


def dpmpp_3m(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """DPM-Solver++ with three evaluations (Lu et al. 2022b, multistep, here with the parabola's integral exact on uneven
    steps). Order 3 once it has its past, one evaluation; memory = up to two earlier (log-SNR, x0).

    First and last steps are of order 1, the second of order 2: from an empty memory the error falls with order 2.
    """
    x0 = denoiser(z, t)
    lam, lam_s = path.log_snr(t), path.log_snr(s)
    past = [(lam, x0), *(memory or [])][:3]
    h = lam_s - lam
    if not math.isfinite(h):
        return StepOut(exponential(path, z, x0, t, s), x0, past[:2] if math.isfinite(lam) else [])
    weights = quadrature([(at - lam) / h for at, _ in past], exponential_moments(h, len(past)))
    mean = _weighted(weights, [x for _, x in past])
    return StepOut(path.sigma(s) / path.sigma(t) * z + path.alpha(s) * mean, x0, past[:2])


def dpmpp_2m_sde(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """SDE-DPM-Solver++ 2M (Lu et al. 2022b, section on SDE solvers): dpmpp_2m for the reverse SDE of the same marginals.
    Stochastic, one evaluation; memory = (steps done, (log-SNR, x0) of the step before)."""
    done, before = memory or (0, None)
    noise = fresh_noise(z, seeds, done, "dpmpp_2m_sde")
    x0 = denoiser(z, t)
    lam = path.log_snr(t)
    decay = math.exp(lam - path.log_snr(s))
    best = _extrapolate(path, x0, lam, s, before)
    keep, fresh = path.sigma(s) / path.sigma(t) * decay, 1 - decay**2
    end = keep * z + path.alpha(s) * fresh * best + path.sigma(s) * fresh**0.5 * noise
    return StepOut(end, x0, (done + 1, (lam, x0)))


def unipc_2(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """UniPC-2 on x0 (Zhao et al. 2023, algorithms 1 and 2, B(h) = e^h - 1): the evaluation at the predicted z_t first corrects
    the step that led there, then predicts the next one as dpmpp_2m does. Order 3, one evaluation; memory = up to two earlier
    (log-SNR, x0), and the corrected z with its time.

    The first correction, and those with an infinite interval, take the mean of both evaluations.
    """
    x0 = denoiser(z, t)
    lam = path.log_snr(t)
    past: list[tuple[float, Tensor]] = []
    if memory is not None:
        past, z_before, before = memory
        z = _correct(path, z_before, before, t, [(lam, x0), *past])
    best = _extrapolate(path, x0, lam, s, past[0] if past else None)
    return StepOut(exponential(path, z, best, t, s), x0, ([(lam, x0), *past][:2], z, t))


def _correct(path: Path, z: Tensor, before: float, t: float, points: Sequence[tuple[float, Tensor]]) -> Tensor:
    """z at t from z at `before` > t, through the evaluations (log-SNR, x0) at t, at `before`, and one earlier if there is."""
    start, h = points[1][0], points[0][0] - points[1][0]
    if len(points) < 3 or not all(math.isfinite(lam) for lam, _ in points):
        return exponential(path, z, 0.5 * (points[0][1] + points[1][1]), before, t)
    weights = quadrature([(lam - start) / h for lam, _ in points], exponential_moments(h, 3))
    mean = _weighted(weights, [x for _, x in points])
    return path.sigma(t) / path.sigma(before) * z + path.alpha(t) * mean


ADAMS_BASHFORTH = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))


def ipndm_4(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """iPNDM of order 4 (Zhang & Chen 2023, after the pseudo-linear multistep of Liu et al. 2022): DDIM's move with eps replaced
    by the Adams-Bashforth mean of the last four. One evaluation; memory = up to three earlier eps.

    The weights are those of even steps whatever the grid: of order 4 where the steps are even in sigma / alpha, of order 2 on
    other smooth grids, yet at 4 to 12 steps far better than weights fitted to the uneven steps (which hardly extrapolate
    when steps shrink). The step from alpha(1) = 0 is DDIM's.
    """
    x0 = denoiser(z, t)
    past = [path.to_eps(x0, z, t), *(memory or [])][:4]
    if not math.isfinite(path.log_snr(t)):
        return StepOut(exponential(path, z, x0, t, s), x0, past[:3])
    grow = path.alpha(s) / path.alpha(t)
    eps = _weighted(ADAMS_BASHFORTH[len(past) - 1], past)
    return StepOut(grow * z + (path.sigma(s) - grow * path.sigma(t)) * eps, x0, past[:3])


def ab2(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """Adams-Bashforth 2 on dz/dt with variable steps (Hairer, Norsett & Wanner 1993, equation III.5.4). Order 2, one
    evaluation; memory = (t, dz/dt) of the step before. The first step is Euler's; unlike dpmpp_2m the second step after pure
    noise and the last one are of order 2 already, which counts when there are four in all.
    """
    x0 = denoiser(z, t)
    v = mean = slope(path, z, x0, t)
    if memory is not None:
        before, v_before = memory
        mean = v + 0.5 * (s - t) / (t - before) * (v - v_before)
    return StepOut(z + (s - t) * mean, x0, (t, v))
