"""Guides: Denoiser -> Denoiser, composed by plain function application. None of them changes its input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqdiff.path import Path
from seqdiff.types import Denoiser


@dataclass(frozen=True)
class ClassifierFree:
    """Classifier-free guidance on x0: x_u + weight (x_c - x_u) (Ho & Salimans 2021, equation 6).

    On an affine path guiding x0, eps or v is the same up to the path's own factors.

    Args:
        unconditional: the same net with the context dropped (`Cond.drop`).
        weight: 1 = the condition alone, 0 = none, above 1 = sharper than the training law.
        interval: times (low, high) outside which the weight is 1 (Kynkaanniemi et al. 2024) and no second pass is paid.
    """

    unconditional: Denoiser
    weight: float
    interval: tuple[float, float] = (0.0, 1.0)

    def __call__(self, denoiser: Denoiser) -> Denoiser:
        def guided(z: Tensor, t: float) -> Tensor:
            x_c = denoiser(z, t)
            if self.weight == 1 or not self.interval[0] <= t <= self.interval[1]:
                return x_c
            x_u = self.unconditional(z, t)
            return x_u + self.weight * (x_c - x_u)

        return guided


@dataclass(frozen=True)
class Infill:
    """Known entries of the latents are kept, the rest is drawn around them (replacement; Lugmayr et al. 2022, equation 8).

    On the way the known part is at the noise level of z_t with the start's own noise, so that it lies on the path the
    sampler is on; `finish` writes it once more, so that it is exact to 0.0. The free part follows the known one less than
    the true conditional does (about half as much for a Gaussian with correlation .9), unless the net was trained with
    known parts.

    Args:
        known: b #k n d, values in latents.
        known_mask: b #k n d, True = known.
        noise: b k n d, the start noise of the run.
        path: the run's path.
    """

    known: Tensor
    known_mask: Tensor
    noise: Tensor
    path: Path

    def __call__(self, denoiser: Denoiser) -> Denoiser:
        def guided(z: Tensor, t: float) -> Tensor:
            z = torch.where(self.known_mask, self.path.mix(self.known, self.noise, t), z)
            return self.finish(denoiser(z, t))

        return guided

    def finish(self, z: Tensor) -> Tensor:
        """The result with the known part exact."""
        return torch.where(self.known_mask, self.known, z)
