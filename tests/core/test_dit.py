"""The net: the context is shared by samples and steps, masks are kept, rotary positions are relative, zero at the start."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from seqdiff.dit import Attention, DiT, rotary
from seqdiff.types import Cond

B, N, M, C, D = 2, 4, 5, 16, 3


def condition(n: int = N, m: int = M, positions: str = "pose") -> Cond:
    g = torch.Generator().manual_seed(3)
    poses = torch.randn(B, m, 3, generator=g) * 5
    ctx = torch.randn(B, m, C, generator=g)
    index = torch.arange(n, dtype=torch.float32).view(1, n, 1).expand(B, n, 1)
    return Cond(
        mask=torch.ones(B, 1, n, dtype=torch.bool),
        pos=poses[:, :n] if positions == "pose" else index,
        group=torch.arange(n).expand(B, n),
        ctx=ctx,
        ctx_pos=poses if positions == "pose" else torch.zeros(B, m, 1),
        ctx_mask=torch.ones(B, m, dtype=torch.bool),
        tok=ctx[:, :n],
    )


def net(awake: bool = True, **changes) -> DiT:
    torch.manual_seed(0)
    model = DiT(D, C, **{"width": 32, "depth": 2, "heads": 2, "pair_dim": 8, **changes}).eval()
    if awake:  # zero-initialised parts would make most tests below say nothing
        for p in model.parameters():
            if p.abs().max() == 0:
                torch.nn.init.normal_(p, std=0.1)
    return model


@torch.no_grad()
def run(model: DiT, z: torch.Tensor, cond: Cond, t: float = 0.5) -> torch.Tensor:
    return model(z, t, t, model.prepare(cond))


# ---- shared context ----------------------------------------------------------------------------------------------------


def test_the_context_is_projected_once_for_all_samples_and_steps():
    model, cond = net(), condition()
    rows: list[int] = []
    keys = Attention.keys

    def counted(self: Attention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(x.shape[0] * x.shape[1])
        return keys(self, x)

    with patch.object(Attention, "keys", counted), torch.no_grad():
        prepared = model.prepare(cond)
        for t in (1.0, 0.75, 0.5, 0.25):
            model(torch.randn(B, 64, N, D), t, t, prepared)
    assert rows == [B * (M + 1)] * 2  # once a block, m + 1 tokens, without the samples
    assert all(block.cross_kv[0].shape == (B, 2, M + 1, 16) for block in prepared.blocks)


def test_a_sample_does_not_depend_on_how_many_are_drawn_with_it():
    model, cond = net(), condition()
    z = torch.randn(B, 64, N, D)
    many = run(model, z, cond)
    for i in (0, 17, 63):
        torch.testing.assert_close(run(model, z[:, i : i + 1], cond), many[:, i : i + 1], rtol=0, atol=1e-5)


def test_times_as_floats_and_as_tensors_agree():
    model, cond = net(), condition()
    z = torch.randn(B, 3, N, D)
    with torch.no_grad():
        prepared = model.prepare(cond)
        want = model(z, 0.3, 0.1, prepared)
        for t, s in [
            (torch.tensor(0.3), torch.tensor(0.1)),
            (torch.full((B,), 0.3), torch.full((B,), 0.1)),
            (torch.full((B, 3), 0.3), torch.full((B, 3), 0.1)),
        ]:
            torch.testing.assert_close(model(z, t, s, prepared), want, rtol=0, atol=1e-6)
        t = torch.tensor([[0.1, 0.5, 0.9], [0.2, 0.4, 0.6]])
        each = model(z, t, t, prepared)
        for i in range(B):
            for j in range(3):
                one = model(z[:, j : j + 1], float(t[i, j]), float(t[i, j]), prepared)
                torch.testing.assert_close(each[i, j], one[i, 0], rtol=0, atol=1e-5)
        assert (model(z, 0.3, 0.3, prepared) - want).abs().max() > 1e-4  # s is seen


# ---- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["pose", "index"])
def test_padded_context_and_latents_change_nothing(positions):
    model, cond = net(positions=positions), condition(positions=positions)
    z = torch.randn(B, 3, N, D)
    want = run(model, z, cond)

    def longer(x: torch.Tensor, by: int, fill: float) -> torch.Tensor:
        return torch.cat([x, torch.full_like(x[:, :1], fill).expand(-1, by, *x.shape[2:])], 1)

    padded = Cond(
        mask=torch.cat([cond.mask, torch.zeros(B, 1, 2, dtype=torch.bool)], -1),
        pos=longer(cond.pos, 2, 1e3),
        group=longer(cond.group, 2, 0),
        ctx=longer(cond.ctx, 3, 1e3),
        ctx_pos=longer(cond.ctx_pos, 3, -1e3),
        ctx_mask=longer(cond.ctx_mask, 3, False),
        tok=longer(cond.tok, 2, 1e3),
    )
    got = run(model, torch.cat([z, torch.full((B, 3, 2, D), 1e3)], 2), padded)
    torch.testing.assert_close(got[:, :, :N], want, rtol=0, atol=1e-5)
    assert torch.isfinite(got).all()


def test_lengths_may_differ_by_sample():
    model, cond = net(), condition()
    mask = torch.ones(B, 2, N, dtype=torch.bool)
    mask[:, 1, -1] = False
    z = torch.randn(B, 2, N, D)
    got = run(model, z, replace(cond, mask=mask))
    torch.testing.assert_close(got[:, :1], run(model, z[:, :1], cond), rtol=0, atol=1e-5)
    short = run(model, z[:, 1:], replace(cond, mask=mask[:, 1:]))
    torch.testing.assert_close(got[:, 1:], short, rtol=0, atol=1e-5)
    assert (got[:, 1, :-1] - run(model, z[:, 1:], cond)[:, 0, :-1]).abs().max() > 1e-4


def test_without_any_context_the_output_is_finite_and_the_context_matters():
    model, cond = net(), condition()
    z = torch.randn(B, 2, N, D)
    alone = run(model, z, cond.drop())
    assert torch.isfinite(alone).all() and (alone - run(model, z, cond)).abs().max() > 1e-3


# ---- rotary ------------------------------------------------------------------------------------------------------------


def test_rotary_is_relative_and_keeps_lengths():
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 6, 1, 2, 8, generator=g, dtype=torch.float64) for _ in range(2))
    index = torch.arange(6, dtype=torch.float64).view(1, 6)

    def scores(shift: float) -> torch.Tensor:
        return torch.einsum("bnkhe,bmkhe->bhnm", rotary(q, index + shift), rotary(k, index + shift))

    torch.testing.assert_close(scores(0.0), scores(31.0), rtol=0, atol=1e-4)  # angles are float32
    torch.testing.assert_close(rotary(q, index).norm(dim=-1), q.norm(dim=-1), rtol=0, atol=1e-6)
    assert torch.equal(rotary(q, torch.zeros(1, 6, dtype=torch.float64)), q)
    turned = torch.einsum("bnkhe,bmkhe->bhnm", rotary(q, index), rotary(k, 2 * index))
    assert (turned - scores(0.0)).abs().max() > 0.1


def test_a_net_over_an_index_sees_order_but_not_where_it_begins():
    model, cond = net(positions="index"), condition(positions="index")
    cond = replace(cond, tok=None)
    z = torch.randn(B, 2, N, D)
    want = run(model, z, cond)
    torch.testing.assert_close(run(model, z, replace(cond, pos=cond.pos + 40)), want, rtol=0, atol=1e-4)
    order = torch.tensor([1, 0, 2, 3])
    assert (run(model, z[:, :, order], cond)[:, :, order] - want).abs().max() > 1e-3  # not a set
    moved = replace(cond, pos=cond.pos[:, order])
    torch.testing.assert_close(run(model, z[:, :, order], moved)[:, :, order], want, rtol=0, atol=1e-5)


# ---- start, refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["pose", "index"])
def test_an_untrained_net_gives_zero_and_learns_from_the_first_step(positions):
    model, cond = net(awake=False, positions=positions).train(), condition(positions=positions)
    z = torch.randn(B, 2, N, D)
    out = model(z, 0.5, 0.5, model.prepare(cond))
    assert out.shape == z.shape and (out == 0).all()
    (out - 1).square().mean().backward()
    assert model.output.bias.grad.abs().max() > 0


@pytest.mark.parametrize("width, heads", [(30, 4), (12, 4)])
def test_widths_that_do_not_divide_are_refused(width, heads):
    with pytest.raises(ValueError, match=rf"width {width} must be a multiple of 2 x heads \({heads}\)"):
        DiT(D, C, width=width, heads=heads)


def test_cross_every_leaves_attention_to_the_context_out():
    model = net(depth=4, cross_every=2)
    assert [block.cross for block in model.blocks] == [True, False, True, False]
    prepared = model.prepare(condition())
    assert [p.cross_kv is not None for p in prepared.blocks] == [True, False, True, False]
