"""Closed forms to hold samplers to, and contract checks for adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqdiff.path import Path
from seqdiff.sample import sample
from seqdiff.steps import Step
from seqdiff.types import Adapter, Draw


@dataclass(frozen=True)
class Gaussian:
    """x0 ~ N(mean, diag(std^2)), for which denoiser and flow are known exactly. mean, std: d."""

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


@dataclass(frozen=True)
class Mixture:
    """One-dimensional Gaussian mixture. weight, mean, std: c components."""

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


def order_of(
    step: Step, law: Gaussian | Mixture, path: Path, steps: Sequence[int], t_max: float = 0.95, t_min: float = 0.05
) -> list[float]:
    """Measured orders of convergence by halvings: log2 of the ratio of the largest errors at successive numbers of steps.

    The grid runs from t_max to t_min > 0, where the flow is smooth; the exact end point is the law's flow to 0 compared
    through its own flow from t_min, so that no floor of the last step hides the order.
    """
    z = torch.linspace(-2, 2, 41, dtype=torch.float64).view(1, 1, 41, 1)
    exact = law.flow(path, z, t_max)
    errors = []
    for n in steps:
        times = [t_max + (t_min - t_max) * i / n for i in range(n + 1)]
        end = sample(law.denoiser(path), Draw(z, torch.zeros(1, 1)), times, path=path, step=step).z
        errors.append((law.flow(path, end, t_min) - exact).abs().max().item())
    return [float(torch.tensor(a / b).log2()) for a, b in zip(errors[:-1], errors[1:], strict=True)]


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
