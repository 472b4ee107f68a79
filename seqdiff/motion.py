"""Hard limits on how things move: first and second differences of a sequence, and the curvature of a path.

Sets for `seqdiff.projection`: `project`, and `violation` b k. Arithmetic is in float64; what rounding back leaves is in the
violation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Motion:
    """Limits on the first and second differences of a sequence, x of shape b k ... t c: |x_i - x_i-1| <= speed dt and
    |x_i - 2 x_i-1 + x_i-2| <= acceleration dt^2, lengths over c. With c = 1 on headings they limit turning rates.

    Nearly the nearest such sequence by ADMM (Boyd et al. 2011, with the differences as the split variable), then one sweep that
    clips each difference in turn, so that the limits hold exactly; how near is up to `iterations`.

    Args:
        dt: seconds between points.
        speed, acceleration: limits in units of x per s and per s^2; inf = none.
        before: the p = 1 or 2 points before the first (broadcast to b k ... p c), fixed: with one the first step is limited,
            with two its acceleration as well. None: the sequence starts freely.
        valid: broadcast to b k ... t; False = padding, which is left as it is and limits nothing.
        iterations: of ADMM.

    Violation: largest excess relative to the limit (0.01 = one per cent too fast).

    Raises:
        ValueError: a limit or dt that is not positive, or more than two points before.
    """

    dt: float
    speed: float = math.inf
    acceleration: float = math.inf
    before: Tensor | None = None
    valid: Tensor | None = None
    iterations: int = 60

    def __post_init__(self) -> None:
        for name in ("dt", "speed", "acceleration"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number")
        if self.before is not None and self.before.shape[-2] not in (1, 2):
            raise ValueError(f"before has {self.before.shape[-2]} points; expected the last one or two")

    def project(self, x: Tensor) -> Tensor:
        target = x.double()
        valid = self._valid(x)
        head = self._head(x)
        p = head.shape[-2]
        rows, bound = self._rows(x.shape[-2], p, x.device)
        free, given = rows[:, p:], rows[:, :p] @ head
        whole = torch.cat([valid.new_ones(*valid.shape[:-1], p), valid], -1).to(rows)
        real = (((rows != 0).to(rows) @ (1 - whole)[..., None]) == 0) & (
            bound < math.inf
        )  # differences of real points alone
        rho = 10.0
        inverse = torch.linalg.inv(torch.eye(x.shape[-2], dtype=rows.dtype, device=x.device) + rho * free.mT @ free)

        def clip(d: Tensor) -> Tensor:
            return torch.where(real, _shorten(d, bound), d)

        split = clip(free @ target + given)
        dual = torch.zeros_like(split)
        for _ in range(self.iterations):
            point = inverse @ (target + rho * free.mT @ (split - dual - given))
            relaxed = 1.6 * (free @ point + given) - 0.6 * split
            split = clip(relaxed + dual)
            dual = dual + relaxed - split
        point = inverse @ (target + rho * free.mT @ (split - dual - given))
        return torch.where(valid[..., None], self._sweep(point, head, valid), target).to(x.dtype)

    def violation(self, x: Tensor) -> Tensor:
        head, valid = self._head(x), self._valid(x)
        whole = torch.cat([head, x.double()], -2)
        real = torch.cat([valid.new_ones(*valid.shape[:-1], head.shape[-2]), valid], -1)
        out = x.new_zeros(x.shape[:2], dtype=torch.float64)
        limits = self.speed * self.dt, self.acceleration * self.dt**2
        for limit in limits:
            whole, real = whole.diff(dim=-2), real[..., 1:] & real[..., :-1]
            excess = torch.where(real, whole.norm(dim=-1) / limit - 1, 0).clamp_min(0)
            out = torch.maximum(out, excess.flatten(2).amax(-1)) if excess.shape[-1] else out
        return out.to(x.dtype)

    def _head(self, x: Tensor) -> Tensor:
        if self.before is None:
            return x.new_zeros(*x.shape[:-2], 0, x.shape[-1], dtype=torch.float64)
        return self.before.double().expand(*x.shape[:-2], -1, -1)

    def _valid(self, x: Tensor) -> Tensor:
        if self.valid is None:
            return torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        return self.valid.expand(x.shape[:-1])

    def _rows(self, t: int, p: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Differences that touch the t free points (rows of p + t), and the limit of each."""
        eye = torch.eye(p + t, dtype=torch.float64, device=device)
        first = eye.diff(dim=0)
        second = first.diff(dim=0)
        first, second = first[max(p - 1, 0) :], second[max(p - 2, 0) :]
        bound = torch.cat([
            torch.full((len(first), 1), self.speed * self.dt), torch.full((len(second), 1), self.acceleration * self.dt**2)
        ])  # fmt: skip
        return torch.cat([first, second]), bound.to(eye)

    def _sweep(self, target: Tensor, head: Tensor, valid: Tensor) -> Tensor:
        """Towards each target in turn, as far as the limits allow: first the acceleration is clipped, then the speed, which
        cannot break the acceleration again, since the step before lies within the speed limit itself."""
        done = list(head.unbind(-2))
        known = [torch.ones_like(valid[..., 0])] * len(done)
        for i in range(target.shape[-2]):
            goal = target[..., i, :]
            if done:
                step = goal - done[-1]
                if len(done) > 1:
                    before = done[-1] - done[-2]
                    limited = before + _shorten(step - before, self.acceleration * self.dt**2)
                    step = torch.where((known[-1] & known[-2])[..., None], limited, step)
                goal = torch.where(known[-1][..., None], done[-1] + _shorten(step, self.speed * self.dt), goal)
            done.append(goal)
            known.append(valid[..., i])
        return torch.stack(done[head.shape[-2] :], -2)


@dataclass(frozen=True)
class Curvature:
    """Turning of a path in the plane, x of shape b k ... t 2: between two successive moves at most `limit` times their mean
    length (curvature in 1/m; a car's is at most about 0.2). Moves keep their lengths and turn towards their own direction as far
    as the limit allows; a move backwards is one of negative length. Not convex: a near point that holds it, not the nearest.

    Args:
        limit: 1 / unit of x.
        start, heading: of the moment before the first point, broadcast to b k ... 2 and b k ...; None: the first move is free.

    Violation: largest excess of a turn, radians. A point that stays where it is does not turn.
    """

    limit: float
    start: Tensor | None = None
    heading: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"limit is {self.limit}; expected a positive curvature, 1 / unit of x")
        if (self.start is None) != (self.heading is None):
            raise ValueError("Curvature got one of start and heading; give both, or neither for a free first move")

    def project(self, x: Tensor) -> Tensor:
        points, length, way = self._walk(x)
        out = [points[..., 0, :]]
        for i, (turn, room, back) in enumerate(self._turns(points, length, way, clip=True)):
            way = way + torch.maximum(torch.minimum(turn, room), -room)
            size = torch.where(back, -length[..., i], length[..., i])
            out.append(out[-1] + size[..., None] * torch.stack([way.cos(), way.sin()], -1))
        return torch.stack(out[-x.shape[-2] :], -2).to(x.dtype)

    def violation(self, x: Tensor) -> Tensor:
        points, length, way = self._walk(x)
        out = x.new_zeros(x.shape[:2], dtype=torch.float64)
        for turn, room, _ in self._turns(points, length, way, clip=False):
            out = torch.maximum(out, (turn.abs() - room).clamp_min(0).reshape(*x.shape[:2], -1).amax(-1))
        return out.to(x.dtype)

    def _walk(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Points (with the start), lengths of the moves between them, and the first heading."""
        points = x.double()
        if self.start is not None:
            points = torch.cat([self.start.double().expand(*x.shape[:-2], 2)[..., None, :], points], -2)
        moves = points.diff(dim=-2)
        length = moves.norm(dim=-1)
        if self.heading is not None:
            return points, length, self.heading.double().expand(x.shape[:-2])
        first = (length > 0).to(torch.uint8).argmax(-1, keepdim=True)  # the first move that is one
        return points, length, torch.atan2(moves[..., 1], moves[..., 0]).gather(-1, first)[..., 0]

    def _turns(
        self, points: Tensor, length: Tensor, way: Tensor, clip: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each move: its turn against the way so far (clipped or as it is), the room there is, and whether it goes back."""
        moves = points.diff(dim=-2)
        for i in range(moves.shape[-2]):
            turn = torch.atan2(moves[..., i, 1], moves[..., i, 0]) - way
            turn = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
            back = turn.abs() > math.pi / 2
            turn = torch.where(back, turn - math.pi * turn.sign(), turn)
            turn = torch.where(length[..., i] > 0, turn, 0)
            room = self.limit * (length[..., max(i - 1, 0)] * (i > 0) + length[..., i]) / 2
            yield turn, room, back
            way = way + (torch.maximum(torch.minimum(turn, room), -room) if clip else turn)


def _shorten(d: Tensor, limit: Tensor | float) -> Tensor:
    """Vectors (last axis) no longer than the limit."""
    if isinstance(limit, float) and math.isinf(limit):
        return d
    return d * (limit / d.norm(dim=-1, keepdim=True).clamp_min(1e-300)).clamp_max(1)
