"""Differentiable energies for guidance: keep clear of others, stay on the drivable area. One number per agent of each sample.

They are smooth stand-ins for `energies.py`, which decides what counts. Boxes are boxes here too: `separation` is negative
exactly where two of them overlap; the road is a signed distance read between the cells of a raster. What a user may wish
beyond that is in `wish_energies.py`. Letters: b scenes, k samples, a agents, t steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import shapely
import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.energies import DISC, ON_ROAD, of_types
from seqdiff.domains.trajectory.geometry import corners, inside

CLEARANCE = 0.3  # metres kept beyond touching, for the steps between those looked at
CELL = 0.5  # metres, raster of the signed distance
ROAD_MARGIN = 0.1  # metres that corners keep from the edge of the road
ROAD_LOST = 3.0  # metres; further out the mapped world has ended, and nothing pulls back
EVERY_S = 0.2  # seconds between the steps looked at


def separation(p: Tensor, size_p: Tensor, disc_p: Tensor, q: Tensor, size_q: Tensor, disc_q: Tensor) -> Tensor:
    """Signed gap between two agents, metres: below 0 exactly where `geometry.overlap` says that they overlap.

    Boxes: the largest gap along their four axes (separating axes; Gottschalk et al. 1996), so between separate boxes at most
    the distance, and between overlapping ones the shortest way out. Discs of diameter min(length, width): true distances.

    p, q: [..., 3] poses; size_*: [..., 2]; disc_*: bool [...]. -> [...], differentiable, finite gradients everywhere.
    """
    d = q[..., :2] - p[..., :2]
    hp, hq = 0.5 * size_p.to(p.dtype), 0.5 * size_q.to(q.dtype)
    in_p, in_q = _seen(d, p[..., 2]).abs(), _seen(d, q[..., 2]).abs()
    turn = q[..., 2] - p[..., 2]
    c, s = torch.cos(turn).abs()[..., None], torch.sin(turn).abs()[..., None]
    boxes = torch.maximum(in_p - hp - hq * c - hq.flip(-1) * s, in_q - hq - hp * c - hp.flip(-1) * s).amax(-1)
    if not bool((disc_p | disc_q).any()):
        return boxes
    rp, rq = hp.amin(-1), hq.amin(-1)
    discs = d.norm(dim=-1) - rp - rq
    with_disc = torch.where(disc_q, _to_box(in_p - hp) - rq, _to_box(in_q - hq) - rp)
    return torch.where(disc_p & disc_q, discs, torch.where(disc_p | disc_q, with_disc, boxes))


def _to_box(out: Tensor) -> Tensor:
    """Signed distance of a point to a box from its offsets beyond the sides [..., 2]."""
    return out.clamp_min(0).norm(dim=-1) + out.amax(-1).clamp_max(0)


def _seen(d: Tensor, heading: Tensor) -> Tensor:
    c, s = torch.cos(heading), torch.sin(heading)
    return torch.stack([d[..., 0] * c + d[..., 1] * s, d[..., 1] * c - d[..., 0] * s], -1)


def keep_clear(futures: Tensor, batch: SceneBatch, who: Tensor | None = None) -> Tensor:
    """Squared shortfall of the gap to CLEARANCE, metres squared, summed over partners and steps -> [b, k, a].

    Zero at a step only if every two boxes (discs) are apart by CLEARANCE along some axis there: no part of a box is
    uncovered. Steps EVERY_S apart are looked at: two agents that close in at v m/s come at most v EVERY_S / 2 - CLEARANCE
    into each other unseen between them. Pairs that touch already at t0 are left out.

    futures: [b, k, a, t, 3]; who: bool [b, a], pairs with none of these are not looked at. Only pairs that come near in
    some sample cost time.
    """
    every = max(1, round(EVERY_S / batch.dt))
    x = futures[:, :, :, every - 1 :: every]
    b, k, a = x.shape[:3]
    disc = of_types(batch, DISC)
    total = futures.new_zeros(b, k, a)
    reach = 0.5 * batch.size.norm(dim=-1)
    for i in range(b):
        size, round_ = batch.size[i], disc[i]
        one, two = torch.triu_indices(a, a, 1, device=x.device)
        real = batch.mask[i, one] & batch.mask[i, two]
        if who is not None:
            real &= who[i, one] | who[i, two]
        one, two = one[real], two[real]
        now = batch.hist[i, :, -1]
        touching = separation(now[one], size[one], round_[one], now[two], size[two], round_[two]) < 0
        one, two = one[~touching], two[~touching]
        with torch.no_grad():
            low, high = x[i, ..., :2].amin((0, 2)), x[i, ..., :2].amax((0, 2))
            far = ((low[one] - high[two]).amax(-1) > reach[i, one] + reach[i, two] + CLEARANCE) | (
                (low[two] - high[one]).amax(-1) > reach[i, one] + reach[i, two] + CLEARANCE
            )
            one, two = one[~far], two[~far]
            apart = (x[i, :, one, :, :2] - x[i, :, two, :, :2]).square().sum(-1)
            near = apart < (reach[i, one] + reach[i, two] + CLEARANCE).square()[None, :, None]
            s, p, m = near.nonzero(as_tuple=True)
        if len(s) == 0:
            continue
        i1, i2 = one[p], two[p]
        gap = separation(x[i, s, i1, m], size[i1], round_[i1], x[i, s, i2, m], size[i2], round_[i2]) - CLEARANCE
        pain = 0.5 * gap.clamp_max(0).square()
        flat = total[i].flatten().index_add(0, s * a + i1, pain).index_add(0, s * a + i2, pain)
        total = total.index_copy(0, torch.tensor([i], device=x.device), flat.view(1, k, a))
    return total


class SignedDistance:
    """Signed distance to the edge of a drivable area on a raster, metres, negative inside."""

    def __init__(self, geometry: Any, margin: float = 20.0) -> None:
        x0, y0, x1, y1 = shapely.bounds(geometry)
        self.origin = torch.tensor([x0 - margin, y0 - margin], dtype=torch.float32)
        nx, ny = int((x1 - x0 + 2 * margin) / CELL) + 1, int((y1 - y0 + 2 * margin) / CELL) + 1
        gx, gy = np.meshgrid(x0 - margin + CELL * np.arange(nx), y0 - margin + CELL * np.arange(ny))
        on = inside(geometry, np.stack([gx, gy], -1))
        signed = distance_transform_edt(~on) - distance_transform_edt(on)
        self.grid = torch.from_numpy((signed * CELL).astype(np.float32))  # y x

    def __call__(self, points: Tensor) -> Tensor:
        """[..., 2] -> [...], bilinear; differentiable."""
        ny, nx = self.grid.shape
        cell = (points - self.origin) / CELL
        scale = torch.tensor([2 / (nx - 1), 2 / (ny - 1)])
        at = (cell * scale - 1).view(1, 1, -1, 2)
        out = torch.nn.functional.grid_sample(self.grid[None, None], at, padding_mode="border", align_corners=True)
        return out.view(points.shape[:-1])


class Validity:
    """Energy of a batch of scenes: keep clear of others and stay on the road. Rasters are made once per scene.

    Args:
        batch: the scenes.
        margin: metres around the agents at t0 that the rasters cover; beyond them the nearest cell counts.
        who: bool [b, a], the agents looked at; None = all. Partners of theirs count as well.
    """

    def __init__(self, batch: SceneBatch, margin: float = 80.0, who: Tensor | None = None) -> None:
        self.batch, self.who = batch, who
        self.motor = of_types(batch, ON_ROAD) & batch.mask
        if who is not None:
            self.motor = self.motor & who
        self.road: list[SignedDistance | None] = []
        for i, area in enumerate(batch.drivable):
            if area is None or not bool(self.motor[i].any()):
                self.road.append(None)
                continue
            xy = batch.hist[i, batch.mask[i], -1, :2]
            box = shapely.box(*(xy.amin(0) - margin).tolist(), *(xy.amax(0) + margin).tolist())
            part = shapely.intersection(area, box)
            self.road.append(None if part.is_empty else SignedDistance(part))

    def __call__(self, futures: Tensor) -> Tensor:
        """[b, k, a, t, 3] -> [b, k, a], metres squared."""
        return keep_clear(futures, self.batch, self.who) + self.stay_on_road(futures)

    def stay_on_road(self, futures: Tensor) -> Tensor:
        """Squared distance of box corners outside the drivable area, summed over corners and steps -> [b, k, a].

        Of motor vehicles that are on it at t0; 0 where no drivable area is known.
        """
        batch = self.batch
        every = max(1, round(EVERY_S / batch.dt))
        x = futures[:, :, :, every - 1 :: every]
        total = []
        for i, distance in enumerate(self.road):
            if distance is None:
                total.append(x.new_zeros(x.shape[1:3]))
                continue
            at = self.motor[i].nonzero()[:, 0]
            size = batch.size[i, at]
            now = distance(corners(batch.hist[i, at, -1], size)).amax(-1) <= 0
            out = (distance(corners(x[i, :, at], size[None, :, None])) + ROAD_MARGIN).clamp_min(0)
            near = out < ROAD_LOST
            each = torch.where(near, out, 0.0).square().sum((-1, -2)) * now
            total.append(x.new_zeros(x.shape[1:3]).index_copy(1, at, each))
        return torch.stack(total)
