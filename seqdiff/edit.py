"""Editing samples of any domain in latents: interpolate, move along a learned direction, invert to noise, edit a part.

The law of the data lives in the model: after an edit in latents `move` can noise and denoise the result, and `redraw` lets the
rest of a sample follow the part that was edited.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seqdiff.path import Path
from seqdiff.sample import sample
from seqdiff.steps import Step
from seqdiff.types import Denoiser, Draw, FlowMap, Guide, Seeds


@dataclass(frozen=True)
class Sampling:
    """How samples were drawn, and are drawn again: the arguments of `seqdiff.sample.sample` apart from the start."""

    model: Denoiser | FlowMap
    path: Path
    step: Step
    times: Sequence[float]
    guides: Sequence[Guide] = ()
    seeds: Seeds | None = None

    @torch.no_grad()
    def run(self, start: Draw, extra: Sequence[Guide] = ()) -> Draw:
        """From a start at times[0], with further guides outermost."""
        guides = [*self.guides, *extra]
        return sample(self.model, start, self.times, path=self.path, step=self.step, guides=guides, seeds=self.seeds)


def interpolate(
    z_a: Tensor,
    z_b: Tensor,
    weight: Tensor | float,
    kind: Literal["spherical", "linear"] = "spherical",
    correlation: float = 0.0,
) -> Tensor:
    """Between two starts or two latents: weight 0 is z_a, 1 is z_b.

    "spherical" is for start noise: with weights sin((1 - w) theta) / sin theta and sin(w theta) / sin theta at the angle theta =
    arccos(correlation) of the two laws, jointly standard normal starts give a standard normal start at every weight, in any
    dimension (for angles between vectors: Shoemake 1985). "linear" is for latents of data.

    Args:
        z_a, z_b: b k n d, k may be 1.
        weight: a number, or a tensor that broadcasts against b k (several samples as a row of weights).
        correlation: of z_a and z_b as random variables, entry by entry: 0 for starts of different seeds.

    Raises:
        ValueError: shapes that do not fit together, an unknown kind, a correlation outside (-1, 1].
    """
    _check_latents(z_a=z_a, z_b=z_b)
    if z_a.shape[0] != z_b.shape[0] or z_a.shape[2:] != z_b.shape[2:]:
        raise ValueError(
            f"z_a is {tuple(z_a.shape)} and z_b {tuple(z_b.shape)}; only the number of samples may be 1 in one"
        )
    if not -1 < correlation <= 1:
        raise ValueError(f"correlation is {correlation}; expected a number in (-1, 1], 0 for independent starts")
    w = torch.as_tensor(weight, dtype=z_a.dtype, device=z_a.device)
    w = w[..., None, None] if w.dim() else w
    if kind == "linear" or (kind == "spherical" and correlation == 1):
        return (1 - w) * z_a + w * z_b
    if kind != "spherical":
        raise ValueError(f"unknown kind {kind!r}; one of spherical (start noise), linear (latents of data)")
    theta = math.acos(correlation)
    return (torch.sin((1 - w) * theta) * z_a + torch.sin(w * theta) * z_b) / math.sin(theta)


@dataclass(frozen=True)
class Direction:
    """How latents change with a label.

    unit: n d, of length 1. scale: how far along it the mean latents move for a label that is larger by 1 (False -> True).
    score: cross-validated, of predicting the label from latents: accuracy for bool labels, share of variance explained
    (R^2) for numbers. chance: what a constant guess scores. Near chance the direction means nothing.
    """

    unit: Tensor
    scale: float
    score: float
    chance: float


def fit_direction(z: Tensor, label: Tensor, ridge: float = 0.1, folds: int = 5) -> Direction:
    """The direction in which latents change with a label, from labelled examples.

    It is Cov(z, label) / Var(label), the regression of z on the label: for bool labels the difference of the two class means,
    which is linear discriminant analysis in whitened latents carried back as a displacement (whitening makes the discriminant
    and the difference of means one vector). Whether latents tell the label at all is the cross-validated score of the ridge
    predictor (covariance + ridge x mean variance); for bool labels that is a regularised linear discriminant.

    Args:
        z: ... n d, the tokens that the label is about (one agent's, or all of a sample); no padding.
        label: ... of bool, or of numbers.
        ridge: regularisation of the predictor that is scored, in units of the mean variance of the latents.
        folds: of the cross-validation; example i is in fold i mod folds, so shuffle examples that come in blocks.

    Raises:
        ValueError: shapes that do not fit, too few examples, all labels alike, values that are not finite.
    """
    if z.shape[:-2] != label.shape:
        raise ValueError(f"z is {tuple(z.shape)} and label {tuple(label.shape)}; expected one label for each n d of z")
    x, y = z.double().reshape(-1, z.shape[-2] * z.shape[-1]), label.double().flatten()
    if not bool(torch.isfinite(x).all() and torch.isfinite(y).all()):
        raise ValueError("latents or labels are not finite; leave out examples that are unknown")
    binary = label.dtype == torch.bool
    fewest = int(min(y.sum(), len(y) - y.sum())) if binary else len(y)
    if len(y) < 2 * folds or fewest < folds or y.var() == 0:
        raise ValueError(
            f"{len(y)} examples ({fewest} of the rarer label) are too few for {folds} folds, or all labels are alike"
        )
    change = ((x - x.mean(0)) * (y - y.mean())[:, None]).mean(0) / y.var(correction=0)
    scale = float(change.norm())
    fold = torch.arange(len(y), device=y.device) % folds
    guess = torch.empty_like(y)
    for i in range(folds):
        guess[fold == i] = _ridge(x[fold != i], y[fold != i], x[fold == i], ridge, binary)
    if binary:
        score, chance = float(((guess > 0) == (y > 0.5)).double().mean()), float(max(y.mean(), 1 - y.mean()))
    else:
        score, chance = float(1 - (guess - y).square().mean() / y.var(correction=0)), 0.0
    return Direction((change / max(scale, 1e-300)).view(z.shape[-2:]).to(z.dtype), scale, score, chance)


def _ridge(x: Tensor, y: Tensor, new: Tensor, ridge: float, binary: bool) -> Tensor:
    """Predictions at new points; for bool labels positive = True, cut halfway between the projected class means."""
    mean = x.mean(0)
    c = x - mean
    cov = c.T @ c / len(c)
    cov = cov + ridge * cov.diagonal().mean() * torch.eye(len(cov), dtype=x.dtype, device=x.device)
    w = torch.linalg.solve(cov, c.T @ (y - y.mean()) / len(c))
    if not binary:
        return y.mean() + (new - mean) @ w
    return (new - (x[y > 0.5].mean(0) + x[y < 0.5].mean(0)) / 2) @ w


def move(
    z: Tensor, direction: Direction, amount: Tensor | float, noise: Tensor | None = None, again: Sampling | None = None
) -> Tensor:
    """Latents moved by `amount` labels along a direction; with `noise` and `again` then noised to t = again.times[0] and
    denoised from there (SDEdit, Meng et al. 2022), so that the result is on the law again. The later the start, the nearer
    the result stays to the moved sample: t of 0.3 to 0.6 is usual.

    Args:
        z: b k n d, with the direction's n and d.
        amount: a number or a tensor that broadcasts against b k; 1 = as far as False to True.
        noise: b k n d, for example the sample's own start noise.
        again: how to denoise; its times begin at the noise level.

    Raises:
        ValueError: shapes that do not fit; one of noise and again alone; times that begin at pure noise.
    """
    _check_latents(z=z)
    if z.shape[2:] != direction.unit.shape:
        raise ValueError(f"z is {tuple(z.shape)}, the direction {tuple(direction.unit.shape)}; pass those tokens alone")
    if (noise is None) != (again is None):
        raise ValueError("move got one of noise and again; give both to noise and denoise, or neither to move alone")
    far = torch.as_tensor(amount, dtype=z.dtype, device=z.device)
    far = far[..., None, None] if far.dim() else far
    moved = z + far * direction.scale * direction.unit
    if noise is None or again is None:
        return moved
    t = float(again.times[0])
    if again.path.alpha(t) < 1e-6:
        raise ValueError(f"times begin at {t:g}, pure noise, where nothing of the sample is left; begin at 0.3 to 0.6")
    return again.run(Draw(again.path.mix(moved, noise, t), torch.zeros_like(moved[..., 0, 0]))).z


def invert(denoiser: Denoiser, path: Path, z0: Tensor, times: Sequence[float]) -> Tensor:
    """The noise at times[0] from which the probability-flow ODE leads to z0 (DDIM inversion's limit: Song et al. 2021, section
    4.3), by the classical Runge-Kutta method of order 4 in t upwards, four evaluations a step.

    At t = 0 the net is not asked: there sigma E[eps | z] vanishes and dz/dt = alpha'(0) z, for data with a smooth density.

    Args:
        denoiser: E[x0 | z_t]; of a student, its instantaneous field.
        z0: b k n d, at times[-1].
        times: as for sampling, strictly decreasing; 16 to 64 steps.

    Raises:
        ValueError: a FlowMap, whose jumps go to smaller t alone; times that do not decrease strictly.
    """
    if isinstance(denoiser, FlowMap):
        raise ValueError(
            "a FlowMap jumps to smaller t alone; invert with the instantaneous field of the same net, a Denoiser"
        )
    _check_latents(z0=z0)
    if len(times) < 2 or any(not 1 >= a > b >= 0 for a, b in zip(times[:-1], times[1:], strict=True)):
        raise ValueError(f"times must decrease strictly within [0, 1] and hold at least two entries, got {list(times)}")

    def slope(z: Tensor, t: float) -> Tensor:
        if t == 0:
            return path.d_alpha(0.0) * z
        x0 = denoiser(z, t)
        return path.velocity(x0, path.to_eps(x0, z, t), t)

    z = z0
    up = [float(t) for t in reversed(times)]
    for s, t in zip(up[:-1], up[1:], strict=True):
        h, mid = t - s, (s + t) / 2
        a = slope(z, s)
        b = slope(z + h / 2 * a, mid)
        c = slope(z + h / 2 * b, mid)
        z = z + h / 6 * (a + 2 * b + 2 * c + slope(z + h * c, t))
    return z


class _Keep:
    """Record the states of a run, in the order of the model's calls."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def __call__(self, denoiser: Denoiser) -> Denoiser:
        def kept(z: Tensor, t: float) -> Tensor:
            self.states.append(z)
            return denoiser(z, t)

        return kept

    def on_flow_map(self, student: FlowMap) -> FlowMap:
        def kept(z: Tensor, t: float, s: float) -> Tensor:
            self.states.append(z)
            return student(z, t, s)

        return FlowMap(kept)


@dataclass
class _Follow:
    """The edited part goes along its recorded way, shifted by the edit at the scale of z_t; `finish` writes it exactly."""

    states: list[Tensor]
    shift: Tensor
    value: Tensor
    mask: Tensor
    path: Path
    calls: int = 0

    def __call__(self, denoiser: Denoiser) -> Denoiser:
        return lambda z, t: self.finish(denoiser(self._next(z, t), t))

    def on_flow_map(self, student: FlowMap) -> FlowMap:
        return FlowMap(lambda z, t, s: student(self._next(z, t), t, s))

    def finish(self, z: Tensor) -> Tensor:
        return torch.where(self.mask, self.value, z)

    def _next(self, z: Tensor, t: float) -> Tensor:
        state = self.states[self.calls]
        self.calls += 1
        return torch.where(self.mask, state + self.path.alpha(t) * self.shift, z)


def redraw(again: Sampling, start: Draw, value: Tensor, mask: Tensor) -> tuple[Draw, Draw]:
    """Edit part of a sample and draw the rest again with the same noise. -> the original and the edited samples.

    The run is repeated twice: once as it was, once with the edited part on its own recorded way, shifted by alpha(t) (value -
    original). So the rest answers to the edit alone: with value = original nothing changes, bit for bit. How strongly it answers
    is as in `seqdiff.guidance.Infill`: less than the true conditional, unless the net was trained with known parts.

    Args:
        again: how the sample was drawn; guides with a state of a run report on the edited one.
        start: the noise that it was drawn from.
        value: b #k n d, latents of the edited part; elsewhere ignored.
        mask: b #k n d, True = edited: exactly `value` in the result. Entries that are to stay as they were are marked as
            well, with the original's values.

    Raises:
        ValueError: shapes that do not fit; a guide that selects among samples, after which sample j is not sample j.
    """
    for guide in again.guides:
        if hasattr(guide, "after_step"):
            raise ValueError(
                f"{type(guide).__name__} selects among the samples, so that none can be redrawn; leave it out here"
            )
    b, k, n, d = start.z.shape
    for name, x in (("value", value), ("mask", mask)):
        if tuple(x.shape) not in ((b, k, n, d), (b, 1, n, d)):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; the start {(b, k, n, d)} asks for that shape or {(b, 1, n, d)}"
            )
    keep = _Keep()
    original = again.run(start, [keep])
    shift = torch.where(mask, value - original.z, 0)
    edited = again.run(start, [_Follow(keep.states, shift, value, mask, again.path)])
    return original, edited


def _check_latents(**named: Tensor) -> None:
    for name, z in named.items():
        if z.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(z.shape)}; expected latents b k n d")
