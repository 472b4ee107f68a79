"""Metrics against cases worked by hand, the av2 package and scoringrules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from seqdiff.domains.trajectory import metrics as m

NAN = math.nan


def case(b: int = 3, k: int = 6, a: int = 4, t: int = 8, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(b, a, t, 2, generator=g, dtype=torch.float64).cumsum(2)
    pred = truth[:, None] + torch.randn(b, k, a, t, 2, generator=g, dtype=torch.float64).cumsum(3)
    p = torch.softmax(torch.randn(b, k, generator=g, dtype=torch.float64), -1)
    return pred, truth, torch.ones(b, a, t, dtype=torch.bool), torch.ones(b, a, dtype=torch.bool), p


def by_hand():
    """Two agents, two samples, two steps; errors: sample 0: (1, 1), (3, 5); sample 1: (2, 4), (0, 1)."""
    error = torch.tensor([[[[1.0, 1.0], [3.0, 5.0]], [[2.0, 4.0], [0.0, 1.0]]]], dtype=torch.float64)
    pred = torch.stack([error, torch.zeros_like(error)], -1)
    truth = torch.zeros(1, 2, 2, 2, dtype=torch.float64)
    return pred, truth, torch.ones(1, 2, 2, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool)


def test_by_hand():
    f = m.forecast(*by_hand(), torch.tensor([[0.75, 0.25]]))
    assert f.min_ade.tolist() == [[1.0, 0.5]] and f.min_fde.tolist() == [[1.0, 1.0]]
    assert f.missed.tolist() == [[0, 0]]
    # worlds: ADE (1 + 4) / 2 = 2.5 and (3 + .5) / 2 = 1.75; FDE 3 and 2.5
    assert (f.min_jade.item(), f.min_jfde.item(), f.best_world.item()) == (1.75, 2.5, 1)
    assert f.joint_miss.item() == 0.5  # world 1: end points 4 m and 1 m away
    assert f.brier_min_jfde.item() == 2.5 + 0.75**2
    assert f.brier_min_fde.tolist() == [[1 + 0.25**2, 1 + 0.75**2]]


def test_best_of_each_agent_is_not_a_world():
    f = m.forecast(*by_hand())
    assert f.min_jade.item() > f.min_ade.mean().item()


def test_one_agent_joint_is_marginal():
    pred, truth, valid, scored, p = case(a=1)
    f = m.forecast(pred, truth, valid, scored, p)
    assert torch.equal(f.min_jade, f.min_ade[:, 0]) and torch.equal(f.min_jfde, f.min_fde[:, 0])
    assert torch.equal(f.joint_miss, f.missed[:, 0]) and torch.equal(f.brier_min_jfde, f.brier_min_fde[:, 0])


def test_joint_does_not_depend_on_the_batch():
    pred, truth, valid, scored, p = case(b=5)
    whole = m.forecast(pred, truth, valid, scored, p)
    order = torch.tensor([3, 1, 4, 0, 2])
    turned = m.forecast(*(x[order] for x in (pred, truth, valid, scored, p)))
    assert whole.best_world.unique().numel() > 1  # one k for the batch would be wrong
    for name, x in vars(whole).items():
        assert torch.equal(x[order], getattr(turned, name)), name
        alone = [m.forecast(*(v[i : i + 1] for v in (pred, truth, valid, scored, p))) for i in range(5)]
        assert torch.equal(torch.cat([getattr(a, name) for a in alone]), x), name


def test_order_of_samples_and_agents_does_not_matter():
    pred, truth, valid, scored, p = case()
    f = m.forecast(pred, truth, valid, scored, p)
    g = m.forecast(pred.flip(1, 2), truth.flip(1), valid, scored, p.flip(1))
    torch.testing.assert_close(f.min_jade, g.min_jade)
    torch.testing.assert_close(f.min_ade, g.min_ade.flip(1))
    torch.testing.assert_close(f.brier_min_jfde, g.brier_min_jfde)


def test_padding_never_enters():
    pred, truth, valid, scored, p = case(a=4)
    valid[:, 2:] = False
    scored[:, 3] = False
    f = m.forecast(pred, truth, valid, scored, p)
    pred[:, :, 2:], truth[:, 2:] = NAN, 1e9
    g = m.forecast(pred, truth, valid, scored, p)
    h = m.forecast(pred[:, :, :2], truth[:, :2], valid[:, :2], scored[:, :2], p)
    assert f.count.tolist() == [[True, True, False, False]] * 3
    for name in ("min_jade", "min_jfde", "joint_miss", "brier_min_jfde"):
        assert torch.equal(getattr(f, name), getattr(g, name)) and torch.equal(getattr(f, name), getattr(h, name))


def test_missing_steps_and_missing_end():
    pred, truth, valid, scored = by_hand()
    valid[0, 0, 0] = False  # a hole: ADE over the other step
    assert m.forecast(pred, truth, valid, scored).min_ade.tolist() == [[1.0, 0.5]]
    valid[0, 0, 1] = False  # no end point: not counted
    f = m.forecast(pred, truth, valid, scored)
    assert f.count.tolist() == [[False, True]] and f.min_jfde.item() == 1.0


def test_nan_in_a_counted_agent_stays_nan():
    pred, truth, valid, scored, p = case()
    pred[1, 2, 0, 3] = NAN
    f = m.forecast(pred, truth, valid, scored, p)
    assert f.min_ade.isnan().tolist() == [[False] * 4, [True, False, False, False], [False] * 4]
    assert f.min_jade.isnan().tolist() == [False, True, False]
    pred[1, 2, 0, -1] = NAN
    f = m.forecast(pred, truth, valid, scored, p)
    assert f.missed[1, 0].isnan() and f.joint_miss[1].isnan() and f.brier_min_jfde[1].isnan()
    assert m.pedestrian_collisions(pred, scored)[1].isnan().tolist() == [False, False, True, False, False, False]
    assert m.energy_score(pred, truth, valid, scored).isnan().tolist() == [False, True, False]


def test_nobody_counts():
    pred, truth, valid, scored, p = case()
    f = m.forecast(pred, truth, valid, torch.zeros_like(scored), p)
    assert f.min_jade.isnan().all() and f.joint_miss.isnan().all() and not f.count.any()
    assert m.energy_score(pred, truth, valid, torch.zeros_like(scored)).isnan().all()


@pytest.mark.parametrize("p", [[0.5, 0.6], [NAN, 1.0], [-0.5, 1.5], [1.0, 1.0]])
def test_brier_refuses_what_is_not_a_probability(p):
    with pytest.raises(ValueError, match="probabilities"):
        m.forecast(*by_hand(), torch.tensor([p]))


def test_shapes_are_checked():
    pred, truth, valid, scored = by_hand()
    with pytest.raises(ValueError, match="expected bkat2"):
        m.forecast(pred[:, :, :1], truth, valid, scored)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_equal_to_the_av2_package():
    av2 = pytest.importorskip("av2.datasets.motion_forecasting.eval.metrics", reason="needs the av2 package")
    pred, truth, valid, scored, p = case(b=4, k=6, a=5, t=60)
    f = m.forecast(pred, truth, valid, scored, p)
    error = m.displacement(pred, truth)
    a, e = m.ade(error, valid), m.fde(error, valid)
    close = dict(rtol=0, atol=1e-12)
    for i in range(4):
        q = p[i].numpy()
        for j in range(5):
            x, y = pred[i, :, j].numpy(), truth[i, j].numpy()
            np.testing.assert_allclose(a[i, :, j], av2.compute_ade(x, y), **close)
            np.testing.assert_allclose(e[i, :, j], av2.compute_fde(x, y), **close)
            np.testing.assert_array_equal(m.misses(e)[i, :, j], av2.compute_is_missed_prediction(x, y))
            brier = (1 - p[i]) ** 2
            np.testing.assert_allclose(a[i, :, j] + brier, av2.compute_brier_ade(x, y, q), **close)
            best = av2.compute_fde(x, y).argmin()
            np.testing.assert_allclose(f.brier_min_fde[i, j], av2.compute_brier_fde(x, y, q)[best], **close)
            ade_best = m.brier_at_best(a, p)[i, j]
            np.testing.assert_allclose(
                ade_best, av2.compute_brier_ade(x, y, q)[av2.compute_ade(x, y).argmin()], **close
            )
        x, y = pred[i].transpose(0, 1).numpy(), truth[i].numpy()  # (M, K, N, 2)
        wa, wf = av2.compute_world_ade(x, y), av2.compute_world_fde(x, y)
        np.testing.assert_allclose(m.world_mean(a, scored)[i], wa, **close)
        np.testing.assert_allclose(f.min_jade[i], wa.min(), **close)
        np.testing.assert_allclose(f.min_jfde[i], wf.min(), **close)
        np.testing.assert_allclose(f.brier_min_jfde[i], av2.compute_world_brier_fde(x, y, q)[wf.argmin()], **close)
        missed = av2.compute_world_misses(x, y)
        np.testing.assert_allclose(f.joint_miss[i], missed[:, wf.argmin()].mean(), **close)


@pytest.mark.filterwarnings("ignore")
def test_energy_score_equals_scoringrules():
    scoringrules = pytest.importorskip("scoringrules")
    pred, truth, valid, scored, _ = case(k=7)
    valid[1, 2, 3:] = False
    scored[2, 0] = False
    got = m.energy_score(pred, truth, valid, scored)
    for i in range(3):
        v = valid[i] & scored[i][:, None]
        x, y = pred[i][:, v].reshape(7, -1).numpy(), truth[i][v].reshape(-1).numpy()
        want = scoringrules.es_ensemble(y, x, backend="numpy")
        assert got[i].item() == pytest.approx(want / math.sqrt(int(v.sum())), rel=1e-12)


def test_energy_score_of_one_sample_is_its_distance():
    pred, truth, valid, scored, _ = case(k=1)
    want = (pred[:, 0] - truth).square().sum(-1).mean((1, 2)).sqrt()
    torch.testing.assert_close(m.energy_score(pred, truth, valid, scored), want)


def test_spread_modes_and_collapse():
    x = torch.zeros(2, 4, 3, 5, 2)
    x[0, 1, 2, :, 0], x[0, 2, 2, :, 0], x[0, 3, 2, :, 0] = 1.0, 30.0, 31.0  # only the third agent differs
    valid = torch.ones(2, 3, 5, dtype=torch.bool)
    assert m.modes(x, valid).tolist() == [2, 1]
    apart = [1, 30, 31, 29, 30, 1]
    torch.testing.assert_close(m.spread(x, valid), torch.tensor([sum(apart) / 6 / 3, 0.0], dtype=torch.float64))
    assert m.spread(x[:, :1], valid).isnan().all() and m.modes(x[:, :1], valid).tolist() == [1, 1]


def test_diversity_looks_at_valid_steps_of_a_long_horizon():
    x = torch.zeros(1, 2, 1, 60, 2)
    x[0, 1, 0, :, 0] = torch.arange(1, 61)
    valid = torch.ones(1, 1, 60, dtype=torch.bool)
    steps = [60, 55, 49, 44, 39, 33, 28, 22, 17, 12, 6, 1]  # 12 evenly spaced ones, the last among them
    assert m.spread(x, valid).item() == pytest.approx(sum(steps) / 12, abs=0.3)
    valid[..., :59] = False
    assert m.spread(x, valid).item() == 60


def walk(points: list[list[float]]) -> torch.Tensor:
    return torch.tensor(points, dtype=torch.float64)


def test_pedestrians_meet_between_frames():
    still = walk([[0, 0], [0, 0], [0, 0]])
    through = walk([[-1, 0.19], [1, 0.19], [3, 0.19]])  # passes at 0.19 m between two frames
    beside = walk([[-1, -0.2], [1, -0.2], [3, -0.2]])  # at exactly 0.2 m of the first: strictly closer only
    away = walk([[9, 9], [9, 9], [9, 9]])
    pred = torch.stack([still, through, beside, away])[None, None]
    count = torch.ones(1, 4, dtype=torch.bool)
    assert m.pedestrian_collisions(pred, count).item() == 0.5
    count[0, 1] = False
    assert m.pedestrian_collisions(pred, count).item() == 0.0
    assert m.pedestrian_collisions(pred[:, :, :1], count[:, :1]).item() == 0.0
    together = torch.stack([through, through + 0.1])[None, None]  # same velocity: no relative motion
    assert m.pedestrian_collisions(together, torch.ones(1, 2, dtype=torch.bool)).item() == 1.0


def test_energy_score_sees_which_agent_goes_with_which():
    look = torch.ones(1, 1, 1, dtype=torch.bool)
    one = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1, 1) * torch.tensor([1.0, 0.0, 0.0])
    # errors 1 and 3, 2 apart: 2 - 1/2 x 2
    assert float(m.sample_energy_score(one, torch.zeros(1, 1, 1, 3), look)) == pytest.approx(1.0)
    # truth (1, 1); worlds (1, 1), (-1, -1) against (1, -1), (-1, 1): the same futures of each agent, sqrt(8) apart.
    # errors 0, sqrt(8) against 2, 2; divided by sqrt(2 agents)
    truth = torch.tensor([1.0, 1.0]).view(1, 2, 1, 1) * torch.tensor([1.0, 0.0, 0.0])
    look = torch.ones(1, 2, 1, dtype=torch.bool)
    for worlds, expected in (([[1, 1], [-1, -1]], 0.0), ([[1, -1], [-1, 1]], (2 - 8**0.5 / 2) / 2**0.5)):
        x = torch.tensor(worlds, dtype=torch.float32).view(1, 2, 2, 1, 1) * torch.tensor([1.0, 0.0, 0.0])
        assert float(m.sample_energy_score(x, truth, look)) == pytest.approx(expected, abs=1e-6)
