from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from seqdiff.dit import DiT
from seqdiff.domains.trajectory.adapter import TrajectoryAdapter, motion_heading
from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.kinematics import velocity
from seqdiff.objectives import FlowMatching
from seqdiff.task import Sampler, Task
from seqdiff.testing import check_adapter

H, T, DT = 11, 20, 0.1


def scene_batch(b: int = 2, a: int = 5, s: int = 6, seed: int = 0) -> SceneBatch:
    """Agents on gentle arcs, the last one of each item padding, some holes in the history, one agent with one past frame."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(-(H - 1), T + 1) * DT
    speed = torch.rand(b, a, 1, generator=g) * 10 + 2
    turn = (torch.rand(b, a, 1, generator=g) - 0.5) * 0.4
    start = (torch.rand(b, a, 2, generator=g) - 0.5) * 60
    heading = (torch.rand(b, a, 1, generator=g) - 0.5) * 6 + turn * t
    xy = start[:, :, None] + torch.cumsum(
        torch.stack([torch.cos(heading), torch.sin(heading)], -1) * speed[..., None] * DT, dim=2
    )
    heading = torch.remainder(heading + math.pi, 2 * math.pi) - math.pi
    xyh = torch.cat([xy, heading[..., None]], -1)
    mask = torch.ones(b, a, dtype=torch.bool)
    mask[:, -1] = False
    hist_valid = mask[..., None].expand(b, a, H).clone()
    hist_valid[:, 1:2, 2:5] = False
    hist_valid[:, 2:3, :-1] = False
    fut_valid = mask[..., None].expand(b, a, T).clone()
    fut_valid[:, 3:4, T // 2 :] = False
    corner = (torch.rand(b, s, 1, 2, generator=g) - 0.5) * 60
    seg = corner + torch.cumsum(torch.rand(b, s, 10, 2, generator=g) * 2, dim=2)
    return SceneBatch(
        hist=xyh[:, :, :H] * hist_valid[..., None],
        hist_valid=hist_valid,
        fut=xyh[:, :, H:] * fut_valid[..., None],
        fut_valid=fut_valid,
        mask=mask,
        scored=mask & fut_valid.all(-1),
        type=torch.randint(0, 7, (b, a), generator=g),
        size=torch.tensor([4.6, 1.9]).expand(b, a, 2) * mask[..., None],
        size_known=mask.clone(),
        seg=seg,
        seg_mask=torch.ones(b, s, dtype=torch.bool),
        seg_kind=torch.zeros(b, s, dtype=torch.int64),
        seg_signal=torch.zeros(b, s, dtype=torch.int64),
        map_known=torch.ones(b, dtype=torch.bool),
        origin=torch.zeros(b, 2, dtype=torch.float64),
        scene_id=[f"s{i}" for i in range(b)],
        t0=[H - 1] * b,
        agent_id=[[f"a{j}" for j in range(a - 1)] for _ in range(b)],
        focal=torch.zeros(b, dtype=torch.int64),
        left_out=torch.zeros(b, dtype=torch.int64),
        drivable=[None] * b,
        dt=DT,
    )


class Data:
    """What `adapter.fit` needs of a data module."""

    def train_batches(self):
        return (scene_batch(8, 6, seed=i) for i in range(10))


def small_task(lever: float = 2.0, **changes) -> Task:
    adapter = TrajectoryAdapter(
        H, T, DT, latent_dim=6, ctx_dim=32, layers=1, heads=2, pair_dim=8, lever=lever, **changes
    )
    adapter.fit(Data())
    net = DiT(6, 32, width=32, depth=2, heads=2, pair_dim=8)
    for p in net.parameters():  # zero-initialised parts would make the tests below say nothing
        if p.abs().max() == 0:
            torch.nn.init.normal_(p, std=0.05)
    return Task(adapter, net, FlowMatching(), Sampler(steps=3)).eval()


def futures(task: Task, batch: SceneBatch, **args) -> torch.Tensor:
    with torch.no_grad():
        return task.adapter.decode(task.draw(batch, k=3, seed=1, **args).z, batch)


def select(batch: SceneBatch, index: torch.Tensor, axis_fields: tuple[str, ...], axis: int) -> SceneBatch:
    return replace(batch, **{f: getattr(batch, f).index_select(axis, index) for f in axis_fields})


AGENT_FIELDS = ("hist", "hist_valid", "fut", "fut_valid", "mask", "scored", "type", "size", "size_known")
ITEM_FIELDS = (*AGENT_FIELDS, "seg", "seg_mask", "seg_kind", "seg_signal", "map_known", "origin", "focal", "left_out")


def moved(xyh: torch.Tensor, angle: float, shift: torch.Tensor) -> torch.Tensor:
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = xyh[..., 0] * cos - xyh[..., 1] * sin, xyh[..., 0] * sin + xyh[..., 1] * cos
    out = [x + shift[0], y + shift[1]]
    return torch.stack([*out, xyh[..., 2] + angle] if xyh.shape[-1] == 3 else out, -1)


@pytest.mark.parametrize("lever", [2.0, 0.0])
def test_contract(lever):
    def change_future(batch):
        return replace(batch, fut=batch.fut + 7.0, scored=~batch.scored)

    check_adapter(small_task(lever).adapter, scene_batch(), change_future, tolerance=1e-4)


@pytest.mark.parametrize("lever", [2.0, 0.0])
def test_turning_and_shifting_the_scene_turns_and_shifts_the_futures(lever):
    task, batch = small_task(lever), scene_batch()
    angle, shift = 2.1, torch.tensor([31.0, -17.0])
    turned = replace(
        batch,
        hist=moved(batch.hist, angle, shift) * batch.hist_valid[..., None],
        seg=moved(batch.seg, angle, shift),
        fut=torch.zeros_like(batch.fut),
    )
    want, got = moved(futures(task, batch), angle, shift), futures(task, turned)
    real = batch.mask[:, None, :, None, None].expand_as(want)[..., :2]
    assert (want[..., :2] - got[..., :2])[real].abs().max() < 1e-4  # metres
    turn = torch.remainder(want[..., 2] - got[..., 2] + math.pi, 2 * math.pi) - math.pi
    assert turn[real[..., 0]].abs().max() < 1e-4


def test_the_order_of_agents_does_not_matter():
    task, batch = small_task(), scene_batch()
    order = torch.tensor([3, 1, 0, 2, 4])
    swapped = select(batch, order, AGENT_FIELDS, 1)
    with torch.no_grad():
        z = torch.randn(2, 3, 5, 6)
        a = task.net(z, 0.5, 0.5, task.net.prepare(task.adapter.context(batch)))
        b = task.net(z[:, :, order], 0.5, 0.5, task.net.prepare(task.adapter.context(swapped)))
    torch.testing.assert_close(a[:, :, order][:, :, batch.mask[0][order]], b[:, :, swapped.mask[0]], rtol=0, atol=1e-5)


def test_padding_changes_nothing():
    task, batch = small_task(), scene_batch()
    wide = {f: torch.cat([getattr(batch, f), torch.zeros_like(getattr(batch, f)[:, :3])], 1) for f in AGENT_FIELDS}
    for f in ("seg", "seg_mask", "seg_kind", "seg_signal"):
        wide[f] = torch.cat([getattr(batch, f), torch.zeros_like(getattr(batch, f)[:, :4])], 1)
    a, b = futures(task, batch), futures(task, replace(batch, **wide))
    torch.testing.assert_close(a[:, :, :4], b[:, :, :4], rtol=0, atol=1e-4)


def test_samples_do_not_depend_on_the_batch_split():
    task, batch = small_task(), scene_batch(b=3)
    whole = futures(task, batch)
    one = select(batch, torch.tensor([2]), ITEM_FIELDS, 0)
    one = replace(one, drivable=[None])
    alone = futures(task, one, first_item=2)
    torch.testing.assert_close(whole[2:], alone, rtol=0, atol=1e-5 * 60)
    assert torch.equal(whole, futures(task, batch))  # same call, bit-equal
    with torch.no_grad():
        twice = [task.draw(batch, k=k, seed=1).z[:, :2] for k in (2, 3)]
    torch.testing.assert_close(twice[0], twice[1], rtol=0, atol=1e-5)


def test_swapping_two_scenes_swaps_the_outputs():
    task, batch = small_task(), scene_batch(b=2)
    with torch.no_grad():
        z = torch.randn(2, 3, 5, 6)
        a = task.denoiser(task.adapter.context(batch))(z, 0.7)
        flipped = select(batch, torch.tensor([1, 0]), ITEM_FIELDS, 0)
        b = task.denoiser(task.adapter.context(flipped))(z.flip(0), 0.7)
    torch.testing.assert_close(a.flip(0), b, rtol=0, atol=1e-6)


def test_temperature_zero_gives_identical_samples():
    task, batch = small_task(), scene_batch()
    out = futures(task, batch, sampler=Sampler(steps=2, temperature=0.0))
    assert torch.equal(out[:, :1].expand_as(out), out)
    assert futures(task, batch).std(1)[batch.mask].max() > 0.1


def test_no_map_one_agent_and_256_agents_are_finite():
    task = small_task()
    no_map = scene_batch(s=1)
    no_map = replace(no_map, seg_mask=torch.zeros_like(no_map.seg_mask), map_known=torch.zeros(2, dtype=torch.bool))
    assert torch.isfinite(futures(task, no_map)).all()
    assert torch.isfinite(futures(task, scene_batch(a=2))).all()
    assert torch.isfinite(futures(task, scene_batch(b=1, a=257))).all()


def test_codec_reconstructs_whole_futures_and_leaves_partial_ones_out_of_the_loss():
    task, batch = small_task(), scene_batch()
    z, weight = task.adapter.encode(batch)
    assert weight.tolist() == [[1, 1, 1, 0, 0]] * 2
    back = task.adapter.decode(z, batch)[:, 0]
    error = (back - batch.fut)[..., :2].norm(dim=-1)[batch.scored]
    assert error.max() < 0.5 and error.mean() < 0.1
    assert (z[:, 0][~batch.mask] == 0).all()


def test_a_parked_vehicle_is_whitened_with_its_own_kind():
    adapter = small_task().adapter
    batch = scene_batch()
    still = replace(batch, hist=batch.hist[:, :, -1:].expand_as(batch.hist) * batch.hist_valid[..., None])
    assert (adapter.group(still) == still.type * 5).all()
    assert (adapter.group(batch)[:, 0] % 5 > 0).all()


def test_batches_of_another_shape_are_refused():
    task = small_task()
    with pytest.raises(ValueError, match=r"dt 0\.5 s; the model was built for 11, 20, 0\.1 s"):
        task.adapter.context(replace(scene_batch(), dt=0.5))


def test_guidance_without_dropped_contexts_in_training_is_refused():
    with pytest.raises(ValueError, match="context_drop"):
        futures(small_task(), scene_batch(), sampler=Sampler(guidance=2.0))


def test_known_agents_are_exact():
    task, batch = small_task(), scene_batch()
    z, _ = task.adapter.encode(batch)
    mask = torch.zeros_like(z, dtype=torch.bool)
    mask[:, :, 0] = True
    with torch.no_grad():
        out = task.draw(batch, k=4, seed=0, known=(z, mask)).z
    assert (out[:, :, 0] - z[:, :, 0]).abs().max() == 0.0


def test_velocity_by_hand():
    hist = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 1, 0], [4, 3, 0]])
    every = torch.ones(4, dtype=torch.bool)
    torch.testing.assert_close(velocity(hist, every, 0.5, 2), torch.tensor([4.0, 4.0]))
    torch.testing.assert_close(
        velocity(hist, every, 0.5, 3), torch.tensor([3.0, 3.0])
    )  # line through 1, 2, 4 and 0, 1, 3
    hole = torch.tensor([True, False, False, True])
    torch.testing.assert_close(velocity(hist, hole, 0.5, 2), torch.tensor([4 / 1.5, 3 / 1.5]))
    assert (velocity(hist, torch.tensor([False, False, False, True]), 0.5, 2) == 0).all()


def test_heading_follows_motion_and_is_kept_while_standing():
    xy = torch.tensor([[1.0, 0], [1, 1], [1, 1], [0, 1]])
    want = torch.tensor([0.0, math.pi / 2, math.pi / 2, math.pi])
    torch.testing.assert_close(motion_heading(xy, 0.1), want)
    assert (motion_heading(torch.zeros(3, 2), 0.1) == 0).all()


def test_masses_are_tilted_by_wrong_agents_and_uniform_without_tilt():
    batch = scene_batch()  # 4 real agents
    energies = {
        "collision": torch.tensor([[0.0, 0.5], [0.0, 0.0]]),
        "off_road": torch.tensor([[0.0, 0.0], [torch.nan] * 2]),
    }
    tilted = small_task(tilt=1.0).adapter.mass(energies, batch)
    want = torch.softmax(torch.tensor([0.0, -2.0], dtype=torch.float64), -1)  # 2 of 4 agents collide, a nat each
    torch.testing.assert_close(tilted, torch.stack([want, torch.full((2,), 0.5, dtype=torch.float64)]))
    assert (small_task().adapter.mass(energies, batch) == 0.5).all()


def test_energy_guidance_lowers_the_energy_and_reports_it():
    task = small_task()
    batch = replace(scene_batch(), drivable=[None, None])
    crowded = replace(batch, hist=batch.hist * torch.tensor([0.15, 0.15, 1.0]))  # close together: futures overlap
    plain = task.draw(crowded, k=6, seed=0)
    guided = task.draw(crowded, k=6, seed=0, sampler=Sampler(steps=3, energy_iterations=10))
    assert plain.energy is None and guided.energy is not None
    before, after = guided.energy
    assert before.sum() > 0 and (after <= before).all() and after.sum() < 0.5 * before.sum()


def test_a_run_can_start_from_another_ones_weights(tmp_path):
    from seqdiff import checkpoint

    source, target = small_task(), small_task()
    path = tmp_path / "a.ckpt"
    torch.save({checkpoint.KEY: checkpoint.header(""), "state_dict": source.state_dict()}, path)
    target.init = str(path)
    target.print = lambda *a: None
    target.setup("fit")
    for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    target.init = str(tmp_path / "none")
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        target.setup("fit")
