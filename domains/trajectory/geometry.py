"""Which road users overlap and which box corners leave the drivable area, exactly and fast.

Letters: b scenes, k samples, a agents, t steps, p pairs that overlap. Metres, radians (counter-clockwise from x).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import shapely
import torch
from torch import Tensor

_CHUNK = 1 << 20  # (pair, step) entries looked at together
_CELL = 1.0  # metres; side of a raster cell, before the limit below
_MAX_CELLS = 1 << 24  # 16 MB a geometry
_CACHE: OrderedDict[int, tuple[Any, _Raster]] = OrderedDict()
_CACHE_SIZE = 128  # geometries


class Overlaps(NamedTuple):
    """Where agents overlap."""

    hit: Tensor  # bool b k a t: the agent overlaps another one
    pairs: Tensor  # int64 p 5: rows b, k, first agent, second agent (first < second), t


def corners(xyh: Tensor, size: Tensor) -> Tensor:
    """Corners of boxes, counter-clockwise from front left. xyh: [..., 3], size: [..., 2] (length, width) -> [..., 4,
    2].
    """
    half = 0.5 * size.to(xyh.dtype)
    sign = torch.tensor([[1, 1], [-1, 1], [-1, -1], [1, -1]], dtype=xyh.dtype, device=xyh.device)
    along, across = (half[..., None, :] * sign).unbind(-1)  # ... 4
    c, s = torch.cos(xyh[..., 2:3]), torch.sin(xyh[..., 2:3])
    return torch.stack([xyh[..., :1] + along * c - across * s, xyh[..., 1:2] + along * s + across * c], -1)


def overlap(p: Tensor, size_p: Tensor, disc_p: Tensor, q: Tensor, size_q: Tensor, disc_q: Tensor) -> Tensor:
    """Do two agents overlap? Oriented boxes by separating axes; discs of diameter min(length, width). Touching is not
    overlap.

    p, q: [..., 3] poses; size_*: [..., 2]; disc_*: bool [...], the agent is a disc. -> bool [...]
    """
    d = q[..., :2] - p[..., :2]
    hp, hq = 0.5 * size_p.to(p.dtype), 0.5 * size_q.to(q.dtype)
    in_p, in_q = _turned(d, p[..., 2]).abs(), _turned(d, q[..., 2]).abs()  # offset seen in each frame
    turn = q[..., 2] - p[..., 2]
    c, s = torch.cos(turn).abs()[..., None], torch.sin(turn).abs()[..., None]
    boxes = ((in_p < hp + hq * c + hq.flip(-1) * s) & (in_q < hq + hp * c + hp.flip(-1) * s)).all(-1)
    rp, rq = hp.amin(-1), hq.amin(-1)
    box_disc = (in_p - hp).clamp_min(0).norm(dim=-1) < rq  # distance from disc q's centre to box p
    disc_box = (in_q - hq).clamp_min(0).norm(dim=-1) < rp
    discs = d.norm(dim=-1) < rp + rq
    return torch.where(disc_p, torch.where(disc_q, discs, disc_box), torch.where(disc_q, box_disc, boxes))


def overlaps(xyh: Tensor, valid: Tensor, size: Tensor, disc: Tensor, skip: Tensor | None = None) -> Overlaps:
    """All overlaps between agents of a scene in each sample and step.

    xyh: [b, k, a, t, 3]; valid: bool [b, a, t]; size: [b, a, 2]; disc: bool [b, a]; skip: bool [b, a, a], pairs (in
    either order) that are not looked at. Broad phase: bounding boxes of whole futures, then centre distance; the exact
    test on what is left. Raises ValueError where a valid pose is not finite: a NaN must not pass as "no collision".
    """
    b, k, a, t, _ = xyh.shape
    if not bool((torch.isfinite(xyh).all(-1) | ~valid[:, None]).all()):
        raise ValueError("overlaps got a pose that is not finite where valid is True; mask it or repair the sample")
    hit = torch.zeros(b, k, a, t, dtype=torch.bool, device=xyh.device)
    rows: list[Tensor] = []
    first, second = torch.triu_indices(a, a, 1, device=xyh.device)
    for i in range(b):
        keep = torch.ones_like(first, dtype=torch.bool)
        if skip is not None:
            keep = ~(skip[i][first, second] | skip[i][second, first])
        found = _scene_overlaps(xyh[i], valid[i], size[i], disc[i], (first[keep], second[keep]))
        hit[i, found[:, 0], found[:, 1], found[:, 3]] = True
        hit[i, found[:, 0], found[:, 2], found[:, 3]] = True
        rows.append(torch.cat([torch.full_like(found[:, :1], i), found], 1))
    return Overlaps(hit, torch.cat(rows) if rows else torch.zeros(0, 5, dtype=torch.long, device=xyh.device))


def _scene_overlaps(xyh: Tensor, valid: Tensor, size: Tensor, disc: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Rows k, first, second, t. xyh: [k, a, t, 3]; valid: [a, t]; size: [a, 2]; disc: [a]; pairs: two int64 [n]."""
    t = xyh.shape[2]
    radius = 0.5 * torch.where(disc, size.amin(-1), size.norm(dim=-1)).to(xyh.dtype)  # a: circle around the agent
    low = xyh[..., :2].masked_fill(~valid[..., None], torch.inf).amin(2) - radius[:, None]  # k a 2
    high = xyh[..., :2].masked_fill(~valid[..., None], -torch.inf).amax(2) + radius[:, None]
    i, j = pairs
    near = ((low[:, i] < high[:, j]) & (low[:, j] < high[:, i])).all(-1)  # k n
    sample, pair = torch.nonzero(near, as_tuple=True)
    out: list[Tensor] = []
    step = max(1, _CHUNK // max(1, t))
    for s, n in zip(sample.split(step), pair.split(step), strict=True):
        pi, pj = xyh[s, i[n]], xyh[s, j[n]]  # n t 3
        reach = (radius[i[n]] + radius[j[n]])[:, None]
        close = (pj[..., :2] - pi[..., :2]).square().sum(-1) < reach.square()
        m, at = torch.nonzero(close & valid[i[n]] & valid[j[n]], as_tuple=True)
        ai, aj = i[n[m]], j[n[m]]
        exact = overlap(pi[m, at], size[ai], disc[ai], pj[m, at], size[aj], disc[aj])
        out.append(torch.stack([s[m], ai, aj, at], 1)[exact])
    return torch.cat(out) if out else torch.zeros(0, 4, dtype=torch.long, device=xyh.device)


def _turned(d: Tensor, heading: Tensor) -> Tensor:
    """Offsets [..., 2] seen in frames that face `heading` [...]."""
    c, s = torch.cos(heading), torch.sin(heading)
    return torch.stack([d[..., 0] * c + d[..., 1] * s, d[..., 1] * c - d[..., 0] * s], -1)


def inside(geometry: Any, points: np.ndarray) -> np.ndarray:
    """Which points lie in a polygon or on its boundary. points: [..., 2], same frame and unit as the geometry -> bool
    [...].

    Exact: a raster, filled as it is asked and kept per geometry object, says which cells lie wholly inside or outside;
    points in cells that the boundary crosses are tested one by one.
    """
    key = id(geometry)
    if key in _CACHE:
        _CACHE.move_to_end(key)
    else:
        _CACHE[key] = (geometry, _Raster(geometry))  # holds the geometry, so that its id is not given to another one
        while len(_CACHE) > _CACHE_SIZE:
            _CACHE.popitem(last=False)
    flat = np.ascontiguousarray(points, np.float64).reshape(-1, 2)
    if not np.isfinite(flat).all():
        raise ValueError("inside got a point that is not finite; mask it before asking where it lies")
    return _CACHE[key][1](flat).reshape(points.shape[:-1])


class _Raster:
    UNKNOWN, IN, OUT, EDGE = 0, 1, 2, 3

    def __init__(self, geometry: Any) -> None:
        self.geometry = geometry
        shapely.prepare(geometry)
        bounds = np.asarray(geometry.bounds, np.float64)
        self.empty = geometry.is_empty or not np.isfinite(bounds).all()
        if self.empty:
            return
        self.low = bounds[:2]
        extent = np.maximum(bounds[2:] - self.low, 1e-6)
        self.cell = max(_CELL, float(np.sqrt(extent.prod() / _MAX_CELLS)), float(extent.max()) / _MAX_CELLS)
        nx, ny = (np.ceil(extent / self.cell).astype(np.int64) + 1).tolist()
        self.shape = nx + 2, ny + 2  # with a rim of cells that stand for everything beyond the bounds
        self.state = np.full(self.shape, self.OUT, np.int8)
        self.state[1:-1, 1:-1] = self.UNKNOWN
        self.state = self.state.reshape(-1)

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """points: float64 [n, 2] -> bool [n]"""
        if self.empty:
            return np.zeros(len(points), bool)
        ij = [np.clip((points[:, i] - self.low[i]) / self.cell + 1, 0, self.shape[i] - 1) for i in range(2)]
        cell = ij[0].astype(np.int64) * self.shape[1] + ij[1].astype(np.int64)
        state = self.state[cell]
        if (state == self.UNKNOWN).any():
            self._classify(np.unique(cell[state == self.UNKNOWN]))
            state = self.state[cell]
        out = state == self.IN
        edge = np.flatnonzero(state == self.EDGE)
        out[edge] = shapely.intersects_xy(self.geometry, points[edge, 0], points[edge, 1])
        return out

    def _classify(self, cells: np.ndarray) -> None:
        ij = np.stack([cells // self.shape[1], cells % self.shape[1]], 1) - 1
        slack = 1e-6 * self.cell  # rounding may put a point in the cell next door
        low = self.low + ij * self.cell - slack
        high = low + self.cell + 2 * slack
        boxes = shapely.box(low[:, 0], low[:, 1], high[:, 0], high[:, 1])
        state = np.full(len(cells), self.EDGE, np.int8)
        state[shapely.contains_properly(self.geometry, boxes)] = self.IN
        state[shapely.disjoint(self.geometry, boxes)] = self.OUT
        self.state[cells] = state
