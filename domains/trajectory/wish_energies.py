"""Differentiable energies of what a user may wish of futures, and the quantities that they and the hard checks share.

Each is zero where the wish holds with a small margin, positive where not, never NaN, in metres squared at a time scale of
one second (so that metres, m/s and m/s^2 add up). Letters: k samples, a agents, t steps, i and j steps of two agents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seqdiff.domains.trajectory.energies import BASELINE_S
from seqdiff.domains.trajectory.guides import separation

LEVER = 2.0  # metres by which a radian counts
MARGIN = 0.95  # of a limit at which the energy begins, so that its zero satisfies the hard check
STOP_MARGIN = 0.3  # metres kept before a stop line or a region of conflict
SLIP = 0.2  # m/s sideways that recordings show as well
MOVING = 1.0  # m/s, below it the direction of motion says nothing


class Motion(NamedTuple):
    """Derivatives over BASELINE_S (or one step, if longer), reaching back into the history; `*_ok`: has one [a, t]."""

    speed: Tensor  # k a t, m/s
    along: Tensor  # k a t, m/s^2, along the direction of motion
    across: Tensor  # k a t, m/s^2, to its side
    jerk: Tensor  # k a t, m/s^3, magnitude of the vector
    speed_ok: Tensor
    acceleration_ok: Tensor
    jerk_ok: Tensor


def motion(futures: Tensor, hist: Tensor, hist_valid: Tensor, dt: float) -> Motion:
    """futures: [k, a, t, 3]; hist: [a, h, 3]; hist_valid: [a, h]."""
    m = max(1, round(BASELINE_S / dt))
    k, a, t = futures.shape[:3]
    tail = min(hist.shape[1], 3 * m)
    past = hist[None, :, -tail:, :2].expand(k, a, tail, 2).to(futures.dtype)
    xy = torch.cat([past, futures[..., :2]], 2)
    ok = torch.cat([hist_valid[:, -tail:], hist_valid.new_ones(a, t)], 1)

    def differ(x: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
        lead = x[:, :, :m] * 0
        d = torch.cat([lead, (x[:, :, m:] - x[:, :, :-m]) / (m * dt)], 2)
        return d, torch.cat([torch.zeros_like(has[:, :m]), has[:, m:] & has[:, :-m]], 1)

    velocity, has_v = differ(xy, ok)
    acceleration, has_a = differ(velocity, has_v)
    jerk, has_j = differ(acceleration, has_a)
    speed = velocity.norm(dim=-1)
    ahead = velocity / speed[..., None].clamp_min(MOVING)
    along = (acceleration * ahead).sum(-1)
    across = acceleration[..., 1] * ahead[..., 0] - acceleration[..., 0] * ahead[..., 1]
    now = slice(tail, None)
    return Motion(
        speed[:, :, now], along[:, :, now], across[:, :, now], jerk.norm(dim=-1)[:, :, now],
        has_v[:, now], has_a[:, now], has_j[:, now],
    )  # fmt: skip


def _excess(value: Tensor, limit: Tensor | float, ok: Tensor) -> Tensor:
    """Squared excess over MARGIN of a limit, mean over the steps that have a value. [k, a, t] -> [k, a]."""
    over = (value - MARGIN * limit).clamp_min(0).square()
    return torch.where(ok, over, 0.0).sum(-1) / ok.sum(-1).clamp_min(1)


def allowed_speed(limit: float, now: Tensor, braking: float, steps: int, dt: float) -> Tensor:
    """Greatest speed that a limit allows at each step: the limit, or what braking at `braking` m/s^2 from the speed at t0
    (now: [a]) still leaves; as a mean over BASELINE_S, like the speeds of `motion`. -> [a, t]."""
    span = max(1, round(BASELINE_S / dt)) * dt
    t = torch.arange(1, steps + 1, device=now.device, dtype=now.dtype) * dt
    start = now.clamp_min(limit)[:, None]
    until = (start - limit) / braking

    def way(t: Tensor) -> Tensor:
        slow = t.clamp_min(0).minimum(until)  # seconds of braking
        return start * t.minimum(slow) - 0.5 * braking * slow.square() + limit * (t - until).clamp_min(0)

    return (way(t) - way(t - span)) / span


def speed_energy(m: Motion, allowed: Tensor) -> Tensor:
    """[k, a]; allowed: [a, t]."""
    return _excess(m.speed, allowed, m.speed_ok)


def comfort_energy(m: Motion, acceleration: float, lateral: float, jerk: float) -> Tensor:
    """[k, a]; limits in m/s^2 and m/s^3."""
    return (
        _excess(m.along.abs(), acceleration, m.acceleration_ok)
        + _excess(m.across.abs(), lateral, m.acceleration_ok)
        + _excess(m.jerk, jerk, m.jerk_ok)
    )


def goal_distance(x: Tensor, goal: Tensor, step: int | None) -> tuple[Tensor, Tensor]:
    """Distance to a point [2] at a step (from 0), or where the path is nearest to it. x: [k, t, 3] -> [k], step [k]."""
    d = (x[..., :2] - goal).norm(dim=-1)
    at = d.detach().argmin(-1) if step is None else torch.full(d.shape[:1], step, device=d.device)
    return d.gather(-1, at[:, None])[:, 0], at


def goal_energy(x: Tensor, goal: Tensor, step: int | None, radius: float) -> Tensor:
    """x: [k, t, 3] -> [k]."""
    return (goal_distance(x, goal, step)[0] - 0.8 * radius).clamp_min(0).square()


def turn_to(x: Tensor, heading: float, at: Tensor) -> Tensor:
    """How far the heading at steps `at` [k] is from `heading`, radians, signed, wrapped. x: [k, t, 3] -> [k]."""
    d = x[..., 2].gather(-1, at[:, None])[:, 0] - heading
    return torch.atan2(d.sin(), d.cos())


def heading_energy(x: Tensor, heading: float, tolerance: float, at: Tensor) -> Tensor:
    """x: [k, t, 3]; at: [k] -> [k]."""
    return (LEVER * (turn_to(x, heading, at).abs() - 0.8 * tolerance)).clamp_min(0).square()


def slip(x: Tensor, now: Tensor, length: Tensor, dt: float) -> Tensor:
    """Speed sideways to the heading beyond what a wheeled vehicle of that length has at its middle, m/s. x: [k, t, 3] ->
    [k, t]; now: [3], the agent at t0.

    The middle lies up to 0.4 lengths before the rear axle and so moves sideways by that much times the yaw rate.
    """
    all_ = torch.cat([now.expand(len(x), 1, 3), x], 1)
    d = torch.diff(all_, dim=1)
    turn = torch.atan2(d[..., 2].sin(), d[..., 2].cos())
    mid = all_[:, :-1, 2] + 0.5 * turn
    sideways = (d[..., 1] * mid.cos() - d[..., 0] * mid.sin()).abs()
    return (sideways - 0.4 * length * turn.detach().abs()) / dt


def slip_energy(x: Tensor, now: Tensor, length: Tensor, dt: float) -> Tensor:
    """Squared slip beyond SLIP, mean over steps: vehicles are driven to where a wish wants them, not pushed. -> [k]."""
    return (slip(x, now, length, dt) - SLIP).clamp_min(0).square().mean(-1)


def past_line(x: Tensor, length: Tensor, line: Tensor, until: int, slack: float) -> tuple[Tensor, Tensor]:
    """How far the front is past a stop line while it holds, and whether it crossed there.

    x: [k, t, 3]; length: of the agent, []; line: [2, 2], its left and right end as the driver sees them; until: steps for
    which it holds; slack: metres added to the depth.
    -> depth [k, until], crossed [k]: the first step beyond the line lies between its ends.
    """
    front = x[:, :until, :2] + 0.5 * length * torch.stack([x[:, :until, 2].cos(), x[:, :until, 2].sin()], -1)
    along = line[1] - line[0]
    width = along.norm()
    along = along / width
    across = torch.stack([-along[1], along[0]])  # the way of travel
    depth = (front - line[0]) @ across + slack
    side = (front - line[0]) @ along
    over = depth.detach() > 0
    first = over.float().argmax(-1)
    at = side.detach().gather(-1, first[:, None])[:, 0]
    return depth, over.any(-1) & (at > 0) & (at < width)


def stop_energy(x: Tensor, length: Tensor, line: Tensor, until: int) -> Tensor:
    """Squared depth past a stop line that is crossed while it holds, mean over those steps. As `past_line` -> [k]."""
    depth, crossed = past_line(x, length, line, until, STOP_MARGIN)
    return torch.where(crossed[:, None], depth.clamp_min(0).square(), 0.0).mean(-1)


def conflicts(x: Tensor, y: Tensor, size: Tensor, disc: Tensor, clearance: float) -> Tensor:
    """Where agent A at step i is on ground that B covers at step j. x, y: [k, t, 3] -> bool [k, i, j].

    size: [2, 2] of A and B; disc: bool [2].
    """
    t = x.shape[1]
    p, q = x.detach()[:, :, None], y.detach()[:, None]
    reach = 0.5 * size.norm(dim=-1).sum() + clearance
    near = (p[..., :2] - q[..., :2]).square().sum(-1) < reach.square()
    s, i, j = near.nonzero(as_tuple=True)
    gap = separation(
        x.detach()[s, i], size[0].expand(len(s), 2), disc[0].expand(len(s)),
        y.detach()[s, j], size[1].expand(len(s), 2), disc[1].expand(len(s)),
    )  # fmt: skip
    out = torch.zeros(len(x), t, t, dtype=torch.bool, device=x.device)
    out[s, i, j] = gap < clearance
    return out


def yield_energy(x: Tensor, now: Tensor, y: Tensor, size: Tensor, disc: Tensor) -> Tensor:
    """A waits before the ground that B has still to cover: squared length of A's way beyond it, mean over steps -> [k].

    A yields to B if there are no steps i <= j at which A (at i) is where B (at j) will be. Where there are, the first such
    i says where on A's way the region begins, and the last j when B has left it: until then A must not have come further.
    That place and time are taken from the sample as they are; the gradient shortens A's way and leaves B alone.

    x, y: [k, t, 3] futures of A and B; now: [3], A at t0; size: [2, 2]; disc: bool [2].
    """
    t = x.shape[1]
    early = conflicts(x, y, size, disc, STOP_MARGIN) & torch.ones(t, t, dtype=torch.bool, device=x.device).triu()
    broken = early.flatten(1).any(-1)
    entry = early.any(-1).float().argmax(-1)
    leave = (t - 1) - early.any(1).flip(-1).float().argmax(-1)
    xy = torch.cat([now[None, None, :2].expand(len(x), 1, 2), x[..., :2]], 1)
    way = torch.diff(xy, dim=1).norm(dim=-1).cumsum(-1)  # k t
    begin = torch.cat([torch.zeros_like(way[:, :1]), way], 1).detach().gather(-1, entry[:, None])
    over = (way - begin + STOP_MARGIN).clamp_min(0).square()
    held = (torch.arange(t, device=x.device) <= leave[:, None]) & broken[:, None]
    return torch.where(held, over, 0.0).mean(-1)
