"""Two sample sets of one window, side by side: which futures stand beside which, and the comparison in figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from seqdiff.domains.trajectory.io import NUMBERS
from seqdiff.viz.page_file import summary
from seqdiff.viz.scene_view import SceneView

SHARES = {"collision": "agents that collide", "off_road": "off the road", "infeasible": "infeasible"}


def compare_views(view: SceneView, other: SceneView, here: Path, there: Path) -> None:
    """Make `other` the comparison of `view`, in place. here, there: their samples folders, whose names they are called by.

    The figures are those of NUMBERS in `here` (what_if writes it), else means over the futures by probability, and how far
    apart the agents of the same sample numbers are: what a change did, if both were drawn from the same noise.
    """
    view.compare = other
    view.label, other.label = (here.name, there.name) if here.name != there.name else (str(here), str(there))
    file = here / NUMBERS
    if file.is_file():
        rows = json.loads(file.read_text(encoding="utf-8"))
        view.numbers = [(str(r["name"]), _text(r["before"], r["unit"]), _text(r["after"], r["unit"])) for r in rows]
        return
    view.numbers = [_row("minJADE", summary(other)["minJADE"], summary(view)["minJADE"], "m")]
    for name in [*SHARES, *sorted(n for n in view.scores if n.startswith("satisfied_"))]:
        values = [100 * _mean(v, name) for v in (other, view)]
        label = SHARES.get(name, name.removeprefix("satisfied_").replace("_", " ") + " met")
        if np.isfinite(values).any():
            view.numbers.append(_row(label, values[0], values[1], "%"))
    if view.futures.shape == other.futures.shape:
        moved = np.linalg.norm((view.futures - other.futures)[..., :2], axis=-1).mean((0, 2))  # a
        view.numbers.append(_row("agents moved by", np.nan, float(moved.mean()), "m"))
        view.numbers.append(_row(f"most, {view.agent_id[int(moved.argmax())]}", np.nan, float(moved.max()), "m"))


def _mean(view: SceneView, name: str) -> float:
    values = view.scores.get(name)
    if values is None:
        return float("nan")
    p = view.scores.get("probability", np.full(len(values), 1 / len(values)))
    return float((values * p).sum())


def _row(name: str, there: float, here: float, unit: str) -> tuple[str, str, str]:
    return name, _text(there, unit), _text(here, unit)


def _text(value: float | None, unit: str) -> str:
    return "" if value is None or not np.isfinite(value) else f"{value:.3g} {unit}"
