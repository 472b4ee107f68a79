from __future__ import annotations

from dataclasses import replace

import pytest
import shapely
import torch

from seqdiff.domains.trajectory.geometry import overlap
from seqdiff.domains.trajectory.guides import CLEARANCE, SignedDistance, Validity, keep_clear, separation


def two_cars(make_batch, gap: float):
    """Two cars 4 m x 2 m in one lane, `gap` metres between bumpers at every future step; far apart at t0."""
    hist, fut = torch.zeros(1, 2, 2, 3), torch.zeros(1, 2, 10, 3)
    hist[:, 1, :, 0] = 100.0
    fut[:, 1, :, 0] = 4.0 + gap
    return make_batch(hist, fut)


def test_separation_is_negative_exactly_where_boxes_overlap():
    """Against `geometry.overlap`, over random pairs of boxes and discs; and hand-made gaps."""
    g = torch.Generator().manual_seed(0)
    n = 4000
    p, q = torch.rand(2, n, 3, generator=g, dtype=torch.float64) * torch.tensor([8.0, 8.0, 6.3])
    sizes = torch.rand(2, n, 2, generator=g, dtype=torch.float64) * torch.tensor([6.0, 2.0]) + 0.5
    discs = torch.rand(2, n, generator=g) < 0.3
    gap = separation(p, sizes[0], discs[0], q, sizes[1], discs[1])
    hit = overlap(p, sizes[0], discs[0], q, sizes[1], discs[1])
    assert ((gap < 0) == hit).all() and 0.2 < hit.double().mean() < 0.8

    def one(x: float, y: float, turn: float, disc: bool) -> float:
        car, flags = torch.tensor([4.0, 2.0]), torch.tensor([False, disc])
        return float(separation(torch.zeros(3), car, flags[0], torch.tensor([x, y, turn]), car, flags[1]))

    assert one(5.0, 0, 0, False) == pytest.approx(1.0) and one(0, 1.5, 0, False) == pytest.approx(-0.5)
    assert one(4.0, 0, torch.pi / 2, False) == pytest.approx(1.0, abs=1e-5)  # 2 m and 1 m before the middles
    assert one(5.0, 5.0, 0, True) == pytest.approx((9 + 16) ** 0.5 - 1.0, abs=1e-5)  # from the corner at (2, 1)


def test_separation_has_finite_gradients_where_agents_coincide():
    p = torch.zeros(3, 3, requires_grad=True)
    disc = torch.tensor([False, True, False]), torch.tensor([False, True, True])
    separation(p, torch.ones(3, 2), disc[0], torch.zeros(3, 3), torch.ones(3, 2), disc[1]).sum().backward()
    assert torch.isfinite(p.grad).all()


def test_only_the_named_agents_are_looked_at(make_batch):
    batch = two_cars(make_batch, -1.0)
    for who, cost in (([True, False], True), ([False, False], False)):
        assert bool((keep_clear(batch.fut[:, None], batch, torch.tensor([who])) > 0).all()) == cost


@pytest.mark.parametrize("gap, free", [(2.0, True), (0.35, True), (0.2, False), (-1.0, False)])
def test_clear_is_zero_and_overlap_costs_both(make_batch, gap, free):
    batch = two_cars(make_batch, gap)
    energy = keep_clear(batch.fut[:, None], batch)
    assert energy.shape == (1, 1, 2)
    assert (energy == 0).all() == free
    if not free:  # half of (0.3 - gap)^2 for each, at every second of ten steps
        steps = 10 // max(1, round(0.2 / batch.dt))
        expected = 0.5 * min(CLEARANCE - gap, CLEARANCE + 2.0) ** 2 * steps
        torch.testing.assert_close(energy, torch.full((1, 1, 2), expected), rtol=0.01, atol=1e-3)


def test_the_gradient_moves_cars_apart(make_batch):
    batch = two_cars(make_batch, -0.5)
    x = batch.fut[:, None].clone().requires_grad_()
    keep_clear(x, batch).sum().backward()
    assert x.grad[0, 0, 0, :, 0].sum() > 0 > x.grad[0, 0, 1, :, 0].sum()  # descent: back and forward


def test_pairs_that_touch_at_t0_are_left_out(make_batch):
    batch = two_cars(make_batch, -1.0)
    hist = batch.hist.clone()
    hist[:, 1, :, 0] = 2.0
    batch = replace(batch, hist=hist)
    assert (keep_clear(batch.fut[:, None], batch) == 0).all()


def test_signed_distance_of_a_square():
    distance = SignedDistance(shapely.box(-10, -10, 10, 10))
    points = torch.tensor([[0.0, 0.0], [9.0, 0.0], [14.0, 0.0], [0.0, -12.0]], requires_grad=True)
    got = distance(points)
    torch.testing.assert_close(got.detach(), torch.tensor([-10.0, -1.0, 4.0, 2.0]), rtol=0, atol=0.6)
    got[2].backward()
    torch.testing.assert_close(points.grad[2], torch.tensor([1.0, 0.0]), rtol=0, atol=1e-3)


def test_leaving_the_road_costs_and_no_map_is_free(make_batch):
    batch = two_cars(make_batch, 20.0)
    lane = shapely.box(-200, -3, 300, 3)
    batch = replace(batch, drivable=[lane])
    x = batch.fut[:, None].clone()
    assert (Validity(batch).stay_on_road(x) == 0).all()
    x[:, :, 0, :, 1] = 3.0  # corners a metre outside
    energy = Validity(batch).stay_on_road(x)
    assert energy[0, 0, 0] > 1 and energy[0, 0, 1] == 0
    assert (Validity(replace(batch, drivable=[None])).stay_on_road(x) == 0).all()
    x[:, :, 0, :, 1] = 50.0  # beyond the mapped world nothing pulls back
    assert (Validity(batch).stay_on_road(x) == 0).all()
