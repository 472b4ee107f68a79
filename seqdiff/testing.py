"""Closed forms to hold samplers to, distances between laws, and contract checks for adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from seqdiff.path import Path
from seqdiff.sample import sample
from seqdiff.steps import Step
from seqdiff.types import Adapter, Draw

DATA = Path()  # at t = 0, where every path holds the data


@runtime_checkable
class Law(Protocol):
    """A law of x0 whose denoiser and marginals are known on any path."""

    def denoiser(self, path: Path) -> Callable[[Tensor, float], Tensor]:
        """E[x0 | z_t]."""
        ...

    def log_prob(self, z: Tensor, path: Path = DATA, t: float = 0.0) -> Tensor:
        """Log-density of z_t, over the last axis; of the data at t = 0."""
        ...

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Data x0, shape + (d,)."""
        ...


@runtime_checkable
class Flowing(Law, Protocol):
    """A law whose probability flow is known too."""

    def flow(self, path: Path, z: Tensor, t: float) -> Tensor:
        """Where the probability-flow ODE carries z from t to 0."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """x0 ~ N(mean, diag(std^2)). mean, std: d."""

    mean: Tensor
    std: Tensor

    def denoiser(self, path: Path) -> Callable[[Tensor, float], Tensor]:
        """E[x0 | z_t], elementwise."""

        def denoise(z: Tensor, t: float) -> Tensor:
            a, s = path.alpha(t), path.sigma(t)
            var = (a * self.std) ** 2 + s**2
            return self.mean + a * self.std**2 / var * (z - a * self.mean)

        return denoise

    def flow(self, path: Path, z: Tensor, t: float) -> Tensor:
        """Where the probability-flow ODE carries z from t to 0."""
        a, s = path.alpha(t), path.sigma(t)
        return self.mean + self.std * (z - a * self.mean) / ((a * self.std) ** 2 + s**2) ** 0.5

    def log_prob(self, z: Tensor, path: Path = DATA, t: float = 0.0) -> Tensor:
        """Log-density of z_t (... d) over the last axis."""
        a, s = path.alpha(t), path.sigma(t)
        var = (a * self.std) ** 2 + s**2
        return (-0.5 * ((z - a * self.mean) ** 2 / var + (2 * math.pi * var).log())).sum(-1)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Data, shape + (d,)."""
        return self.mean + self.std * _normal((*shape, len(self.mean)), self.mean, generator)


@dataclass(frozen=True)
class CorrelatedGaussian:
    """x0 ~ N(mean, cov) over the last axis. mean: d, cov: d d, positive definite."""

    mean: Tensor
    cov: Tensor

    def _frame(self) -> tuple[Gaussian, Tensor]:
        """The same law along the principal axes, and these as columns: there every channel is on its own."""
        value, axes = torch.linalg.eigh(self.cov)
        return Gaussian(self.mean @ axes, value.sqrt()), axes

    def denoiser(self, path: Path) -> Callable[[Tensor, float], Tensor]:
        """E[x0 | z_t] = mean + alpha cov (alpha^2 cov + sigma^2)^-1 (z - alpha mean)."""
        law, axes = self._frame()
        inner = law.denoiser(path)
        return lambda z, t: inner(z @ axes, t) @ axes.T

    def flow(self, path: Path, z: Tensor, t: float) -> Tensor:
        """Where the probability-flow ODE carries z from t to 0."""
        law, axes = self._frame()
        return law.flow(path, z @ axes, t) @ axes.T

    def log_prob(self, z: Tensor, path: Path = DATA, t: float = 0.0) -> Tensor:
        """Log-density of z_t (... d) over the last axis."""
        law, axes = self._frame()
        return law.log_prob(z @ axes, path, t)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Data, shape + (d,)."""
        law, axes = self._frame()
        return law.sample(shape, generator) @ axes.T


@dataclass(frozen=True)
class Mixture:
    """One-dimensional Gaussian mixture of each number by itself. weight, mean, std: c components."""

    weight: Tensor
    mean: Tensor
    std: Tensor

    def denoiser(self, path: Path) -> Callable[[Tensor, float], Tensor]:
        """E[x0 | z_t], elementwise."""

        def denoise(z: Tensor, t: float) -> Tensor:
            a, s = path.alpha(t), path.sigma(t)
            var = (a * self.std) ** 2 + s**2
            d = z[..., None] - a * self.mean
            log_p = self.weight.log() - 0.5 * d**2 / var - 0.5 * var.log()
            return (torch.softmax(log_p, -1) * (self.mean + a * self.std**2 / var * d)).sum(-1)

        return denoise

    def cdf(self, path: Path, z: Tensor, t: float) -> Tensor:
        """P(z_t <= z)."""
        a, s = path.alpha(t), path.sigma(t)
        std = ((a * self.std) ** 2 + s**2) ** 0.5
        return (self.weight * torch.special.ndtr((z[..., None] - a * self.mean) / std)).sum(-1)

    def flow(self, path: Path, z: Tensor, t: float) -> Tensor:
        """Where the probability-flow ODE carries z from t to 0: in one dimension it keeps the quantile (bisection)."""
        p = self.cdf(path, z, t)
        lo = torch.full_like(z, float((self.mean - 12 * self.std).min()))
        hi = torch.full_like(z, float((self.mean + 12 * self.std).max()))
        for _ in range(80):
            mid = (lo + hi) / 2
            below = self.cdf(path, mid, 0.0) < p
            lo, hi = torch.where(below, mid, lo), torch.where(below, hi, mid)
        return (lo + hi) / 2

    def log_prob(self, z: Tensor, path: Path = DATA, t: float = 0.0) -> Tensor:
        """Log-density of z_t (... d) over the last axis."""
        a, s = path.alpha(t), path.sigma(t)
        var = (a * self.std) ** 2 + s**2
        each = self.weight.log() - 0.5 * ((z[..., None] - a * self.mean) ** 2 / var + (2 * math.pi * var).log())
        return torch.logsumexp(each, -1).sum(-1)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Data, shape + (1,)."""
        which = torch.multinomial(self.weight, math.prod(shape), True, generator=generator).view(*shape, 1)
        return self.mean[which] + self.std[which] * _normal((*shape, 1), self.mean, generator)


@dataclass(frozen=True)
class MixtureND:
    """Gaussian mixture over the last axis. weight: c, mean: c d, cov: c d d. Its flow has no closed form."""

    weight: Tensor
    mean: Tensor
    cov: Tensor

    def _parts(self) -> list[CorrelatedGaussian]:
        return [CorrelatedGaussian(m, c) for m, c in zip(self.mean, self.cov, strict=True)]

    def _logits(self, z: Tensor, path: Path, t: float) -> Tensor:
        """log(weight_c p_c(z_t)), ... c."""
        each = [part.log_prob(z, path, t) for part in self._parts()]
        return self.weight.log() + torch.stack(each, -1)

    def denoiser(self, path: Path) -> Callable[[Tensor, float], Tensor]:
        """E[x0 | z_t]: the components' means weighted by how likely each one is."""
        inner = [part.denoiser(path) for part in self._parts()]

        def denoise(z: Tensor, t: float) -> Tensor:
            share = torch.softmax(self._logits(z, path, t), -1)
            return (torch.stack([f(z, t) for f in inner], -1) * share[..., None, :]).sum(-1)

        return denoise

    def log_prob(self, z: Tensor, path: Path = DATA, t: float = 0.0) -> Tensor:
        """Log-density of z_t (... d) over the last axis."""
        return torch.logsumexp(self._logits(z, path, t), -1)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Data, shape + (d,)."""
        which = torch.multinomial(self.weight, math.prod(shape), True, generator=generator).view(*shape, 1)
        every = torch.stack([part.sample(shape, generator) for part in self._parts()], -2)  # ... c d
        return torch.take_along_dim(every, which[..., None], -2).squeeze(-2)


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype)


def energy_distance(x: Tensor, y: Tensor) -> float:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'| >= 0, 0 for equal laws only (Szekely & Rizzo 2013). x: N d, y: M d; unbiased."""
    within = [torch.pdist(a).mean() for a in (x, y)]
    return (2 * torch.cdist(x, y).mean() - within[0] - within[1]).item()


def order_of(
    step: Step,
    law: Flowing,
    path: Path,
    steps: Sequence[int],
    t_max: float = 0.95,
    t_min: float = 0.05,
    warm: int = 1,
) -> list[float]:
    """Measured orders of convergence by halvings: log2 of the ratio of the largest errors at successive numbers of steps.

    The grid is even in the linear path's time from t_max to t_min > 0 (at the same noise levels on other paths), where the
    flow is smooth; the exact end point is the law's flow to 0 compared through its own flow from t_min, so that no floor of
    the last step hides the order.

    Args:
        warm: order p of a multistep method whose first steps are of order 1, 2, ...: they are made so short (h^(p / 2),
            h^(p / 3), ... for a step h of the grid) that the error of the method itself shows. 1 = an even grid.
    """
    z = torch.linspace(-2, 2, 41, dtype=torch.float64).view(1, 1, 41, 1)
    errors = []
    for n in steps:
        short = [(1 / n) ** (warm / (j + 1)) for j in range(1, warm - 1)]
        share = [sum(short[:i]) for i in range(len(short) + 1)]
        share += [share[-1] + (1 - share[-1]) * i / n for i in range(1, n + 1)]
        levels = [DATA.log_snr(t_max + (t_min - t_max) * w) for w in share]
        times = [path.time_of_log_snr(lam) for lam in levels]
        start = z * (path.alpha(times[0]) ** 2 + path.sigma(times[0]) ** 2) ** 0.5
        end = sample(law.denoiser(path), Draw(start, torch.zeros(1, 1)), times, path=path, step=step).z
        errors.append((law.flow(path, end, times[-1]) - law.flow(path, start, times[0])).abs().max().item())
    return [math.log2(a / b) for a, b in zip(errors[:-1], errors[1:], strict=True)]


def check_adapter(adapter: Adapter, batch: Any, change_future: Callable[[Any], Any], tolerance: float = 1e-4) -> None:
    """Contract of an adapter on one batch.

    The condition never sees the future; latents have the stated shape and are finite; decoding gives one sample per latent;
    energies have one number per whole sample.

    Raises:
        AssertionError: with what was broken.
    """
    with torch.no_grad():
        before, after = adapter.context(batch), adapter.context(change_future(batch))
        for name in ("pos", "ctx", "ctx_pos", "tok"):
            a, b = getattr(before, name), getattr(after, name)
            assert a is None or torch.equal(a, b), f"context: {name} changes with the future"
        z, weight = adapter.encode(batch)
        b, n = before.pos.shape[:2]
        assert z.shape == (b, 1, n, adapter.latent_dim), f"encode gave {tuple(z.shape)}"
        assert weight.shape == (b, n) and torch.isfinite(z).all()
        assert before.ctx.shape[-1] == adapter.ctx_dim
        many = torch.cat([z, z, torch.randn_like(z)], dim=1)
        out = adapter.decode(many, batch)
        assert out.shape[:2] == (b, 3) and torch.isfinite(out).all()
        assert torch.allclose(out[:, 0], out[:, 1], atol=tolerance), "equal latents decode alike"
        for name, value in adapter.score(out, batch).items():
            assert value.shape == (b, 3), (
                f"score {name} has shape {tuple(value.shape)}; expected one number per sample (b k)"
            )
