from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from seqdiff.motion import Curvature, Motion


def test_motion_is_near_the_nearest_and_exact():
    """Against a general solver (SLSQP) on a sequence in the plane with given points before."""
    rng = np.random.default_rng(0)
    dt, speed, acceleration, t = 0.5, 2.0, 1.0, 8
    before = np.array([[-0.8, 0.0], [0.0, 0.0]])
    x = np.cumsum(rng.normal([0.7, 0.0], 0.5, (t, 2)), 0)

    def differences(y):
        whole = np.concatenate([before, y.reshape(t, 2)])
        d = np.diff(whole, axis=0)
        return d[1:], np.diff(d, axis=0)

    def slack(y):
        v, a = differences(y)
        return np.concatenate([(speed * dt) ** 2 - (v**2).sum(-1), (acceleration * dt**2) ** 2 - (a**2).sum(-1)])

    best = minimize(
        lambda y: ((y - x.ravel()) ** 2).sum(), np.repeat([[0.1, 0.0]], t, 0).cumsum(0).ravel(),
        jac=lambda y: 2 * (y - x.ravel()), constraints={"type": "ineq", "fun": slack}, options={"maxiter": 300},
    )  # fmt: skip
    assert best.success
    motion = Motion(dt, speed, acceleration, before=torch.from_numpy(before))
    got = motion.project(torch.from_numpy(x)[None, None])
    v, a = differences(got[0, 0].numpy())
    assert np.linalg.norm(v, axis=-1).max() <= speed * dt * (1 + 1e-12)
    assert np.linalg.norm(a, axis=-1).max() <= acceleration * dt**2 * (1 + 1e-12)
    assert motion.violation(got).item() < 1e-12
    distance = ((got[0, 0].numpy() - x) ** 2).sum()
    assert best.fun * (1 - 1e-6) <= distance <= best.fun * 1.01
    v, a = differences(x)
    want = (
        max(np.linalg.norm(v, axis=-1).max() / (speed * dt), np.linalg.norm(a, axis=-1).max() / (acceleration * dt**2))
        - 1
    )
    assert motion.violation(torch.from_numpy(x)[None, None]).item() == pytest.approx(want)


def test_motion_leaves_what_holds_alone_and_padding_out():
    line = torch.arange(6.0)[:, None].expand(6, 2)[None, None].clone()  # 1.41 a step
    torch.testing.assert_close(Motion(1.0, 1.5, 0.1).project(line), line, rtol=0, atol=1e-6)
    valid = torch.ones(1, 1, 6, dtype=torch.bool)
    valid[..., 4:] = False
    line[..., 4:, :] = 100.0
    motion = Motion(1.0, 1.5, 0.1, valid=valid)
    torch.testing.assert_close(motion.project(line), line, rtol=0, atol=1e-6)
    assert motion.violation(line).item() == 0.0 < Motion(1.0, 1.5, 0.1).violation(line).item()
    with pytest.raises(ValueError, match="speed is -1"):
        Motion(1.0, speed=-1.0)
    with pytest.raises(ValueError, match="before has 3 points"):
        Motion(1.0, before=torch.zeros(3, 2))


def test_motion_alone_on_speed_is_by_hand():
    """Two free points 3 apart, at most 1: each gives way by 1; with the first given, the second comes to it."""
    x = torch.tensor([0.0, 3.0], dtype=torch.float64).view(1, 1, 2, 1)
    torch.testing.assert_close(
        Motion(1.0, 1.0).project(x).flatten(), torch.tensor([1.0, 2.0]).double(), rtol=0, atol=1e-5
    )
    given = Motion(1.0, 1.0, before=torch.zeros(1, 1)).project(x[:, :, 1:])
    torch.testing.assert_close(given.flatten(), torch.ones(1).double())


def test_curvature_of_a_corner_and_of_a_stop():
    corner = torch.tensor([[0.0, 0], [1, 0], [2, 0], [2, 1], [2, 2]], dtype=torch.float64)[None, None]
    bend = Curvature(0.5)
    assert bend.violation(corner).item() == pytest.approx(math.pi / 2 - 0.5)
    out = bend.project(corner)
    assert bend.violation(out).item() < 1e-12
    torch.testing.assert_close(out.diff(dim=-2).norm(dim=-1), torch.ones(1, 1, 4).double())  # lengths are kept
    ways = torch.atan2(*out.diff(dim=-2).flip(-1).unbind(-1))[0, 0]
    torch.testing.assert_close(ways, torch.tensor([0.0, 0.0, 0.5, 1.0]).double())
    back = torch.tensor([[0.0, 0], [1, 0], [0, 0], [0, 0], [-1, 0]], dtype=torch.float64)[None, None]
    assert bend.violation(back).item() == 0.0  # reversing and standing turn nothing
    torch.testing.assert_close(bend.project(back), back)
    started = Curvature(0.5, start=torch.zeros(2), heading=torch.tensor(0.0))
    first = started.project(torch.tensor([[0.0, 1.0]]).double()[None, None])  # wants to jump sideways: turns by .25
    torch.testing.assert_close(first.flatten(), torch.tensor([math.cos(0.25), math.sin(0.25)]).double())
    with pytest.raises(ValueError, match="both, or neither"):
        Curvature(0.5, start=torch.zeros(2))
