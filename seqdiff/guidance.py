"""Guides: Denoiser -> Denoiser, composed by plain function application. None of them changes its input."""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass
class EnergyDescent:
    """Bounded descent on an energy of the estimated data (in the spirit of training-free guidance, Yu et al. 2023, FreeDoM,
    here with steps in x0 rather than z_t, so that the net is not differentiated).

    Each token takes Polyak's step towards energy 0, rate E / |grad E|^2 grad E, at most `max_step` long in latents, so that
    no scale has to be tuned and tokens without energy do not move. A sample whose energy did not fall keeps its unguided
    version. Whitened latents make the descent follow the directions in which the data vary.

    Args:
        energy: x0 (b k n d) -> energy of each token (b k n), >= 0, differentiable.
        iterations: gradient evaluations at each guided step.
        rate: 1 solves a linear constraint in one step on a squared hinge with rate 2.
        max_step: length of one move of a token, in standard deviations of the latents.
        below: only at times t <= below; near noise x0 is a blur of many futures.
        before, after: energies of the samples (b k) at the last guided step, for reports.
    """

    energy: Callable[[Tensor], Tensor]
    iterations: int = 12
    rate: float = 1.6
    max_step: float = 0.1
    below: float = 0.3
    before: Tensor | None = None
    after: Tensor | None = None

    def __call__(self, denoiser: Denoiser) -> Denoiser:
        def guided(z: Tensor, t: float) -> Tensor:
            x0 = denoiser(z, t)
            return x0 if t > self.below else self.descend(x0)

        return guided

    def descend(self, x0: Tensor) -> Tensor:
        """x0 with lower energy, sample by sample."""
        with torch.inference_mode(False), torch.enable_grad():
            best = x = x0.clone()
            least = None
            for _ in range(self.iterations + 1):
                x = x.detach().requires_grad_()
                each = self.energy(x)
                total = each.detach().sum(-1)
                if least is None:
                    self.before, least = total, total
                else:
                    lower = total < least
                    best = torch.where(lower[..., None, None], x.detach(), best)
                    least = torch.where(lower, total, least)
                if not bool((total > 0).any()):
                    break
                (grad,) = torch.autograd.grad(each.sum(), x)
                size = grad.square().sum(-1, keepdim=True)
                move = self.rate * each.detach()[..., None] * grad / size.clamp_min(1e-12)
                x = x - move * (self.max_step / move.norm(dim=-1, keepdim=True).clamp_min(self.max_step))
            self.after = least
        return best.detach()


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
