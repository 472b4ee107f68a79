"""Selection among the k samples of an item by a reward that needs no gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqdiff.sample import Selection
from seqdiff.steps import STEPS
from seqdiff.types import Denoiser, Draw, FlowMap, Seeds

_STREAM = 0x5E1EC7 << 32  # second half of the generator's key: never the numbers that the noise comes from


class _State(NamedTuple):
    log_weight: Tensor  # b k, float64
    reward: Tensor  # b k, of the last look
    root: Tensor  # b k, which sample of the start each one goes back to
    looks: int


@dataclass
class Resample:
    """Particle resampling (Feynman-Kac steering, Singhal et al. 2025; the potentials as in sequential Monte Carlo for
    diffusions, Wu et al. 2023): the k samples of an item as draws of the sampler's law times exp(reward / temperature).

    Potentials are differences, exp((reward now - reward before) / temperature), so that their product is the final sample's
    own, whatever the rewards of the estimates on the way were: weighted means over the samples of an item, with the weights
    softmax(log_weight), are right up to the Monte Carlo error of k (and a bias of order 1 / k). The mean of exp(log_weight) over
    the samples estimates the normalising constant. Samples are drawn anew when the effective sample size
    (sum w)^2 / sum w^2 of an item falls below `threshold` k: systematic resampling (Kitagawa 1996), one uniform an item by its
    first sample's seed, so that a run repeats and does not depend on the batch split.

    Copies go apart by the noise of the step alone: a deterministic step is refused (unless threshold = 0), and nothing is
    selected after the last step that draws noise. Start weights (`Draw.log_weight`) are carried along.

    Valid for a student: weights alone with any step, selection with a step that draws noise between its jumps; the potentials
    of a way's end points are as good as those of conditional means, since only the last one counts in the product.

    Args:
        reward: x0 (b k n d) -> b k, finite, higher is better; a hard constraint is a large negative number.
        temperature: of the tilt, in units of the reward.
        threshold: share of k in [0, 1]; 0 = never select, importance weights alone (one look, at the finished samples).
        interval: times (low, high) at which to look and select; the reward is computed there and at the end only.

    After a run (None before):
        ess: effective sample size of the finished weights, b.
        selected: how many times each item was drawn anew, b.
        distinct: samples of the start that have descendants, b.

    Raises:
        ValueError: a setting outside its range; in a run: a deterministic step, no seeds, a reward that is not finite.
    """

    reward: Callable[[Tensor], Tensor]
    temperature: float = 1.0
    threshold: float = 0.5
    interval: tuple[float, float] = (0.0, 1.0)
    ess: Tensor | None = field(default=None, init=False)
    selected: Tensor | None = field(default=None, init=False)
    distinct: Tensor | None = field(default=None, init=False)
    _draw: Draw | None = field(default=None, init=False, repr=False)
    _times: Sequence[float] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}; expected a positive number in units of the reward")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; expected a share of k in [0, 1], 0 = weights alone")
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise ValueError(f"interval is {self.interval}; expected times (low, high) with 0 <= low <= high <= 1")

    def __call__(self, denoiser: Denoiser) -> Denoiser:
        return denoiser

    def on_flow_map(self, student: FlowMap) -> FlowMap:
        return student

    def begin(self, draw: Draw, times: Sequence[float], step: Any) -> None:
        """Refuse a step whose copies stay identical."""
        self.ess = self.selected = self.distinct = None
        self._draw, self._times = draw, times
        name = next((name for name, claim in STEPS.items() if claim.step is step), None)
        if self.threshold > 0 and name is not None and not STEPS[name].stochastic:
            noisy = ", ".join(name for name, claim in STEPS.items() if claim.stochastic)
            raise ValueError(
                f"Resample copies samples, and with the deterministic step {name} copies stay identical: take a step that "
                f"draws noise ({noisy or 'your own'}), or threshold=0 for importance weights alone"
            )

    def after_step(self, z: Tensor, x0: Tensor, t: float, s: float, state: Any, seeds: Seeds | None) -> Selection:
        assert self._draw is not None, "sample() calls begin first"
        b, k = z.shape[:2]
        own = torch.arange(k, device=z.device).expand(b, k)
        if state is None:
            start = self._draw.log_weight.to(z.device, torch.float64)
            state = _State(start, torch.zeros_like(start), own, 0)
            self.selected = torch.zeros(b, dtype=torch.int64, device=z.device)
        last = s == self._times[-1]
        inside = self.interval[0] <= t <= self.interval[1] and self.threshold > 0
        if not (inside or last):
            return Selection(None, None, state)
        reward = self._look(z if last else x0)
        log_weight = state.log_weight + (reward - state.reward) / self.temperature
        ancestor, root = None, state.root
        # the step to the last time draws no noise, so that copies made just before it would stay identical
        if not last and s != self._times[-2]:
            low = effective_size(log_weight) < self.threshold * k
            index = torch.where(low[:, None], systematic(log_weight, self._uniform(seeds, state.looks, b, z)), own)
            mean = torch.logsumexp(log_weight, -1, keepdim=True) - math.log(k)
            log_weight = torch.where(low[:, None], mean, log_weight)
            reward, root, ancestor = reward.gather(1, index), root.gather(1, index), index
            assert self.selected is not None
            self.selected += low
        if last:
            self.ess = effective_size(log_weight)
            present = torch.zeros(b, k, device=z.device).scatter_(1, root, 1.0)
            self.distinct = present.sum(-1).long()
        weight = log_weight.to(self._draw.log_weight.dtype)
        return Selection(ancestor, weight, _State(log_weight, reward, root, state.looks + 1))

    def _look(self, x: Tensor) -> Tensor:
        reward = self.reward(x).detach().double()
        if reward.shape != x.shape[:2]:
            raise ValueError(
                f"the reward has shape {tuple(reward.shape)}; expected one number a sample, {tuple(x.shape[:2])}"
            )
        bad = int((~torch.isfinite(reward)).sum())
        if bad:
            raise ValueError(
                f"{bad} of {reward.numel()} rewards are not finite; give a large negative number where a constraint is broken"
            )
        return reward

    def _uniform(self, seeds: Seeds | None, look: int, items: int, like: Tensor) -> Tensor:
        """One number in [0, 1) an item, by its first sample's seed and the number of looks before."""
        if seeds is None:
            raise ValueError("Resample draws by the samples' seeds: pass seeds to sample()")
        out = np.empty(items)
        for i, seed in enumerate(seeds[:, 0].cpu().numpy().astype(np.uint64)):
            key = np.array([seed, _STREAM + look], np.uint64)
            out[i] = np.random.Generator(np.random.Philox(key=key)).random()
        return torch.from_numpy(out).to(like.device)


def effective_size(log_weight: Tensor) -> Tensor:
    """Effective sample size (sum w)^2 / sum w^2 of each item's weights: b k -> b, from 1 to k."""
    return torch.exp(2 * torch.logsumexp(log_weight, -1) - torch.logsumexp(2 * log_weight, -1))


def systematic(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """Which samples go on: sample j of item i is drawn floor or ceil of k w_ij times (Kitagawa 1996).

    Args:
        log_weight: b k, of any common offset an item.
        uniform: b, in [0, 1).

    Returns:
        ancestors, b k, ascending.
    """
    k = log_weight.shape[-1]
    edges = torch.softmax(log_weight.double(), -1).cumsum(-1)
    edges = edges / edges[:, -1:]
    points = (torch.arange(k, device=log_weight.device)[None] + uniform.double()[:, None]) / k
    return torch.searchsorted(edges, points, right=True).clamp_max(k - 1)
