"""Shapes and the few types that every part of the core agrees on.

Letters: b items (scenes), k samples, n latent tokens, d latent channels, m context tokens, c channels, p position axes.
`#k` is k or 1. Time t runs from 0 (data) to 1 (noise).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

Z: TypeAlias = Float[Tensor, "b k n d"]
Seeds: TypeAlias = Int64[Tensor, "b k"]
Denoiser: TypeAlias = Callable[[Tensor, float], Tensor]  # (z, t) -> E[x0 | z_t], the condition closed over
Guide: TypeAlias = Callable[[Denoiser], Denoiser]  # may have on_flow_map, after_step, finish: see seqdiff.guidance


@dataclass(frozen=True)
class FlowMap:
    """A few-step student's jump z_t -> z_s along the flow (Boffi et al. 2024), the condition closed over.

    A type of its own, since its jump to 0 is the end point of one trajectory and not E[x0 | z_t]: what is derived for a
    Denoiser (classifier-free guidance, multistep extrapolation, the probability-flow likelihood) does not hold for it.
    """

    jump: Callable[[Tensor, float, float], Tensor]  # (z, t, s) -> z_s, 0 <= s < t <= 1

    def __call__(self, z: Tensor, t: float, s: float) -> Tensor:
        return self.jump(z, t, s)


@dataclass(frozen=True)
class Cond:
    """Everything a net may know about an item. The context has no sample axis: it is encoded once and shared by all k samples.

    `mask` says which latent tokens are real; it is carried from the data and never guessed from zeros.
    """

    mask: Bool[Tensor, "b #k n"]
    pos: Float[Tensor, "b n p"]
    group: Int64[Tensor, "b n"]  # whom a latent belongs to (trajectories: the agent)
    ctx: Float[Tensor, "b m c"]
    ctx_pos: Float[Tensor, "b m p"]
    ctx_mask: Bool[Tensor, "b m"]
    tok: Float[Tensor, "b n c"] | None = None  # what is known of each token's own subject
    known: Float[Tensor, "b #k n d"] | None = None  # latents that are given (infilling, continuation)
    known_mask: Bool[Tensor, "b #k n d"] | None = None  # True = given
    scale: Float[Tensor, "b n d"] | None = None  # size of a unit of each latent channel, in data units
    guidance: Float[Tensor, " b"] | None = None  # classifier-free weight, for nets that take it as an input

    def drop(self, items: Bool[Tensor, " b"] | None = None) -> Cond:
        """The condition without its context (all items, or those marked): what classifier-free guidance is trained on."""
        keep = torch.zeros_like(self.ctx_mask[:, 0]) if items is None else ~items
        tok = None if self.tok is None else self.tok * keep[:, None, None]
        return replace(self, ctx_mask=self.ctx_mask & keep[:, None], tok=tok)


@dataclass(frozen=True)
class Draw:
    """Samples and the log of their importance weight relative to i.i.d. noise (0 for i.i.d.).

    `energy`: of each sample before and after energy guidance, b k each; None = there was none.
    """

    z: Z
    log_weight: Float[Tensor, "b k"]
    energy: tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]] | None = None


@runtime_checkable
class Net(Protocol):
    """u(z, t, s, cond). `prepare` does once per scene all that depends on the condition alone."""

    def prepare(self, cond: Cond) -> Any: ...

    def __call__(self, z: Z, t: Tensor | float, s: Tensor | float, prepared: Any) -> Z: ...


@runtime_checkable
class Adapter(Protocol):
    """What a domain owes the core. Usually an `nn.Module`, since its context encoder is trained with the net."""

    latent_dim: int
    ctx_dim: int

    def fit(self, data: Any) -> dict[str, float]:
        """Fit the codec and the normaliser on the training split alone; returns what it measured, for the log."""
        ...

    def context(self, batch: Any) -> Cond:
        """The condition. Never sees the future."""
        ...

    def encode(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The recorded future as latents (b 1 n d), and the weight of each token in the loss (b n)."""
        ...

    def decode(self, z: Tensor, batch: Any) -> Tensor:
        """Latents (b k n d) to samples in domain units."""
        ...

    def coordinates(self, sample: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """In what the samples of an item are compared as wholes: b k n t c, and validity b n or b n t."""
        ...

    def energy(self, batch: Any, constraints: Any = None) -> Callable[[Tensor], Tensor]:
        """Latents (b k n d) -> what is wrong with each token's subject (b k n), >= 0, differentiable, for guidance.

        `constraints`: the user's wishes in the domain's own terms, as its reader gives them."""
        ...

    def score(self, sample: Tensor, batch: Any) -> dict[str, Tensor]:
        """Named energies, ONE number per whole sample (b k), lower is better, NaN = unknown."""
        ...

    def mass(self, energies: dict[str, Tensor], batch: Any) -> Tensor:
        """What share of the law each sample stands for (b k, sums to one): 1/k, or tilted by its energies."""
        ...

    def validate(self, sample: Tensor, batch: Any) -> dict[str, Tensor]:
        """Measures of samples against the recorded future, one number per item (b), for validation curves."""
        ...


class DomainModule(nn.Module):
    """Base of adapters that are modules, so that checks can name the type."""

    latent_dim: int
    ctx_dim: int


def as_seeds(seed: int, items: int, samples: int, first_item: int = 0) -> Tensor:
    """Per-sample seeds (b k): a function of (seed, item, sample) alone, whatever the batch split.

    Args:
        seed: the run's seed, 0 <= seed < 2**31.
        items, samples: b and k.
        first_item: index of the first item in the whole set.
    """
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed is {seed}; expected an integer in [0, 2**31)")
    if items + first_item > 2**16 * 64 or samples > 2**10:
        raise ValueError(
            f"{first_item + items} items x {samples} samples; at most {2**22} items and {2**10} samples a seed"
        )
    item = torch.arange(first_item, first_item + items, dtype=torch.int64)
    sample = torch.arange(samples, dtype=torch.int64)
    return (torch.tensor(seed, dtype=torch.int64) << 32) + (item[:, None] << 10) + sample[None, :]
