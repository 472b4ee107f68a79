"""The kinds of wishes, what each needs of a scene, its energy and its hard check. Read from yaml by `constraints.py`.

Letters: k samples, a agents, t steps. Positions in a wish are world frame, metres; headings radians; times seconds from t0.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from seqdiff.domains.trajectory import wish_energies as we
from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.energies import DISC, LIMITS, ON_ROAD, collisions, of_types, off_road
from seqdiff.domains.trajectory.geometry import overlap
from seqdiff.domains.trajectory.kinematics import velocity
from seqdiff.domains.trajectory.scene import AGENT_TYPES
from seqdiff.domains.trajectory.stop_lines import red_lines

STOPPING = 6.0  # m/s^2, hardest braking that a red light may ask for
LINE_FAR = 120.0  # metres before a stop line from which an agent may be bound by it


class ConstraintError(ValueError):
    """A wish that cannot be read or asked as it stands; the text says what was got and what to write instead."""


class Term(NamedTuple):
    """A wish bound to one scene."""

    energy: Callable[[Tensor], Tensor]  # futures k a t 3 -> k a, >= 0, differentiable
    satisfied: Callable[[Tensor], Tensor]  # futures k a t 3 -> bool k


def one_scene(batch: SceneBatch, i: int) -> SceneBatch:
    """A batch of scene i alone."""
    part: dict[str, Any] = {}
    for f in fields(batch):
        value = getattr(batch, f.name)
        part[f.name] = value if f.name == "dt" else value[i : i + 1]
    return SceneBatch(**part)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What every kind has.

    Args:
        scene_id, t0: where it holds; None = every scene, every window.
        agent: id of the one it is for.
        weight: factor of its energy.
    """

    kind: ClassVar[str] = ""
    scene_id: str | None = None
    t0: int | None = None
    agent: str | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.agent is not None and self.scene_id is None:
            raise ConstraintError(f"{self.kind} names agent {self.agent!r} but no scene; add scene_id")
        if not self.weight > 0:
            raise ConstraintError(f"weight is {self.weight:g}, expected more than 0; leave the wish out instead")

    def matches(self, batch: SceneBatch, i: int) -> bool:
        """Whether it holds in scene i of a batch. Without t0 it waits for the windows in which its agents are there."""
        here = self.scene_id in (None, batch.scene_id[i]) and self.t0 in (None, int(batch.t0[i]))
        return here and (self.t0 is not None or all(name in batch.agent_id[i] for name in self.agents()))

    def agents(self) -> list[str]:
        """Ids that it names."""
        return [] if self.agent is None else [self.agent]

    def concerns(self, batch: SceneBatch, i: int) -> Tensor:
        """Agents of scene i that it is for -> bool [a]; all without a name."""
        ids = batch.agent_id[i] + [""] * (batch.mask.shape[1] - len(batch.agent_id[i]))
        return torch.tensor([not self.agents() or name in self.agents() for name in ids], device=batch.mask.device)

    def told(self) -> dict[str, Any]:
        """As plain data, for run.json."""
        return {"kind": self.kind} | {key: v for key, v in asdict(self).items() if v is not None}

    def bind(self, scene: SceneBatch) -> Term | None:
        """Its term in a batch of one scene; None = unknown there, where the wish does not name the scene."""
        raise NotImplementedError

    def unknown(self, why: str) -> Term | None:
        """The scene lacks what the wish needs: an error where it names the scene, else unknown (None)."""
        if self.scene_id is not None:
            raise ConstraintError(why)
        return None


def _index(scene: SceneBatch, agent: str) -> int:
    ids = scene.agent_id[0]
    if agent not in ids:
        near = difflib.get_close_matches(agent, ids, 5, 0.3) or ids[:5]
        raise ConstraintError(
            f"no agent {agent!r} in scene {scene.scene_id[0]!r} at t0 {int(scene.t0[0])} ({len(ids)} agents); "
            f"nearest ids: {', '.join(near)}"
        )
    return ids.index(agent)


def _chosen(scene: SceneBatch, agent: str | None) -> Tensor:
    """Which agents a wish is for, bool [a]: the named one, or all motor vehicles."""
    if agent is None:
        return of_types(scene, ON_ROAD)[0] & scene.mask[0]
    out = torch.zeros_like(scene.mask[0])
    out[_index(scene, agent)] = True
    return out


def _put(value: Tensor, j: int, a: int) -> Tensor:
    """[k] as the energy of agent j -> [k, a]."""
    return torch.nn.functional.one_hot(torch.tensor(j, device=value.device), a).to(value.dtype) * value[:, None]


def _speed_now(scene: SceneBatch) -> Tensor:
    return velocity(scene.hist, scene.hist_valid, scene.dt)[0].norm(dim=-1)


@dataclass(frozen=True, kw_only=True)
class Goal(Wish):
    """An agent is within `radius` of a point at `at_s` seconds, or at some step if that is not given; there it may have to
    face `heading` within `heading_tolerance`."""

    kind: ClassVar[str] = "goal"
    x: float
    y: float
    at_s: float | None = None
    radius: float = 2.0
    heading: float | None = None
    heading_tolerance: float = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.agent is None:
            raise ConstraintError("goal needs agent and scene_id")
        if not self.radius > 0 or (self.at_s is not None and not self.at_s > 0) or not self.heading_tolerance > 0:
            raise ConstraintError("goal needs radius, at_s and heading_tolerance above 0")

    def bind(self, scene: SceneBatch) -> Term:
        assert self.agent is not None
        j, a, steps = _index(scene, self.agent), scene.mask.shape[1], scene.fut.shape[2]
        world = torch.tensor([self.x, self.y], dtype=torch.float64) - scene.origin[0].cpu()
        goal = world.to(scene.hist)
        step = None
        if self.at_s is not None:
            step = round(self.at_s / scene.dt) - 1
            if not 0 <= step < steps:
                raise ConstraintError(f"at_s is {self.at_s:g}; the futures end at {steps * scene.dt:g} s")
        self._reachable(scene, j, goal, (steps if step is None else step + 1) * scene.dt)

        wheeled = bool(of_types(scene, ON_ROAD)[0, j])
        now, length = scene.hist[0, j, -1], scene.size[0, j, 0]

        def energy(x: Tensor) -> Tensor:
            e = we.goal_energy(x[:, j], goal.to(x), step, self.radius)
            if self.heading is not None:
                at = we.goal_distance(x[:, j], goal.to(x), step)[1]
                e = e + we.heading_energy(x[:, j], self.heading, self.heading_tolerance, at)
            if wheeled:
                e = e + we.slip_energy(x[:, j], now, length, scene.dt)
            return _put(e, j, a)

        def satisfied(x: Tensor) -> Tensor:
            d = (x[:, j, :, :2] - goal.to(x)).norm(dim=-1) <= self.radius  # k t
            if self.heading is not None:
                turn = x[:, j, :, 2] - self.heading
                d = d & (torch.atan2(turn.sin(), turn.cos()).abs() <= self.heading_tolerance)
            return d.any(-1) if step is None else d[:, step]

        return Term(energy, satisfied)

    def _reachable(self, scene: SceneBatch, j: int, goal: Tensor, seconds: float) -> None:
        """Refuse what the type could not reach at its limits of acceleration and speed: a generous bound."""
        limit = LIMITS[AGENT_TYPES[int(scene.type[0, j])]]
        now = float(_speed_now(scene)[j])
        far = float((goal - scene.hist[0, j, -1, :2]).norm()) - self.radius
        most = min(now * seconds + 0.5 * limit.acceleration * seconds**2, max(limit.speed, now) * seconds)
        if far > most:
            raise ConstraintError(
                f"the goal is {far:.0f} m from agent {self.agent!r}, which at {now:.1f} m/s comes at most {most:.0f} m in "
                f"{seconds:g} s; x and y are in the world frame, as in samples.parquet"
            )


@dataclass(frozen=True, kw_only=True)
class SpeedLimit(Wish):
    """One agent or all motor vehicles stay at or below `mps` m/s. Who is faster at t0 may brake at `braking` m/s^2."""

    kind: ClassVar[str] = "speed_limit"
    mps: float
    braking: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.mps >= 0 and self.braking > 0):
            raise ConstraintError("speed_limit needs mps of at least 0 and braking above 0")

    def bind(self, scene: SceneBatch) -> Term:
        who = _chosen(scene, self.agent)
        now = _speed_now(scene)
        allowed = we.allowed_speed(self.mps, now, self.braking, scene.fut.shape[2], scene.dt)

        def moving(x: Tensor) -> we.Motion:
            return we.motion(x, scene.hist[0], scene.hist_valid[0], scene.dt)

        def energy(x: Tensor) -> Tensor:
            return torch.where(who, we.speed_energy(moving(x), allowed), 0.0)

        def satisfied(x: Tensor) -> Tensor:
            m = moving(x)
            over = (m.speed > allowed + 0.02) & m.speed_ok & who[:, None]
            return ~over.flatten(1).any(-1)

        return Term(energy, satisfied)


@dataclass(frozen=True, kw_only=True)
class Comfort(Wish):
    """One agent or all motor vehicles stay within limits: acceleration along and across the motion, jerk."""

    kind: ClassVar[str] = "comfort"
    acceleration: float = 3.0  # m/s^2, along, either way
    lateral: float = 4.0  # m/s^2
    jerk: float = 8.0  # m/s^3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not min(self.acceleration, self.lateral, self.jerk) > 0:
            raise ConstraintError("comfort needs limits above 0")

    def bind(self, scene: SceneBatch) -> Term:
        who = _chosen(scene, self.agent)

        def moving(x: Tensor) -> we.Motion:
            return we.motion(x, scene.hist[0], scene.hist_valid[0], scene.dt)

        def energy(x: Tensor) -> Tensor:
            return torch.where(who, we.comfort_energy(moving(x), self.acceleration, self.lateral, self.jerk), 0.0)

        def satisfied(x: Tensor) -> Tensor:
            m = moving(x)
            over = ((m.along.abs() > self.acceleration) | (m.across.abs() > self.lateral)) & m.acceleration_ok
            over = over | ((m.jerk > self.jerk) & m.jerk_ok)
            return ~(over & who[:, None]).flatten(1).any(-1)

        return Term(energy, satisfied)


@dataclass(frozen=True, kw_only=True)
class RedLight(Wish):
    """Nobody (or one agent) crosses a stop line for `until_s` seconds; default: the whole future.

    Stop lines are where lanes begin that are red at t0, and only where all lanes that begin there are; or `line`: its left
    and right end as the driver sees them. Agents are bound that are before it at t0, face it, and can still stop at 6 m/s^2.
    """

    kind: ClassVar[str] = "red_light"
    until_s: float | None = None
    line: tuple[tuple[float, float], tuple[float, float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.line is not None and (self.scene_id is None or self.line[0] == self.line[1]):
            raise ConstraintError("line needs a scene_id and two different points")
        if self.until_s is not None and not self.until_s > 0:
            raise ConstraintError("red_light needs until_s above 0")

    def bind(self, scene: SceneBatch) -> Term | None:
        steps, a = scene.fut.shape[2], scene.mask.shape[1]
        until = steps if self.until_s is None else min(steps, max(1, round(self.until_s / scene.dt)))
        if self.line is not None:
            ends = torch.tensor(self.line, dtype=torch.float64) - scene.origin[0].cpu()
            lines = [ends.to(scene.hist)]
        else:
            lines = red_lines(scene)
        if not lines:
            why = "no map" if not bool(scene.map_known[0]) else "no lane that is red at t0"
            return self.unknown(f"scene {scene.scene_id[0]!r} has {why}; give line: [[x, y], [x, y]]")
        bound = [(j, line) for j in _chosen(scene, self.agent).nonzero()[:, 0].tolist() for line in lines
                 if self._binds(scene, j, line)]  # fmt: skip
        if not bound and self.agent is not None:
            raise ConstraintError(
                f"agent {self.agent!r} is not before a red stop line that it faces and can still stop at ({len(lines)} "
                "lines in the scene); give line: [[x, y], [x, y]], left end first"
            )
        length = scene.size[0, :, 0]

        def energy(x: Tensor) -> Tensor:
            total = x.new_zeros(x.shape[:2])
            for j, line in bound:
                total = total + _put(we.stop_energy(x[:, j], length[j], line.to(x), until), j, a)
            return total

        def satisfied(x: Tensor) -> Tensor:
            crossed = [we.past_line(x[:, j], length[j], line.to(x), until, 0.0)[1] for j, line in bound]
            return ~torch.stack(crossed).any(0) if crossed else torch.ones(len(x), dtype=torch.bool, device=x.device)

        return Term(energy, satisfied)

    def _binds(self, scene: SceneBatch, j: int, line: Tensor) -> bool:
        pose, length = scene.hist[0, j, -1], scene.size[0, j, 0]
        depth, _ = we.past_line(pose[None, None], length, line, 1, 0.0)
        along = (line[1] - line[0]) / (line[1] - line[0]).norm()
        facing = float(-along[1] * pose[2].cos() + along[0] * pose[2].sin())  # cosine to the way across
        gap = -float(depth[0, 0])
        side = float((pose[:2] - line[0]) @ along)
        in_lane = 0 < side < float((line[1] - line[0]).norm()) or gap > 30
        now = float(_speed_now(scene)[j])
        return 0 <= gap < LINE_FAR and facing > 0.5 and in_lane and now**2 / (2 * STOPPING) <= gap


@dataclass(frozen=True, kw_only=True)
class Yields(Wish):
    """`agent` lets `to` pass: it comes to no ground that `to` has still to cover. Met as well where their ways do not cross."""

    kind: ClassVar[str] = "yields"
    to: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.agent is None or self.agent == self.to:
            raise ConstraintError("yields needs two different agents: agent waits for to; and scene_id")

    def agents(self) -> list[str]:
        return [*super().agents(), self.to]

    def bind(self, scene: SceneBatch) -> Term:
        assert self.agent is not None
        i, j, a = _index(scene, self.agent), _index(scene, self.to), scene.mask.shape[1]
        size, disc = scene.size[0, [i, j]], of_types(scene, DISC)[0, [i, j]]
        now = scene.hist[0, i, -1]

        def energy(x: Tensor) -> Tensor:
            return _put(we.yield_energy(x[:, i], now.to(x), x[:, j].detach(), size, disc), i, a)

        def satisfied(x: Tensor) -> Tensor:
            k, t = x.shape[0], x.shape[2]
            p, q = x[:, i, :, None].expand(k, t, t, 3), x[:, j, None].expand(k, t, t, 3)
            box = [s.expand(k, t, t, 2) for s in size]
            hit = overlap(p, box[0], disc[0].expand(k, t, t), q, box[1], disc[1].expand(k, t, t))
            return ~hit.triu().flatten(1).any(-1)

        return Term(energy, satisfied)


def _none(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[:2])


@dataclass(frozen=True, kw_only=True)
class DrivableArea(Wish):
    """One agent or all motor vehicles stay on the drivable area. Its energy is always there beside wishes; naming it counts it."""

    kind: ClassVar[str] = "drivable_area"

    def bind(self, scene: SceneBatch) -> Term | None:
        who = _chosen(scene, self.agent)
        if scene.drivable[0] is None:
            return self.unknown(f"scene {scene.scene_id[0]!r} has no drivable area")

        def satisfied(x: Tensor) -> Tensor:
            share = off_road(x[None].float(), scene)
            return ~((share.bad[0] > 0) & who[:, None]).flatten(1).any(-1)

        return Term(_none, satisfied)


@dataclass(frozen=True, kw_only=True)
class KeepClear(Wish):
    """One agent or all touch nobody. Its energy is always there beside wishes; naming it counts it."""

    kind: ClassVar[str] = "keep_clear"

    def bind(self, scene: SceneBatch) -> Term:
        who = scene.mask[0] if self.agent is None else _chosen(scene, self.agent)

        def satisfied(x: Tensor) -> Tensor:
            return ~(collisions(x[None], scene).hit[0].any(-1) & who).any(-1)

        return Term(_none, satisfied)


KINDS: dict[str, type[Wish]] = {
    w.kind: w for w in (Goal, SpeedLimit, Comfort, RedLight, Yields, DrivableArea, KeepClear)
}
