"""Joint scores: distances between scenes, worlds, mass."""

from __future__ import annotations

import pytest
import torch

from seqdiff.score import choose_worlds, sample_probability, scene_distance, score_samples


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def scenes(b: int = 2, k: int = 16, n: int = 5, t: int = 7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(b, k, n, t, 2, generator=g).cumsum(3)
    return x, torch.rand(b, n, t, generator=g) > 0.3


def test_distance_by_hand():
    x = torch.zeros(1, 2, 2, 3, 2)
    x[0, 1, 0, :, 0] = torch.tensor([3.0, 6.0, 9.0])  # agent 0: 3, 6, 9 m apart
    x[0, 1, 1, :, 1] = torch.tensor([4.0, 4.0, torch.nan])  # agent 1: 4, 4 and a step that is not valid
    valid = torch.tensor([[[True, True, True], [True, True, False]]])
    assert scene_distance(x, valid)[0].tolist() == [[0, 5], [5, 0]]
    assert scene_distance(x, valid, agents="max")[0, 0, 1] == 6
    assert scene_distance(x, valid, weight=torch.tensor([0.0, 1.0, 0.0]))[0, 0, 1] == 5
    assert scene_distance(x, torch.tensor([[True, False]]))[0, 0, 1] == 6


def test_distance_equals_the_plain_formula():
    x, valid = scenes()
    d = (x[:, :, None] - x[:, None]).double().norm(dim=-1)  # b k k n t
    w = valid[:, None, None].double()
    has = valid.any(-1)
    agent = (d * w).sum(-1) / w.sum(-1).clamp_min(1)
    want = (agent * has[:, None, None]).sum(-1) / has.sum(-1)[:, None, None]
    torch.testing.assert_close(scene_distance(x, valid), want, rtol=1e-6, atol=1e-6)


def test_order_of_samples_and_agents_does_not_matter():
    x, valid = scenes(b=3, k=24)
    ps, pa = torch.randperm(24, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 0, 4, 1, 2])
    y, vy = x[:, ps][:, :, pa], valid[:, pa]
    dx, dy = scene_distance(x, valid), scene_distance(y, vy)
    torch.testing.assert_close(dx[:, ps][:, :, ps], dy)
    for k in (1, 6, 24):
        wx, wy = choose_worlds(dx, k), choose_worlds(dy, k)
        assert [set(r) for r in wx.medoid.tolist()] == [set(r) for r in ps[wy.medoid].tolist()]
        torch.testing.assert_close(wx.probability, wy.probability)
        px, py = sample_probability(dx, wx.cluster), sample_probability(dy, wy.cluster)
        torch.testing.assert_close(px[:, ps], py)


def test_one_scene_alone_and_in_a_batch():
    x, valid = scenes(b=4)
    whole = choose_worlds(scene_distance(x, valid), 5)
    for i in range(4):
        alone = choose_worlds(scene_distance(x[i : i + 1], valid[i : i + 1]), 5)
        assert torch.equal(alone.medoid[0], whole.medoid[i]) and torch.equal(alone.cluster[0], whole.cluster[i])


def test_separated_groups_are_found_with_their_mass():
    g = torch.Generator().manual_seed(3)
    group = torch.tensor([0] * 10 + [1] * 5 + [2] * 1)[torch.randperm(16, generator=g)]
    x = (100.0 * group)[None, :, None, None, None] + 0.1 * torch.randn(1, 16, 3, 4, 2, generator=g)
    w = choose_worlds(scene_distance(x, torch.ones(1, 3, dtype=torch.bool)), 3)
    assert group[w.medoid[0]].tolist() == [0, 1, 2]
    torch.testing.assert_close(w.probability[0], torch.tensor([10.0, 5.0, 1.0], dtype=torch.float64) / 16)
    assert torch.equal(w.cluster[0], group)


def test_swaps_reach_a_local_optimum_no_worse_than_any_single_swap():
    x, valid = scenes(b=1, k=20, seed=5)
    d = scene_distance(x, valid)
    m = choose_worlds(d, 4).medoid[0].tolist()

    def cost(medoids: list[int]) -> float:
        return float(d[0][:, medoids].min(-1).values.mean())

    best = cost(m)
    assert all(cost([*m[:i], c, *m[i + 1 :]]) >= best - 1e-12 for i in range(4) for c in range(20) if c not in m)


def test_all_samples_are_worlds_of_equal_mass_when_k_is_s():
    x, valid = scenes(k=6)
    w = choose_worlds(scene_distance(x, valid), 6)
    assert w.medoid.tolist() == [list(range(6))] * 2 and torch.all(w.probability == 1 / 6)


def test_given_masses_are_carried():
    x, valid = scenes(b=1, k=4)
    mass = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    w = choose_worlds(scene_distance(x, valid), 4, mass)
    assert w.medoid[0].tolist() == [3, 2, 1, 0]
    torch.testing.assert_close(
        w.probability[0], torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64), atol=1e-7, rtol=0
    )


def test_probability_sums_to_one_and_prefers_the_dense_middle():
    x = torch.tensor([0.0, 1.0, 1.1, 1.2, 2.2, 50.0])[None, :, None, None, None].expand(1, 6, 1, 1, 2)
    d = scene_distance(x, torch.ones(1, 1, dtype=torch.bool))
    w = choose_worlds(d, 2)
    p = sample_probability(d, w.cluster)[0]
    assert p.sum() == pytest.approx(1, abs=1e-12) and p[5] == pytest.approx(1 / 6) and int(p.argmax()) == 2


@pytest.mark.parametrize("k", [1, 3, 8])
def test_identical_samples_stay_finite(k: int):
    out = score_samples(torch.ones(2, 8, 3, 4, 2), torch.ones(2, 3, dtype=torch.bool), k=k)
    torch.testing.assert_close(out["probability"], torch.full((2, 8), 1 / 8, dtype=torch.float64))


def test_scene_without_agents_has_equal_samples():
    d = scene_distance(torch.randn(1, 3, 2, 4, 2), torch.zeros(1, 2, dtype=torch.bool))
    assert d.abs().max() == 0


def test_errors_name_the_remedy():
    x, valid = scenes(k=3)
    d = scene_distance(x, valid)
    with pytest.raises(ValueError, match="ask for 1 to 3 worlds"):
        choose_worlds(d, 4)
    with pytest.raises(ValueError, match="sum to one"):
        choose_worlds(d, 2, torch.full((2, 3), 0.5))
    with pytest.raises(ValueError, match="not finite"):
        scene_distance(torch.full_like(x, torch.nan), valid)
    with pytest.raises(ValueError, match="add the missing axis"):
        scene_distance(x[0], valid)
