"""Overlaps, drivable area and kinematic limits, against cases worked by hand and against shapely."""

from __future__ import annotations

import math

import numpy as np
import pytest
import shapely
import torch

from seqdiff.domains.trajectory.energies import LIMITS, collisions, energies, infeasible, off_road
from seqdiff.domains.trajectory.geometry import corners, inside, overlap, overlaps
from seqdiff.domains.trajectory.scene import AGENT_TYPES

YES, NO = torch.tensor(True), torch.tensor(False)
CAR = torch.tensor([4.0, 2.0])


def pose(x: float, y: float, heading: float = 0.0) -> torch.Tensor:
    return torch.tensor([x, y, heading])


@pytest.mark.parametrize(
    ("q", "hit"),
    [
        (pose(3.9, 0), True),
        (pose(4.0, 0), False),  # touching
        (pose(0, 1.9), True),
        (pose(0, 2.1), False),
        (pose(2.9, 0, math.pi / 2), True),  # 2 m along + 1 m across
        (pose(3.1, 0, math.pi / 2), False),
        (pose(3.0, 2.0, math.pi / 4), True),
        (pose(3.6, 2.6, math.pi / 4), False),  # circles meet, boxes do not
        (pose(0, 0, 1.0), True),
    ],
)
def test_box_pairs(q, hit):
    p = pose(0, 0)
    assert bool(overlap(p, CAR, NO, q, CAR, NO)) is hit and bool(overlap(q, CAR, NO, p, CAR, NO)) is hit
    boxes = [shapely.Polygon(corners(x.double(), CAR).numpy()) for x in (p, q)]
    assert (boxes[0].intersection(boxes[1]).area > 1e-9) is hit


def test_discs():
    man = torch.tensor([0.6, 0.5])  # a disc of radius 0.25 m
    p = pose(0, 0)
    assert overlap(p, man, YES, pose(0.49, 0), man, YES) and not overlap(p, man, YES, pose(0.5, 0), man, YES)
    assert overlap(p, CAR, NO, pose(2.24, 0), man, YES) and not overlap(p, CAR, NO, pose(2.25, 0), man, YES)
    corner = pose(2 + 0.2, 1 + 0.2)  # 0.28 m from the corner
    assert not overlap(p, CAR, NO, corner, man, YES) and not overlap(corner, man, YES, p, CAR, NO)
    assert overlap(pose(2.2, 1.0), man, YES, p, CAR, NO)


def test_random_pairs_agree_with_shapely():
    g = torch.Generator().manual_seed(0)
    n = 400
    p = torch.rand(2, n, 3, generator=g, dtype=torch.float64) * torch.tensor([7.0, 7.0, 6.28])
    size = 0.5 + 4 * torch.rand(2, n, 2, generator=g, dtype=torch.float64)
    none = torch.zeros(n, dtype=torch.bool)
    got = overlap(p[0], size[0], none, p[1], size[1], none).numpy()
    polygons = [shapely.polygons(corners(p[i], size[i]).numpy()) for i in range(2)]
    want = shapely.area(shapely.intersection(*polygons)) > 1e-12
    assert 0.2 < want.mean() < 0.9
    np.testing.assert_array_equal(got, want)


def test_broad_phase_misses_nothing():
    g = torch.Generator().manual_seed(1)
    b, k, a, t = 2, 3, 7, 9
    xyh = torch.rand(b, k, a, t, 3, generator=g) * 20
    valid = torch.rand(b, a, t, generator=g) > 0.2
    size = 1 + 4 * torch.rand(b, a, 2, generator=g)
    disc = torch.rand(b, a, generator=g) > 0.6
    got = overlaps(xyh.masked_fill(~valid[:, None, ..., None], torch.nan), valid, size, disc)
    want = {
        (i, s, m, n, u)
        for i in range(b)
        for s in range(k)
        for m in range(a)
        for n in range(m + 1, a)
        for u in range(t)
        if valid[i, m, u]
        and valid[i, n, u]
        and overlap(xyh[i, s, m, u], size[i, m], disc[i, m], xyh[i, s, n, u], size[i, n], disc[i, n])
    }
    assert len(want) > 50 and set(map(tuple, got.pairs.tolist())) == want
    assert {(i, s, x, u) for i, s, m, n, u in want for x in (m, n)} == set(map(tuple, got.hit.nonzero().tolist()))


def test_nan_is_not_collision_free():
    xyh = torch.zeros(1, 1, 2, 1, 3)
    xyh[0, 0, 1] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        overlaps(xyh, torch.ones(1, 2, 1, dtype=torch.bool), CAR.expand(1, 2, 2), torch.zeros(1, 2, dtype=torch.bool))


def lane_scene(make_batch, y: list[float], speed: list[float], t: int = 20, h: int = 10, **given):
    """Cars side by side on lines of constant y, driving along x at constant speed; batch and its own future as [1, 1,
    a, t, 3].
    """
    step = torch.arange(-h + 1, t + 1) * 0.1
    x = torch.tensor(speed)[:, None] * step
    states = torch.stack([x, torch.tensor(y)[:, None].expand_as(x), torch.zeros_like(x)], -1)[None]
    batch = make_batch(states[:, :, :h], states[:, :, h:], **given)
    return batch, batch.fut[:, None].clone()


def test_collision_energy_is_a_share_of_agents(make_batch):
    batch, fut = lane_scene(make_batch, [0.0, 5.0, 10.0], [10.0, 10.0, 10.0])
    fut = fut.repeat(1, 2, 1, 1, 1)
    fut[0, 1, 1, 10:, 1] = 1.0  # sample 1: the second car cuts into the first one, from step 10 on
    e = energies(fut, batch)
    assert e["collision"].tolist() == [[0.0, pytest.approx(2 / 3)]]
    hit = collisions(fut, batch).hit[0, 1]
    assert hit.any(-1).tolist() == [True, True, False] and not hit[0, :10].any() and hit[0, 10:].all()


def test_padding_and_pairs_that_overlap_at_t0_do_not_count(make_batch):
    batch, fut = lane_scene(make_batch, [0.0, 1.0, 10.0, 10.0], [10.0] * 4)
    batch.mask[0, 3] = False  # a padded row on top of the third car
    assert energies(fut, batch)["collision"].item() == 0.0
    fut[0, 0, 2, :, 1] = 2.5  # the third car now meets the second one, a new pair
    assert energies(fut, batch)["collision"].item() == pytest.approx(2 / 3)


def road(width: float = 6.0, hole: bool = False):
    p = shapely.box(-100, -width / 2, 100, width / 2)
    return p.difference(shapely.box(10, -2, 12, 2)) if hole else p


def test_off_road_share_counts_corners(make_batch):
    kinds = [AGENT_TYPES.index(n) for n in ("vehicle", "pedestrian", "truck")]
    batch, fut = lane_scene(
        make_batch, [0.0, 50.0, 30.0], [5.0, 1.0, 5.0], type=torch.tensor([kinds]), drivable=[road()]
    )
    # the pedestrian is not looked at, the truck is outside at t0 and left out
    assert energies(fut, batch)["off_road"].item() == 0.0
    fut[0, 0, 0, 15:, 1] = 2.5  # 5 of 20 steps with two of four corners outside
    assert energies(fut, batch)["off_road"].item() == pytest.approx(5 * 2 / (20 * 4))
    seen = off_road(fut, batch)
    assert seen.of[0].sum(-1).tolist() == [80, 0, 0] and seen.bad[0, 0, 0].tolist() == [0] * 15 + [2] * 5


def test_off_road_is_unknown_without_a_map_and_without_vehicles(make_batch):
    batch, fut = lane_scene(make_batch, [0.0], [5.0])
    assert math.isnan(energies(fut, batch)["off_road"].item())
    walkers = torch.full((1, 1), AGENT_TYPES.index("pedestrian"))
    batch, fut = lane_scene(make_batch, [0.0], [1.0], type=walkers, drivable=[road()])
    assert math.isnan(energies(fut, batch)["off_road"].item())


def test_inside_is_exact_on_a_ragged_polygon_with_a_hole():
    g = np.random.default_rng(0)
    angle = np.sort(g.uniform(0, 2 * np.pi, 200))
    ring = np.stack([np.cos(angle), np.sin(angle)], 1) * g.uniform(20, 40, (200, 1))
    geometry = shapely.make_valid(shapely.Polygon(ring).difference(shapely.box(-5, -3, 5, 3)))
    points = g.uniform(-50, 50, (20_000, 2))
    for _ in range(2):  # the second time from the filled raster
        np.testing.assert_array_equal(inside(geometry, points), shapely.intersects_xy(geometry, *points.T))
    ends = np.array([[-100.0, 0.0], [100.0, 3.0], [100.0 + 1e-9, 0.0], [0.0, -3.0 - 1e-9]])
    assert inside(road(), ends).tolist() == [True, True, False, False]  # a boundary point is inside
    assert not inside(shapely.Polygon(), ends).any()
    with pytest.raises(ValueError, match="not finite"):
        inside(road(), np.array([[np.nan, 0.0]]))


def test_a_hole_is_outside(make_batch):
    batch, fut = lane_scene(make_batch, [0.0], [10.0], drivable=[road(hole=True)])
    assert energies(fut, batch)["off_road"].item() > 0


def test_plain_driving_is_feasible_and_jumps_are_not(make_batch):
    batch, fut = lane_scene(make_batch, [0.0, 5.0], [10.0, 0.0])
    assert energies(fut, batch)["infeasible"].item() == 0.0
    fut[0, 0, 0, :, 0] += 5.0  # starts with a jump of 5 m: the joint at t0 is tested
    bad = infeasible(fut, batch).bad[0, 0]
    assert bad[0, 0] and not bad[0, -1] and not bad[1].any()


@pytest.mark.parametrize(("radius", "bad"), [(6.0, False), (2.5, True)])
def test_curvature_limit(make_batch, radius, bad):
    """Driving round a circle at 4 m/s: 0.17 1/m is possible, 0.4 1/m is not (yaw rate .67 and 1.6 rad/s)."""
    assert LIMITS["vehicle"].curvature == 0.3
    s = torch.arange(-9, 21) * 0.1 * 4.0 / radius
    states = torch.stack([radius * s.sin(), radius * (1 - s.cos()), s], -1)[None, None]
    batch = make_batch(states[:, :, :10], states[:, :, 10:])
    assert energies(batch.fut[:, None], batch)["infeasible"].item() == float(bad)


def test_heading_wraps(make_batch):
    batch, fut = lane_scene(make_batch, [0.0], [10.0])
    batch.hist[..., 2] = math.pi - 0.01
    fut[..., 2] = -math.pi + 0.01
    assert energies(fut, batch)["infeasible"].item() == 0.0


def test_history_with_one_frame(make_batch):
    batch, fut = lane_scene(make_batch, [0.0], [10.0])
    batch.hist_valid[0, 0, :-1] = False
    batch.hist[0, 0, :-1] = 0
    assert energies(fut, batch)["infeasible"].item() == 0.0
    assert infeasible(fut, batch).of[0, 0].tolist() == [0, 0] + [1] * 18  # 0.3 s need three steps


def test_recording_with_gaps_uses_its_own_validity(make_batch):
    batch, fut = lane_scene(make_batch, [0.0, 5.0], [10.0, 10.0])
    batch.fut_valid[0, 1, 10:] = False
    fut[0, 0, 1, 10:] = 0.0
    e = energies(fut, batch, batch.fut_valid)
    assert e["collision"].item() == 0.0 and e["infeasible"].item() == 0.0
    assert energies(fut[:, :, :0], make_batch(batch.hist[:, :0], batch.fut[:, :0]))["collision"].isnan().all()
