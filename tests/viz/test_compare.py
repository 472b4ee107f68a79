"""Two sample sets of one window on one page: figures by hand, the toggle in a browser, refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqdiff.viz.browser import NoBrowser, offline_page
from seqdiff.viz.compare import compare_views
from seqdiff.viz.page_file import PageText, write_page
from seqdiff.viz.scene_view import SceneView

EVIL = "<img src=x onerror=alert(1)>"


def both(make_view: Callable[..., SceneView], folder: Path) -> SceneView:
    """Six futures of four agents; in the later set agent 2 ends up 5 m further east and every future collides."""
    view, other = (make_view(k=6, a=4, t=20) for _ in range(2))
    view.futures[:, 2, :, 0] += 5.0
    for v, share in ((view, 1.0), (other, 0.25)):
        v.scores = {"probability": np.full(6, 1 / 6), "collision": np.full(6, share), "off_road": np.full(6, np.nan)}
    view.scores["satisfied_goal"] = np.array([1.0, 1, 1, 0, 0, 0])
    compare_views(view, other, folder / EVIL, folder / "before")
    return view


def test_figures_by_hand(make_view: Callable[..., SceneView], tmp_path: Path) -> None:
    rows = {name: (there, here) for name, there, here in both(make_view, tmp_path).numbers}
    assert rows["agents that collide"] == ("25 %", "100 %")
    assert rows["goal met"] == ("", "50 %")
    assert rows["agents moved by"] == ("", "1.25 m")  # one of four by 5 m
    assert rows["most, veh_2"] == ("", "5 m")
    assert "off the road" not in rows  # unknown in both


def test_other_agents_or_horizons_are_refused(make_view: Callable[..., SceneView]) -> None:
    view = make_view(k=2, a=3, t=20)
    for other in (make_view(k=2, a=2, t=20), make_view(k=2, a=3, t=10)):
        with pytest.raises(ValueError, match="other agents or of another horizon"):
            replace(view, compare=other)


@pytest.mark.slow
def test_toggle_keeps_future_time_and_frame(make_view: Callable[..., SceneView], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_page([both(make_view, tmp_path)], out, PageText())
    assert "<img src=x" not in out.read_text()
    try:
        with offline_page() as (page, trouble):
            page.goto(out.as_uri() + "#0,3,12")
            page.wait_for_selector("body[data-ready]", timeout=30_000)
            labels = page.evaluate("[...document.querySelectorAll('#sides button')].map(b => b.textContent)")
            assert labels == ["before", EVIL]
            dashed = "[...document.querySelectorAll('#picked .other')].map(p => p.dataset.agent)"
            assert page.evaluate(dashed) == ["veh_2"]  # where the two sets are a metre apart
            frame = "JSON.stringify(document.getElementById('plot')._fullLayout.xaxis.range)"
            place = (
                "document.querySelectorAll('#over .box')[2].getAttribute('transform').match(/[-.0-9]+/g).map(Number)"
            )
            before, here = page.evaluate(frame), page.evaluate(place)
            page.keyboard.press("c")
            page.wait_for_function("document.body.dataset.side === '1'")
            data = page.evaluate("({ ...document.body.dataset })")
            assert (data["scene"], data["future"], data["step"]) == ("0", "3", "12")
            assert page.evaluate(frame) == before
            there = page.evaluate(place)
            assert here[0] - there[0] == pytest.approx(5.0, abs=0.02) and here[1] == pytest.approx(there[1], abs=0.02)
            assert trouble == []
    except NoBrowser as error:
        if os.environ.get("SEQDIFF_REQUIRE_BROWSER") == "1":
            pytest.fail(f"SEQDIFF_REQUIRE_BROWSER=1, but {error}")
        pytest.skip(f"the page is not tested in a browser here: {error}")
