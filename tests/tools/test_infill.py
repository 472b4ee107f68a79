"""Infilling, measured: the given road user is exact and out of the measures; a net trained with known parts follows them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from seqdiff.dit import DiT
from seqdiff.domains.trajectory.adapter import TrajectoryAdapter
from seqdiff.objectives import FlowMatching
from seqdiff.task import Sampler, Task
from seqdiff.tools.bench import random_scene
from seqdiff.tools.infill import chosen, rows
from seqdiff.types import Cond


def small_task(inputs: tuple[str, ...]) -> Task:
    torch.manual_seed(0)
    adapter = TrajectoryAdapter(5, 10, 0.1, latent_dim=4, ctx_dim=16, layers=1, heads=2, pair_dim=4)
    net = DiT(4, 16, width=16, depth=1, heads=2, pair_dim=4, inputs=inputs)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return Task(adapter, net, FlowMatching(), Sampler(steps=2)).eval()


def test_who_is_given_goes_farthest_or_is_every_second():
    batch = random_scene(4, 5, 10, 8, 0.1)
    gone = (batch.fut[0, :, -1, :2] - batch.hist[0, :, -1, :2]).norm(dim=-1)
    order = gone.argsort(descending=True)
    given, ok = chosen(batch, half=False)
    assert given[0].nonzero().flatten().tolist() == [order[0].item()] and ok.all()
    assert set(chosen(batch, half=True)[0][0].nonzero().flatten().tolist()) == {order[0].item(), order[2].item()}
    scored = batch.scored.clone()
    scored[0, order[0]] = False
    assert chosen(replace(batch, scored=scored), half=False)[0][0, order[1]]
    scored[0, order[1:3]] = False
    assert not chosen(replace(batch, scored=scored), half=True)[1].any()  # no other one left to measure


def test_the_given_part_is_exact_and_only_the_others_are_measured():
    batch = random_scene(4, 5, 10, 8, 0.1)
    table = rows(small_task(("known",)), [batch], [2], 3)
    assert [r["given"] for r in table] == ["nothing", "replacement", "trained"]
    assert [r["off"] for r in table] == [0.0, 0.0, 0.0] and all(r["n"] == 1 for r in table)
    assert table[1]["energy_score"] != table[2]["energy_score"]
    assert [r["given"] for r in rows(small_task(()), [batch], [2], 3)] == ["nothing", "replacement"]
    # what the given agent itself does is in no measure: another truth of it changes nothing where nothing is given
    at = int(chosen(batch, half=False)[0][0].nonzero())
    moved = batch.fut.clone()
    moved[0, at] += 3 * (moved[0, at] - batch.hist[0, at, -1])
    assert rows(small_task(()), [replace(batch, fut=moved)], [2], 3)[0] == pytest.approx(
        rows(small_task(()), [batch], [2], 3)[0]
    )


@pytest.mark.slow
def test_a_net_trained_with_known_parts_draws_from_the_conditional_law():
    """x2 given x1 = 2 of a Gaussian with correlation .9 has mean 1.8 and standard deviation .436; replacement alone stops at .86
    (tests/core/test_guidance.py)."""
    torch.manual_seed(0)
    net = DiT(1, 1, width=48, depth=2, heads=2, positions="index", inputs=("known",))
    objective = FlowMatching(known=0.7, draws=4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    cond = Cond(
        mask=torch.ones(256, 1, 2, dtype=torch.bool), pos=torch.arange(2.0).view(1, 2, 1).expand(256, 2, 1),
        group=torch.zeros(256, 2, dtype=torch.int64), ctx=torch.zeros(256, 1, 1), ctx_pos=torch.zeros(256, 1, 1),
        ctx_mask=torch.ones(256, 1, dtype=torch.bool),
    )  # fmt: skip
    for step in range(900):
        first = torch.randn(256, 1, 1, 1)
        z0 = torch.cat([first, 0.9 * first + 0.19**0.5 * torch.randn(256, 1, 1, 1)], 2)
        loss = objective(net, z0, torch.ones(256, 2), cond).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / 900)
    known = torch.tensor([2.0, 0.0]).view(1, 1, 2, 1).expand(256, 1, 2, 1)
    mask = torch.tensor([True, False]).view(1, 1, 2, 1).expand(256, 1, 2, 1)
    prepared = net.prepare(replace(cond, known=known, known_mask=mask))
    z = noise = torch.randn(256, 8, 2, 1)
    with torch.no_grad():
        for i in range(32):
            t, s = 1 - i / 32, 1 - (i + 1) / 32
            z = torch.where(mask, (1 - t) * known + t * noise, z)
            z = z + (s - t) * net(z, t, t, prepared)
    assert z[..., 1, 0].mean().item() == pytest.approx(1.8, abs=0.1)
    assert z[..., 1, 0].std().item() == pytest.approx(0.436, abs=0.1)
