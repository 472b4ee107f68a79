"""A learned grid: the few times of a sampler, fitted so that its samples land where a fine run of the same noise lands."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from tqdm import tqdm

from seqdiff.path import Path, check_times, time_grid

SIGMA_MIN = 0.002  # sigma / alpha beyond which no learned time goes
Run = Callable[[list[float]], Tensor]


def grid_error(run: Run, reference: Tensor, times: list[float]) -> float:
    """Mean squared distance of run(times) to the fine run's end points; inf where it is not finite."""
    with torch.no_grad():
        error = float((run(times) - reference).square().mean())
    return error if math.isfinite(error) else math.inf


def fixed_grids(path: Path, steps: int, t_max: float = 1.0) -> dict[str, list[float]]:
    """The grids that a learned one starts from and has to beat."""
    return {
        "uniform": time_grid(path, steps, "uniform", t_max=t_max),
        "logsnr": time_grid(path, steps, "logsnr", t_max=t_max),
        "karras": time_grid(path, steps, "karras", t_max=t_max),
    }


def learn_grid(
    run: Run, reference: Tensor, steps: int, path: Path, t_max: float = 1.0, budget: int = 300, progress: bool = True
) -> list[float]:
    """steps + 1 times from t_max to 0 whose run ends nearest to `reference`, by Nelder & Mead 1965 on the increments in
    log-SNR. Gradient-free, so that any sampler and guided models can be fitted (compare Watson et al. 2021 and Sabour et al.
    2024, who optimise the times by other measures).

    Never worse on `reference` than the best of `fixed_grids`, from which it starts. Fit on other noise than it is judged on.

    Args:
        run: times -> end points, always from the same start; `sample` with everything but the times closed over.
        reference: end points of a fine run from that start, as `run` gives them. The start has to belong to t_max.
        steps: intervals; the first and the last time stay t_max and 0.
        budget: how many runs at most, each of `steps` steps.
        progress: a bar on stderr.

    Raises:
        ValueError: steps or budget < 1, or no grid whose run is finite.
    """
    if budget < 1:
        raise ValueError(f"budget is {budget}; expected at least 1 run")
    starts = fixed_grids(path, steps, t_max)
    errors = {name: grid_error(run, reference, times) for name, times in starts.items()}
    first = min(errors, key=lambda name: errors[name])
    if not math.isfinite(errors[first]):
        raise ValueError(f"no run on {', '.join(starts)} with {steps} steps is finite; expected a model that samples")
    if steps == 1:
        return starts[first]
    best, least = starts[first], errors[first]
    low = max(path.log_snr(t_max), -math.log(80.0))
    span = -math.log(SIGMA_MIN) - low

    with tqdm(total=budget, unit="run", desc=f"fitting {steps} steps", disable=not progress) as bar:

        def error_of(x: np.ndarray) -> float:
            nonlocal best, least
            bar.update()
            share = np.exp(np.append(x, 0.0) - max(0.0, x.max()))
            inner = low + span * np.cumsum(share / share.sum())[:-1]
            times = [t_max, *(path.time_of_log_snr(float(lam)) for lam in inner), 0.0]
            if any(a <= b for a, b in zip(times[:-1], times[1:], strict=True)):
                return math.inf
            error = grid_error(run, reference, times)
            if error < least:
                best, least = times, error
            return error

        x = _increments([path.log_snr(t) for t in best[1:-1]], low, span)
        simplex = np.vstack([x, *(x + 0.5 * row for row in np.eye(len(x)))])
        options = {"maxfev": budget, "initial_simplex": simplex, "adaptive": len(x) > 3, "xatol": 1e-3, "fatol": 0.0}
        minimize(error_of, x, method="Nelder-Mead", options=options)
    return check_times(best)


def _increments(inner: list[float], low: float, span: float) -> np.ndarray:
    """Logs of the gaps in log-SNR relative to the last one: what a softmax turns back into the gaps."""
    gaps = np.diff([low, *np.clip(inner, low, low + span), low + span]).clip(1e-3 * span)
    return np.log(gaps[:-1] / gaps[-1])
