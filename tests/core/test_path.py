from __future__ import annotations

import math

import pytest
import torch

from seqdiff.path import Path, target, time_grid


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("prediction", ["v", "x0", "eps"])
def test_every_prediction_gives_x0_back(kind, prediction):
    path = Path(kind)
    x0, eps = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for t in (1e-3, 0.3, 0.9, 0.999):
        z = path.mix(x0, eps, t)
        out = target(path, x0, eps, torch.tensor(t, dtype=torch.float64), prediction)
        torch.testing.assert_close(path.to_x0(out, z, t, prediction), x0, rtol=0, atol=1e-9)
        torch.testing.assert_close(path.to_eps(x0, z, t), eps, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_velocity_is_the_derivative(kind):
    path, h = Path(kind), 1e-6
    x0, eps = torch.tensor([1.5], dtype=torch.float64), torch.tensor([-0.7], dtype=torch.float64)
    for t in (0.1, 0.5, 0.9):
        slope = (path.mix(x0, eps, t + h) - path.mix(x0, eps, t - h)) / (2 * h)
        torch.testing.assert_close(path.velocity(x0, eps, t), slope, rtol=0, atol=1e-8)
        assert path.time_of_log_snr(path.log_snr(t)) == pytest.approx(t, abs=1e-12)
    assert path.log_snr(0.0) == math.inf


def test_ends_of_the_paths():
    for kind in ("linear", "cosine"):
        path = Path(kind)
        assert (path.alpha(0.0), path.sigma(0.0)) == (1, 0)
        assert path.alpha(1.0) == pytest.approx(0, abs=1e-15) and path.sigma(1.0) == 1


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_eps_prediction_from_pure_noise_is_refused(kind):
    z = torch.zeros(1)
    with pytest.raises(ValueError, match="t_max"):
        Path(kind).to_x0(z, z, 1.0, "eps")


@pytest.mark.parametrize("kind", ["uniform", "logsnr"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10, 100])
def test_grids_decrease_strictly_to_zero(kind, steps):
    for shift in (1.0, 3.0, 0.3):
        times = time_grid(Path(), steps, kind, shift)
        assert len(times) == steps + 1 and times[0] == 1.0 and times[-1] == 0.0
        assert all(a > b for a, b in zip(times[:-1], times[1:], strict=True))
        assert all(isinstance(t, float) for t in times)


def test_uniform_grid_and_shift_by_hand():
    assert time_grid(Path(), 4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert time_grid(Path(), 2, shift=3.0) == pytest.approx([1.0, 0.75, 0.0], abs=1e-15)  # 3 * .5 / (1 + 2 * .5)


@pytest.mark.parametrize("bad", [dict(steps=0), dict(steps=4, t_max=0.0), dict(steps=4, shift=-1.0)])
def test_grid_refuses(bad):
    with pytest.raises(ValueError):
        time_grid(Path(), **bad)
