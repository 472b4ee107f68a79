"""The only sampling loop; the noise it starts from is in noise.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from seqdiff.noise import NOISE, find_noise, gaussian_noise
from seqdiff.path import Path, check_times
from seqdiff.steps import FLOW_MAP_STEPS, Step
from seqdiff.types import Denoiser, Draw, FlowMap, Guide, Seeds

__all__ = ["NOISE", "Selection", "find_noise", "gaussian_noise", "sample"]


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
        draw: start, z of shape b k n d at times[0] (standard noise times `path.start_scale(times[0])`).
        times: strictly decreasing; each step goes from one entry to the next, by position.
        guides: folded around the model, the first one innermost. A guide may have a method `on_flow_map` (what it does to
            a FlowMap; without it a student is refused), `after_step(z, x0, t, s, state, seeds)` (resampling of the k samples
            between steps), `finish(z)` (the last word on the result: known parts are written exactly once more), and
            `begin(draw, times, step)` and `report(z)`, called before the first step and on the finished result.
        seeds: b k, for stochastic steps.

    Raises:
        ValueError: times that are not strictly decreasing within [0, 1]; a step or a guide that the model is not made for.
    """
    times = check_times(times)
    model = _fold(model, step, guides)
    _each(guides, "begin", draw, times, step)
    z, memory, log_weight = draw.z, None, draw.log_weight
    selecting = [(guide, guide.after_step) for guide in guides if hasattr(guide, "after_step")]
    states: list[Any] = [None] * len(selecting)
    for t, s in zip(times[:-1], times[1:], strict=True):
        z, x0, memory = step(model, path, z, t, s, memory, seeds)  # type: ignore[arg-type]
        for i, (_, after_step) in enumerate(selecting):
            chosen = after_step(z, x0, t, s, states[i], seeds)
            states[i] = chosen.state
            log_weight = chosen.log_weight if chosen.log_weight is not None else log_weight
            if chosen.ancestor is not None:
                z, memory = _take(z, chosen.ancestor), _take(memory, chosen.ancestor)
    for guide in guides:
        finish = getattr(guide, "finish", None)
        if finish is not None:
            z = finish(z)
    _each(guides, "report", z)
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
            reason = getattr(
                guide, "no_flow_map", "it is derived for E[x0 | z_t], and a student's jump is an end point"
            )
            raise ValueError(
                f"{type(guide).__name__} does not guide a few-step student: {reason}. Take a step on the student's "
                "instantaneous field (ddim, dpmpp_2m, ...) or another guide"
            )
    return model


def _each(guides: Sequence[Guide], method: str, *args: Any) -> None:
    """Call a method of those guides that have it."""
    for guide in guides:
        if hasattr(guide, method):
            getattr(guide, method)(*args)


def _take(tree: Any, index: Tensor) -> Any:
    """Tensors b k ... of a tree, reordered along k."""

    def take(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape[:2] != index.shape:
            return x
        return torch.gather(x, 1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand_as(x))

    return tree_map(take, tree)
