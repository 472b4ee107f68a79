"""One self-contained HTML file from SceneViews: no network, no other file, names from data escaped."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

from seqdiff.viz.pack import CM, MRAD, Blob
from seqdiff.viz.scene_view import Event, SceneView, joint_errors

SCRIPTS = ("decode.js", "view.js", "pick.js", "panels.js", "main.js")
ROUNDING = (
    "Positions are rounded to 1 cm, headings to 1 mrad; speeds come from the rounded positions, "
    "over one step to each side."
)
COLUMNS = {
    "minJADE": ("minJADE", "least joint average displacement over the K futures, metres", True),
    "collision": ("coll.", "collision of the scene's futures, weighted by their probability", True),
    "off_road": ("off-rd", "off-road of the scene's futures, weighted by their probability", True),
    "minJFDE": ("minJFDE", "least joint final displacement over the K futures, metres", True),
    "agents": ("N", "agents", True),
    "futures": ("K", "joint futures", True),
    "top_p": ("top p", "probability of the most probable future", False),
}


@dataclass
class PageText:
    """What the page says about the sample set. `head`: (label, value, explanation), after each scene's own facts."""

    title: str = "seqdiff review"
    head: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    total: int | None = None  # windows in the sample set, where more than the page holds
    rank_by: str = "minJADE"
    metrics: dict[str, Any] | None = None  # what metrics.json holds, for the table of the whole set


@dataclass
class PageReport:
    """What became of the page: its size, and the scenes that did not fit the budget."""

    path: Path
    bytes: int
    shown: list[tuple[str, int]]
    left_out: list[tuple[str, int]]


def summary(view: SceneView) -> dict[str, float]:
    """One row of the scene index: the least joint errors and the expected energies; NaN = unknown."""
    errors = joint_errors(view)
    p = view.scores.get("probability", np.full(view.futures.shape[0], 1.0 / view.futures.shape[0]))
    row = {
        "minJADE": float(errors["JADE"].min()),
        "minJFDE": float(errors["JFDE"].min()),
        "top_p": float(p.max()) if "probability" in view.scores else math.nan,
        "agents": float(len(view.agent_id)),
        "futures": float(view.futures.shape[0]),
    }
    for name in ("collision", "off_road"):
        values = view.scores.get(name)
        row[name] = math.nan if values is None else float((values * p).sum())
    return row


def write_page(views: Iterable[SceneView], out: Path, text: PageText, budget_mb: float = 10.0) -> PageReport:
    """Write the page beside `out`, then move it there. Scenes come in the given order, the most wanted first.

    A scene that would take the file over `budget_mb` (10^6 bytes) is left out and reported. Where not even the
    first one fits, this raises ValueError.
    """
    fixed = _assets()
    used = sum(len(part.encode()) for part in fixed.values())
    scenes: list[dict] = []
    blobs: list[str] = []
    report = PageReport(out, 0, [], [])
    for view in views:
        meta, blob = _scene(view, f"blob-{len(scenes)}")
        own = {f"blob-{len(scenes)}": blob}
        if view.compare is not None:
            meta["other"], own[f"blob-{len(scenes)}-other"] = _other(view.compare, f"blob-{len(scenes)}-other")
            meta |= {"label": view.label, "numbers": view.numbers}
        need = len(_json(meta)) + sum(len(b) + 100 for b in own.values())
        if used + need > budget_mb * 1e6 - 20_000:
            if not scenes:
                raise ValueError(
                    f"scene {view.scene_id!r} at t0 {view.t0} ({view.futures.shape[0]} futures x {len(view.agent_id)} "
                    f"agents) needs a page of {(used + need) / 1e6:.1f} MB, expected at most {budget_mb:g}: "
                    "raise budget_mb, or sample fewer futures or agents"
                )
            report.left_out.append((view.scene_id, view.t0))
            continue
        used += need
        scenes.append(meta)
        blobs += [f'<script type="application/octet-stream" id="{name}">{b}</script>' for name, b in own.items()]
        report.shown.append((view.scene_id, view.t0))
    if not scenes:
        raise ValueError("no scene to show: got 0 windows, expected at least one")
    fixed["data"] = _json(_page_data(scenes, text, report))
    fixed["blobs"] = "\n".join(blobs)
    fixed["title"] = html.escape(text.title)
    page = _fill(files("seqdiff.viz").joinpath("page/page.html").read_text("utf-8"), fixed)
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".partial")
    beside.write_text(page, encoding="utf-8")
    os.replace(beside, out)
    report.bytes = out.stat().st_size
    return report


def _assets() -> dict[str, str]:
    folder = files("seqdiff.viz").joinpath("page")
    js = "\n".join(folder.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    return {
        "css": folder.joinpath("page.css").read_text("utf-8"),
        "js": _inside_script(f'"use strict";\n(() => {{\n{js}\n}})();'),
        "plotly": _inside_script(get_plotlyjs()),
    }


def _inside_script(js: str) -> str:
    return js.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _fill(template: str, parts: dict[str, str]) -> str:
    pieces = template.split("{{")
    page = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("}}", 1)
        page += [parts[name], rest]
    return "".join(page)


def _json(value: object) -> str:
    """JSON that cannot end its script element, whatever the names in it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _numbers(values: Iterable[float], digits: int = 6) -> list[float | None]:
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in map(float, values)]


def _page_data(scenes: list[dict], text: PageText, report: PageReport) -> dict:
    known = [name for name in COLUMNS if any(s["row"].get(name) is not None for s in scenes)]
    columns: list[dict[str, Any]] = [
        {"key": "id_text", "label": "scene", "title": "scene id"},
        {"key": "t0", "label": "t0", "title": "scene step of the present"},
    ]
    columns += [
        {
            "key": n,
            "label": COLUMNS[n][0],
            "title": COLUMNS[n][1],
            "down": COLUMNS[n][2],
            "digits": 0 if n in ("agents", "futures") else 2,
        }
        for n in known
    ]
    sort = (
        text.rank_by if text.rank_by in known else next((n for n in ("collision", "off_road") if n in known), "id_text")
    )
    worst = f"worst {COLUMNS[sort][0]} first" if sort in COLUMNS else "by name"
    total = text.total if text.total is not None else len(scenes) + len(report.left_out)
    notes = [ROUNDING, *text.notes]
    if report.left_out:
        names = ", ".join(f"{i} at {t}" for i, t in report.left_out[:5]) + (" …" if len(report.left_out) > 5 else "")
        notes.append(f"{len(report.left_out)} scenes left out, since the page would be too large: {names}.")
    return {
        "head": text.head,
        "notes": notes,
        "scenes": scenes,
        "scene_columns": columns,
        "sort": sort,
        "metrics": _whole_set(text.metrics),
        "sort_down": sort in COLUMNS,
        "scenes_note": f"{len(scenes)} of {total}, {worst}",
    }


def _whole_set(metrics: dict[str, Any] | None) -> dict[str, Any] | None:
    if metrics is None:
        return None
    keep = ("name", "k", "minJADE", "minJFDE", "collision", "off_road")
    title = f"{metrics['header']['n_windows']} windows, {metrics['header']['n_agents']} agents"
    return {"title": title, "rows": [{key: row.get(key) for key in keep} for row in metrics["rows"]]}


def _scene(view: SceneView, blob_id: str) -> tuple[dict, str]:
    blob = Blob()
    for name, rows in (("f", view.futures), ("p", view.past), ("t", view.truth)):
        if rows is not None:
            for axis, letter, unit in ((0, "x", CM), (1, "y", CM), (2, "h", MRAD)):
                blob.add(name + letter, rows[..., axis], unit)
    pieces, points = _map(view)
    if points is not None:
        blob.add("mx", points[:, 0], CM)
        blob.add("my", points[:, 1], CM)
    errors = {n: v for n, v in joint_errors(view).items() if np.isfinite(v).any()}
    scores = {n: _numbers(v) for n, v in {**view.scores, **errors}.items()}
    meta = {
        "id": view.scene_id,
        "t0": view.t0,
        "dt": view.dt,
        "K": view.futures.shape[0],
        "blob": blob_id,
        "arrays": blob.index,
        "agents": {
            "id": view.agent_id,
            "type": view.agent_type,
            "box": [_numbers(b) for b in view.size],
            "known": view.size_known.tolist(),
        },
        "focal": view.focal,
        "scores": scores,
        "truth_scores": dict(zip(view.truth_scores, _numbers(view.truth_scores.values()))),
        "events": None if view.events is None else [[_event(e) for e in row] for row in view.events],
        "truth_events": [_event(e) for e in view.truth_events or []],
        "off_road_known": view.off_road_known,
        "map": pieces,
        "signals": view.signals,
        "notes": _notes(view),
        "row": {"id_text": view.scene_id, "t0": view.t0, **dict(zip(row := summary(view), _numbers(row.values())))},
    }
    return meta, blob.text()


def _other(view: SceneView, blob_id: str) -> tuple[dict, str]:
    """What differs in the other sample set of a scene: its futures, scores and events."""
    blob = Blob()
    for axis, letter, unit in ((0, "x", CM), (1, "y", CM), (2, "h", MRAD)):
        blob.add("f" + letter, view.futures[..., axis], unit)
    errors = {n: v for n, v in joint_errors(view).items() if np.isfinite(v).any()}
    meta = {
        "label": view.label,
        "K": view.futures.shape[0],
        "blob": blob_id,
        "arrays": blob.index,
        "scores": {n: _numbers(v) for n, v in {**view.scores, **errors}.items()},
        "events": None if view.events is None else [[_event(e) for e in row] for row in view.events],
    }
    return meta, blob.text()


def _event(e: Event) -> dict:
    return {"kind": e.kind, "a": e.a, "b": e.b, "first": e.first, "last": e.last}


def _notes(view: SceneView) -> list[str]:
    notes = list(view.notes)
    if view.map is None and view.drivable is None:
        notes.insert(0, "Map unknown: none was recorded for this scene.")
    if view.map_left_out:
        notes.append(f"{view.map_left_out} map elements beyond the shown area are left out.")
    if (guessed := int((~view.size_known).sum())) > 0:
        notes.append(
            f"{guessed} of {len(view.agent_id)} agents have no recorded size: drawn paler, with their type's usual one."
        )
    if view.truth is None:
        notes.append("No recorded future for this scene.")
    elif (unscored := int((~view.scored).sum())) > 0:
        notes.append(f"{unscored} of {len(view.agent_id)} agents do not count in JADE and JFDE.")
    notes.append(f"World coordinates of the page's zero: {view.origin[0]:.2f}, {view.origin[1]:.2f} m.")
    return notes


def _map(view: SceneView) -> tuple[list[dict] | None, np.ndarray | None]:
    """The map as drawn pieces, bottom first, with the point counts of their rings; and all points in one array."""
    if view.map is None and view.drivable is None:
        return None, None
    pieces: list[dict] = []
    rings: list[np.ndarray] = []
    for polygon in getattr(view.drivable, "geoms", [view.drivable]) if view.drivable is not None else []:
        if polygon.is_empty or polygon.geom_type != "Polygon":
            continue
        own = [np.asarray(r.coords)[:-1, :2] for r in (polygon.exterior, *polygon.interiors)]
        pieces.append({"kind": "drivable_area", "rings": [len(r) for r in own]})
        rings += own
    signalled = {name for name, _, _ in view.signals}
    order = {"crosswalk": 0, "lane_center": 1, "lane_boundary": 2, "road_edge": 3}
    for element in sorted((e for e in view.map or [] if e.kind in order), key=lambda e: order[e.kind]):
        piece = {"kind": element.kind, "rings": [len(element.points)]}
        if element.id in signalled:
            piece["signal"] = element.id
        pieces.append(piece)
        rings.append(element.points)
    return pieces, np.concatenate(rings) if rings else None
