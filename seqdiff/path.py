"""Probability paths z_t = alpha(t) x0 + sigma(t) eps for t in [0, 1] (0 = data, 1 = noise), and what follows from them.

Schedule arithmetic is in Python floats (float64) while sampling: a table in half precision turns the last step into NaN.
Conversions are those of any affine path (Lipman et al. 2024, "Flow Matching Guide and Code", section 4.8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

Prediction = Literal["v", "x0", "eps"]
Grid = Literal["uniform", "logsnr", "karras"]
T = TypeVar("T", bound="float | Tensor")
RHO = 7.0  # of the Karras grid


def _cos(x: T) -> T:
    return torch.cos(x) if isinstance(x, Tensor) else math.cos(x)  # type: ignore[return-value]


def _sin(x: T) -> T:
    return torch.sin(x) if isinstance(x, Tensor) else math.sin(x)  # type: ignore[return-value]


@dataclass(frozen=True)
class Path:
    """An affine Gaussian path.

    Args:
        kind: "linear" (rectified flow: alpha = 1 - t, sigma = t; Liu et al. 2022), "cosine" (variance preserving:
            alpha = cos(pi t / 2), sigma = sin(pi t / 2); Nichol & Dhariwal 2021 without the offset) or "edm" (variance
            exploding: alpha = 1, sigma = sigma_max t; Karras et al. 2022).
        sigma_max: noise at t = 1 on the edm path, in standard deviations of the latents; the others end at 1.
    """

    kind: Literal["linear", "cosine", "edm"] = "linear"
    sigma_max: float = 80.0

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "cosine", "edm"):
            raise ValueError(f"unknown path {self.kind!r}; one of linear, cosine, edm")
        if not self.sigma_max > 0:
            raise ValueError(f"sigma_max is {self.sigma_max}; expected a positive number, 80 in Karras et al. 2022")

    def alpha(self, t: T) -> T:
        if self.kind == "edm":
            return 0 * t + 1  # type: ignore[return-value]
        return 1 - t if self.kind == "linear" else _cos(t * (math.pi / 2))  # type: ignore[return-value]

    def sigma(self, t: T) -> T:
        if self.kind == "edm":
            return t * self.sigma_max  # type: ignore[return-value]
        return t if self.kind == "linear" else _sin(t * (math.pi / 2))  # type: ignore[return-value]

    def d_alpha(self, t: T) -> T:
        """d alpha / d t."""
        if self.kind == "edm":
            return 0 * t  # type: ignore[return-value]
        return 0 * t - 1 if self.kind == "linear" else _sin(t * (math.pi / 2)) * (-math.pi / 2)  # type: ignore[return-value]

    def d_sigma(self, t: T) -> T:
        """d sigma / d t."""
        if self.kind == "edm":
            return 0 * t + self.sigma_max  # type: ignore[return-value]
        return 0 * t + 1 if self.kind == "linear" else _cos(t * (math.pi / 2)) * (math.pi / 2)  # type: ignore[return-value]

    def scale_in(self, t: T) -> T:
        """What z_t is multiplied by before the net sees it: 1, on the edm path 1 / sqrt(1 + sigma^2), so that latents of
        unit variance stay so at every noise level (Karras et al. 2022, table 1, c_in with sigma_data = 1)."""
        if self.kind == "edm":
            return (1 + self.sigma(t) ** 2) ** -0.5  # type: ignore[return-value]
        return 0 * t + 1  # type: ignore[return-value]

    def net_time(self, t: T) -> T:
        """The time that the net is told: t, on the edm path that of the cosine path at the same sigma / alpha, since there nearly
        all of [0, 1] is noise."""
        if self.kind != "edm":
            return t
        sigma = self.sigma(t)
        return (torch.atan(sigma) if isinstance(sigma, Tensor) else math.atan(sigma)) * 2 / math.pi  # type: ignore[return-value]

    def train_time(self, u: Tensor) -> Tensor:
        """Times of training from u in [0, 1] of some density: the inverse of `net_time`, at most 1."""
        return u if self.kind != "edm" else (torch.tan(u * (math.pi / 2)) / self.sigma_max).clamp(1e-6, 1)

    def start_scale(self, t_max: float) -> float:
        """What standard noise is multiplied by to start at the first time of the grid: 1, on the edm path sigma(t_max)."""
        return self.sigma(t_max) if self.kind == "edm" else 1.0

    def log_snr(self, t: float) -> float:
        """lambda(t) = log(alpha / sigma): +inf at t = 0, -inf where alpha = 0."""
        a, s = self.alpha(t), self.sigma(t)
        if s <= 0:
            return math.inf
        return math.log(a / s) if a > 1e-15 else -math.inf  # cos(pi / 2) is 6e-17 in floats and means 0

    def time_of_log_snr(self, lam: float) -> float:
        """Inverse of `log_snr`; above 1 on the edm path for more noise than sigma_max."""
        ratio = math.exp(min(-lam, 700.0))
        if self.kind == "linear":
            return 1.0 if lam < -700 else ratio / (1 + ratio)
        return math.atan(ratio) * 2 / math.pi if self.kind == "cosine" else ratio / self.sigma_max

    def mix(self, x0: Tensor, eps: Tensor, t: Tensor | float) -> Tensor:
        """z_t. `t` is a float or broadcasts against x0."""
        return self.alpha(t) * x0 + self.sigma(t) * eps

    def velocity(self, x0: Tensor, eps: Tensor, t: Tensor | float) -> Tensor:
        """dz/dt along the straight conditional path."""
        return self.d_alpha(t) * x0 + self.d_sigma(t) * eps

    def target(self, x0: Tensor, eps: Tensor, t: Tensor | float, kind: Prediction) -> Tensor:
        """What a net with this parametrisation predicts.

        "v" is dz/dt on the linear and cosine paths. On the edm path it is (eps - sigma x0) / sqrt(1 + sigma^2): v of Salimans
        & Ho 2022 (appendix D) for z scaled to unit variance, and minus F of Karras et al. 2022 (equation 7, sigma_data = 1),
        whose size is the same at all noise levels.
        """
        if kind == "x0":
            return x0
        if kind == "eps":
            return eps
        if self.kind == "edm":
            return self.scale_in(t) * (eps - self.sigma(t) * x0)
        return self.velocity(x0, eps, t)

    def to_x0(self, out: Tensor, z: Tensor, t: Tensor | float, kind: Prediction) -> Tensor:
        """The net's output as x0.

        Raises:
            ValueError: eps-prediction at alpha(t) = 0, where x0 does not follow from eps. Start at t_max < 1.
        """
        if kind == "x0":
            return out
        if kind == "v":
            if self.kind == "edm":
                c = self.scale_in(t)
                return c * c * z - self.sigma(t) * c * out
            a, s, da, ds = self.alpha(t), self.sigma(t), self.d_alpha(t), self.d_sigma(t)
            return (ds * z - s * out) / (a * ds - da * s)
        alpha = self.alpha(t)
        if bool(alpha < 1e-6 if isinstance(alpha, float) else (torch.as_tensor(alpha) < 1e-6).any()):
            at = f"t = {t:g}" if isinstance(t, float) else "t = 1"
            raise ValueError(
                f"eps-prediction on the {self.kind} path has no x0 at {at} (alpha = 0): start sampling at t_max < 1, "
                "for example t_max: 0.995, or train with prediction v or x0"
            )
        return (z - self.sigma(t) * out) / alpha

    def to_eps(self, x0: Tensor, z: Tensor, t: Tensor | float) -> Tensor:
        """The noise that goes with x0 and z_t (t > 0)."""
        return (z - self.alpha(t) * x0) / self.sigma(t)

    def from_x0(self, x0: Tensor, z: Tensor, t: Tensor | float, kind: Prediction) -> Tensor:
        """The inverse of `to_x0`: what a net that knows x0 would put out at z_t.

        Raises:
            ValueError: eps or v at t = 0, where z_t holds no noise to tell.
        """
        if kind == "x0":
            return x0
        if isinstance(t, (int, float)) and self.sigma(t) <= 0:
            raise ValueError(f"{kind} does not follow from x0 at t = {t:g} (sigma = 0); ask at t > 0, or for x0")
        return self.target(x0, self.to_eps(x0, z, t), t, kind)


def min_snr_weight(path: Path, t: Tensor, kind: Prediction, gamma: float = 5.0) -> Tensor:
    """Weight of the squared error of a prediction that makes it the x0-loss weighted by min(SNR, gamma), SNR = (alpha /
    sigma)^2 (Hang et al. 2023, min-SNR-gamma). Finite at both ends: no SNR of 0 or infinity is ever divided by.

    Args:
        t: times of any shape, 0 <= t <= 1.
    """
    a2, s2 = path.alpha(t) ** 2, path.sigma(t) ** 2
    if kind == "x0":
        return gamma * a2 / torch.maximum(gamma * s2, a2)
    if kind == "eps":
        return gamma * s2 / torch.maximum(gamma * s2, a2)
    kept = torch.minimum(a2, gamma * s2)
    if path.kind == "edm":
        return kept * path.scale_in(t) ** 2
    return kept / (path.alpha(t) * path.d_sigma(t) - path.d_alpha(t) * path.sigma(t)) ** 2


def time_grid(
    path: Path,
    steps: int,
    kind: Grid = "uniform",
    shift: float = 1.0,
    t_max: float = 1.0,
    sigma_min: float = 0.02,
    sigma_max: float = 80.0,
) -> list[float]:
    """steps + 1 strictly decreasing times from t_max to 0, as Python floats.

    Args:
        kind: "uniform" in t; "logsnr": uniform in log-SNR; "karras": uniform in (sigma / alpha)^(1 / 7) (Karras et al.
            2022, equation 5). The last two go from t_max to sigma_min, and then to 0 in the last step.
        shift: t -> shift t / (1 + (shift - 1) t), applied once (Esser et al. 2024, equation 23); > 1 spends steps near
            noise. It moves a t_max below 1 too: scale the start noise by `path.start_scale(times[0])`.
        t_max: first time; the noise there is taken as pure (x0 contributes alpha(t_max) of nothing).
        sigma_min, sigma_max: sigma / alpha of the last time before 0, and the most that the first one counts as.

    Raises:
        ValueError: steps < 1, t_max outside (0, 1], shift <= 0, sigma_min not below the noise at t_max.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; expected at least 1")
    if not 0 < t_max <= 1:
        raise ValueError(f"t_max is {t_max}; expected a time in (0, 1]")
    if not shift > 0:
        raise ValueError(f"shift is {shift}; expected a positive number, 1 = no shift")
    if kind == "uniform":
        times = [t_max * (1 - i / steps) for i in range(steps)]
    elif kind in ("logsnr", "karras"):
        top = min(math.exp(min(-path.log_snr(t_max), 700.0)), sigma_max)
        if not 0 < sigma_min < top:
            raise ValueError(
                f"sigma_min is {sigma_min:g}; expected sigma / alpha above 0 and below the first time's {top:g}"
            )
        share = [i / max(steps - 1, 1) for i in range(steps)]
        if kind == "logsnr":
            ratios = [top * (sigma_min / top) ** w for w in share]
        else:
            ratios = [(top ** (1 / RHO) + w * (sigma_min ** (1 / RHO) - top ** (1 / RHO))) ** RHO for w in share]
        times = [t_max, *(path.time_of_log_snr(-math.log(r)) for r in ratios[1:])]
    else:
        raise ValueError(f"unknown time grid {kind!r}; one of uniform, logsnr, karras")
    # written so that t = 1 stays exactly 1
    return check_times([t / (t + (1 - t) / shift) for t in times] + [0.0])


def check_times(times: Sequence[float]) -> list[float]:
    """Times that a sampler can walk, as Python floats, otherwise unchanged.

    Raises:
        ValueError: fewer than two, or not strictly decreasing within [0, 1].
    """
    if len(times) < 2 or any(not 1 >= a > b >= 0 for a, b in zip(times[:-1], times[1:], strict=True)):
        raise ValueError(f"times must decrease strictly within [0, 1] and hold at least two entries, got {list(times)}")
    return [float(t) for t in times]
