"""Wishes on scenes made by hand: zero where met, positive where not, the gradient's way, descent; the reader's refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import shapely
import torch

from seqdiff.domains.trajectory.constraints import ConstraintError, parse_constraints, read_constraints
from seqdiff.domains.trajectory.scene import MAP_KINDS, SIGNAL_STATES

DT, STEPS = 0.1, 30


def straight(x: float, y: float, heading: float, speed: float, steps: torch.Tensor) -> torch.Tensor:
    """Poses [n, 3] at times steps * DT from t0."""
    s = speed * steps * DT
    return torch.stack([x + s * math.cos(heading), y + s * math.sin(heading), torch.full_like(s, heading)], -1)


@pytest.fixture
def scene(make_batch):
    """Car a0 from (-20, 0) east and car a1 from (0, -30) north, 10 m/s: a0 is in the middle after 2 s, a1 after 3."""
    past, future = torch.arange(-10.0, 1.0), torch.arange(1.0, STEPS + 1.0)
    cars = ((-20.0, 0.0, 0.0, 10.0), (0.0, -30.0, math.pi / 2, 10.0))
    hist = torch.stack([straight(*car, past) for car in cars])[None]
    fut = torch.stack([straight(*car, future) for car in cars])[None]
    return make_batch(hist, fut, origin=torch.tensor([[1000.0, 2000.0]], dtype=torch.float64))


def wish(kind: str, **more):
    return parse_constraints([{"kind": kind, "scene_id": "s0", **more}])


def measured(c, x, batch) -> tuple[torch.Tensor, bool]:
    """Energies [a] of one sample, and whether it meets the wishes by the hard check."""
    met = c.satisfied(x, batch)
    assert len(met) == 1
    return c.energy(batch)(x)[0, 0], bool(next(iter(met.values()))[0, 0])


def descend(c, x, batch, agent: int, iterations: int = 200) -> torch.Tensor:
    """Polyak's steps in a space of smooth paths (straight and curved speed and offset), as a codec would give."""
    t = torch.linspace(0, 1, x.shape[3] + 1)[1:]
    basis = torch.stack([t, t**2, t**3], -1)  # t 3
    w = torch.zeros(3, 2, requires_grad=True)
    energy = c.energy(batch)

    def moved(w: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0, 0, agent, :, :2] = x[0, 0, agent, :, :2] + basis @ w
        way = torch.diff(y[0, 0, agent, :, :2], dim=0, prepend=batch.hist[0, agent, -1:, :2])
        y[0, 0, agent, :, 2] = torch.atan2(way[:, 1], way[:, 0])
        return y

    for _ in range(iterations):
        e = energy(moved(w)).sum()
        if e == 0:
            break
        (g,) = torch.autograd.grad(e, w)
        w = (w - 1.5 * e.detach() * g / g.square().sum().clamp_min(1e-12)).detach().requires_grad_()
    return moved(w).detach()


WISHES = {
    "goal": (wish("goal", agent="a0", x=1010.0, y=2003.0, at_s=3.0, radius=1.0), 0),
    "goal by the end": (wish("goal", agent="a0", x=1000.0, y=2006.0), 0),
    "speed_limit": (wish("speed_limit", agent="a0", mps=6.0, braking=4.0), 0),
    "yields": (wish("yields", agent="a0", to="a1"), 0),
    "red_light": (wish("red_light", agent="a0", line=[[995.0, 2002.0], [995.0, 1998.0]]), 0),
}


@pytest.mark.parametrize("name", WISHES)
def test_broken_wishes_cost_their_agent_and_descent_mends_them(scene, name):
    c, agent = WISHES[name]
    x = scene.fut[:, None].clone()
    energy, met = measured(c, x, scene)
    assert not met and energy[agent] > 0 and energy[1 - agent] == 0
    better = descend(c, x, scene, agent)
    energy, met = measured(c, better, scene)
    assert met, energy
    assert torch.isfinite(better).all()


@pytest.mark.parametrize("name", WISHES)
def test_gradients_agree_with_finite_differences(scene, name):
    """In double precision, along a smooth push; places that a wish takes from the sample do not move with this small one."""
    c, agent = WISHES[name]
    double = replace(scene, **{f: getattr(scene, f).double() for f in ("hist", "fut", "size")})
    x = double.fut[:, None].clone()
    push = torch.zeros_like(x)
    ramp = torch.linspace(0, 1, STEPS, dtype=torch.float64)
    push[0, 0, agent, :, 0], push[0, 0, agent, :, 1] = 0.7 * ramp, 0.2 * ramp**2
    energy = c.energy(double)
    at = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(energy(at).sum(), at)
    assert torch.isfinite(grad).all() and (grad[0, 0, 1 - agent] == 0).all()
    slope = float((grad * push).sum())
    if name == "yields":  # its place moves with the sample: only the way is compared
        assert energy(x - 0.2 * slope / abs(slope) * push).sum() < energy(x).sum()
        return
    h = 1e-5
    measured_slope = float((energy(x + h * push) - energy(x - h * push)).sum()) / (2 * h)
    assert slope == pytest.approx(measured_slope, rel=1e-3, abs=1e-6)


def test_goal_by_hand(scene):
    x = scene.fut[:, None]
    c = wish("goal", agent="a0", x=1010.0, y=2004.0, at_s=3.0, radius=1.0)  # a0 is at (10, 0) then: 4 m away
    assert measured(c, x, scene)[0][0].item() == pytest.approx((4.0 - 0.8) ** 2, rel=1e-5)
    assert measured(wish("goal", agent="a0", x=1010.0, y=2000.5, at_s=3.0, radius=1.0), x, scene)[1]
    early = wish("goal", agent="a0", x=1000.0, y=2000.0, at_s=3.0)  # passed after 2 s, gone at 3
    by_the_end = wish("goal", agent="a0", x=1000.0, y=2000.0)
    assert not measured(early, x, scene)[1] and measured(by_the_end, x, scene)[1]
    faces = wish("goal", agent="a0", x=1000.0, y=2000.0, heading=math.pi / 2)
    energy, met = measured(faces, x, scene)
    assert not met and energy[0] == pytest.approx((2 * (math.pi / 2 - 0.8 * 0.35)) ** 2, rel=1e-3)


def test_who_yields_to_whom(scene):
    x = scene.fut[:, None]
    second_waits = wish("yields", agent="a1", to="a0")  # a0 comes first and a1 a second later: already so
    energy, met = measured(second_waits, x, scene)
    assert met and (energy == 0).all()
    apart = x.clone()
    apart[0, 0, 1, :, 0] += 300.0  # ways that never cross
    energy, met = measured(WISHES["yields"][0], apart, scene)
    assert met and (energy == 0).all()


def test_following_is_yielding_to_the_one_ahead(make_batch):
    past, future = torch.arange(-10.0, 1.0), torch.arange(1.0, STEPS + 1.0)
    cars = ((-10.0, 0.0, 0.0, 8.0), (0.0, 0.0, 0.0, 8.0))
    hist, fut = (torch.stack([straight(*car, s) for car in cars])[None] for s in (past, future))
    batch = make_batch(hist, fut)
    assert measured(wish("yields", agent="a0", to="a1"), fut[:, None], batch)[1]
    assert not measured(wish("yields", agent="a1", to="a0"), fut[:, None], batch)[1]


def test_speed_may_fall_by_braking(scene):
    x = scene.fut[:, None].clone()
    t = torch.arange(1, STEPS + 1) * DT
    x[0, 0, 0, :, 0] = -20.0 + torch.where(
        t < 1.0, 10 * t - 2 * t**2, 8 + 6 * (t - 1)
    )  # 10 to 6 m/s in a second, then 6
    c = wish("speed_limit", agent="a0", mps=6.0, braking=4.0)
    assert measured(c, x, scene)[1]
    assert not measured(wish("speed_limit", agent="a0", mps=6.0, braking=3.0 / 2), scene.fut[:, None], scene)[1]
    everybody = parse_constraints([{"kind": "speed_limit", "mps": 9.0}])
    energy = everybody.energy(scene)(scene.fut[:, None])
    assert (energy > 0).all()


def test_comfort_by_hand(scene):
    c = parse_constraints([{"kind": "comfort", "acceleration": 3.0}])
    assert measured(c, scene.fut[:, None], scene)[1]
    t = torch.arange(1, STEPS + 1) * DT
    for braking, fine in ((2.0, True), (4.0, False)):
        x = scene.fut[:, None].clone()
        ramp = torch.clamp(t / 0.5, max=1.0)  # half a second to build up
        speed = 10 - torch.cumsum(braking * ramp * DT, 0)
        x[0, 0, 0, :, 0] = -20 + torch.cumsum(speed * DT, 0)
        energy, met = measured(c, x, scene)
        assert met == fine and (energy[0] > 0) == (not fine) and energy[1] == 0


def with_lane(scene, state: str):
    """A lane that begins at (-5, 0) and leads east, its light in `state`."""
    points = torch.stack([torch.linspace(-5, 10, 4), torch.zeros(4)], -1)[None, None]
    kind = torch.tensor([[MAP_KINDS.index("lane_center")]])
    light = torch.tensor([[SIGNAL_STATES.index(state)]])
    known = torch.tensor([True])
    return replace(scene, seg=points, seg_mask=known[None], seg_kind=kind, seg_signal=light, map_known=known)


def test_red_lights_of_the_map(scene):
    x = scene.fut[:, None].clone()
    red = with_lane(scene, "red")
    c = wish("red_light")
    energy, met = measured(c, x, red)
    assert not met and energy[0] > 0 and energy[1] == 0  # a1 does not face that line
    until = wish("red_light", until_s=1.2)  # the front, 2 m ahead, comes to the line after 1.3 s
    assert measured(until, x, red)[1]
    x[0, 0, 0, :, 0] = -20 + torch.linspace(0.5, 12.9, STEPS)  # stops with its front 0.1 m before
    assert measured(c, x, red)[1]
    with pytest.raises(ConstraintError, match="no lane that is red"):
        c.energy(with_lane(scene, "green"))
    with pytest.raises(ConstraintError, match="no map"):
        c.energy(scene)
    anywhere = parse_constraints([{"kind": "red_light"}])  # names no scene: unknown there, not met and not broken
    assert anywhere.satisfied(x, scene)["satisfied_red_light"].isnan().all()
    with pytest.raises(ConstraintError, match="can still stop"):
        wish("red_light", agent="a1").energy(red)


def test_counted_kinds(scene):
    x = scene.fut[:, None].clone()
    assert measured(wish("keep_clear"), x, scene)[1]
    x[0, 0, 1] = x[0, 0, 0]
    assert not measured(wish("keep_clear", agent="a0"), x, scene)[1]
    road = replace(scene, drivable=[shapely.box(-100, -3, 100, 3).union(shapely.box(-3, -100, 3, 100))])
    assert measured(wish("drivable_area"), scene.fut[:, None], road)[1]
    x[0, 0, 0, :, 1] += 2.5
    assert not measured(wish("drivable_area"), x, road)[1]
    with pytest.raises(ConstraintError, match="no drivable area"):
        wish("drivable_area").satisfied(x, scene)


def test_other_scenes_and_agents_are_left_alone(make_batch, scene):
    c = WISHES["goal"][0]
    assert c.agents(scene).tolist() == [[True, False]]
    other = replace(scene, scene_id=["elsewhere"])
    assert not c.agents(other).any() and (c.energy(other)(other.fut[:, None]) == 0).all()
    assert c.satisfied(other.fut[:, None], other)["satisfied_goal"].isnan().all()
    count = c.measure()
    count.add(other.fut[:, None], other)
    with pytest.raises(ConstraintError, match="no wish was asked"):
        count.report()
    count.add(scene.fut[:, None].repeat(1, 4, 1, 1, 1), scene)
    (row,) = count.report()["wishes"]
    assert (row["n_windows"], row["satisfied"], row["kind"], row["agent"]) == (1, 0.0, "goal", "a0")


def test_agents_and_goals_that_cannot_be(scene):
    with pytest.raises(ConstraintError, match=r"no agent 'a9'.*nearest ids: a"):
        wish("goal", t0=0, agent="a9", x=0, y=0).energy(scene)
    with pytest.raises(ConstraintError, match="world frame"):
        wish("goal", agent="a0", x=0.0, y=0.0).energy(scene)
    with pytest.raises(ConstraintError, match="end at 3 s"):
        wish("goal", agent="a0", x=1010.0, y=2000.0, at_s=9).energy(scene)


@pytest.mark.parametrize(
    "item, told",
    [
        ({"kind": "gaol"}, "did you mean goal"),
        ({"kind": "speed_limit", "kmh": 30}, "takes no 'kmh'"),
        ({"kind": "speed_limit"}, "needs mps"),
        ({"kind": "speed_limit", "mps": "fast"}, "a finite number"),
        ({"kind": "speed_limit", "mps": float("nan")}, "a finite number"),
        ({"kind": "speed_limit", "mps": 3, "agent": "a"}, "add scene_id"),
        ({"kind": "goal", "scene_id": "s", "x": 0, "y": 0}, "needs agent"),
        ({"kind": "yields", "scene_id": "s", "agent": "a", "to": "a"}, "two different agents"),
        ({"kind": "red_light", "scene_id": "s", "line": [[0, 0], [0]]}, "two points"),
        ({"kind": "comfort", "weight": 0}, "more than 0"),
        ("goal", "a mapping with a kind"),
    ],
)
def test_what_is_wrong_is_said(item, told):
    with pytest.raises(ConstraintError, match=f"wish 2.*{told}"):
        parse_constraints([{"kind": "comfort"}, item])


def test_reads_yaml(tmp_path):
    file = tmp_path / "wishes.yaml"
    file.write_text(
        "- {kind: goal, scene_id: s0, t0: 20, agent: 17, x: 12.0, y: 40, at_s: 6.0}\n- {kind: speed_limit, mps: 8.3}\n"
        "- {kind: yields, scene_id: s0, agent: a, to: b}\n"
    )
    c = read_constraints(file)
    assert c.kinds == ["goal", "speed_limit", "yields"] and c.wishes[0].agent == "17" and c.wishes[1].mps == 8.3
    for text, told in (("kind: goal", "a list of wishes"), ("[]", "no wish"), ("- {", "not yaml")):
        file.write_text(text)
        with pytest.raises(ConstraintError, match=told):
            read_constraints(file)
