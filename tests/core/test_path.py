from __future__ import annotations

import math

import pytest
import torch

from seqdiff.path import Path, check_times, min_snr_weight, time_grid

F64 = torch.float64
KINDS = ["linear", "cosine", "edm"]
GRIDS = ["uniform", "logsnr", "karras"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prediction", ["v", "x0", "eps"])
def test_every_prediction_gives_x0_back(kind, prediction):
    path = Path(kind)
    x0, eps = torch.randn(2, 3, 4, 5, dtype=F64), torch.randn(2, 3, 4, 5, dtype=F64)
    for t in (1e-3, 0.3, 0.9, 0.999):
        z = path.mix(x0, eps, t)
        for time in (t, torch.tensor(t, dtype=F64)):
            out = path.target(x0, eps, torch.tensor(t, dtype=F64), prediction)
            torch.testing.assert_close(path.to_x0(out, z, time, prediction), x0, rtol=0, atol=1e-9)
            torch.testing.assert_close(path.from_x0(x0, z, time, prediction), out, rtol=0, atol=1e-8)
        torch.testing.assert_close(path.to_eps(x0, z, t), eps, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_conversions_at_extreme_times_stay_finite(kind):
    path = Path(kind)
    x0, eps = torch.randn(50), torch.randn(50)  # single precision, as nets compute
    for t in (1e-6, 1e-4, 1 - 1e-6, 1.0):
        z = path.mix(x0, eps, t)
        v = path.target(x0, eps, t, "v")
        assert torch.isfinite(v).all() and torch.isfinite(path.from_x0(x0, z, t, "eps")).all()
        assert (path.to_x0(v, z, t, "v") - x0).abs().max() < 2e-3
    still = path.to_x0(torch.randn(50), x0, 0.0, "v")
    torch.testing.assert_close(still, x0)  # at t = 0 z is the data whatever the net says


@pytest.mark.parametrize("kind", KINDS)
def test_velocity_is_the_derivative(kind):
    path, h = Path(kind), 1e-6
    x0, eps = torch.tensor([1.5], dtype=F64), torch.tensor([-0.7], dtype=F64)
    for t in (0.1, 0.5, 0.9):
        slope = (path.mix(x0, eps, t + h) - path.mix(x0, eps, t - h)) / (2 * h)
        torch.testing.assert_close(path.velocity(x0, eps, t), slope, rtol=0, atol=1e-7)
        assert path.time_of_log_snr(path.log_snr(t)) == pytest.approx(t, abs=1e-12)
    assert path.log_snr(0.0) == math.inf and path.time_of_log_snr(math.inf) == 0


def test_ends_of_the_paths():
    for kind in ("linear", "cosine"):
        path = Path(kind)
        assert (path.alpha(0.0), path.sigma(0.0)) == (1, 0)
        assert path.alpha(1.0) == pytest.approx(0, abs=1e-15) and path.sigma(1.0) == 1
        assert path.log_snr(1.0) == -math.inf and path.time_of_log_snr(-math.inf) == 1
        assert path.start_scale(0.7) == 1 and path.scale_in(0.7) == 1
    edm = Path("edm")
    assert (edm.alpha(0.0), edm.sigma(0.0), edm.alpha(1.0), edm.sigma(1.0)) == (1, 0, 1, 80)
    assert edm.start_scale(0.5) == 40 and Path("edm", 10.0).start_scale(1.0) == 10


def test_edm_v_is_the_preconditioned_net_of_karras():
    """D = c_skip z + c_out F with sigma_data = 1 (Karras et al. 2022, table 1) and F = -v; unit-variance input and target."""
    path = Path("edm")
    x0, eps = torch.randn(20000, dtype=F64), torch.randn(20000, dtype=F64)
    for t in (1e-3, 1 / 80, 0.5):
        sigma, z = 80 * t, path.mix(x0, eps, t)
        v = path.target(x0, eps, t, "v")
        torch.testing.assert_close(z / (1 + sigma**2) + sigma / math.sqrt(1 + sigma**2) * -v, x0, rtol=0, atol=1e-9)
        assert (path.scale_in(t) * z).std().item() == pytest.approx(1, abs=0.02)
        assert v.std().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_eps_prediction_from_pure_noise_is_refused(kind):
    z = torch.zeros(1)
    with pytest.raises(ValueError, match="t_max"):
        Path(kind).to_x0(z, z, 1.0, "eps")
    with pytest.raises(ValueError, match="t_max"):
        Path(kind).to_x0(z, z, torch.ones(1), "eps")


@pytest.mark.parametrize("prediction", ["eps", "v"])
def test_noise_is_not_told_from_clean_data(prediction):
    with pytest.raises(ValueError, match="sigma = 0"):
        Path().from_x0(torch.zeros(1), torch.zeros(1), 0.0, prediction)


@pytest.mark.parametrize("kind", KINDS)
def test_min_snr_weight_is_that_of_the_x0_loss(kind):
    """Weight times squared error of the prediction = min(SNR, 5) times squared error of the x0 it stands for."""
    path = Path(kind)
    t = torch.tensor([1e-4, 0.01, 0.2, 0.5, 0.9, 0.99], dtype=F64)
    z, out = torch.randn(6, dtype=F64), torch.randn(6, dtype=F64)
    snr = (path.alpha(t) / path.sigma(t)) ** 2
    for prediction in ("x0", "eps", "v"):
        moved = path.to_x0(out + 1, z, t, prediction) - path.to_x0(out, z, t, prediction)
        want = snr.clamp_max(5.0) * moved**2
        torch.testing.assert_close(min_snr_weight(path, t, prediction), want, rtol=1e-6, atol=1e-9)
    ends = torch.tensor([0.0, 1.0])
    assert all(torch.isfinite(min_snr_weight(path, ends, p)).all() for p in ("x0", "eps", "v"))


def test_a_path_without_noise_is_refused():
    with pytest.raises(ValueError, match="sigma_max is 0"):
        Path("edm", sigma_max=0.0)


# ---- grids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [Path(kind) for kind in KINDS], ids=KINDS)
@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10, 100])
def test_grids_decrease_strictly_to_zero(path, kind, steps):
    for shift in (1.0, 3.0, 0.3):
        times = time_grid(path, steps, kind, shift)
        assert len(times) == steps + 1 and times[0] == 1.0 and times[-1] == 0.0
        assert all(a > b for a, b in zip(times[:-1], times[1:], strict=True))
        assert all(isinstance(t, float) for t in times)


def test_uniform_grid_and_shift_by_hand():
    assert time_grid(Path(), 4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert time_grid(Path(), 2, shift=3.0) == pytest.approx([1.0, 0.75, 0.0], abs=1e-15)  # 3 * .5 / (1 + 2 * .5)


def test_karras_grid_by_hand():
    """Karras et al. 2022, equation 5: (80^(1/7) + i/2 (.002^(1/7) - 80^(1/7)))^7 for i = 0, 1, 2, then 0."""
    edm = Path("edm")
    sigmas = [80 * t for t in time_grid(edm, 3, "karras", sigma_min=0.002)]
    middle = ((80 ** (1 / 7) + 0.002 ** (1 / 7)) / 2) ** 7
    assert sigmas == pytest.approx([80, middle, 0.002, 0], rel=1e-12)
    linear = time_grid(Path(), 3, "karras", sigma_min=0.002)
    assert linear == pytest.approx([1.0, middle / (1 + middle), 0.002 / 1.002, 0], rel=1e-12)


def test_logsnr_grid_by_hand():
    times = time_grid(Path("edm"), 3, "logsnr", sigma_min=0.05)
    assert [80 * t for t in times] == pytest.approx([80, 2, 0.05, 0])  # 80, 80 / 40, 80 / 1600


@pytest.mark.parametrize(
    "bad", [dict(steps=0), dict(steps=4, t_max=0.0), dict(steps=4, shift=-1.0), dict(steps=4, shift=math.nan)]
)
def test_grid_refuses(bad):
    with pytest.raises(ValueError):
        time_grid(Path(), **bad)


def test_grid_refuses_a_floor_above_its_start():
    with pytest.raises(ValueError, match="sigma_min"):
        time_grid(Path(), 4, "karras", t_max=0.01)


def test_explicit_times_come_back_unchanged_or_refused():
    assert check_times([0.9, 0.4, 0.0]) == [0.9, 0.4, 0.0]
    for bad in ([1.0], [0.5, 0.5, 0.0], [0.0, 1.0], [1.2, 0.0], [1.0, math.nan, 0.0]):
        with pytest.raises(ValueError, match="decrease strictly"):
            check_times(bad)
