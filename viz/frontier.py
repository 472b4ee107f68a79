"""Quality against cost as one Plotly figure, on a self-contained page with the whole table below it."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

COLOURS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6", "#dd4477", "#66aa00", "#b82e2e", "#316395")
GREY = "#777777"
STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:0 auto;padding:16px;max-width:1400px;color:#222}
h1{font-size:20px;margin:0 0 4px}p{margin:4px 0;max-width:90em}table{border-collapse:collapse;margin-top:12px}
th,td{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
tr:hover td{background:#f3f6fb}"""


@dataclass(frozen=True)
class Line:
    """One method. x, y, and the interval of each y, where there is one. solid: students are drawn solid, samplers of the
    teacher dashed."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    interval: Sequence[tuple[float, float]] | None = None
    solid: bool = True


@dataclass(frozen=True)
class Panel:
    """One pair of axes, x logarithmic.

    level: height of a horizontal line and its name. bands: (x, bottom, top): where a target is met. ticks: of x.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    level: tuple[float, str] | None = None
    bands: Sequence[tuple[float, float, float]] = field(default_factory=tuple)
    log_y: bool = False
    ticks: Sequence[float] | None = None


def figure(panels: Sequence[Panel], title: str = "") -> go.Figure:
    """Panels side by side, four of them in two rows. A method has one colour in all of them, and one entry in the legend that
    shows and hides it."""
    if not panels:
        raise ValueError("no panel to draw: got 0, expected at least one")
    wide = 2 if len(panels) == 4 else len(panels)
    deep = -(-len(panels) // wide)
    fig = make_subplots(deep, wide, subplot_titles=[p.title for p in panels], horizontal_spacing=0.07)
    names = list(dict.fromkeys(line.name for p in panels for line in p.lines))
    for i, panel in enumerate(panels):
        place = {"row": i // wide + 1, "col": i % wide + 1}
        _levels(fig, panel, place, not i)
        for line in panel.lines:
            fig.add_trace(_trace(line, COLOURS[names.index(line.name) % len(COLOURS)], not i), **place)
        fig.update_xaxes(title_text=panel.x_label, type="log", **place)
        if panel.ticks:
            fig.update_xaxes(tickvals=list(panel.ticks), ticktext=[f"{t:g}" for t in panel.ticks], **place)
        fig.update_yaxes(title_text=panel.y_label, type="log" if panel.log_y else "linear", **place)
        if panel.log_y:
            fig.update_yaxes(dtick="D2", **place)
    fig.update_layout(
        title=title, template="plotly_white", height=80 + 420 * deep, margin={"l": 60, "r": 20, "t": 60, "b": 40},
        legend={"orientation": "h", "y": -0.2 / deep}, hovermode="closest",
    )  # fmt: skip
    return fig


def _trace(line: Line, colour: str, legend: bool) -> go.Scatter:
    y, error = list(line.y), None
    if line.interval is not None:
        above = [high - v for v, (_, high) in zip(y, line.interval, strict=True)]
        below = [v - low for v, (low, _) in zip(y, line.interval, strict=True)]
        error = {"type": "data", "array": above, "arrayminus": below, "thickness": 1, "width": 2}
    return go.Scatter(
        x=list(line.x), y=y, error_y=error, name=html.escape(line.name), legendgroup=line.name, showlegend=legend,
        mode="lines+markers", line={"color": colour, "width": 2.5 if line.solid else 1.5, "dash": None if line.solid else "dot"},
        marker={"size": 8 if line.solid else 5, "symbol": "circle" if line.solid else "x"},
    )  # fmt: skip


def _levels(fig: go.Figure, panel: Panel, place: dict[str, int], legend: bool) -> None:
    """The horizontal line and the target bands, below the methods."""
    xs = [x for line in panel.lines for x in line.x if x > 0 and math.isfinite(x)]
    if panel.level is not None and xs:
        value, name = panel.level
        fig.add_trace(
            go.Scatter(
                x=[min(xs) / 1.1, max(xs) * 1.1], y=[value, value], mode="lines", name=html.escape(name), showlegend=legend,
                legendgroup="level", line={"color": GREY, "width": 1, "dash": "dash"},
            ), **place,
        )  # fmt: skip
    for i, (x, bottom, top) in enumerate(panel.bands):
        fig.add_trace(
            go.Scatter(
                x=[x / 1.15, x * 1.15, x * 1.15, x / 1.15], y=[bottom, bottom, top, top], fill="toself", mode="lines",
                line={"width": 0}, fillcolor="rgba(16,150,24,.18)", name="target", legendgroup="target",
                showlegend=legend and i == 0, hoverinfo="skip",
            ), **place,
        )  # fmt: skip


def write_page(
    fig: go.Figure, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str], title: str, out: Path
) -> Path:
    """One HTML file with everything in it; opens from disk, needs no network. Text is escaped."""
    plot = fig.to_html(
        full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True},
        post_script="document.body.dataset.ready = '1';",
    )  # fmt: skip
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    text = "".join(f"<p>{html.escape(n)}</p>" for n in notes)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}'
        f"</style></head><body><h1>{html.escape(title)}</h1>{plot}{text}<table><thead><tr>{head}</tr></thead>"
        f"<tbody>{cells}</tbody></table></body></html>"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".partial")
    beside.write_text(page, encoding="utf-8")
    os.replace(beside, out)
    return out
