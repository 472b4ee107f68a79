"""Guides: Denoiser -> Denoiser, composed by plain function application. None of them changes its input.

A guide may also have: `on_flow_map(FlowMap) -> FlowMap` (what it does to a student; without it one is refused, with the text of
`no_flow_map`), `begin(draw, times, step)` (refuse a run before it starts), `after_step(z, x0, t, s, state, seeds)`
(choose among
the k samples), `finish(z)` (the last word on the result), `report(z)` (measure the finished result).

Which of them guide a few-step student, whose jump to 0 is an end point and not E[x0 | z_t]:

    guide                    student   why
    ClassifierFree           refused   x_u + w (x_c - x_u) of two end points is no end point; guidance is an input of such a net
    EnergyDescent            yes       on jumps to 0, finished samples, alone: what a jump to s > 0 points to is no sample
    projection.Projection    yes       on jumps to 0 alone
    Infill                   yes       known entries enter each jump at the noise level of t and leave it at that of s
    resampling.Resample      yes       importance weights with any step; selection with a step that draws noise between jumps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seqdiff.path import Path
from seqdiff.types import Denoiser, Draw, FlowMap

Energy = Callable[[Tensor], Tensor]  # x0 (b k n d) -> energy of each token (b k n), >= 0, differentiable


@dataclass(frozen=True)
class ClassifierFree:
    """Classifier-free guidance on x0: x_u + weight (x_c - x_u) (Ho & Salimans 2021, equation 6).

    On an affine path guiding x0, eps or v is the same up to the path's own factors. For a student it is refused.

    Args:
        unconditional: the same net with the context dropped (`Cond.drop`).
        weight: 1 = the condition alone, 0 = none, above 1 = sharper than the training law.
        interval: times (low, high) outside which the weight is 1 (Kynkaanniemi et al. 2024) and no second pass is paid.
        rescale: share, 0 to 1, by which the guided x0 is brought back to the standard deviation of x_c over the tokens and
            channels of a sample (Lin et al. 2024, section 3.4, there on the net's output): against overshoot at high weights.
        mask: b #k n, the real tokens, for the standard deviations; None = all are real.

    Raises:
        ValueError: an interval outside [0, 1] or upside down, a rescale outside [0, 1], a weight that is not finite.
    """

    unconditional: Denoiser
    weight: float
    interval: tuple[float, float] = (0.0, 1.0)
    rescale: float = 0.0
    mask: Tensor | None = None
    no_flow_map = (
        "x_u + w (x_c - x_u) of two end points is not an end point. Train the student with guidance as an input of the net "
        "(Cond.guidance), distilled from the guided teacher: it then costs one pass"
    )

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise ValueError(f"interval is {self.interval}; expected times (low, high) with 0 <= low <= high <= 1")
        if not 0 <= self.rescale <= 1:
            raise ValueError(f"rescale is {self.rescale}; expected a share from 0 (off) to 1")
        if not math.isfinite(self.weight):
            raise ValueError(f"weight is {self.weight}; expected a finite number, 1 = off")

    def __call__(self, denoiser: Denoiser) -> Denoiser:
        def guided(z: Tensor, t: float) -> Tensor:
            x_c = denoiser(z, t)
            if self.weight == 1 or not self.interval[0] <= t <= self.interval[1]:
                return x_c
            x_u = self.unconditional(z, t)
            x = x_u + self.weight * (x_c - x_u)
            if self.rescale == 0:
                return x
            wanted, got = self._std(x_c), self._std(x)
            ratio = torch.where(got > 0, wanted / got, torch.ones_like(got))
            return x * (self.rescale * ratio + 1 - self.rescale)

        return guided

    def _std(self, x: Tensor) -> Tensor:
        """Standard deviation over the real tokens and channels of each sample: b k 1 1."""
        real = torch.ones_like(x) if self.mask is None else self.mask[..., None].to(x).expand_as(x)
        count = real.sum((-2, -1), keepdim=True).clamp_min(1)
        mean = (x * real).sum((-2, -1), keepdim=True) / count
        return (((x - mean) * real).square().sum((-2, -1), keepdim=True) / count).sqrt()


def weighted(energies: Sequence[Energy], weights: Sequence[float]) -> Energy:
    """One energy from several: sum of weight x energy. Polyak's step does not feel a common factor, only the proportions.

    Raises:
        ValueError: no energies, not one weight each, or a weight that is negative or not finite.
    """
    if len(energies) != len(weights) or not energies:
        raise ValueError(f"weighted got {len(energies)} energies and {len(weights)} weights; give one weight an energy")
    if not all(math.isfinite(w) and w >= 0 for w in weights):
        raise ValueError(
            f"weights are {list(weights)}; expected finite numbers >= 0: an energy is lowered, never raised"
        )

    def energy(x: Tensor) -> Tensor:
        return torch.stack([w * e(x) for e, w in zip(energies, weights, strict=True)]).sum(0)

    return energy


@dataclass
class EnergyDescent:
    """Bounded descent on an energy of the estimated data (in the spirit of training-free guidance, Yu et al. 2023, FreeDoM,
    here with steps in x0 rather than z_t, so that the net is not differentiated).

    Each token takes Polyak's step towards energy 0, rate E / |grad E|^2 grad E, at most `max_step` long in latents, so that
    no scale has to be tuned and tokens without energy do not move. A sample whose energy did not fall keeps its unguided
    version. Whitened latents make the descent follow the directions in which the data vary.

    Valid for a student: its jump to 0 is a finished sample, on which the energy means what it says. A jump to s > 0 is left
    alone, since the x0 it points to is the mean direction of the way from t to s and no sample; the net therefore does not
    see what the descent did.

    Args:
        energy: x0 (b k n d) -> energy of each token (b k n), >= 0, differentiable. Several: `weighted`.
        iterations: gradient evaluations at each guided step.
        rate: 1 solves a linear constraint in one step on a squared hinge with rate 2.
        max_step: length of one move of a token, in standard deviations of the latents.
        below: only at times t <= below; near noise x0 is a blur of many futures.
        through_net: a sample moves along J^T grad E, J = dx0/dz, instead of along grad E: since J is Cov(x0 | z_t) up to a
            factor (Dhariwal & Nichol 2021; Song et al. 2023, pseudoinverse guidance), everything correlated with what
            the wish is about goes along, in the proportions of the law. Costs a backward pass through the net an
            iteration; a student's jump to 0 is guided without it.

    After a run (b k each; None before):
        before: energy of the last guided step's x0, as the model gave it.
        after: energy of the finished sample, after all guides.
        kept: had energy > 0 at the last guided step and the descent did not lower it: its unguided version stands.
    """

    energy: Energy
    iterations: int = 12
    rate: float = 1.6
    max_step: float = 0.1
    below: float = 0.3
    through_net: bool = False
    before: Tensor | None = field(default=None, init=False)
    after: Tensor | None = field(default=None, init=False)
    kept: Tensor | None = field(default=None, init=False)
    _student: bool = field(default=False, init=False, repr=False)

    def begin(self, draw: Draw, times: Sequence[float], step: Any) -> None:
        """Forget the run before.

        Raises:
            ValueError: nothing would be guided: the last evaluation is above `below`, or a student never jumps to 0.
        """
        self.before = self.after = self.kept = None
        if self._student and times[-1] > 0:
            raise ValueError(f"energy guidance of a student acts on its jump to 0, but the times end at {times[-1]:g}")
        if not self._student and times[-2] > self.below:
            raise ValueError(
                f"energy guidance acts at t <= below = {self.below:g}, but the last evaluation of these {len(times) - 1} "
                f"steps is at t = {times[-2]:g}: nothing would be guided. Set below={times[-2]:g} or more, or take more steps"
            )

    def __call__(self, denoiser: Denoiser) -> Denoiser:
        self._student = False

        def guided(z: Tensor, t: float) -> Tensor:
            if t > self.below:
                return denoiser(z, t)
            if not self.through_net:
                return self.descend(denoiser(z, t))
            with torch.inference_mode(False), torch.enable_grad():
                at = z.clone().requires_grad_()
                x0 = denoiser(at, t)
                if not x0.requires_grad:
                    raise ValueError(
                        "energy guidance through the net got a denoiser without a gradient: put it before guides that move x0, and "
                        "prepare the condition outside torch.inference_mode"
                    )
                return self.descend(x0.detach(), lambda g: torch.autograd.grad(x0, at, g, retain_graph=True)[0])

        return guided

    def on_flow_map(self, student: FlowMap) -> FlowMap:
        self._student = True

        def jump(z: Tensor, t: float, s: float) -> Tensor:
            end = student(z, t, s)
            return end if s > 0 else self.descend(end)

        return FlowMap(jump)

    def report(self, z: Tensor) -> None:
        with torch.no_grad():
            self.after = self.energy(z).sum(-1)

    def descend(self, x0: Tensor, pull: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """x0 with lower energy, sample by sample. pull: g -> J^T g, for `through_net`."""
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
                x = x - (
                    self._of_tokens(grad, each.detach()) if pull is None else self._of_samples(grad, pull(grad), total)
                )
            self.after = least
            assert self.before is not None and least is not None
            self.kept = (self.before > 0) & ~(least < self.before)
        return best.detach()

    def _of_tokens(self, grad: Tensor, energy: Tensor) -> Tensor:
        """Polyak's step of each token by itself. energy: b k n."""
        move = self.rate * energy[..., None] * grad / grad.square().sum(-1, keepdim=True).clamp_min(1e-12)
        return move * (self.max_step / move.norm(dim=-1, keepdim=True).clamp_min(self.max_step))

    def _of_samples(self, grad: Tensor, along: Tensor, energy: Tensor) -> Tensor:
        """Polyak's step of a whole sample along J^T grad, in which the first-order fall of the energy is grad . J^T grad; along
        grad itself where a net's J makes that negative. energy: b k; the longest move of a token is bounded."""
        fall = (grad * along).sum((-2, -1), keepdim=True)
        along = torch.where(fall > 0, along, grad)
        fall = torch.where(fall > 0, fall, grad.square().sum((-2, -1), keepdim=True))
        move = self.rate * energy[..., None, None] * along / fall.clamp_min(1e-12)
        longest = move.norm(dim=-1).amax(-1)[..., None, None]
        return move * (self.max_step / longest.clamp_min(self.max_step))


@dataclass(frozen=True)
class Infill:
    """Known entries of the latents are kept, the rest is drawn around them (replacement; Lugmayr et al. 2022, equation 8).

    On the way the known part is at the noise level of z_t with the start's own noise, so that it lies on the path the
    sampler is on; `finish` writes it once more, so that it is exact to 0.0. The free part follows the known one less than
    the true conditional does (about half as much for a Gaussian with correlation .9), unless the net was trained with
    known parts (`Cond.known`): then the net knows, and this makes it exact.

    Valid for a student: the known entries are put into each jump at the noise level of t and leave it at that of s.

    Args:
        known: b #k n d, values in latents.
        known_mask: b #k n d, True = known. Continuation: `prefix`; some agents or tracks of a scene: `groups_known`.
        noise: b k n d, the start noise of the run.
        path: the run's path.

    Raises:
        ValueError: shapes that do not fit together; known entries that are not finite.
    """

    known: Tensor
    known_mask: Tensor
    noise: Tensor
    path: Path

    def __post_init__(self) -> None:
        b, k, n, d = self.noise.shape
        for name in ("known", "known_mask"):
            shape = tuple(getattr(self, name).shape)
            if shape not in ((b, k, n, d), (b, 1, n, d)):
                raise ValueError(
                    f"{name} has shape {shape}; the noise {(b, k, n, d)} asks for that shape or {(b, 1, n, d)}"
                )
        if not bool(torch.isfinite(torch.where(self.known_mask, self.known, 0)).all()):
            raise ValueError("known has entries marked as known that are not finite; mark only what is known")

    def __call__(self, denoiser: Denoiser) -> Denoiser:
        def guided(z: Tensor, t: float) -> Tensor:
            return self.finish(denoiser(self._at(z, t), t))

        return guided

    def on_flow_map(self, student: FlowMap) -> FlowMap:
        return FlowMap(lambda z, t, s: self._at(student(self._at(z, t), t, s), s))

    def finish(self, z: Tensor) -> Tensor:
        """The result with the known part exact."""
        return torch.where(self.known_mask, self.known, z)

    def _at(self, z: Tensor, t: float) -> Tensor:
        return torch.where(self.known_mask, self.path.mix(self.known, self.noise, t), z)


def prefix(known: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Continuation: the first tokens are given, the rest is to be drawn. -> known and known_mask, b #k length d each.

    Args:
        known: b #k p d, latents of the given start.
        length: n, tokens of the whole.

    Raises:
        ValueError: nothing is left to draw.
    """
    p = known.shape[-2]
    if not 0 < p < length:
        raise ValueError(f"the prefix has {p} tokens and the whole {length}; expected 1 to {length - 1} of them")
    whole = known.new_zeros(*known.shape[:-2], length, known.shape[-1])
    whole[..., :p, :] = known
    mask = torch.zeros_like(whole, dtype=torch.bool)
    mask[..., :p, :] = True
    return whole, mask


def groups_known(z: Tensor, group: Tensor, known: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Some subjects of a scene are given, the others react. -> z itself and known_mask, b #k n d.

    Args:
        z: b #k n d, latents that hold the given subjects' values.
        group: b n, whom each token belongs to (`Cond.group`).
        known: the groups that are given.

    Raises:
        ValueError: a group that some item does not have.
    """
    for g in known:
        missing = (~(group == g).any(-1)).nonzero().flatten().tolist()
        if missing:
            raise ValueError(f"items {missing[:5]} have no token of group {g}; name groups that every item has")
    mask = torch.isin(group, torch.as_tensor(list(known), dtype=group.dtype, device=group.device))
    return z, mask[:, None, :, None].expand_as(z)
