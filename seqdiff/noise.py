"""Noise to start from, and fresh noise for stochastic steps. Every source: (shape (n, d), seeds b k, temperature) -> Draw.

All numbers are made by counter-based generators keyed by the samples' seeds, token by token with padding last: bit-equal
whatever the batch split and the padding. `gaussian` makes each sample alone; the others draw the k samples of an item
jointly, from the item's first seed, so that there a sample depends on k and on its place among the k, but on no other item.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from torch import Tensor

from seqdiff.types import Draw, Seeds

MAX_SOBOL = 21201  # dimensions for which direction numbers are known (Joe & Kuo 2008)
_SOBOL_BITS = 30


def _generator(seed: np.uint64, stream: int) -> np.random.Generator:
    """A stream of its own for each (seed, stream): the highest word of Philox's counter is never reached by counting."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, stream]))


def _keys(seeds: Tensor) -> np.ndarray:
    return seeds.cpu().numpy().astype(np.uint64)


def _scale(temperature: float) -> float:
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; expected 0 (identical samples) or more, 1 = the training law")
    return temperature


def _normal(shape: tuple[int, int], seeds: Tensor, stream: int = 0) -> Tensor:
    """b k n d, standard normal, each sample from (its seed, stream) alone."""
    n, d = shape
    flat = _keys(seeds).flatten()
    out = np.empty((flat.size, n * d), np.float32)
    for row, seed in zip(out, flat, strict=True):
        _generator(seed, stream).standard_normal(dtype=np.float32, out=row)
    return torch.from_numpy(out).view(*seeds.shape, n, d)


def gaussian_noise(shape: tuple[int, int], seeds: Seeds, temperature: float = 1.0) -> Draw:
    """I.i.d. Gaussian start noise: sample i is bit-equal alone, in any batch split and under any padding.

    Args:
        shape: (n, d).
        seeds: b k.
        temperature: scale of the noise: 1 = the training law, 0 = every sample the same.

    Raises:
        ValueError: a negative temperature.
    """
    return Draw(_normal(shape, seeds) * _scale(temperature), torch.zeros(seeds.shape))


def antithetic_noise(shape: tuple[int, int], seeds: Seeds, temperature: float = 1.0) -> Draw:
    """Pairs z, -z: sample 2j + 1 is the mirror image of sample 2j; the last of an odd k stands alone.

    Each sample by itself is Gaussian; the mean over a pair of anything odd in z is exact, of anything even no better.
    Arguments and errors as in `gaussian_noise`.
    """
    z = _normal(shape, seeds)
    pairs = seeds.shape[1] // 2
    z[:, 1 : 2 * pairs : 2] = -z[:, 0 : 2 * pairs : 2]
    return Draw(z * _scale(temperature), torch.zeros(seeds.shape))


def sobol_noise(shape: tuple[int, int], seeds: Seeds, temperature: float = 1.0) -> Draw:
    """The k samples of an item are the first k points of a Sobol sequence, randomly scrambled for each item, through the
    Gaussian quantile function (Matousek 1998: random linear scrambling with a digital shift).

    Each sample by itself is Gaussian, and together they cover the space evenly; best with k a power of two.
    Arguments as in `gaussian_noise`.

    Raises:
        ValueError: a negative temperature; more than 21201 numbers a sample.
    """
    (n, d), (b, k) = shape, seeds.shape
    if n * d > MAX_SOBOL:
        raise ValueError(
            f"{n} x {d} = {n * d} numbers a sample; Sobol points have at most {MAX_SOBOL}: take gaussian or antithetic"
        )
    points = _sobol(n * d, k)
    out = np.empty((b, k, n * d), np.float32)
    for item, seed in zip(out, _keys(seeds)[:, 0], strict=True):
        item[:] = ndtri((_scramble(points, _generator(seed, 0)) + 0.5) / 2.0**_SOBOL_BITS)
    return Draw(torch.from_numpy(out).view(b, k, n, d) * _scale(temperature), torch.zeros(seeds.shape))


@lru_cache(maxsize=8)
def _sobol(dims: int, k: int) -> np.ndarray:
    """The first k points as integers of 30 bits, k dims."""
    points = torch.quasirandom.SobolEngine(dims, scramble=False).draw(k, dtype=torch.float64)
    return (points.numpy() * 2.0**_SOBOL_BITS).astype(np.uint64)


def _scramble(points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each bit of a coordinate becomes itself plus random bits above it (mod 2), then all are shifted by one random number.

    Random words come dimension by dimension, so that padding at the end changes nothing before it.
    """
    words = rng.integers(0, 2**_SOBOL_BITS, size=(points.shape[1], _SOBOL_BITS + 1), dtype=np.uint64)
    out = np.zeros_like(points)
    for bit in range(_SOBOL_BITS):  # 0 = the highest
        own = np.uint64(1 << (_SOBOL_BITS - 1 - bit))
        above = np.uint64((1 << _SOBOL_BITS) - 1) ^ (own | (own - np.uint64(1)))
        row = (words[:, bit] & above) | own
        out |= (np.bitwise_count(points & row) & 1).astype(np.uint64) * own
    return out ^ words[:, -1]


def quantised_noise(shape: tuple[int, int], seeds: Seeds, temperature: float = 1.0) -> Draw:
    """The leading channel of an item's first token (trajectories: the first agent's largest component) takes the k points of
    the optimal quantiser of N(0, 1), each with the mass of its cell; everything else is i.i.d.

    Outcomes along that channel are covered from one tail to the other by few samples, and the masses say how likely each is.
    `log_weight` is log(k mass): weighted means over the k are exact for what is linear along the channel, and of order 1 / k^2
    for what is smooth. Its points lie inside their cells, so that without the weights the law is wrong.
    Arguments and errors as in `gaussian_noise`.
    """
    z = _normal(shape, seeds)
    k = seeds.shape[1]
    points, mass = quantiser(k)
    z[:, :, 0, 0] = torch.from_numpy(points).float()
    log_weight = torch.from_numpy(np.log(k * mass)).float()
    return Draw(z * _scale(temperature), log_weight.expand(seeds.shape).clone())


@lru_cache(maxsize=32)
def quantiser(k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k points of N(0, 1) with the least mean squared distance, in rising order, and the masses of their cells.

    Lloyd's iteration with exact cell means (Graf & Luschgy 2000), from the asymptotically optimal density N(0, 3).
    """
    points = ndtri((np.arange(k) + 0.5) / k) * math.sqrt(3.0)
    for _ in range(2000):
        edges = np.concatenate([[-np.inf], (points[1:] + points[:-1]) / 2, [np.inf]])
        density = np.exp(-0.5 * edges**2) / math.sqrt(2 * math.pi)
        lower = np.where(edges[:-1] > 0, -1, 1)  # differences of the smaller tail, so that far cells keep their digits
        mass = lower * (ndtr(lower * edges[1:]) - ndtr(lower * edges[:-1]))
        new = (density[:-1] - density[1:]) / mass
        new = (new - new[::-1]) / 2  # symmetric to the last bit
        moved, points = np.abs(new - points).max(), new
        if moved < 1e-12:
            break
    return points, mass / mass.sum()


def fresh_noise(z: Tensor, seeds: Tensor | None, step: int, who: str) -> Tensor:
    """Standard noise like z (b k n d) for the step-th stochastic step of a run, by (seed, step) of each sample alone.

    Args:
        step: how many stochastic steps there were before, from 0; kept in the step's memory.
        who: the step's name, for the error.

    Raises:
        ValueError: no seeds, or seeds of another shape than b k.
    """
    if seeds is None or seeds.shape != z.shape[:2]:
        got = "none" if seeds is None else f"shape {tuple(seeds.shape)}"
        raise ValueError(
            f"{who} draws fresh noise and got seeds: {got}; expected one a sample, shape {tuple(z.shape[:2])}: "
            "sample(..., seeds=as_seeds(seed, items, samples))"
        )
    noise = _normal((z.shape[2], z.shape[3]), seeds, step + 1)  # stream 0 is the start's
    return noise.to(z.device, z.dtype, non_blocking=True)


Noise = Callable[[tuple[int, int], Tensor, float], Draw]

NOISE: dict[str, Noise] = {
    "gaussian": gaussian_noise,
    "antithetic": antithetic_noise,
    "sobol": sobol_noise,
    "quantised": quantised_noise,
}


def find_noise(name: str) -> Noise:
    """The noise source by name.

    Raises:
        ValueError: no such source; the text lists those there are.
    """
    if name not in NOISE:
        raise ValueError(f"unknown noise source {name!r}; one of {', '.join(NOISE)}")
    return NOISE[name]
