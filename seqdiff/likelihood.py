"""Log-density of whole samples by the probability-flow ODE (Song et al. 2021, "Score-Based Generative Modeling through Stochastic
Differential Equations", section 4.3; Grathwohl et al. 2019, FFJORD, for the trace).

Every affine path is the same flow seen at another scale. It is integrated here as w = cos(a) x0 + sin(a) eps, where the angle a
has tan(a) = sigma / alpha, by the classical Runge-Kutta method of order 4 in a. Whitened data hardly move in w, and the angle is
bounded, so that the flow ends at pure noise and not somewhere before it. Measured on mixtures at equal cost, the error is 8 to 30
times smaller than in log sigma on a Karras grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from seqdiff.path import Path
from seqdiff.types import Denoiser, FlowMap, Z

Directions = Callable[[], Iterator[Tensor]]
_STREAM = 1 << 32  # probes have generators of their own, apart from the start noise of the same seeds


@dataclass(frozen=True)
class Likelihood:
    """How a log-density is integrated.

    Args:
        steps: of Runge-Kutta, 4 evaluations each. 16: about 1e-3 nats a dimension on mixtures whose parts are 30 times
            narrower than the whole, 32: 1e-4.
        sigma_min: the density is that of x0 + sigma_min eps, at the point x0 (latents have unit variance). A law without a
            density (parked cars) has one, and the net is not asked about noise levels that it was not trained on. On data of
            standard deviation s it costs sigma_min^2 / (2 s^2) nats a dimension.
        sigma_max: where the flow ends, sigma / alpha; inf = pure noise at t = 1, for nets that can be asked there (a net that
            predicts eps on a path with alpha(1) = 0 cannot: 80). A path that ends earlier ends there. At a finite end
            the law is taken as a Gaussian of unit data variance around the mean that the denoiser states, one evaluation more.
        trace: "exact" costs n d vector-Jacobian products (backward passes) an evaluation, "rademacher" `probes` of them
            (Hutchinson 1989).
        probes: for "rademacher": the same ones all along the flow and for all k candidates of an item. Unbiased; the variance
            falls as 1 / probes, and their spread tells it. Where the flow is linear candidates share the whole error; on
            trained nets hardly any of it.
    """

    steps: int = 16
    sigma_min: float = 0.01
    sigma_max: float = math.inf
    trace: Literal["exact", "rademacher"] = "exact"
    probes: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1 or self.probes < 1:
            raise ValueError(f"steps is {self.steps}, probes {self.probes}; expected at least 1 of each")
        if not 0 < self.sigma_min < self.sigma_max:
            raise ValueError(
                f"sigma_min is {self.sigma_min}, sigma_max {self.sigma_max}; expected 0 < sigma_min < sigma_max: a law on a "
                "lower-dimensional set has no density without noise"
            )
        if self.trace not in ("exact", "rademacher"):
            raise ValueError(f"unknown trace {self.trace!r}; one of exact, rademacher")


class LogProb(NamedTuple):
    """Log-densities of whole samples, in nats.

    log_prob: float64 b k, of x0 + sigma_min eps over all real tokens together. dims: int64 b k, how many real numbers a sample
    has; log_prob / dims are nats a dimension. error: float64 b k, standard error that the probes leave, 0 with the exact trace,
    NaN (unknown) of one probe. evaluations: of the net, each with its vector-Jacobian products.
    """

    log_prob: Float[Tensor, "b k"]
    dims: Int64[Tensor, "b k"]
    error: Float[Tensor, "b k"]
    evaluations: int


def log_prob(
    denoiser: Denoiser | FlowMap,
    path: Path,
    z0: Z,
    *,
    mask: Bool[Tensor, "b #k n"] | None = None,
    seeds: Int64[Tensor, "b #k"] | None = None,
    how: Likelihood = Likelihood(),
) -> LogProb:
    """Log-density of each sample as a whole under the flow of a denoiser.

    Works under no_grad and inference_mode; then what the denoiser closes over must not be made in inference mode (prepare
    the condition under `torch.inference_mode(False)`).

    Args:
        denoiser: (z, t) -> E[x0 | z_t], the k samples independent of each other; differentiable.
        path: that it was trained on.
        z0: latents, b k n d.
        mask: b #k n, True = real. Padding enters neither trace nor prior.
        seeds: b #k, for Rademacher probes: an item's first one serves all its candidates (seqdiff.types.as_seeds).

    Raises:
        ValueError: a student's FlowMap; probes without seeds; a denoiser that autograd cannot follow.
    """
    if isinstance(denoiser, FlowMap):
        raise ValueError(
            "log_prob got a few-step student's FlowMap: a jump between two times has no trace of a velocity to integrate. Take "
            "the student's instantaneous field (a Denoiser), or its teacher's denoiser"
        )
    with torch.inference_mode(False), torch.enable_grad():
        z0 = z0.detach().clone()
        b, k, n, d = z0.shape
        real = torch.ones(b, k, n, dtype=torch.bool, device=z0.device) if mask is None else mask.expand(b, k, n).clone()
        keep = real[..., None].expand(b, k, n, d).to(z0.dtype)
        dims = real.sum(-1) * d
        field = _Field(denoiser, path, _directions(how, keep, seeds), keep, dims.double(), how)
        angles = angle_grid(path, how)
        w = z0 * math.cos(angles[0])
        divergence = torch.zeros(b, k, dtype=torch.float64, device=z0.device)
        for a, e in zip(angles[:-1], angles[1:]):
            w, more = _rk4(field, w, a, e - a)
            divergence = divergence + more
        prior, spent = _prior(denoiser, path, w, keep, dims, angles[-1])
    volume = dims.double() * math.log(math.cos(angles[0]))  # of w = cos(a) y
    error = torch.zeros_like(volume)
    if how.trace == "rademacher":
        error = divergence.std(0) / how.probes**0.5 if how.probes > 1 else torch.full_like(volume, torch.nan)
        divergence = divergence.mean(0)
    return LogProb(prior + divergence + volume, dims, error, 4 * how.steps + spent)


def angle_grid(path: Path, how: Likelihood) -> list[float]:
    """steps + 1 increasing angles from atan(sigma_min) to that of sigma_max or the path's end, uniform in their square root:
    narrow laws change near the data.

    Raises:
        ValueError: a path that ends before sigma_min.
    """
    end = min(math.atan(how.sigma_max), math.atan(math.exp(min(-path.log_snr(1.0), 700.0))))
    start = math.atan(how.sigma_min)
    if not start < end:
        raise ValueError(f"sigma_min is {how.sigma_min}, but the path ends at sigma / alpha = {math.tan(end):g}")
    lo, hi = math.sqrt(start), math.sqrt(end)
    return [start, *((lo + (hi - lo) * i / how.steps) ** 2 for i in range(1, how.steps)), end]


def _at(path: Path, angle: float) -> tuple[float, float]:
    """Time of an angle, and z / w there."""
    t = min(path.time_of_log_snr(math.log(math.cos(angle) / math.sin(angle))), 1.0)
    return t, math.hypot(path.alpha(t), path.sigma(t))


@dataclass(frozen=True)
class _Field:
    """(w, angle) -> dw/da = (cos(a) w - x0) / sin(a), and its divergence: b k, or probes b k."""

    denoiser: Denoiser
    path: Path
    directions: Directions
    keep: Tensor
    dims: Tensor
    how: Likelihood

    def __call__(self, w: Tensor, angle: float) -> tuple[Tensor, Tensor]:
        t, scale = _at(self.path, angle)
        z = (w * scale).detach().requires_grad_()
        x0 = self.denoiser(z, t)
        if not x0.requires_grad:
            raise ValueError(
                "the denoiser's output carries no gradient: it must not run under no_grad or detach its input"
            )
        trace = torch.zeros_like(self.dims)
        if self.how.trace == "exact":
            for v in self.directions():
                trace = trace + _quadratic(x0, z, v).sum(0)
        else:
            trace = torch.cat([_quadratic(x0, z, v) for v in self.directions()])  # probes b k
        cos, sin = math.cos(angle), math.sin(angle)
        return (cos * w - x0.detach()) / sin * self.keep, (cos * self.dims - scale * trace) / sin


def _quadratic(x0: Tensor, z: Tensor, v: Tensor) -> Tensor:
    """v^T (d x0 / d z) v of each direction, c b k. v: c b k n d."""
    if len(v) == 1:
        (grad,) = torch.autograd.grad(x0, z, v[0], retain_graph=True)
        grad = grad[None]
    else:
        (grad,) = torch.autograd.grad(x0, z, v, retain_graph=True, is_grads_batched=True)
    return (grad * v).sum((3, 4), dtype=torch.float64)


def _rk4(field: _Field, w: Tensor, a: float, h: float) -> tuple[Tensor, Tensor]:
    """One step of the classical Runge-Kutta method: w at a + h, and the integral of the divergence from a to there."""
    k1, d1 = field(w, a)
    k2, d2 = field(w + 0.5 * h * k1, a + 0.5 * h)
    k3, d3 = field(w + 0.5 * h * k2, a + 0.5 * h)
    k4, d4 = field(w + h * k3, a + h)
    return w + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), h / 6 * (d1 + 2 * d2 + 2 * d3 + d4)


def _prior(denoiser: Denoiser, path: Path, w: Tensor, keep: Tensor, dims: Tensor, angle: float) -> tuple[Tensor, int]:
    """Log-density at the end of the flow, b k, and the evaluations spent: N(0, 1) at pure noise. Before it, the Gaussian of unit
    data variance with the score that the denoiser states, |w - cos x0|^2 / sin^4: exact for unit data of any mean."""
    spent = 0
    rest = w.double()
    if math.cos(angle) > 1e-9:
        t, scale = _at(path, angle)
        with torch.no_grad():
            x0 = denoiser(w * scale, t).double()
        rest = (rest - math.cos(angle) * x0) / math.sin(angle) ** 2
        spent = 1
    square = (rest.square() * keep).sum((2, 3))
    return -0.5 * square - 0.5 * math.log(2 * math.pi) * dims.double(), spent


def _directions(how: Likelihood, keep: Tensor, seeds: Tensor | None) -> Directions:
    """Gives the directions along which the Jacobian is measured, in chunks c b k n d, zero on padding."""
    b, _, n, d = keep.shape
    # few small products wait for each other, large ones fight for the cache
    chunk = max(1, (1 << 13 if keep.device.type == "cpu" else 1 << 20) // keep.numel())
    if how.trace == "exact":
        used = keep.flatten(0, 1).amax(0).flatten().nonzero()[:, 0]  # real in some sample

        def unit() -> Iterator[Tensor]:
            for part in used.split(chunk):
                one = nn.functional.one_hot(part, n * d).to(keep.dtype).view(-1, 1, 1, n, d)
                yield one * keep

        return unit
    if seeds is None:
        raise ValueError("Rademacher probes need seeds (b #k): write seeds=as_seeds(seed, b, 1, first_item)")
    if len(seeds) != b:
        raise ValueError(f"seeds have {len(seeds)} items, the latents {b}")
    probes = rademacher((n, d), seeds[:, 0], how.probes).to(keep)[:, :, None]

    def random() -> Iterator[Tensor]:
        for part in probes.split(chunk):
            yield part * keep

    return random


def rademacher(shape: tuple[int, int], seeds: Tensor, probes: int) -> Tensor:
    """Probes of +-1, probes b n d, float32: a function of the item's seed, the number of the probe and the place alone, whatever
    the batch split and the padding (which comes last).

    Args:
        shape: (n, d).
        seeds: b.
    """
    n, d = shape
    out = np.empty((probes, len(seeds), n * d), np.float32)
    for i, seed in enumerate(seeds.cpu().numpy().astype(np.uint64)):
        for j in range(probes):
            key = np.array([seed, _STREAM + j], np.uint64)
            out[j, i] = np.where(np.random.Generator(np.random.Philox(key=key)).random(n * d) < 0.5, -1, 1)
    return torch.from_numpy(out).view(probes, len(seeds), n, d)
