"""From one value per window and row to the table: means as the protocols take them, notes, warnings, and its look on
screen.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from seqdiff.domains.trajectory.metrics import COLLAPSE_M, MISS_M, MODE_M
from seqdiff.domains.trajectory.scene import AGENT_TYPES

FORMAT, VERSION = "seqdiff-metrics", 1
AGENT_MEANS = ("minADE", "minFDE", "MR", "brier_minFDE", "collision")  # mean over all agents of all windows
WINDOW_MEANS = ("minJADE", "minJFDE", "joint_MR", "brier_minJFDE", "energy_score", "spread", "modes", "CR_mean")
SHARES = ("off_road", "infeasible")  # bad of looked at, over everything; None = nothing to look at (no map)
TABLES = (  # two that fit a terminal of 80 columns: (name in metrics.json, heading, digits, factor)
    (
        ("minADE", "minADE", 3, 1),
        ("minFDE", "minFDE", 3, 1),
        ("MR", "MR", 3, 1),
        ("minJADE", "minJADE", 3, 1),
        ("minJFDE", "minJFDE", 3, 1),
        ("joint_MR", "joint\nMR", 3, 1),
    ),
    (
        ("brier_minJFDE", "brier\nJFDE", 3, 1),
        ("energy_score", "energy\nscore", 3, 1),
        ("collision", "collide\n%", 2, 100),
        ("CR_mean", "CR\nmean", 3, 1),
        ("off_road", "off\nroad %", 2, 100),
        ("infeasible", "infeas.\n%", 2, 100),
        ("spread", "spread\nm", 2, 1),
        ("modes", "modes", 1, 1),
    ),
)
UNITS = (
    "metres; marginal measures are means over all agents of all windows, joint ones take one sample for the whole"
    " scene, the mean over its agents, the minimum over K and the mean over windows. MR: end point further than "
    f"{MISS_M:g} m; joint MR: share of agents that the world of minJFDE misses. Rates are over the recorded steps,"
    " weighted by probability: collide = scored agents that overlap another one (oriented boxes, pedestrians "
    "discs), off-road = box corners of motor vehicles outside the drivable area, infeasible = steps beyond a "
    f"kinematic limit. Spread: mean distance between samples; modes: samples pairwise more than {MODE_M:g} m "
    "apart. Energy score: a proper score, per square root of the number of positions."
)


def reduce(values: dict[str, np.ndarray]) -> dict[str, float | None]:
    """One number per measure from one value per window. None = unknown: nothing to take a mean of."""
    n = values["n_agents"]
    some = n > 0
    out: dict[str, float | None] = {}
    for name in AGENT_MEANS:
        if name in values:
            out[name] = float((values[name][some] * n[some]).sum() / n.sum()) if some.any() else None
    for name in WINDOW_MEANS:
        if name in values:
            v = values[name][some]
            out[name] = float(v.mean()) if len(v) and not np.isnan(v).all() else None
    for name in SHARES:
        of = values[f"{name}_of"].sum()
        out[name] = float(values[name].sum() / of) if of > 0 else None
    return out


Filled = tuple[str, str, int, dict[str, np.ndarray]]  # key, name, k, values per window


def summary(
    run: dict[str, Any],
    n_split: int,
    keys: list[tuple[str, int]],
    kinds: np.ndarray,
    rows: list[Filled],
    notes: list[str],
) -> dict[str, Any]:
    """What metrics.json holds but for its format: header, rows, windows, notes, warnings.

    n_split: windows of the split; kinds: types of all scored agents.
    """
    n = rows[-1][3]["n_agents"]
    spec = run["windows"]
    header = {
        "store": run["store"]["name"],
        "content_hash": run["store"]["content_hash"],
        "split": run["split"],
        "dt": run["dt"],
        "history_s": spec["history_s"],
        "horizon_s": spec["horizon_s"],
        "windows": spec,
        "n_windows": int((n > 0).sum()),
        "n_agents": int(n.sum()),
        "agents": {AGENT_TYPES[i]: int(c) for i, c in enumerate(np.bincount(kinds, minlength=len(AGENT_TYPES))) if c},
        "n_samples": run["n_samples"],
        "steps": run["steps"],
        "evaluations": run["evaluations"],
        "sampler": run["sampler"],
        "temperature": run["temperature"],
        "seed": run["seed"],
        "checkpoint": run["checkpoint"],
        "units": UNITS,
    }
    notes = list(notes)
    if len(keys) != n_split:
        notes.append(f"samples cover {len(keys)} of the {n_split} windows of split {run['split']}")
    if (n == 0).any():
        notes.append(f"{int((n == 0).sum())} windows without a scored agent are in no mean")
    if run.get("likelihood"):
        header["likelihood"] = run["likelihood"]
        notes.append(likelihood_note(run["likelihood"]))
    return {
        "header": header,
        "rows": [{"key": key, "name": name, "k": k, **reduce(values)} for key, name, k, values in rows],
        "windows": _windows(keys, rows),
        "notes": notes,
        "warnings": _warnings(rows),
    }


def likelihood_note(found: dict[str, Any]) -> str:
    """What run.json's "likelihood" says, in a sentence: of samples, and of the recorded futures given their scenes."""

    def number(x: float | None) -> str:
        return "unknown" if x is None else f"{x:.3f}"

    records = found["records"]
    text = (
        f"log-density, nats a latent dimension ({found['measure']}; field: {found['field']}; {found['evaluations']} evaluations, "
        f"{found['trace']} trace): samples {number(found['samples_per_dim'])}"
    )
    if found["standard_error"] is not None:
        text += f", each total known to +-{found['standard_error']:.2g} nats"
    if found["not_finite"]:
        text += f", {found['not_finite']} of them unknown"
    if records["known"]:
        text += (
            f"; recorded futures given the scene {number(records['per_dim'])}, samples of those windows "
            f"{number(records['samples_per_dim'])}; windows by the share of samples that are less likely than the record, in "
            f"fifths: {' '.join(map(str, records['rank_fifths']))} (alike = calibrated)"
        )
    if records["unknown"]:
        text += f"; of {records['unknown']} windows the record is unknown: an agent's future is not recorded whole"
    if records["full"] is not None:
        text += f"; records in all their coordinates, residual included: {records['full']:.1f} nats a window"
    return text


def _windows(keys: list[tuple[str, int]], rows: list[Filled]) -> list[dict[str, Any]]:
    """Per window what the page sorts by: joint and marginal errors of the model at each K, and constant velocity's."""
    shown = (
        "minJADE",
        "minJFDE",
        "minADE",
        "minFDE",
        "joint_MR",
        "energy_score",
        "collision",
        "spread",
        "modes",
        "best_world",
    )
    kept = [(key, values) for key, _, _, values in rows if key.startswith("model_") or key == "constant_velocity"]
    n = rows[-1][3]["n_agents"]
    return [
        {
            "scene_id": scene,
            "t0": int(t0),
            "n_agents": int(n[i]),
            **{key: {m: float(values[m][i]) for m in shown if m in values} for key, values in kept},
        }
        for i, (scene, t0) in enumerate(keys)
    ]


def _warnings(rows: list[Filled]) -> list[str]:
    out = []
    for key, name, k, values in rows:
        if key.startswith("model_") and k > 1:
            v = values["spread"][values["n_agents"] > 0]
            collapsed = int((v < COLLAPSE_M).sum())
            if collapsed > 0.05 * len(v):
                out.append(
                    f"{name}: in {collapsed} of {len(v)} windows the {k} samples lie less than {COLLAPSE_M:g} m "
                    "apart on average: collapsed; sample at a higher temperature, or train longer"
                )
    return out


def show(out: dict[str, Any], console: Console) -> None:
    """Prints header, tables, notes and warnings."""
    h = out["header"]
    console.print(
        f"{h['store']}, split {h['split']}: N = {h['n_agents']:,} agents in {h['n_windows']:,} windows, "
        f"dt {h['dt']:g} s, history {h['history_s']:g} s, horizon {h['horizon_s']:g} s\n"
        f"{h['n_samples']} samples, {h['steps']} steps, {h['evaluations']} evaluations, sampler {h['sampler']}, "
        f"temperature {h['temperature']}, seed {h['seed']}",
        style="bold",
        markup=False,
        highlight=False,
    )
    for table in TABLES:
        console.print(_table(out["rows"], table))
        console.print()
    for note in out["notes"]:
        console.print(f"note: {note}", markup=False, highlight=False)
    for warning in out["warnings"]:
        console.print(f"WARNING: {warning}", style="bold red", markup=False, highlight=False)


def _table(rows: list[dict[str, Any]], columns: tuple[tuple[str, str, int, int], ...]) -> Table:
    columns = tuple(c for c in columns if any(c[0] in row for row in rows))
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("K", *(heading for _, heading, _, _ in columns)):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    shown = [row for row in rows if any(name in row for name, *_ in columns)]
    for i, row in enumerate(shown):
        cells = [_cell(row, name, digits, factor) for name, _, digits, factor in columns]
        last = i + 1 < len(shown) and _group(row) != _group(shown[i + 1])
        k = "" if row["key"] == "recording" else str(row["k"])
        table.add_row(escape(row["name"]), k, *cells, end_section=last)
    return table


def _group(row: dict[str, Any]) -> str:
    return str(row["key"]).split("_")[0]


def _cell(row: dict[str, Any], name: str, digits: int, factor: int) -> str:
    if name not in row:
        return "-"
    value = row[name]
    if value is None:
        return "unknown" if name == "off_road" else "-"
    return "nan" if math.isnan(value) else f"{factor * value:.{digits}f}"
