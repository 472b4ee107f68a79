"""The only sampling loop, and the noise it starts from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from seqdiff.path import Path
from seqdiff.steps import Step
from seqdiff.types import Denoiser, Draw, Guide, Seeds


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
    denoiser: Denoiser,
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
        denoiser: (z, t) -> E[x0 | z_t].
        draw: start, z of shape b k n d.
        times: strictly decreasing; each step goes from one entry to the next, by position.
        guides: folded around the denoiser, the first one innermost. A guide with a method `finish(z)` has the last word on
            the result (known parts are written exactly once more).
        seeds: for stochastic steps.

    Raises:
        ValueError: times that are not strictly decreasing within [0, 1].
    """
    if len(times) < 2 or any(not 1 >= a > b >= 0 for a, b in zip(times[:-1], times[1:], strict=True)):
        raise ValueError(f"times must decrease strictly within [0, 1] and hold at least two entries, got {list(times)}")
    for guide in guides:
        denoiser = guide(denoiser)
    z, memory = draw.z, None
    for t, s in zip(times[:-1], times[1:], strict=True):
        z, _, memory = step(denoiser, path, z, float(t), float(s), memory, seeds)
    for guide in guides:
        finish = getattr(guide, "finish", None)
        if finish is not None:
            z = finish(z)
    return Draw(z, draw.log_weight)
