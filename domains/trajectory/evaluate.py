"""`seqdiff evaluate`: a samples folder and its store -> the table of measures, on screen and as metrics.json.

Every row is measured on the same windows and the same agents: the model's K worlds, the floors, and the recording
itself.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from tqdm import tqdm

from seqdiff.domains.trajectory import floors, metrics
from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.energies import collisions, infeasible, of_types, off_road
from seqdiff.domains.trajectory.evaluate_table import FORMAT, VERSION, show, summary
from seqdiff.domains.trajectory.floors import Measure, Noise, fit_noise, sampled
from seqdiff.domains.trajectory.io import SampleError, SampleSet, Window, read_samples
from seqdiff.domains.trajectory.store import Store
from seqdiff.domains.trajectory.windows import WindowDataset, WindowSpec
from seqdiff.score import choose_worlds, scene_distance

_BATCH = 1 << 21  # numbers (samples x agents x steps x 3) handled at once
_RATE_SAMPLES = 3  # collision, off-road and feasibility of a floor: its samples are i.i.d., so a few of them suffice
Draw = Callable[[SceneBatch], Tensor]


@dataclass
class Row:
    """One row of the table, filled batch by batch with one value per window."""

    key: str
    name: str
    k: int
    parts: list[dict[str, np.ndarray]] = field(default_factory=list)

    def values(self) -> dict[str, np.ndarray]:
        """Name -> float64 [windows]."""
        return {name: np.concatenate([p[name] for p in self.parts]) for name in self.parts[0]} if self.parts else {}


@dataclass
class Rates:
    """What is wrong with samples as driving, [b, k, ...]."""

    hit: Tensor  # bool b k a
    off: Tensor  # b k, corners outside
    off_of: Tensor  # b
    broken: Tensor  # b k, steps beyond a limit
    broken_of: Tensor  # b

    def choose(self, index: Tensor) -> Rates:
        """The samples at index [b, K]."""
        hit = self.hit.gather(1, index[..., None].expand(-1, -1, self.hit.shape[2]))
        return Rates(hit, self.off.gather(1, index), self.off_of, self.broken.gather(1, index), self.broken_of)


def evaluate(
    samples: Path,
    store: Path | None = None,
    k: list[int] | int | None = None,
    train_store: Path | None = None,
    fit: bool = True,
    quiet: bool = False,
    min_agents: int = 1,
) -> dict[str, Any]:
    """Measure a samples folder against the recording, print the table, write metrics.json beside the samples.

    Args:
        samples: folder that `seqdiff sample` wrote.
        store: where its store lies now; default: where it lay when sampled. One with another content is refused.
        k: how many worlds to measure, e.g. k=[6,20], the default. Of S samples K < S are chosen as k-medoids, each with the
            mass of its cluster, without a look at the truth. All S are always measured too.
        train_store: store on whose train split the K-sample floors' noise is fitted; default: the samples' own.
        fit: false leaves the K-sample floors out.
        quiet: true prints no table.
        min_agents: windows with fewer scored agents are in no mean (ETH/UCY has two rules: 1 and 2).

    Returns:
        what metrics.json holds: header, rows, windows, notes, warnings.

    Raises:
        SampleError: (a ValueError) the samples are damaged, or do not belong to the store.
    """
    found = read_samples(Path(samples))
    data = open_windows(found, store)
    asked = sorted({6, 20} if k is None else {k} if isinstance(k, int) else set(k))
    wanted = [n for n in asked if 1 <= n <= found.n_samples]
    ks = sorted({*wanted, found.n_samples})
    notes = [f"K = {n} was left out: there are {found.n_samples} samples" for n in asked if n not in wanted]
    model = {
        n: Row(f"model_{n}", "model" if n == found.n_samples else f"model, {n} of {found.n_samples}", n) for n in ks
    }
    draws = floor_rows(data, wanted, Path(train_store) if train_store else None, fit, notes)
    recorded = Row("recording", "recording itself", 1)
    keys, kinds = _fill(found, data, model, draws, recorded)
    rows = [*model.values(), *(row for row, _ in draws), recorded]
    enough = recorded.values()["n_agents"] >= min_agents
    if not enough.all():
        notes.append(f"{int((~enough).sum())} windows with fewer than {min_agents} scored agents are in no mean")
    out = {
        "format": FORMAT,
        "version": VERSION,
        **summary(
            found.run,
            len(data),
            [key for key, keep in zip(keys, enough, strict=True) if keep],
            np.concatenate([kind for kind, keep in zip(kinds, enough, strict=True) if keep] or [np.zeros(0, np.int64)]),
            [(r.key, r.name, r.k, {m: v[enough] for m, v in r.values().items()}) for r in rows],
            notes,
        ),
    }
    _write(found.path / "metrics.json", out)
    if not quiet:
        show(out, Console())
    return out


def _fill(
    found: SampleSet, data: WindowDataset, model: dict[int, Row], draws: list[tuple[Row, Draw]], recorded: Row
) -> tuple[list[tuple[str, int]], list[np.ndarray]]:
    """Measures every row on every window. -> (scene, t0) and the types of the scored agents of each window."""
    keys: list[tuple[str, int]] = []
    kinds: list[np.ndarray] = []
    with tqdm(total=len(found), desc="evaluating", unit=" windows", delay=2) as bar:
        for windows, batch in batches(found, data):
            pred, p = aligned(windows, batch)
            mass = None
            if all("mass" in w.scores for w in windows):
                mass = torch.from_numpy(np.stack([w.scores["mass"] for w in windows]))
            _measure_model(model, pred, p, mass, batch)
            for row, draw in draws:
                _measure_floor(row, draw(batch), batch)
            recorded.parts.append(_recorded(batch))
            kinds += [types[count].numpy() for types, count in zip(batch.type, _count(batch), strict=True)]
            keys += [(w.scene_id, w.t0) for w in windows]
            bar.update(len(windows))
    return keys, kinds


def open_windows(found: SampleSet, store: Path | None) -> WindowDataset:
    """The windows that the samples were drawn for. Raises SampleError for another store, KeyError for a window it
    lacks.
    """
    told = found.run["store"]
    path = Path(store) if store is not None else Path(told["path"])
    if not path.exists():
        raise SampleError(f"there is no store at {path}; pass store=FOLDER, where {told['name']} lies now")
    opened = Store(path)
    if opened.content_hash != told["content_hash"]:
        raise SampleError(
            f"{path} has content hash {opened.content_hash[:12]}, the samples come from {told['name']} "
            f"{told['content_hash'][:12]}: pass the store they were drawn from, or sample again"
        )
    spec = WindowSpec(**found.run["windows"])
    return WindowDataset(opened, spec, found.run["split"])


def batches(found: SampleSet, data: WindowDataset) -> Iterator[tuple[list[Window], SceneBatch]]:
    """Windows with their SceneBatch, as many at a time as fit."""
    held: list[Window] = []
    size = 0
    for window in found.windows():
        if held and max(size, window.xyh.size) * (len(held) + 1) > _BATCH:
            yield held, data.batch([data.find(w.scene_id, w.t0) for w in held])
            held, size = [], 0
        held.append(window)
        size = max(size, window.xyh.size)
    if held:
        yield held, data.batch([data.find(w.scene_id, w.t0) for w in held])


def aligned(windows: list[Window], batch: SceneBatch) -> tuple[Tensor, Tensor]:
    """Samples in the batch's order of agents, relative to its origin: float64 [b, S, a, t, 3], and probabilities [b,
    S].
    """
    b, a, t = batch.fut.shape[:3]
    s = windows[0].xyh.shape[0]
    pred = torch.zeros(b, s, a, t, 3, dtype=torch.float64)
    for i, w in enumerate(windows):
        place = {name: j for j, name in enumerate(batch.agent_id[i])}
        if set(place) != set(w.agent_ids) or w.xyh.shape[2] != t:
            odd = sorted(set(place) ^ set(w.agent_ids))[:3]
            raise SampleError(
                f"scene {w.scene_id!r} at t0 = {w.t0}: samples of {len(w.agent_ids)} agents x {w.xyh.shape[2]} steps, "
                f"the store's window {len(place)} x {t} (differing: {', '.join(odd) or 'none'})"
            )
        xyh = w.xyh.copy()
        xyh[..., :2] -= batch.origin[i].numpy()
        pred[i][:, [place[name] for name in w.agent_ids]] = torch.from_numpy(xyh)
    return pred, torch.from_numpy(np.stack([w.scores["probability"] for w in windows]))


def floor_rows(
    data: WindowDataset, ks: list[int], train_store: Path | None, fit: bool, notes: list[str]
) -> list[tuple[Row, Draw]]:
    """The floors and how each is drawn. Their noise is fitted on training windows, once for each K and measure."""
    rows: list[tuple[Row, Draw]] = [
        (Row("constant_velocity", "constant velocity", 1), floors.constant_velocity),
        (Row("constant_turn_rate", "constant turn rate", 1), floors.constant_turn_rate),
    ]
    source = Store(train_store) if train_store else data.store
    if not fit or "train" not in source.splits:
        why = "fit=false" if not fit else f"{source.path} has no train split; pass train_store=FOLDER"
        notes.append(f"K-sample floors were left out: {why}")
        return rows
    train = WindowDataset(source, data.spec, "train")
    if not len(train):
        notes.append(f"K-sample floors were left out: the train split of {source.path} has no window")
        return rows
    used = min(len(train), floors.FIT_WINDOWS)
    notes.append(
        "CV, CTR noise: K samples of constant velocity, constant turn rate with the noise that makes minADE or "
        f"minJADE of K best on {used} of {len(train)} windows of split train, never on these"
    )
    for n in (n for n in ks if n > 1):
        for turning, short, name in ((False, "CV", "velocity"), (True, "CTR", "turn_rate")):
            fitted: dict[Noise, list[Measure]] = {}
            for measure in ("minADE", "minJADE"):
                fitted.setdefault(fit_noise(train, n, turning, measure), []).append(measure)  # type: ignore[arg-type]
            for noise, measures in fitted.items():
                label = f"{short} noise, {measures[0] if len(measures) == 1 else 'both'}"
                key = f"constant_{name}_{n}_{'_'.join(measures)}"
                rows.append((Row(key, label, n), _drawer(n, noise, turning)))
                notes.append(f"{label}, K = {n}: {noise.describe()}")
    return rows


def _drawer(k: int, noise: Noise, turning: bool) -> Draw:
    return lambda batch: sampled(batch, k, noise, turning, seed=1)


def _count(batch: SceneBatch) -> Tensor:
    return batch.scored & batch.mask & batch.fut_valid[..., -1]


def _rates(pred: Tensor, batch: SceneBatch) -> Rates:
    """Over the steps that are recorded, so that samples and recording are looked at alike."""
    pred = pred.to(torch.float32)
    off, broken = off_road(pred, batch, batch.fut_valid), infeasible(pred, batch, batch.fut_valid)
    return Rates(
        hit=collisions(pred, batch, batch.fut_valid).hit.any(-1),
        off=off.bad.sum((2, 3), dtype=torch.float64),
        off_of=off.of.sum((1, 2), dtype=torch.float64),
        broken=broken.bad.sum((2, 3), dtype=torch.float64),
        broken_of=broken.of.sum((1, 2), dtype=torch.float64),
    )


def _rate_values(rates: Rates, p: Tensor, batch: SceneBatch) -> dict[str, Tensor]:
    hit = metrics.world_mean(rates.hit.to(torch.float64), _count(batch))
    return {
        "n_agents": _count(batch).sum(-1).to(torch.float64),
        "collision": (hit * p).sum(-1),
        "off_road": (rates.off * p).sum(-1),
        "off_road_of": rates.off_of,
        "infeasible": (rates.broken * p).sum(-1),
        "infeasible_of": rates.broken_of,
    }


def _measure(pred: Tensor, p: Tensor, batch: SceneBatch, rates: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Every measure of k worlds, one value per window. pred: float64 [b, k, a, t, 3]; p: [b, k]."""
    truth = batch.fut.to(torch.float64)
    f = metrics.forecast(pred, truth, batch.fut_valid, batch.scored & batch.mask, p)

    def agents(value: Tensor) -> Tensor:
        return metrics.world_mean(value[:, None], f.count)[:, 0]

    look = f.count[..., None] & batch.fut_valid
    values = {
        "minADE": agents(f.min_ade),
        "minFDE": agents(f.min_fde),
        "MR": agents(f.missed),
        "brier_minFDE": agents(f.brier_min_fde),
        "minJADE": f.min_jade,
        "minJFDE": f.min_jfde,
        "joint_MR": f.joint_miss,
        "brier_minJFDE": f.brier_min_jfde,
        "energy_score": metrics.energy_score(pred, truth, batch.fut_valid, f.count, p),
        "spread": metrics.spread(pred, look),
        "modes": metrics.modes(pred, look).to(torch.float64),
        "best_world": f.best_world.to(torch.float64),
        **rates,
    }
    if bool(of_types(batch, ("pedestrian",))[batch.mask].all()):
        values["CR_mean"] = _pedestrian_rate(pred, f.count)
    return {name: v.numpy() for name, v in values.items()}


def _pedestrian_rate(pred: Tensor, count: Tensor) -> Tensor:
    """CR_mean of each window, [b]; scene by scene, since pairs of a crowd are many."""
    scenes = [pred[i : i + 1][:, :, c] for i, c in enumerate(count)]
    rates = [metrics.pedestrian_collisions(x, torch.ones(1, x.shape[2], dtype=torch.bool)).mean() for x in scenes]
    return torch.stack(rates).to(torch.float64)


def _measure_model(rows: dict[int, Row], pred: Tensor, p: Tensor, mass: Tensor | None, batch: SceneBatch) -> None:
    rates = _rates(pred, batch)
    s = pred.shape[1]
    dist = scene_distance(pred[..., :2].to(torch.float32), batch.mask) if any(n < s for n in rows) else None
    for n, row in rows.items():
        if n == s or dist is None:
            row.parts.append(_measure(pred, p, batch, _rate_values(rates, p, batch)))
            continue
        worlds = choose_worlds(dist, n, mass)
        chosen = pred.gather(1, worlds.medoid[:, :, None, None, None].expand(-1, -1, *pred.shape[2:]))
        part = _rate_values(rates.choose(worlds.medoid), worlds.probability, batch)
        row.parts.append(_measure(chosen, worlds.probability, batch, part))


def _measure_floor(row: Row, pred: Tensor, batch: SceneBatch) -> None:
    k, few = pred.shape[1], pred[:, :_RATE_SAMPLES]
    b, n = few.shape[:2]
    rates = _rate_values(_rates(few, batch), torch.full((b, n), 1 / n, dtype=torch.float64), batch)
    row.parts.append(_measure(pred.to(torch.float64), torch.full((b, k), 1 / k, dtype=torch.float64), batch, rates))


def _recorded(batch: SceneBatch) -> dict[str, np.ndarray]:
    rates = _rates(batch.fut[:, None], batch)
    values = _rate_values(rates, torch.ones(batch.n_scenes, 1, dtype=torch.float64), batch)
    if bool(of_types(batch, ("pedestrian",))[batch.mask].all()):
        values["CR_mean"] = _pedestrian_rate(batch.fut[:, None], _count(batch))
    return {name: v.numpy() for name, v in values.items()}


def _write(file: Path, out: dict[str, Any]) -> None:
    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: plain(v) for key, v in x.items()}
        if isinstance(x, list | tuple):
            return [plain(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    beside = file.with_name(f".{file.name}.partial-{os.getpid()}")
    beside.write_text(json.dumps(plain(out), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(beside, file)
