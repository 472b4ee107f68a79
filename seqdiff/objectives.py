"""Training objectives: (net, z0, weight, cond, generator) -> loss per item. Those of few-step students are in students.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seqdiff.noise import gaussian_noise
from seqdiff.path import Path, Prediction
from seqdiff.types import Cond, Draw, Net, Seeds

Density = Literal["uniform", "logit_normal"]


def sample_times(
    shape: tuple[int, ...], density: str, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Times in (0, 1): "uniform", or "logit_normal" (Esser et al. 2024, section 3.1, m = 0, s = 1).

    The last axis is stratified: the k draws of an item cover [0, 1] evenly, which lowers the variance of its loss.
    """
    k = shape[-1]
    u = torch.rand(shape, generator=generator, device=device)
    u = (u + torch.arange(k, device=device)) / k
    if density == "uniform":
        return u.clamp(1e-4, 1.0)
    if density == "logit_normal":
        return torch.sigmoid(torch.special.ndtri(u.clamp(1e-5, 1 - 1e-5)))
    raise ValueError(f"unknown time density {density!r}; one of uniform, logit_normal")


def reveal(z0: Tensor, weight: Tensor, cond: Cond, share: float, generator: torch.Generator | None) -> Cond:
    """The condition with random parts of the data given: in a `share` of the items either single tokens (each with the item's own
    rate) or one span of them; never a token without weight, since its latent is an estimate.

    Args:
        z0: b 1 n d. weight: b n.
    """
    b, _, n, _ = z0.shape

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=z0.device)

    single = rand(b, n) < rand(b, 1)
    place = torch.arange(n, device=z0.device) / n
    first, second = rand(b, 1), rand(b, 1)
    span = (place >= torch.minimum(first, second)) & (place < torch.maximum(first, second))
    given = torch.where(rand(b, 1) < 0.5, single, span) & (rand(b, 1) < share) & (weight > 0)
    mask = given[:, None, :, None].expand_as(z0)
    return replace(cond, known=torch.where(mask, z0, 0.0), known_mask=mask)


def token_mean(error: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean over tokens: error b n, weight b n -> b. An item without any token to learn from gives 0."""
    return (error * weight).sum(-1) / weight.sum(-1).clamp_min(1e-9)


class Objective(nn.Module):
    """Base of objectives, so that a config names one by class_path.

    Args:
        path: probability path.
        prediction: what the net predicts.
        context_drop: share of items whose context is dropped, for classifier-free guidance.
        known: share of items that are given random parts of the data, for infilling; the net needs the input "known".
    """

    few_step = False  # whether net(z, t, s) with s < t was trained: a FlowMap
    frozen_context = False  # whether the adapter keeps its weights
    learned_starts: int = 0

    def __init__(self, path: Path, prediction: Prediction, context_drop: float, known: float) -> None:
        super().__init__()
        if not 0 <= context_drop < 1 or not 0 <= known < 1:
            raise ValueError(f"context_drop is {context_drop} and known {known}; expected shares in [0, 1)")
        self.teacher: nn.Module | None = None
        self.path, self.prediction = path, prediction
        self.context_drop, self.known = context_drop, known

    def forward(
        self, net: Net, z0: Tensor, weight: Tensor, cond: Cond, generator: torch.Generator | None = None
    ) -> Tensor:
        raise NotImplementedError

    def attach(self, net: nn.Module) -> None:
        """Called once with the net when the model is built: what the objective keeps of it."""

    def begin(self, net: nn.Module, continued: bool) -> None:
        """Called when a training starts, after weights were loaded. continued: from another run's weights."""

    def condition(
        self, z0: Tensor, weight: Tensor, cond: Cond, generator: torch.Generator | None
    ) -> tuple[Cond, Tensor]:
        """The condition as training shows it, and the weight of the tokens that are left to learn."""
        if self.context_drop > 0:
            cond = cond.drop(torch.rand(len(z0), generator=generator, device=z0.device) < self.context_drop)
        if self.known > 0:
            cond = reveal(z0, weight, cond, self.known, generator)
            assert cond.known_mask is not None
            weight = weight * ~cond.known_mask[:, 0, :, 0]
        return cond, weight

    def output(self, net: Net, z: Tensor, t: Tensor | float, s: Tensor | float, prepared: Any) -> Tensor:
        """u(z, t, s): on the edm path the net sees z scaled to unit variance and the cosine path's time. t, s: floats, or b k."""
        if self.path.kind == "edm":
            scale = self.path.scale_in(t)
            z = z * (scale[:, :, None, None] if isinstance(scale, Tensor) else scale)
            t, s = self.path.net_time(t), self.path.net_time(s)
        return net(z, t, s, prepared)

    def denoise(self, out: Tensor, z: Tensor, t: float) -> Tensor:
        """net(z, t, t) as E[x0 | z_t]."""
        return self.path.to_x0(out, z, t, self.prediction)

    def jump(self, out: Tensor, z: Tensor, t: Tensor | float, s: Tensor | float) -> Tensor:
        """net(z, t, s) as z_s: the DDIM update with the x0 that it points to. On the linear path with prediction v this is
        z - (t - s) u, mean flow's own (Geng et al. 2025); at s -> t its slope is the instantaneous velocity."""
        x0 = self.path.to_x0(out, z, t, self.prediction)
        ratio = self.path.sigma(s) / self.path.sigma(t)
        return ratio * z + (self.path.alpha(s) - ratio * self.path.alpha(t)) * x0

    def starts(self, shape: tuple[int, int], seeds: Seeds, temperature: float = 1.0) -> Draw:
        """Where samples start: i.i.d. noise, unless the objective learned its own starts."""
        return gaussian_noise(shape, seeds, temperature)


class FlowMatching(Objective):
    """Regression on the conditional velocity (Lipman et al. 2023, equation 9), or on x0 or eps.

    Args:
        path, prediction, context_drop, known: see Objective.
        density: of the training times.
        draws: noise levels per item and step. The context is encoded once for all of them, so that more are cheap.
    """

    def __init__(
        self,
        path: Path = Path(),  # noqa: B008 (frozen)
        prediction: Prediction = "v",
        density: Density = "logit_normal",
        draws: int = 4,
        context_drop: float = 0.0,
        known: float = 0.0,
    ) -> None:
        if draws < 1:
            raise ValueError(f"draws is {draws}; expected at least 1 noise level per item")
        super().__init__(path, prediction, context_drop, known)
        self.density, self.draws = density, draws

    def forward(
        self, net: Net, z0: Tensor, weight: Tensor, cond: Cond, generator: torch.Generator | None = None
    ) -> Tensor:
        """z0 b 1 n d, weight b n -> loss b. An item without any token to learn from has loss 0."""
        b, _, n, d = z0.shape
        cond, weight = self.condition(z0, weight, cond, generator)
        t = self.path.train_time(sample_times((b, self.draws), self.density, generator, z0.device))
        eps = torch.randn((b, self.draws, n, d), generator=generator, device=z0.device, dtype=z0.dtype)
        tt = t[:, :, None, None]
        z = self.path.mix(z0, eps, tt)
        out = self.output(net, z, t, t, net.prepare(cond))
        error = (out - self.path.target(z0, eps, tt, self.prediction)).square().mean(-1).mean(1)  # b n
        return token_mean(error, weight)
