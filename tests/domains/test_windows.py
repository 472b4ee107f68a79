"""Windows against a plain, slow reading of the same rules, and the counts of the ETH/UCY protocol."""

from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.ragged import nearest_first
from seqdiff.domains.trajectory.scene import MAP_KINDS, SIGNAL_STATES, MapElement, RoadMap, Scene, Track
from seqdiff.domains.trajectory.store import Store, StoreWriter
from seqdiff.domains.trajectory.windows import DEFAULT_SIZE, Vary, WindowDataset, WindowSpec

ETH_UCY = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "trajectory" / "eth_ucy" / "all_data"
SMALL = WindowSpec(history_s=0.5, horizon_s=0.8, stride_s=0.3, radius_m=25.0, max_agents=4, max_segments=6)


def random_scene(name: str, rng: np.random.Generator, road: RoadMap | None, n: int = 9, steps: int = 60) -> Scene:
    tracks = []
    for i in range(n):
        length, start = int(rng.integers(5, steps)), int(rng.integers(0, steps // 2))
        speed = rng.choice([0.0, 5.0, 12.0])
        way = rng.uniform(-3, 3)
        along = speed * 0.1 * np.arange(length)
        xy = rng.uniform(-30, 30, 2) + 1000.0 + along[:, None] * [np.cos(way), np.sin(way)]
        xyh = np.column_stack([xy, np.full(length, way)])
        valid = rng.random(length) > 0.04
        valid[0] = True
        xyh[~valid] = np.nan
        kind = rng.choice(["vehicle", "pedestrian", "bus"])
        size = (4.0, 1.7) if rng.random() < 0.5 else None
        tracks.append(Track(f"{name}_{i}", str(kind), start, xyh, valid, size, scored=i % 2 == 0, focal=i == 0))
    signals = (
        [("lane0", 0, "red"), ("lane0", 20, "green"), ("lane1", 30, "yellow"), ("lane2", 10, "red")] if road else []
    )
    return Scene(name, 0.1, "train", tracks, road, signals)


def random_road(rng: np.random.Generator) -> RoadMap:
    elements = []
    for i in range(12):
        way, begin = rng.uniform(-3, 3), 1000.0 + rng.uniform(-60, 60, 2)
        line = begin + np.linspace(0, 60, 15)[:, None] * [np.cos(way), np.sin(way)]
        elements.append(MapElement(f"lane{i}", "lane_center" if i % 2 == 0 or i == 1 else "road_edge", line))
    square = 1000.0 + np.array([[-80.0, -80], [80, -80], [80, 80], [-80, 80]])
    return RoadMap("square", [*elements, MapElement("area", "drivable_area", square)])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    rng = np.random.default_rng(7)
    road = random_road(rng)
    out = tmp_path_factory.mktemp("windows") / "s"
    with StoreWriter(out, "random", "made up") as writer:
        for k in range(6):
            writer.add(random_scene(f"scene{k}", rng, None if k == 4 else road))
        writer.add(replace(random_scene("other", rng, road), split="val"))
    return Store(out)


def whole(data: WindowDataset) -> SceneBatch:
    return data.batch(np.arange(len(data)))


def slow_window(s: Store, spec: WindowSpec, i: int, t0: int, focal_id: str | None) -> dict[str, Any] | None:
    """One window by the rules, with loops. The focal agent is given: which one is chosen is tested on its own."""
    h, t = round(spec.history_s / s.dt) + 1, round(spec.horizon_s / s.dt)
    xyh, valid = s.states(i, t0 - h + 1, h + t)
    table = s.tracks(i)
    there = [k for k in range(len(table.id)) if valid[k, h - 1]]
    scored = {}
    for k in there:
        scored[k] = bool(valid[k, h:].all() and (spec.history_rule == "any" or valid[k, :h].all()))
        if spec.scored == "marked":
            scored[k] &= bool(table.scored[k] or table.focal[k])
    if spec.focal == "all":
        centre = xyh[there, h - 1, :2].mean(axis=0) if there else np.zeros(2)
    else:
        if focal_id is None:
            return {"candidates": [table.id[k] for k in there if scored[k]]}
        centre = xyh[table.id.index(focal_id), h - 1, :2]
    apart = {k: float(np.hypot(*(xyh[k, h - 1, :2] - centre))) for k in there}
    near = [k for k in sorted(there, key=lambda k: (table.id[k] != focal_id, apart[k]))]
    if spec.radius_m is not None:
        near = [k for k in near if apart[k] <= spec.radius_m]
    kept = near[: spec.max_agents]
    moved = xyh[kept].copy()
    moved[..., :2] -= centre
    moved *= valid[kept][..., None]
    return {
        "id": [table.id[k] for k in kept],
        "hist": moved[:, :h],
        "fut": moved[:, h:],
        "hist_valid": valid[kept][:, :h],
        "fut_valid": valid[kept][:, h:],
        "scored": [scored[k] for k in kept],
        "type": table.type[kept],
        "left_out": len(near) - len(kept),
        "origin": centre + s.origin(i),
    }


SPECS = {
    "one": SMALL,
    "one, everybody": replace(SMALL, radius_m=None, max_agents=64),
    "full history": replace(SMALL, history_rule="full"),
    "two scored": replace(SMALL, min_agents=2),
    "all": replace(SMALL, focal="all", radius_m=None),
    "all of them": replace(SMALL, focal="all", radius_m=None, max_agents=64, min_agents=0),
    "marked": replace(SMALL, focal="marked", scored="marked", radius_m=None, max_agents=64),
}


@pytest.mark.parametrize("case", SPECS)
def test_batches_follow_the_rules(case: str, store: Store) -> None:
    spec = SPECS[case]
    data = WindowDataset(store, spec, "train")
    batch = whole(data)
    seen: dict[tuple[str, int], int] = {}
    for n, (scene_id, t0) in enumerate(zip(batch.scene_id, batch.t0)):
        seen[scene_id, t0] = n
        focal_id = batch.agent_id[n][0] if spec.focal != "all" else None
        want = slow_window(store, spec, store.scene_index(scene_id), t0, focal_id)
        assert want is not None
        a = len(want["id"])
        assert batch.agent_id[n] == want["id"] and batch.mask[n].tolist() == [True] * a + [False] * (
            batch.mask.shape[1] - a
        )
        for key in ("hist", "fut"):
            np.testing.assert_allclose(getattr(batch, key)[n, :a].numpy(), want[key], atol=2e-5)
            assert (getattr(batch, f"{key}_valid")[n, :a].numpy() == want[f"{key}_valid"]).all()
        assert batch.scored[n, :a].tolist() == want["scored"] and batch.type[n, :a].tolist() == want["type"].tolist()
        assert batch.left_out[n] == want["left_out"]
        np.testing.assert_allclose(batch.origin[n].numpy(), want["origin"], atol=1e-4)
        assert batch.focal[n] == (-1 if spec.focal == "all" else 0)
        assert sum(want["scored"]) >= spec.min_agents
    for value in (batch.hist, batch.fut, batch.size, batch.hist_valid, batch.fut_valid, batch.scored, batch.size_known):
        assert not value[~batch.mask].any()  # padding is zero and never valid

    # every (scene, t0) is there exactly once, or was counted with its reason
    h, t = spec.frames(store.dt)
    candidates = [(i, t0) for i in store.scenes("train") for t0 in range(h - 1, store.n_steps(i) - t, 3)]
    assert len(seen) == len(batch.t0) == len(data) and len(data) + sum(data.left.values()) == len(candidates)
    if spec.min_agents == 1 and spec.focal == "one":
        for i, t0 in candidates:
            _, valid = store.states(i, t0 - h + 1, h + t)
            ok = valid[:, h - 1 :].all(axis=1) & (valid[:, :h].all(axis=1) | (spec.history_rule == "any"))
            assert ((store.scene_ids[i], t0) in seen) == bool(ok.any())
    if spec.min_agents == 0:
        assert len(data) == len(candidates)
    for (scene_id, t0), n in seen.items():
        assert data.find(scene_id, t0) == n


def test_result_does_not_depend_on_the_batch_split(store: Store) -> None:
    data = WindowDataset(store, SMALL, "train")
    together = whole(data)
    for n in range(0, len(data), 7):
        alone = data[n]
        a, s = alone.mask.shape[1], alone.seg.shape[1]
        assert alone.agent_id[0] == together.agent_id[n]
        for f in fields(SceneBatch):
            got, want = getattr(alone, f.name), getattr(together, f.name)
            if isinstance(got, torch.Tensor):
                want = want[n]
                want = (
                    want[:s] if f.name.startswith("seg") else want[:a] if got.dim() > 1 and f.name != "origin" else want
                )
                assert torch.equal(got[0], want), f.name


def test_focal_agent_is_chosen_without_the_future_and_moves_if_any_does(store: Store, tmp_path: Path) -> None:
    data = WindowDataset(store, SMALL, "train")
    batch = whole(data)
    h, t = SMALL.frames(store.dt)
    with StoreWriter(
        tmp_path / "s", "turned", "made up"
    ) as writer:  # same presence, but all stand still from step 30 on
        rng = np.random.default_rng(7)
        road = random_road(rng)
        for k in range(6):
            one = random_scene(f"scene{k}", rng, None if k == 4 else road)
            for track in one.tracks:
                rows = np.flatnonzero(track.valid)
                late = rows[rows + track.start > 30]
                if len(late) and len(late) < len(rows):
                    track.xyh[late] = track.xyh[rows[rows + track.start <= 30][-1]]
            writer.add(one)
    other = WindowDataset(Store(tmp_path / "s"), SMALL, "train")
    compared = 0
    for n, (scene_id, t0) in enumerate(zip(batch.scene_id, batch.t0)):
        if t0 <= 30:
            b = other[other.find(scene_id, t0)]
            assert b.agent_id[0] == batch.agent_id[n]
            torch.testing.assert_close(b.hist[0], batch.hist[n, : len(b.agent_id[0])], atol=1e-4, rtol=0)
            compared += 1
    assert compared > 20

    for n, (scene_id, t0) in enumerate(zip(batch.scene_id, batch.t0)):
        i = store.scene_index(scene_id)
        xyh, valid = store.states(i, t0 - h + 1, h + t)
        names, speed = store.tracks(i).id, {}
        for k in np.flatnonzero(valid[:, h - 1 :].all(axis=1)):
            run = h - 1 - (np.flatnonzero(~valid[k, :h]).max(initial=-1) + 1)
            speed[names[k]] = np.hypot(*(xyh[k, h - 1] - xyh[k, h - 1 - run])[:2]) / (max(run, 1) * store.dt)
        focal = batch.agent_id[n][0]
        assert focal in speed and (speed[focal] > 0.5 or max(speed.values()) <= 0.5)
    assert len({ids[0] for ids in batch.agent_id}) > 15  # the hash spreads over the road users


def test_map_tokens_are_the_nearest_pieces(store: Store) -> None:
    data = WindowDataset(store, SMALL, "train")
    batch = whole(data)
    pieces = store.pieces(10.0)
    lane = MAP_KINDS.index("lane_center")
    states = set()
    for n, (scene_id, t0) in enumerate(zip(batch.scene_id, batch.t0)):
        i = store.scene_index(scene_id)
        if scene_id == "scene4":
            assert not batch.map_known[n] and not batch.seg_mask[n].any() and batch.drivable[n] is None
            continue
        assert batch.map_known[n] and batch.seg_mask[n].all()
        shift = store.arrays["map_origin"][store.map_index(i)] - batch.origin[n].numpy()
        apart = np.hypot(*(pieces.mid + shift).T)
        nearest = np.argsort(apart)[: SMALL.max_segments]
        got = batch.seg[n].numpy()
        np.testing.assert_allclose(got, pieces.points[nearest] + shift, atol=1e-4)
        assert batch.seg_kind[n].tolist() == pieces.kind[nearest].tolist()
        told = store.signals(i, t0)
        names = [e.id for e in store.map(i).elements]  # type: ignore[union-attr]
        for token, piece in enumerate(nearest):
            name = names[pieces.element[piece]]
            want = told.get(name, "none") if pieces.kind[piece] == lane else "none"
            assert SIGNAL_STATES[batch.seg_signal[n, token]] == want
            states.add(want)
        area = batch.drivable[n]
        assert area.area == pytest.approx(160.0**2, rel=1e-6)
        assert area.bounds[0] == pytest.approx(920.0 - float(batch.origin[n, 0]), abs=1e-4)
    assert states == {"none", "red", "green", "yellow", "unknown"}
    assert WindowDataset(store, replace(SMALL, max_segments=0), "train")[0].seg.shape[1] == 1  # a masked token
    assert len(pickle.loads(pickle.dumps(batch)).drivable) == len(batch.drivable)


def test_sizes_come_from_the_recording_or_the_type(store: Store) -> None:
    batch = whole(WindowDataset(store, SMALL, "train"))
    known, unknown = batch.size_known, batch.mask & ~batch.size_known
    assert known.any() and unknown.any()
    torch.testing.assert_close(batch.size[known], torch.tensor([4.0, 1.7]).expand_as(batch.size[known]))
    torch.testing.assert_close(batch.size[unknown], torch.from_numpy(DEFAULT_SIZE)[batch.type[unknown]])
    assert DEFAULT_SIZE[1].tolist() == [0.5, 0.5]


def test_training_may_vary_focal_agent_stride_and_scale(store: Store) -> None:
    pinned = WindowDataset(store, SMALL, "train")
    data = WindowDataset(store, SMALL, "train", Vary(stride_s=0.1, random_focal=True, scale=(0.5, 2.0), seed=3))
    assert len(data) > 2.5 * len(pinned)
    first, again = whole(data), whole(data)
    assert first.agent_id == again.agent_id and torch.equal(first.hist, again.hist)
    data.set_epoch(1)
    second = whole(data)
    changed = [a[0] != b[0] for a, b in zip(first.agent_id, second.agent_id)]
    assert 0.3 < np.mean(changed) < 0.95
    plain = WindowDataset(store, SMALL, "train", Vary(stride_s=0.1, random_focal=True, seed=3))
    same = whole(plain)
    ratio = (first.hist[..., :2].norm(dim=-1) / same.hist[..., :2].norm(dim=-1))[
        first.hist_valid & (same.hist[..., 0] != 0)
    ]
    assert 0.5 <= ratio.min() < 0.6 and 1.7 < ratio.max() <= 2.0 + 1e-4 and 0.85 < ratio.log().mean().exp() < 1.2
    torch.testing.assert_close(first.hist[..., 2], same.hist[..., 2])
    n = int(first.map_known.int().argmax())
    factor = first.seg[n, 0, 0] / same.seg[n, 0, 0]
    assert first.drivable[n].area == pytest.approx(160.0**2 * float(factor[0]) ** 2, rel=1e-3)
    torch.testing.assert_close(factor[0], factor[1])


def test_finding_a_window_that_is_not_there(store: Store) -> None:
    data = WindowDataset(store, SMALL, "train")
    with pytest.raises(KeyError, match="no window at t0 3"):
        data.find("scene0", 3)
    with pytest.raises(KeyError, match="in split 'val', these are the windows of 'train'"):
        data.find("other", 5)
    with pytest.raises(KeyError, match="no scene 'x'"):
        data.find("x", 5)
    with pytest.raises(IndexError, match=r"0 ... "):
        data.batch([len(data)])


def test_specs_are_checked() -> None:
    with pytest.raises(ValueError, match="radius_m: null"):
        WindowSpec(focal="all")
    with pytest.raises((ValueError, TypeError, jaxtyping.TypeCheckError), match=r"one, all, marked|parameter 'focal'"):
        WindowSpec(focal="ego")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"history_s is 0.25 s at dt 0.1 s.*history_s: 0.2"):
        replace(SMALL, history_s=0.25).frames(0.1)
    with pytest.raises(ValueError, match=r"min_agents is 0; write 1 or more"):
        WindowSpec(min_agents=0)
    assert WindowSpec(history_s=2.8, horizon_s=4.8).frames(0.4) == (8, 12)
    assert WindowSpec().frames(0.1) == (21, 60)


def test_one_agent_and_one_past_frame(tmp_path: Path) -> None:
    n = 9
    xyh = np.column_stack([np.arange(n) * 1.0, np.zeros(n), np.zeros(n)])
    late = Track("late", "vehicle", 5, xyh, np.ones(n, bool))
    early = Track("gone", "vehicle", 0, xyh[:5], np.ones(5, bool))
    with StoreWriter(tmp_path / "s", "one", "made up") as writer:
        writer.add(Scene("s", 0.1, "train", [late, early]))
    batch = whole(WindowDataset(Store(tmp_path / "s"), replace(SMALL, stride_s=0.1), "train"))
    assert batch.t0 == [5] and batch.agent_id == [["late"]]
    assert batch.hist_valid[0, 0].tolist() == [False] * 5 + [True] and batch.fut_valid.all()
    torch.testing.assert_close(batch.fut[0, 0, :, 0], torch.arange(1.0, 9.0))


def test_equal_distances_keep_their_order() -> None:
    group = np.repeat([0, 1], 40)
    apart = np.tile(np.array([1.0, 0.0], np.float32), 40)
    order = nearest_first(group, apart, first=np.array([4, 41]))
    assert order[:3].tolist() == [4, 1, 3] and order[40:43].tolist() == [41, 43, 45]
    assert (np.diff(order[21:40]) > 0).all() and group[order].tolist() == group.tolist()


def read_eth_ucy(name: str) -> Scene:
    """One file of the benchmark: ten frames are one step, and a gap in the frames is a gap in time."""
    rows = np.loadtxt(ETH_UCY / f"{name}.txt")
    step = np.round((rows[:, 0] - rows[:, 0].min()) / 10).astype(int)
    walkers = defaultdict(list)
    for k, row in zip(step, rows):
        walkers[int(row[1])].append((k, row[2], row[3]))
    tracks = []
    for walker, seen in walkers.items():
        at = np.array([k for k, _, _ in seen])
        xyh = np.full((at.max() - at.min() + 1, 3), np.nan)
        xyh[at - at.min()] = [(x, y, 0.0) for _, x, y in seen]
        tracks.append(Track(str(walker), "pedestrian", int(at.min()), xyh, ~np.isnan(xyh[:, 0])))
    return Scene(name, 0.4, "test", tracks)


COUNTS = {
    "eth": (("biwi_eth",), 364, 181),
    "hotel": (("biwi_hotel",), 1197, 1053),
    "univ": (("students001", "students003"), 24334, 24334),
    "zara1": (("crowds_zara01",), 2356, 2253),
    "zara2": (("crowds_zara02",), 5910, 5833),
}


@pytest.mark.parametrize("fold", COUNTS)
def test_eth_ucy_protocol(fold: str, tmp_path: Path) -> None:
    if not ETH_UCY.is_dir():
        pytest.skip(f"needs the ETH/UCY files in {ETH_UCY}")
    names, one, two = COUNTS[fold]
    with StoreWriter(tmp_path / "s", fold, "ETH/UCY") as writer:
        for name in names:
            writer.add(read_eth_ucy(name))
    spec = WindowSpec(2.8, 4.8, 0.4, None, 512, "all", 1, "full")
    for least, agents in ((1, one), (2, two)):
        data = WindowDataset(Store(tmp_path / "s"), replace(spec, min_agents=least), "test")
        batch = whole(data)
        assert int(batch.scored.sum()) == agents and not batch.left_out.any()
        assert batch.hist_valid[batch.scored].all() and batch.fut_valid[batch.scored].all()
        assert (batch.mask & ~batch.scored).any()  # the others are context
        if fold == "eth" and least == 1:
            assert len(data) == 253


def test_index_is_compact(tmp_path: Path) -> None:
    """8 bytes a window and 4 bytes for 16 steps of a track: 200,000 windows from two tracks."""
    n = 100_060
    xyh = np.column_stack([np.arange(n) * 0.01, np.zeros(n), np.zeros(n)])
    with StoreWriter(tmp_path / "s", "long", "made up") as writer:
        for k in range(2):
            writer.add(Scene(f"s{k}", 0.1, "train", [Track("a", "vehicle", 0, xyh, np.ones(n, bool))]))
    data = WindowDataset(Store(tmp_path / "s"), WindowSpec(stride_s=0.1), "train")
    index = data.index
    assert len(data) == 2 * (n - 80)
    held = sum(v.nbytes for f in fields(index) if isinstance(v := getattr(index, f.name), np.ndarray))
    assert held < 9 * len(data)
    assert data.batch([0, len(data) - 1]).t0 == [20, n - 61]


def test_training_may_take_fewer_agents(store: Store) -> None:
    spec = replace(SMALL, focal="all", radius_m=None, max_agents=64)
    full = whole(WindowDataset(store, spec, "train"))
    data = WindowDataset(store, spec, "train", Vary(max_agents=2))
    few = whole(data)
    assert full.mask.shape[1] > 2 and few.mask.shape[1] == 2 and few.t0 == full.t0
    assert torch.equal(few.left_out + few.mask.sum(1), full.mask.sum(1)) and few.scored[:, 0].all()
    torch.testing.assert_close(few.origin, full.origin)  # the window's own place does not move
    data.set_epoch(1)
    assert [ids[0] for ids in whole(data).agent_id] != [ids[0] for ids in few.agent_id]
    assert torch.equal(torch.from_numpy(data.crowd(np.arange(len(data)))), full.mask.sum(1))


def test_half_of_the_training_windows_are_mirrored_whole(store: Store) -> None:
    """y, heading and map of a mirrored window change sign together; the others are untouched."""
    spec = WindowSpec(history_s=1.0, horizon_s=2.0, stride_s=0.5, max_segments=8)
    plain, data = WindowDataset(store, spec, "train"), WindowDataset(store, spec, "train", Vary(mirror=True, seed=3))
    a, b = whole(plain), whole(data)
    sign = torch.where((a.fut[..., 1] == b.fut[..., 1]).flatten(1).all(1), 1.0, -1.0)
    assert 0.2 < (sign < 0).float().mean() < 0.8
    for name in ("hist", "fut"):
        x, y = getattr(a, name), getattr(b, name)
        assert torch.equal(x[..., 0], y[..., 0])
        assert torch.equal(x[..., 1:] * sign[:, None, None, None], y[..., 1:])
    assert torch.equal(a.seg[..., 1] * sign[:, None, None], b.seg[..., 1])
    assert all(area is None for area, s in zip(b.drivable, sign, strict=True) if s < 0)
