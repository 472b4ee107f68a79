"""Sampling steps that need no past: one- and two-stage methods on the flow ODE, ancestral ones, and students' jumps.

A step takes z at time t to z at time s < t, purely:

    step(model, path, z, t, s, memory, seeds) -> (z_s, x0, memory)

`memory` starts as None for each run and is returned, never kept. Times are Python floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from seqdiff.noise import fresh_noise
from seqdiff.path import Path
from seqdiff.types import Denoiser, FlowMap


class StepOut(NamedTuple):
    z: Tensor
    x0: Tensor
    memory: Any


Step = Callable[[Denoiser, Path, Tensor, float, float, Any, Tensor | None], StepOut]


def exponential(path: Path, z: Tensor, x0: Tensor, t: float, s: float) -> Tensor:
    """z_s if x0 stayed constant from t to s (Lu et al. 2022b, DPM-Solver++, equation 8). DDIM when x0 is E[x0 | z_t]."""
    ratio = path.sigma(s) / path.sigma(t)
    return ratio * z + (path.alpha(s) - ratio * path.alpha(t)) * x0


def slope(path: Path, z: Tensor, x0: Tensor, t: float) -> Tensor:
    """dz/dt of the probability-flow ODE at (z, t), t > 0, from x0 = E[x0 | z_t]."""
    return path.velocity(x0, path.to_eps(x0, z, t), t)


def ddim(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """DDIM with eta = 0 (Song et al. 2021, equation 12). Order 1, one evaluation."""
    x0 = denoiser(z, t)
    return StepOut(exponential(path, z, x0, t, s), x0, None)


def ddim_eta(eta: float) -> Step:
    """DDIM with fresh noise (Song et al. 2021, equations 12 and 16, on any affine path): eta = 0 is `ddim`, 1 `ancestral`.

    The noise added has eta^2 times the variance of q(z_s | z_t, x0); memory = number of steps done.

    Raises:
        ValueError: eta outside [0, 1], where the variance would not fit in z_s.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta is {eta}; expected a number in [0, 1]: 0 adds no noise, 1 is ancestral sampling")

    def step(
        denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
    ) -> StepOut:
        done = memory or 0
        noise = fresh_noise(z, seeds, done, step.__name__)
        x0 = denoiser(z, t)
        a_t, s_t, a_s, s_s = path.alpha(t), path.sigma(t), path.alpha(s), path.sigma(s)
        fresh = (eta * s_s) ** 2 * max(0.0, 1 - (a_t * s_s / (a_s * s_t)) ** 2)
        kept = max(0.0, s_s**2 - fresh) ** 0.5
        return StepOut(a_s * x0 + kept * path.to_eps(x0, z, t) + fresh**0.5 * noise, x0, done + 1)

    step.__name__ = "ancestral" if eta == 1 else f"ddim_eta({eta:g})"
    step.__doc__ = f"DDIM with eta = {eta:g}, see `ddim_eta`. Stochastic, one evaluation."
    return step


ancestral = ddim_eta(1.0)


def euler(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """Euler's method on dz/dt in flow time. Order 1, one evaluation. On the linear and edm paths the same as `ddim`."""
    x0 = denoiser(z, t)
    return StepOut(z + (s - t) * slope(path, z, x0, t), x0, None)


def heun(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """Heun's method on dz/dt (Karras et al. 2022, algorithm 1, in flow time). Order 2, two evaluations.

    The step that ends at s = 0 has one evaluation: dz/dt at t = 0 would divide by sigma = 0.
    """
    x0 = denoiser(z, t)
    if s == 0:
        return StepOut(exponential(path, z, x0, t, s), x0, None)
    v = slope(path, z, x0, t)
    z1 = z + (s - t) * v
    x1 = denoiser(z1, s)
    return StepOut(z + (s - t) * 0.5 * (v + slope(path, z1, x1, s)), x1, None)


def midpoint(
    denoiser: Denoiser, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """The midpoint rule on dz/dt in flow time. Order 2, two evaluations, in the last step too: its second one is at s / 2."""
    half = 0.5 * (t + s)
    z1 = z + (half - t) * slope(path, z, denoiser(z, t), t)
    x1 = denoiser(z1, half)
    return StepOut(z + (s - t) * slope(path, z1, x1, half), x1, None)


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


def consistency(
    model: FlowMap, path: Path, z: Tensor, t: float, s: float, memory: Any = None, seeds: Tensor | None = None
) -> StepOut:
    """A student's jump to 0, then fresh noise up to s (Song et al. 2023, algorithm 1). Stochastic, one evaluation; the step to
    s = 0 ends at the jump and draws nothing. memory = number of steps done."""
    done = memory or 0
    x0 = model(z, t, 0.0)
    if s == 0:
        return StepOut(x0, x0, done + 1)
    return StepOut(path.mix(x0, fresh_noise(z, seeds, done, "consistency"), s), x0, done + 1)
