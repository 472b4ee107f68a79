"""The only sampling loop, and the noise it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from seqdiff.path import Path
from seqdiff.steps import FLOW_MAP_STEPS, Step
from seqdiff.types import Denoiser, Draw, FlowMap, Guide, Seeds


def gaussian_noise(shape: tuple[int, int], seeds: Seeds, temperature: float = 1.0) -> Draw:
    """I.i.d. Gaussian start noise.

    Each sample has its own counter-based generator, and padding comes last, so that sample i is bit-equal alone, in any
    batch split and under any padding.

    Args:
        shape: (n, d).
        seeds: b k.
        temperature: scale of the noise: 1 = the training law, 0 = every sample the same.

    Raises:
        ValueError: a negative temperature.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; expected 0 (identical samples) or more, 1 = the training law")
    n, d = shape
    flat = seeds.flatten().cpu().numpy().astype(np.uint64)
    out = np.empty((flat.size, n * d), np.float32)
    for row, seed in zip(out, flat, strict=True):
        np.random.Generator(np.random.Philox(key=seed)).standard_normal(dtype=np.float32, out=row)
    z = torch.from_numpy(out).view(*seeds.shape, n, d)
    return Draw(z * temperature, torch.zeros(seeds.shape))


def sample(
    model: Denoiser | FlowMap,
    draw: Draw,
    times: Sequence[float],
    *,
    path: Path,
    step: Step,
    guides: Sequence[Guide] = (),
    seeds: Seeds | None = None,
) -> Draw:
    """Carry noise at times[0] to data at times[-1].

    Args:
        model: (z, t) -> E[x0 | z_t], or a student's FlowMap for the steps of FLOW_MAP_STEPS.
        draw: start, z of shape b k n d.
        times: strictly decreasing; each step goes from one entry to the next, by position.
        guides: folded around the model, the first one innermost. A guide may have a method `on_flow_map` (what it does to
            a FlowMap; without it a student is refused), `after_step(z, x0, t, s, state, seeds)` (resampling of the k samples
            between steps) and `finish(z)` (the last word on the result: known parts are written exactly once more).
        seeds: b k, for stochastic steps.

    Raises:
        ValueError: times that are not strictly decreasing within [0, 1]; a step or a guide that the model is not made for.
    """
    if len(times) < 2 or any(not 1 >= a > b >= 0 for a, b in zip(times[:-1], times[1:], strict=True)):
        raise ValueError(f"times must decrease strictly within [0, 1] and hold at least two entries, got {list(times)}")
    model = _fold(model, step, guides)
    z, memory, log_weight = draw.z, None, draw.log_weight
    selecting = [(guide, guide.after_step) for guide in guides if hasattr(guide, "after_step")]
    states: list[Any] = [None] * len(selecting)
    for t, s in zip(times[:-1], times[1:], strict=True):
        z, x0, memory = step(model, path, z, float(t), float(s), memory, seeds)  # type: ignore[arg-type]
        for i, (_, after_step) in enumerate(selecting):
            chosen = after_step(z, x0, float(t), float(s), states[i], seeds)
            states[i] = chosen.state
            log_weight = chosen.log_weight if chosen.log_weight is not None else log_weight
            if chosen.ancestor is not None:
                z, memory = _take(z, chosen.ancestor), _take(memory, chosen.ancestor)
    for guide in guides:
        finish = getattr(guide, "finish", None)
        if finish is not None:
            z = finish(z)
    return Draw(z, log_weight)


class Selection(NamedTuple):
    """What `after_step` of a guide decides.

    ancestor: b k, which sample each one goes on from; None = itself. log_weight: b k, None = unchanged. state: of the guide,
    handed back at the next step.
    """

    ancestor: Tensor | None
    log_weight: Tensor | None
    state: Any


def _fold(model: Denoiser | FlowMap, step: Step, guides: Sequence[Guide]) -> Denoiser | FlowMap:
    """The model with all guides around it."""
    if isinstance(model, FlowMap) != (step in FLOW_MAP_STEPS):
        given = "a FlowMap" if isinstance(model, FlowMap) else "a Denoiser"
        names = ", ".join(f.__name__ for f in FLOW_MAP_STEPS)
        raise ValueError(
            f"the step {getattr(step, '__name__', step)} got {given}; {names} take a student's FlowMap, all others a Denoiser"
        )
    for guide in guides:
        if not isinstance(model, FlowMap):
            model = guide(model)
        elif hasattr(guide, "on_flow_map"):
            model = guide.on_flow_map(model)
        else:
            reason = getattr(guide, "no_flow_map", "it is derived for E[x0 | z_t], and a student's jump is an end point")
            raise ValueError(
                f"{type(guide).__name__} does not guide a few-step student: {reason}. Take a step on the student's "
                "instantaneous field (ddim, dpmpp_2m, ...) or another guide"
            )
    return model


def _take(tree: Any, index: Tensor) -> Any:
    """Tensors b k ... of a tree, reordered along k."""

    def take(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape[:2] != index.shape:
            return x
        return torch.gather(x, 1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand_as(x))

    return tree_map(take, tree)
