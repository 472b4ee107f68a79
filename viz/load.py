"""Samples folder + store -> SceneViews, one for each (scene, t0), the worst first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from tqdm import tqdm

from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.energies import energies
from seqdiff.domains.trajectory.evaluate import aligned, open_windows
from seqdiff.domains.trajectory.io import SampleSet, Window, read_samples
from seqdiff.domains.trajectory.scene import AGENT_TYPES
from seqdiff.domains.trajectory.store import Store
from seqdiff.domains.trajectory.windows import WindowDataset
from seqdiff.viz.compare import compare_views
from seqdiff.viz.events import find_events
from seqdiff.viz.scene_view import SceneView

AROUND = 40.0  # metres of map shown beyond the outermost state of any agent


class Source:
    """A samples folder with the store that its windows were cut from."""

    def __init__(self, samples: Path | str, store: Path | str | None = None) -> None:
        self.samples: SampleSet = read_samples(samples)
        self.run: dict[str, Any] = self.samples.run
        self.windows: WindowDataset = open_windows(self.samples, _place(self.run["store"], self.samples.path, store))
        self.store: Store = self.windows.store

    def batch(self, window: Window) -> SceneBatch:
        """The recorded side of one sampled window."""
        return self.windows.batch([self.windows.find(window.scene_id, window.t0)])

    def views(self, keys: Sequence[tuple[str, int]], compare: Source | None = None) -> Iterator[SceneView]:
        """One view for each (scene id, t0), with map, signals and events; and with the futures of `compare` beside."""
        for scene_id, t0 in tqdm(keys, desc="scenes", unit="scene", disable=len(keys) < 3):
            window = self.samples.window(scene_id, t0)
            batch = self.batch(window)
            view = make_view(window, batch)
            self._add_map(view, batch)
            _add_events(view, batch)
            if compare is not None:
                other = make_view(compare.samples.window(scene_id, t0), batch)
                _add_events(other, batch)
                compare_views(view, other, self.samples.path, compare.samples.path)
            yield view

    def _add_map(self, view: SceneView, batch: SceneBatch) -> None:
        i = self.store.scene_index(view.scene_id)
        road = self.store.map(i)
        if road is None:
            return
        shift = self.store.origin(i) - batch.origin[0].numpy()
        low, high = _extent(view)
        kept = []
        for element in road.elements:
            element.points = element.points + shift
            if (element.points.max(0) >= low).all() and (element.points.min(0) <= high).all():
                kept.append(element)
        view.map, view.map_left_out = kept, len(road.elements) - len(kept)
        if batch.drivable[0] is not None:
            view.drivable = shapely.intersection(batch.drivable[0], shapely.box(*low, *high))
        steps = range(view.t0 - view.past.shape[1] + 1, view.t0 + view.futures.shape[2] + 1)
        before: dict[str, str] = {}
        shown = {element.id for element in kept}
        for step in steps:
            now = self.store.signals(i, step)
            view.signals += [(n, step - view.t0, s) for n, s in now.items() if n in shown and before.get(n) != s]
            before = now


def make_view(window: Window, batch: SceneBatch) -> SceneView:
    """The tracks and scores of one window; batch: a SceneBatch of that one window."""
    n = len(batch.agent_id[0])
    origin = batch.origin[0].numpy()
    futures = aligned([window], batch)[0][0].numpy()
    truth = _holes(batch.fut[0, :n], batch.fut_valid[0, :n])
    view = SceneView(
        scene_id=window.scene_id,
        t0=window.t0,
        dt=batch.dt,
        agent_id=batch.agent_id[0],
        agent_type=[AGENT_TYPES[t] for t in batch.type[0, :n].tolist()],
        size=batch.size[0, :n].double().numpy(),
        size_known=batch.size_known[0, :n].numpy(),
        scored=batch.scored[0, :n].numpy(),
        past=_holes(batch.hist[0, :n], batch.hist_valid[0, :n]),
        futures=futures,
        truth=truth if np.isfinite(truth).any() else None,
        scores={name: np.asarray(v, float) for name, v in window.scores.items()},
        origin=(float(origin[0]), float(origin[1])),
        focal=int(batch.focal[0]),
    )
    record = view.scores.pop("record_log_prob", None)  # of the window, not of a sample: shown on the row of the truth
    if record is not None and np.isfinite(record[0]):
        view.truth_scores["log_prob"] = float(record[0])
    view.scores = {name: v for name, v in view.scores.items() if name != "log_prob" or np.isfinite(v).any()}
    if left := int(batch.left_out[0]):
        view.notes.append(
            f"{left} agents present at t0 are beyond the window's limit of agents: neither sampled nor shown."
        )
    return view


def _holes(xyh: Any, valid: Any) -> np.ndarray:
    return np.where(valid.numpy()[..., None], xyh.double().numpy(), np.nan)


def _extent(view: SceneView) -> tuple[np.ndarray, np.ndarray]:
    xy = np.concatenate([view.past[..., :2].reshape(-1, 2), view.futures[..., :2].reshape(-1, 2)])
    return np.nanmin(xy, 0) - AROUND, np.nanmax(xy, 0) + AROUND


def _add_events(view: SceneView, batch: SceneBatch) -> None:
    view.events, view.off_road_known = find_events(view.futures, batch)
    if view.truth is not None:
        view.truth_events = find_events(batch.fut.numpy(), batch, batch.fut_valid)[0][0]
        own = energies(batch.fut[:, None], batch, batch.fut_valid)
        view.truth_scores |= {name: float(v[0, 0]) for name, v in own.items() if name in view.scores}


def _place(told: dict[str, Any], samples: Path, asked: Path | str | None) -> Path | None:
    """Where the store lies: as asked, or beside the samples if both were moved; None = where run.json says."""
    if asked is not None:
        return Path(asked)
    beside = samples.resolve().parent / Path(told["path"]).name
    return beside if not Path(told["path"]).exists() and beside.exists() else None


def read_metrics(samples: Path) -> dict[str, Any] | None:
    """metrics.json beside the samples, if `seqdiff evaluate` has written one."""
    file = samples / "metrics.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if found is not None and found.get("format") != "seqdiff-metrics":
        raise ValueError(
            f"{file} says format {found.get('format')!r}, expected 'seqdiff-metrics': run `seqdiff evaluate` again"
        )
    return found


def worst_first(source: Source, rank_by: str, row: Any) -> list[tuple[str, int]]:
    """All (scene id, t0) by `row(view)[rank_by]`, largest first, unknown last, ties in the order of the file."""
    rows = []
    for n, window in enumerate(
        tqdm(
            source.samples.windows(),
            total=len(source.samples),
            desc="windows",
            unit="window",
            disable=len(source.samples) < 20,
        )
    ):
        values = row(make_view(window, source.batch(window)))
        if rank_by not in values:
            raise ValueError(f"rank_by={rank_by!r}: there is no such column; write one of {', '.join(sorted(values))}")
        value = values[rank_by]
        rows.append((math.inf if math.isnan(value) else -value, n, (window.scene_id, window.t0)))
    return [key for *_, key in sorted(rows)]
