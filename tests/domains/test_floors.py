"""Forecasts without learning: exact on the motion they assume, the published figures on ETH/UCY, noise fitted on
training windows.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from seqdiff.domains.trajectory import floors
from seqdiff.domains.trajectory.floors import Noise, constant_turn_rate, constant_velocity, fit_noise, sampled
from seqdiff.domains.trajectory.metrics import forecast

ETH = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "trajectory" / "eth_ucy" / "all_data"


def circle(make_batch, radius: float, speed: float, h: int = 10, t: int = 30, dt: float = 0.1):
    angle = torch.arange(-h + 1, t + 1, dtype=torch.float64) * dt * speed / radius
    xyh = torch.stack([radius * angle.sin(), radius * (1 - angle.cos()), angle], -1)[None, None]
    return make_batch(xyh[:, :, :h], xyh[:, :, h:], dt=dt)


def test_straight_motion_is_exact(make_batch):
    batch = circle(make_batch, 1e9, 10.0)
    torch.testing.assert_close(constant_velocity(batch)[:, 0], batch.fut, atol=1e-3, rtol=0)
    torch.testing.assert_close(constant_turn_rate(batch)[:, 0], batch.fut, atol=1e-3, rtol=0)


@pytest.mark.parametrize("radius", [20.0, -20.0])
def test_circle_is_followed(make_batch, radius):
    batch = circle(make_batch, radius, 5.0 if radius > 0 else -5.0)
    if radius < 0:  # driving backwards along the circle: the course is opposite to the heading
        assert constant_turn_rate(batch).isfinite().all()
    got = constant_turn_rate(batch)[:, 0]
    # the last step's chord stands for the tangent: half a step of turning, 0.0125 rad
    assert (got - batch.fut)[..., :2].norm(dim=-1).max() < 0.0125 * 15 * 1.1
    torch.testing.assert_close(got[..., 2], batch.fut[..., 2], atol=1e-4, rtol=0)
    assert (constant_velocity(batch)[:, 0] - batch.fut)[..., -1, :2].norm() > 4


def test_one_frame_stands_still_and_holes_are_bridged(make_batch):
    batch = circle(make_batch, 1e9, 10.0)
    batch.hist_valid[0, 0, 6:9] = False
    batch.hist[0, 0, 6:9] = 0
    torch.testing.assert_close(constant_velocity(batch)[:, 0], batch.fut, atol=1e-3, rtol=0)
    batch.hist_valid[0, 0, :9] = False
    batch.hist[0, 0, :9] = 0
    for got in (constant_velocity(batch), constant_turn_rate(batch)):
        assert got.abs().max() == 0


def test_padding_is_zero_and_the_future_is_not_looked_at(make_batch):
    batch = circle(make_batch, 30.0, 10.0)
    before = [constant_turn_rate(batch), sampled(batch, 3, Noise(0.2, 0.2, 0.1, 0.1), True)]
    batch.fut.fill_(math.nan)
    batch.fut_valid[:] = False
    after = [constant_turn_rate(batch), sampled(batch, 3, Noise(0.2, 0.2, 0.1, 0.1), True)]
    assert all(torch.equal(x, y) for x, y in zip(before, after))
    batch.mask[:] = False
    assert constant_velocity(batch).abs().max() == 0


def test_samples_have_the_stated_spread(make_batch):
    batch = circle(make_batch, 1e9, 10.0, t=10)
    k = 4000
    end = sampled(batch, k, Noise(relative=0.1, absolute=0.5), False)[0, :, 0, -1]  # 1 s ahead: 10 m +- hypot(1, .5)
    assert end[:, 0].mean() == pytest.approx(10, abs=0.1) and end[:, 0].std() == pytest.approx(
        math.hypot(1, 0.5), rel=0.05
    )
    assert end[:, 1].abs().max() < 1e-5
    turned = sampled(batch, k, Noise(heading=0.05), False)[0, :, 0, -1]
    assert turned[:, 2].std() == pytest.approx(0.05, rel=0.05)
    torch.testing.assert_close(turned[:, 1], 10 * turned[:, 2].sin(), atol=1e-3, rtol=0)
    bent = sampled(batch, k, Noise(turn=0.1), True)[0, :, 0, -1]
    assert bent[:, 2].std() == pytest.approx(0.1, rel=0.05)
    slow = sampled(batch, k, Noise(relative=2.0), False)[0, :, 0, -1, 0]
    assert slow.min() == 0  # nobody drives backwards


def test_draws_do_not_depend_on_the_batch(make_batch):
    one = circle(make_batch, 30.0, 10.0)
    noise = Noise(0.2, 0.1, 0.1, 0.1)
    two = make_batch(
        torch.cat([one.hist, one.hist]), torch.cat([one.fut, one.fut]), scene_id=["other", "s0"], t0=[3, 0]
    )
    alone, together = sampled(one, 5, noise, True), sampled(two, 5, noise, True)
    assert torch.equal(alone[0], together[1]) and not torch.equal(alone[0], together[0])
    assert torch.equal(alone, sampled(one, 5, noise, True)) and not torch.equal(
        alone, sampled(one, 5, noise, True, seed=1)
    )
    plain = sampled(one, 1, Noise(), True)
    assert torch.equal(plain, constant_turn_rate(one))


class Walks:
    """Training windows whose speeds differ from the last step's by a known share."""

    def __init__(self, make_batch, spread: float, n: int = 40):
        g = torch.Generator().manual_seed(0)
        factor = 1 + spread * torch.randn(n, 3, 1, generator=g)
        x = torch.arange(-4, 1) * 1.0
        hist = torch.stack([x.expand(n, 3, 5), torch.zeros(n, 3, 5), torch.zeros(n, 3, 5)], -1)
        ahead = torch.arange(1, 9) * factor
        fut = torch.stack([ahead, torch.zeros_like(ahead), torch.zeros_like(ahead)], -1)
        self.parts = [
            make_batch(hist[i : i + 1], fut[i : i + 1], dt=1.0, scene_id=[f"w{i}"]) for i in range(n)
        ]  # fmt: skip

    def __len__(self) -> int:
        return len(self.parts)

    def batch(self, indices: list[int]):
        parts = [self.parts[i] for i in indices]
        fields = {}
        for name, v in vars(parts[0]).items():
            values = [getattr(p, name) for p in parts]
            flat = v if name == "dt" else [x for value in values for x in value]
            fields[name] = torch.cat(values) if isinstance(v, torch.Tensor) else flat
        return type(parts[0])(**fields)


@pytest.mark.parametrize("measure", ["minADE", "minJADE"])
def test_fit_finds_the_spread_of_the_data(make_batch, measure):
    train = Walks(make_batch, 0.3)
    noise = fit_noise(train, 10, False, measure)
    assert 0.1 <= math.hypot(noise.relative, noise.absolute) <= 0.7 and noise.heading == 0 and noise.turn <= 0.01
    still = fit_noise(Walks(make_batch, 0.0), 10, False, measure)
    assert still == Noise()

    def score(n: Noise) -> float:
        batch = train.batch(list(range(len(train))))
        f = forecast(sampled(batch, 10, n, False), batch.fut, batch.fut_valid, batch.scored)
        return float((f.min_ade if measure == "minADE" else f.min_jade).mean())

    assert score(noise) < 0.7 * score(Noise())
    assert score(noise) <= min(score(n) for n in floors.STARTS)


def test_fit_needs_training_windows(make_batch):
    train = Walks(make_batch, 0.3, n=2)
    for p in train.parts:
        p.scored[:] = False
    with pytest.raises(ValueError, match="2 training windows without an agent scored"):
        fit_noise(train, 3, False)


def eth_windows(make_batch, scenes: tuple[str, ...]):
    """All windows of 8 + 12 rows, stride 1, agents present in all 20, as one batch per number of agents."""
    for scene in scenes:
        rows = np.loadtxt(ETH / f"{scene}.txt")
        frames = np.unique(rows[:, 0])
        tracks = {i: dict(zip(rows[rows[:, 1] == i, 0], rows[rows[:, 1] == i, 2:4])) for i in np.unique(rows[:, 1])}
        for start in np.arange(frames[0], frames[-1] - 190 + 1, 10):
            span = start + 10 * np.arange(20)
            xy = [
                np.stack([tr[f] for f in span])
                for tr in tracks.values()
                if span[0] in tr and all(f in tr for f in span)
            ]
            if xy:
                xyh = torch.from_numpy(np.concatenate([xy, np.zeros((len(xy), 20, 1))], -1))[None]
                yield make_batch(xyh[:, :, :8], xyh[:, :, 8:], dt=0.4)


@pytest.mark.skipif(not ETH.is_dir(), reason="needs the ETH/UCY files in ../shared/data")
@pytest.mark.parametrize(
    ("scene", "n", "ade", "fde"),
    [
        ("biwi_eth", 364, 1.08, 2.28),
        ("biwi_hotel", 1197, 0.32, 0.61),
        ("crowds_zara01", 2356, 0.43, 0.95),
        pytest.param("crowds_zara02", 5910, 0.32, 0.72, marks=pytest.mark.slow),
    ],
)
def test_constant_velocity_has_the_published_error(make_batch, scene, n, ade, fde):
    total = torch.zeros(3, dtype=torch.float64)
    for batch in eth_windows(make_batch, (scene,)):
        f = forecast(constant_velocity(batch), batch.fut, batch.fut_valid, batch.scored)
        total += torch.tensor([f.min_ade.sum(), f.min_fde.sum(), f.count.sum()])
    assert int(total[2]) == n
    assert float(total[0] / n) == pytest.approx(ade, abs=0.006) and float(total[1] / n) == pytest.approx(fde, abs=0.01)
