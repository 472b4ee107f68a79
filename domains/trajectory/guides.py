"""Differentiable energies for guidance: keep clear of others, stay on the drivable area. One number per agent of each sample.

They are smooth stand-ins for `energies.py`, which decides what counts: boxes are rows of discs, the road is a signed distance
read between the cells of a raster. Letters: b scenes, k samples, a agents, t steps, c discs of an agent.
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

DISCS = 5
CLEARANCE = 0.45  # metres kept beyond touching: the discs cut the corners of a car by 0.4 m
CELL = 0.5  # metres, raster of the signed distance
ROAD_MARGIN = 0.1  # metres that corners keep from the edge of the road
ROAD_LOST = 3.0  # metres; further out the mapped world has ended, and nothing pulls back
EVERY_S = 0.2  # seconds between the steps looked at


def disc_centres(xyh: Tensor, size: Tensor, disc: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes as DISCS discs along their length. xyh: [..., 3]; size: [..., 2]; disc: bool [...] (pedestrians: one disc).

    -> centres [..., c, 2] and radius [...], metres.
    """
    short = size.amin(-1)
    reach = torch.where(disc, 0.0, 0.5 * (size.amax(-1) - short).clamp_min(0))
    along = torch.linspace(-1, 1, DISCS, device=xyh.device, dtype=xyh.dtype) * reach[..., None]
    ahead = torch.stack([torch.cos(xyh[..., 2]), torch.sin(xyh[..., 2])], -1)
    return xyh[..., None, :2] + along[..., None] * ahead[..., None, :], 0.5 * short


def keep_clear(futures: Tensor, batch: SceneBatch) -> Tensor:
    """Squared penetration of the agents' discs, metres squared, summed over partners and steps -> [b, k, a].

    futures: [b, k, a, t, 3]. Pairs that touch already at t0 are left out. Only pairs that come near in some sample cost time.
    """
    every = max(1, round(EVERY_S / batch.dt))
    x = futures[:, :, :, every - 1 :: every]
    b, k, a = x.shape[:3]
    disc = of_types(batch, DISC)
    total = futures.new_zeros(b, k, a)
    reach = 0.5 * batch.size.norm(dim=-1)
    for i in range(b):
        one, two = torch.triu_indices(a, a, 1, device=x.device)
        real = batch.mask[i, one] & batch.mask[i, two]
        one, two = one[real], two[real]
        now = batch.hist[i, :, -1]
        touching = _gap(now[one], now[two], batch.size[i], disc[i], one, two) < 0
        one, two = one[~touching], two[~touching]
        with torch.no_grad():
            low, high = x[i, ..., :2].amin((0, 2)), x[i, ..., :2].amax((0, 2))
            far = ((low[one] - high[two]).amax(-1) > reach[i, one] + reach[i, two]) | (
                (low[two] - high[one]).amax(-1) > reach[i, one] + reach[i, two]
            )
            one, two = one[~far], two[~far]
            apart = (x[i, :, one, :, :2] - x[i, :, two, :, :2]).norm(dim=-1)
            near = apart < (reach[i, one] + reach[i, two] + CLEARANCE)[None, :, None]
            s, p, m = near.nonzero(as_tuple=True)
        if len(s) == 0:
            continue
        i1, i2 = one[p], two[p]
        gap = _gap(x[i, s, i1, m], x[i, s, i2, m], batch.size[i], disc[i], i1, i2) - CLEARANCE
        pain = 0.5 * gap.clamp_max(0).square()
        flat = total[i].flatten().index_add(0, s * a + i1, pain).index_add(0, s * a + i2, pain)
        total = total.index_copy(0, torch.tensor([i], device=x.device), flat.view(1, k, a))
    return total


def _gap(p: Tensor, q: Tensor, size: Tensor, disc: Tensor, one: Tensor, two: Tensor) -> Tensor:
    """Smallest distance between the discs of two agents less their radii. p, q: [n, 3] -> [n]."""
    cp, rp = disc_centres(p, size[one], disc[one])
    cq, rq = disc_centres(q, size[two], disc[two])
    d = (cp[..., :, None, :] - cq[..., None, :, :]).square().sum(-1)
    return (d.flatten(-2).amin(-1) + 1e-6).sqrt() - rp - rq


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
    """

    def __init__(self, batch: SceneBatch, margin: float = 80.0) -> None:
        self.batch = batch
        self.motor = of_types(batch, ON_ROAD) & batch.mask
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
        return keep_clear(futures, self.batch) + self.stay_on_road(futures)

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
            now = distance(corners(batch.hist[i, :, -1], batch.size[i])).amax(-1) <= 0
            out = (distance(corners(x[i], batch.size[i][None, :, None])) + ROAD_MARGIN).clamp_min(0)
            near = out < ROAD_LOST
            total.append(torch.where(near, out, 0.0).square().sum((-1, -2)) * (self.motor[i] & now))
        return torch.stack(total)
