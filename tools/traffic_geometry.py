"""Points and curves in the plane for the road networks. Metres and radians; lines are arrays [P, 2]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def unit(angle: float) -> np.ndarray:
    return np.array([math.cos(angle), math.sin(angle)])


def pair(p: np.ndarray) -> tuple[float, float]:
    return float(p[0]), float(p[1])


def bezier(points: Sequence[np.ndarray], n: int = 12) -> np.ndarray:
    """A Bezier curve of any degree at n+1 even parameters. [n+1, 2]"""
    u = np.linspace(0.0, 1.0, n + 1)[:, None]
    degree = len(points) - 1
    parts = [math.comb(degree, i) * u**i * (1 - u) ** (degree - i) * p for i, p in enumerate(points)]
    return np.sum(parts, axis=0)


def offset(line: np.ndarray, right: float) -> np.ndarray:
    """The line moved to its right by so many metres (long radii only). [P, 2]"""
    d = np.gradient(line, axis=0)
    d /= np.linalg.norm(d, axis=1, keepdims=True)
    return line + right * np.stack([d[:, 1], -d[:, 0]], axis=1)


def integrate(s: np.ndarray, curvature: np.ndarray, start: float) -> np.ndarray:
    """The plane curve of a curvature along s, from the origin. [P, 2]"""
    step = np.diff(s)
    heading = start + np.r_[0.0, np.cumsum(0.5 * (curvature[1:] + curvature[:-1]) * step)]
    middle = 0.5 * (heading[1:] + heading[:-1])
    return np.r_[[[0.0, 0.0]], np.cumsum(np.stack([np.cos(middle), np.sin(middle)], 1) * step[:, None], axis=0)]
