from __future__ import annotations

import math

import pytest
import torch

from seqdiff.grid import fixed_grids, grid_error, learn_grid
from seqdiff.path import Path
from seqdiff.sample import sample
from seqdiff.steps import STEPS
from seqdiff.testing import Mixture
from seqdiff.types import Draw

F64 = torch.float64
MIXTURE = Mixture(
    torch.tensor([0.3, 0.7], dtype=F64), torch.tensor([-1.0, 0.8], dtype=F64), torch.tensor([0.4, 0.6], dtype=F64)
)


def runner(path: Path, count: int, offset: float, name: str = "dpmpp_2m"):
    """times -> end points from `count` quantiles of the start noise, and where the exact flow ends."""
    z = torch.special.ndtri((torch.arange(count, dtype=F64) + offset) / count).view(1, 1, count, 1) * path.start_scale(
        1.0
    )

    def run(times):
        draw = Draw(z, torch.zeros(1, 1))
        return sample(MIXTURE.denoiser(path), draw, times, path=path, step=STEPS[name].step).z

    return run, MIXTURE.flow(path, z, 1.0)


def gain(path: Path, steps: int, budget: int) -> float:
    """Root mean squared error of the best fixed grid over the learned one's, on noise that the fit never saw."""
    times = learn_grid(*runner(path, 40, 0.5), steps, path, budget=budget, progress=False)
    assert len(times) == steps + 1 and times[0] == 1 and times[-1] == 0 and all(type(t) is float for t in times)
    held_out = runner(path, 201, 0.37)
    best = min(grid_error(*held_out, fixed) for fixed in fixed_grids(path, steps).values())
    return math.sqrt(best / grid_error(*held_out, times))


@pytest.mark.parametrize("steps, factor", [(2, 1.0), (4, 1.4), (6, 1.6)])
def test_learned_times_beat_the_best_fixed_grid(steps, factor):
    assert gain(Path(), steps, 120) > factor


@pytest.mark.slow
@pytest.mark.parametrize("kind, steps, factor", [
    *[("linear", n, f) for n, f in ((2, 1.0), (3, 1.02), (4, 1.4), (5, 1.8), (6, 1.7), (7, 1.7), (8, 1.8))],
    *[("edm", n, 1.4) for n in range(2, 9)],
])  # fmt: skip
def test_learned_times_for_two_to_eight_steps(kind, steps, factor):
    assert gain(Path(kind), steps, 300) > factor


def test_never_worse_than_where_it_starts_whatever_the_budget():
    run, reference = runner(Path(), 20, 0.5, "heun")
    best = min(grid_error(run, reference, fixed) for fixed in fixed_grids(Path(), 3).values())
    assert grid_error(run, reference, learn_grid(run, reference, 3, Path(), budget=1, progress=False)) <= best


def test_one_step_has_nothing_to_learn():
    run, reference = runner(Path(), 5, 0.5)
    assert learn_grid(run, reference, 1, Path(), t_max=0.9, progress=False) == [0.9, 0.0]


def test_the_budget_is_kept():
    calls = []
    run, reference = runner(Path(), 5, 0.5)

    def counted(times):
        calls.append(times)
        return run(times)

    learn_grid(counted, reference, 4, Path(), budget=30, progress=False)
    assert len(calls) <= 30 + 3  # and the three fixed grids


def test_a_model_that_never_is_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        learn_grid(lambda times: torch.full((1,), math.nan), torch.zeros(1), 3, Path(), progress=False)
    with pytest.raises(ValueError, match="budget"):
        learn_grid(lambda times: torch.zeros(1), torch.zeros(1), 3, Path(), budget=0, progress=False)
