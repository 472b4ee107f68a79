"""Probability paths z_t = alpha(t) x0 + sigma(t) eps for t in [0, 1] (0 = data, 1 = noise), and what follows from them.

Schedule arithmetic is in Python floats (float64) while sampling: a table in half precision turns the last step into NaN.
Conversions are those of any affine path (Lipman et al. 2024, "Flow Matching Guide and Code", section 4.8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

Prediction = Literal["v", "x0", "eps"]
Grid = Literal["uniform", "logsnr"]
T = TypeVar("T", bound="float | Tensor")


def _cos(x: T) -> T:
    return torch.cos(x) if isinstance(x, Tensor) else math.cos(x)  # type: ignore[return-value]


def _sin(x: T) -> T:
    return torch.sin(x) if isinstance(x, Tensor) else math.sin(x)  # type: ignore[return-value]


@dataclass(frozen=True)
class Path:
    """An affine Gaussian path.

    Args:
        kind: "linear" (rectified flow: alpha = 1 - t, sigma = t; Liu et al. 2022) or "cosine" (variance preserving:
            alpha = cos(pi t / 2), sigma = sin(pi t / 2); Nichol & Dhariwal 2021 without the offset).
    """

    kind: Literal["linear", "cosine"] = "linear"

    def alpha(self, t: T) -> T:
        return 1 - t if self.kind == "linear" else _cos(t * (math.pi / 2))  # type: ignore[return-value]

    def sigma(self, t: T) -> T:
        return t if self.kind == "linear" else _sin(t * (math.pi / 2))  # type: ignore[return-value]

    def d_alpha(self, t: T) -> T:
        """d alpha / d t."""
        return 0 * t - 1 if self.kind == "linear" else _sin(t * (math.pi / 2)) * (-math.pi / 2)  # type: ignore[return-value]

    def d_sigma(self, t: T) -> T:
        """d sigma / d t."""
        return 0 * t + 1 if self.kind == "linear" else _cos(t * (math.pi / 2)) * (math.pi / 2)  # type: ignore[return-value]

    def log_snr(self, t: float) -> float:
        """lambda(t) = log(alpha / sigma): +inf at t = 0, -inf at t = 1."""
        a, s = self.alpha(t), self.sigma(t)
        if s <= 0:
            return math.inf
        return math.log(a / s) if a > 1e-300 else -math.inf

    def time_of_log_snr(self, lam: float) -> float:
        """Inverse of `log_snr`."""
        if self.kind == "linear":
            return 1 / (1 + math.exp(min(lam, 700.0)))
        return math.atan(math.exp(-lam)) * 2 / math.pi

    def mix(self, x0: Tensor, eps: Tensor, t: Tensor | float) -> Tensor:
        """z_t. `t` is a float or broadcasts against x0."""
        return self.alpha(t) * x0 + self.sigma(t) * eps

    def velocity(self, x0: Tensor, eps: Tensor, t: Tensor | float) -> Tensor:
        """v = dz/dt along the straight conditional path."""
        return self.d_alpha(t) * x0 + self.d_sigma(t) * eps

    def to_x0(self, out: Tensor, z: Tensor, t: Tensor | float, kind: Prediction) -> Tensor:
        """The net's output as x0.

        Raises:
            ValueError: eps-prediction at alpha(t) = 0, where x0 does not follow from eps. Start at t_max < 1.
        """
        if kind == "x0":
            return out
        if kind == "v":
            a, s, da, ds = self.alpha(t), self.sigma(t), self.d_alpha(t), self.d_sigma(t)
            return (ds * z - s * out) / (a * ds - da * s)
        if isinstance(t, float) and self.alpha(t) < 1e-6:
            raise ValueError(
                f"eps-prediction on the {self.kind} path has no x0 at t = {t:g} (alpha = 0): start sampling at t_max < 1, "
                "for example t_max: 0.995, or train with prediction v or x0"
            )
        return (z - self.sigma(t) * out) / self.alpha(t)

    def to_eps(self, x0: Tensor, z: Tensor, t: Tensor | float) -> Tensor:
        """The noise that goes with x0 and z_t (t > 0)."""
        return (z - self.alpha(t) * x0) / self.sigma(t)


def target(path: Path, x0: Tensor, eps: Tensor, t: Tensor, kind: Prediction) -> Tensor:
    """What a net with this parametrisation is asked to predict."""
    return {"x0": lambda: x0, "eps": lambda: eps, "v": lambda: path.velocity(x0, eps, t)}[kind]()


def time_grid(path: Path, steps: int, kind: Grid = "uniform", shift: float = 1.0, t_max: float = 1.0) -> list[float]:
    """steps + 1 strictly decreasing times from t_max to 0, as Python floats.

    Args:
        kind: "uniform" in t, or "logsnr": uniform in log-SNR between the noisiest and cleanest inner times, then 0.
        shift: t -> shift t / (1 + (shift - 1) t), applied once (Esser et al. 2024, equation 23); > 1 spends steps near noise.
        t_max: first time; the noise there is taken as pure (x0 contributes alpha(t_max) of nothing).

    Raises:
        ValueError: steps < 1, t_max outside (0, 1], shift <= 0.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; expected at least 1")
    if not 0 < t_max <= 1:
        raise ValueError(f"t_max is {t_max}; expected a time in (0, 1]")
    if shift <= 0:
        raise ValueError(f"shift is {shift}; expected a positive number, 1 = no shift")
    if kind == "uniform":
        times = [t_max * (1 - i / steps) for i in range(steps)]
    elif kind == "logsnr":
        hi, lo = path.log_snr(min(t_max, 0.999)), path.log_snr(0.02)
        times = [path.time_of_log_snr(hi + (lo - hi) * i / max(steps - 1, 1)) for i in range(steps)]
        times[0] = t_max
    else:
        raise ValueError(f"unknown time grid {kind!r}; one of uniform, logsnr")
    # written so that t = 1 stays exactly 1
    return [t / (t + (1 - t) / shift) for t in times] + [0.0]
