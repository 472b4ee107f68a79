from __future__ import annotations

from dataclasses import replace

import pytest
import shapely
import torch

from seqdiff.domains.trajectory.guides import DISCS, SignedDistance, Validity, disc_centres, keep_clear


def two_cars(make_batch, gap: float):
    """Two cars 4 m x 2 m in one lane, `gap` metres between bumpers at every future step; far apart at t0."""
    hist, fut = torch.zeros(1, 2, 2, 3), torch.zeros(1, 2, 10, 3)
    hist[:, 1, :, 0] = 100.0
    fut[:, 1, :, 0] = 4.0 + gap
    return make_batch(hist, fut)


def test_discs_reach_from_bumper_to_bumper():
    centres, radius = disc_centres(torch.zeros(3), torch.tensor([4.0, 2.0]), torch.tensor(False))
    assert centres.shape == (DISCS, 2) and radius.item() == 1.0
    torch.testing.assert_close(centres[:, 0], torch.linspace(-1, 1, DISCS))
    people, radius = disc_centres(torch.zeros(3), torch.tensor([0.8, 0.5]), torch.tensor(True))
    assert (people == 0).all() and radius.item() == 0.25


@pytest.mark.parametrize("gap, free", [(2.0, True), (0.5, True), (0.2, False), (-1.0, False)])
def test_clear_is_zero_and_overlap_costs_both(make_batch, gap, free):
    batch = two_cars(make_batch, gap)
    energy = keep_clear(batch.fut[:, None], batch)
    assert energy.shape == (1, 1, 2)
    assert (energy == 0).all() == free
    if not free:  # half of (0.45 - gap)^2 for each, at every second of ten steps
        steps = 10 // max(1, round(0.2 / batch.dt))
        expected = 0.5 * (0.45 - gap) ** 2 * steps
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
