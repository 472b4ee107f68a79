"""Energies of whole samples: collisions, off-road, kinematic infeasibility. Lower is better, NaN = unknown.

Letters: b scenes, k samples, a agents, t steps. The same functions applied to the recorded future (k = 1, valid =
fut_valid) give the recording's own rates. What counts, in one place:

collision   Pedestrians are discs whose diameter is the smaller side of their box, all others oriented boxes; touching
is not overlap. A pair that overlaps already at t0 is left out: the recording, not the sample, put it there. off-road
Box corners outside the drivable area, for ON_ROAD types. An agent with a corner outside at t0 is left out (parked
beside the mapped road). Unknown (NaN) without a map, and where no agent is left to look at. infeasible  Steps that
break a limit of LIMITS. Derivatives are differences over BASELINE_S (or one step, if that is longer) and reach back
into the history, so that the joint at t0 is tested too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.geometry import Overlaps, corners, inside, overlaps
from seqdiff.domains.trajectory.scene import AGENT_TYPES

ON_ROAD = ("vehicle", "motorcycle", "truck", "bus")
DISC = ("pedestrian",)
BASELINE_S = 0.3  # recordings carry centimetres of noise: over one step of 0.1 s that alone is 4 m/s^2


class Limits(NamedTuple):
    """What a road user of one type can do."""

    speed: float  # m/s
    acceleration: float  # m/s^2, magnitude of the vector
    jerk: float  # m/s^3, magnitude of the vector
    yaw_rate: float  # rad/s
    curvature: float  # 1/m, yaw rate over speed, above MIN_SPEED


MIN_SPEED = 2.0  # m/s; curvature says nothing below it
LIMITS: dict[str, Limits] = {
    "vehicle": Limits(70.0, 10.0, 40.0, 1.5, 0.3),
    "truck": Limits(40.0, 9.0, 40.0, 1.0, 0.2),
    "bus": Limits(40.0, 9.0, 40.0, 1.0, 0.2),
    "motorcycle": Limits(80.0, 11.0, 60.0, 2.5, 0.5),
    "bicycle": Limits(20.0, 8.0, 60.0, 3.0, 1.0),
    "pedestrian": Limits(12.0, 10.0, 100.0, math.inf, math.inf),
    "other": Limits(100.0, 11.0, 100.0, math.inf, math.inf),
}


class Share(NamedTuple):
    """How much is bad, and of how much."""

    bad: Tensor  # b k a t: what is bad (0..of)
    of: Tensor  # b a t: what was looked at; 0 = nothing, not in any mean

    def per_sample(self) -> Tensor:
        """Share over agents and steps -> float64 [b, k]; NaN where nothing was looked at."""
        return self.bad.sum((2, 3), dtype=torch.float64) / self.of.sum((1, 2), dtype=torch.float64)[:, None]


def energies(futures: Tensor, batch: SceneBatch, valid: Tensor | None = None) -> dict[str, Tensor]:
    """Energies of each sample as a whole -> {"collision", "off_road", "infeasible"}: float64 [b, k] in 0..1, NaN =
    unknown.

    futures: [b, k, a, t, 3] (x, y, heading) relative to batch.origin; valid: bool [b, a, t], default every step of
    every real agent. collision: share of agents that overlap another one at some step; off_road: share of (agent, step,
    corner) outside the drivable area; infeasible: share of (agent, step) beyond a limit. Raises ValueError on a pose
    that is not finite.
    """
    valid = all_steps(futures, batch) if valid is None else valid
    hit = collisions(futures, batch, valid).hit.any(-1)  # b k a
    seen = valid.any(-1)  # b a
    share = (hit & seen[:, None]).sum(-1, dtype=torch.float64) / seen.sum(-1, dtype=torch.float64)[:, None]
    return {
        "collision": share,
        "off_road": off_road(futures, batch, valid).per_sample(),
        "infeasible": infeasible(futures, batch, valid).per_sample(),
    }


def all_steps(futures: Tensor, batch: SceneBatch) -> Tensor:
    """Every step of every real agent -> bool [b, a, t]."""
    return batch.mask[..., None].expand(*batch.mask.shape, futures.shape[3])


def of_types(batch: SceneBatch, names: tuple[str, ...]) -> Tensor:
    """Agents of the named types -> bool [b, a]."""
    return torch.isin(batch.type, torch.tensor([AGENT_TYPES.index(n) for n in names], device=batch.type.device))


def collisions(futures: Tensor, batch: SceneBatch, valid: Tensor | None = None) -> Overlaps:
    """Overlaps of each sample's agents, without the pairs that overlap at t0. Arguments as in `energies`."""
    valid = all_steps(futures, batch) if valid is None else valid
    disc = of_types(batch, DISC)
    now = batch.hist[:, None, :, -1:].to(futures.dtype)  # b 1 a 1 3
    rows = overlaps(now, (batch.mask & batch.hist_valid[:, :, -1])[..., None], batch.size, disc).pairs
    a = batch.mask.shape[1]
    skip = torch.zeros(batch.n_scenes, a, a, dtype=torch.bool, device=futures.device)
    skip[rows[:, 0], rows[:, 2], rows[:, 3]] = True
    return overlaps(futures, valid & batch.mask[..., None], batch.size, disc, skip)


def off_road(futures: Tensor, batch: SceneBatch, valid: Tensor | None = None) -> Share:
    """Corners outside the drivable area, of the agents of ON_ROAD types that are inside at t0. Arguments as in
    `energies`.

    bad: corners outside, 0..4; of: 4 where a step was looked at. Looks at nothing where the scene has no drivable area.
    """
    valid = all_steps(futures, batch) if valid is None else valid
    bad = torch.zeros(futures.shape[:4], dtype=torch.int8)
    of = torch.zeros(valid.shape, dtype=torch.int8)
    agents = (of_types(batch, ON_ROAD) & batch.mask & batch.hist_valid[:, :, -1]).cpu()
    now = corners(batch.hist[:, :, -1], batch.size).cpu().numpy()  # b a 4 2
    for i, geometry in enumerate(batch.drivable):
        if geometry is None:
            continue
        rows = torch.nonzero(agents[i]).flatten()
        rows = rows[torch.from_numpy(inside(geometry, now[i, rows.numpy()]).all(-1))]
        look = valid[i].cpu()[rows]  # n t
        n, at = torch.nonzero(look, as_tuple=True)
        poses = futures[i, :, rows.to(futures.device)].cpu()[:, n, at]  # k m 3
        box = corners(poses, batch.size[i].cpu()[rows[n]].expand(len(poses), -1, -1))  # k m 4 2
        out = ~inside(geometry, box.numpy())
        bad[i][:, rows[n], at] = torch.from_numpy(out.sum(-1).astype("int8"))
        of[i, rows[n], at] = 4
    return Share(bad.to(futures.device), of.to(futures.device))


def infeasible(futures: Tensor, batch: SceneBatch, valid: Tensor | None = None) -> Share:
    """Steps beyond a limit of LIMITS. Arguments as in `energies`. bad: 0 or 1; of: 1 where a speed could be taken."""
    valid = all_steps(futures, batch) if valid is None else valid
    if not bool((torch.isfinite(futures).all(-1) | ~valid[:, None]).all()):
        raise ValueError("infeasible got a pose that is not finite where valid is True; mask it or repair the sample")
    b, k, a = futures.shape[:3]
    m = max(1, round(BASELINE_S / batch.dt))
    tail = min(batch.hist.shape[2], 3 * m)
    past = batch.hist[:, None, :, -tail:].expand(b, k, a, tail, 3).to(futures.dtype)
    xyh = torch.cat([past, futures], 3)
    ok = torch.cat([batch.hist_valid[:, :, -tail:], valid], 2) & batch.mask[..., None]  # b a n
    limit = torch.tensor([LIMITS[n] for n in AGENT_TYPES], dtype=futures.dtype, device=futures.device)[batch.type]
    span = m * batch.dt

    def differ(x: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
        """Backward difference over m steps on the time axis; x: [b, k, a, n, c], has: [b, a, n]."""
        d, good = torch.zeros_like(x), torch.zeros_like(has)
        d[..., m:, :] = x[..., m:, :] - x[..., :-m, :]
        good[..., m:] = has[..., m:] & has[..., :-m]
        return d, good

    velocity, has_v = differ(xyh[..., :2], ok)
    turn, _ = differ(xyh[..., 2:], ok)
    velocity, rate = velocity / span, torch.atan2(turn.sin(), turn.cos())[..., 0].abs() / span
    acceleration, has_a = differ(velocity, has_v)
    jerk, has_j = differ(acceleration / span, has_a)
    speed = velocity.norm(dim=-1)
    broken = torch.zeros_like(speed, dtype=torch.bool)
    curve = torch.where(speed > MIN_SPEED, rate / speed.clamp_min(MIN_SPEED), torch.zeros_like(rate))
    values = (
        (speed, has_v),
        (acceleration.norm(dim=-1) / span, has_a),
        (jerk.norm(dim=-1) / span, has_j),
        (rate, has_v),
        (curve, has_v),
    )
    for which, (value, has) in enumerate(values):
        broken |= (value > limit[:, None, :, None, which]) & has[:, None]
    return Share(broken[..., tail:], has_v[..., tail:])
