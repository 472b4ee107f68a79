"""Training objectives: (net, z0, weight, cond, generator) -> loss per item."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seqdiff.path import Path, Prediction, target
from seqdiff.types import Cond, Net


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


class Objective:
    """Base of objectives, so that a config names one by class_path."""

    path: Path
    context_drop: float

    def __call__(
        self, net: Net, z0: Tensor, weight: Tensor, cond: Cond, generator: torch.Generator | None = None
    ) -> Tensor:
        raise NotImplementedError

    def denoise(self, out: Tensor, z: Tensor, t: float) -> Tensor:
        """The net's output as E[x0 | z_t]."""
        raise NotImplementedError


class FlowMatching(Objective):
    """Regression on the conditional velocity (Lipman et al. 2023, equation 9), or on x0 or eps.

    Args:
        path: probability path.
        prediction: what the net predicts.
        density: of the training times.
        draws: noise levels per item and step. The context is encoded once for all of them, so that more are cheap.
        context_drop: share of items whose context is dropped, for classifier-free guidance.
    """

    def __init__(
        self,
        path: Path = Path(),  # noqa: B008 (frozen)
        prediction: Prediction = "v",
        density: Literal["uniform", "logit_normal"] = "logit_normal",
        draws: int = 4,
        context_drop: float = 0.0,
    ) -> None:
        if draws < 1 or not 0 <= context_drop < 1:
            raise ValueError(
                f"draws is {draws}, context_drop {context_drop}; expected at least 1, and a share in [0, 1)"
            )
        self.path, self.prediction, self.density = path, prediction, density
        self.draws, self.context_drop = draws, context_drop

    def __call__(
        self, net: Net, z0: Tensor, weight: Tensor, cond: Cond, generator: torch.Generator | None = None
    ) -> Tensor:
        """z0 b 1 n d, weight b n -> loss b. An item without any token to learn from has loss 0."""
        b, _, n, d = z0.shape
        if self.context_drop > 0:
            cond = cond.drop(torch.rand(b, generator=generator, device=z0.device) < self.context_drop)
        t = sample_times((b, self.draws), self.density, generator, z0.device)
        eps = torch.randn((b, self.draws, n, d), generator=generator, device=z0.device, dtype=z0.dtype)
        tt = t[:, :, None, None]
        z = self.path.mix(z0, eps, tt)
        out = net(z, t, t, net.prepare(cond))
        error = (out - target(self.path, z0, eps, tt, self.prediction)).square().mean(-1).mean(1)  # b n
        return (error * weight).sum(-1) / weight.sum(-1).clamp_min(1e-9)

    def denoise(self, out: Tensor, z: Tensor, t: float) -> Tensor:
        return self.path.to_x0(out, z, t, self.prediction)
