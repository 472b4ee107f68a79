"""The page in a headless Chromium without a network: click, sort, slider, keys, index, hover, names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqdiff.viz.browser import NoBrowser, offline_page
from seqdiff.viz.page_file import PageText, write_page
from seqdiff.viz.scene_view import SceneView
from seqdiff.viz.screenshot import screenshot

EVIL = "<img src=x onerror=alert(1)>"
Browser = tuple[Any, list[str]]


def no_browser(error: NoBrowser) -> None:
    if os.environ.get("SEQDIFF_REQUIRE_BROWSER") == "1":
        pytest.fail(f"SEQDIFF_REQUIRE_BROWSER=1, but {error}")
    pytest.skip(f"the page is not tested in a browser here: {error}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with offline_page() as (page, trouble):
            yield page, trouble
    except NoBrowser as error:
        no_browser(error)


@pytest.fixture(scope="module")
def folder(make_view: Callable[..., SceneView], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """three.html: scenes of 8, 32 and 12 agents, the second one the worst; others for one case each."""
    out = tmp_path_factory.mktemp("pages")
    views = [make_view(f"crossing-{i}", k=64 if a == 32 else 12, a=a, seed=i) for i, a in enumerate((8, 32, 12))]
    assert views[1].truth is not None
    views[1].truth[..., 0] += 40.0
    write_page(views, out / "three.html", PageText(head=[("seed", "7", "seed of the noise")]))
    evil = replace(make_view(EVIL, k=3, a=2), agent_id=[EVIL, EVIL + "2"])
    write_page([evil], out / "evil.html", PageText(title=EVIL, head=[("store", EVIL, EVIL)], notes=[EVIL]))
    bare = make_view("bare", k=2, a=1, with_map=False, with_truth=False)
    write_page([replace(bare, scores={})], out / "bare.html", PageText())
    write_page([make_view("crowd", k=4, a=256, seed=3)], out / "crowd.html", PageText())
    return out


RESET = """() => {
    const best = document.querySelector("#rank-table th[data-key='probability'] button");
    do best.click(); while (best.parentElement.getAttribute("aria-sort") !== "descending");
    for (const input of document.querySelectorAll("#layer-list input:enabled"))
        if (input.checked === (input.dataset.layer === "labels")) input.click();
    document.getElementById("fit").click();
    const row = document.querySelectorAll("#rank-table tbody tr")[1];
    history.replaceState(null, "", "#1," + row.dataset.id + ",0");
    dispatchEvent(new Event("hashchange"));
}"""


@pytest.fixture(scope="module")
def opened_three(browser: Browser, folder: Path) -> Any:
    return opened(browser, folder / "three.html")


@pytest.fixture
def three(browser: Browser, opened_three: Any) -> Iterator[Any]:
    """The page of three scenes on its worst one, as it opens."""
    yield opened_three
    assert browser[1] == []  # no request left the file, nothing on the console
    opened_three.mouse.move(5, 5)
    opened_three.evaluate(RESET)
    opened_three.wait_for_function("document.body.dataset.scene === '1' && document.body.dataset.step === '0'")


def opened(browser: Browser, path: Path, fragment: str = "") -> Any:
    page, trouble = browser
    trouble.clear()
    page.goto("about:blank")
    page.goto(path.as_uri() + fragment)
    page.wait_for_selector("body[data-ready]", timeout=30_000)
    return page


def at(page: Any, what: str) -> int:
    return int(page.evaluate(f"document.body.dataset.{what}"))


def lit(page: Any) -> list[str]:
    """Agents of the lines that are lit up."""
    return page.evaluate("[...document.querySelectorAll('#picked path.picked')].map(p => p.dataset.agent)")


def numbers(page: Any, key: str, table: str = "rank-table") -> list[float]:
    """A column from top to bottom, without the pinned row and unknown values."""
    js = """([table, key]) => { const t = document.getElementById(table);
        const c = [...t.querySelectorAll('th')].findIndex(h => h.dataset.key === key);
        const cells = [...t.tBodies[0].rows].filter(r => r.dataset.id !== '-1').map(r => r.cells[c].textContent);
        return cells.map(parseFloat).filter(v => !isNaN(v)) }"""
    return page.evaluate(js, [table, key])


def box_at(page: Any, agent: str) -> tuple[float, float]:
    """Where an agent's box is drawn, CSS pixels from the window's corner."""
    js = """id => { const g = [...document.querySelectorAll('#over .box')].find(g => g.dataset.agent === id);
        const b = g.querySelector('.body').getBoundingClientRect();
        return [b.x + b.width / 2, b.y + b.height / 2] }"""
    x, y = page.evaluate(js, agent)
    return x, y


def pixel(page: Any, xy: np.ndarray) -> tuple[float, float]:
    """Where Plotly's own axes put a point in metres."""
    js = """([x, y]) => { const plot = document.getElementById('plot'), f = plot._fullLayout;
        const b = plot.getBoundingClientRect();
        return [b.x + f.xaxis._offset + f.xaxis.l2p(x), b.y + f.yaxis._offset + f.yaxis.l2p(y)] }"""
    px, py = page.evaluate(js, [float(xy[0]), float(xy[1])])
    return px, py


def test_opens_on_the_worst_scene_and_says_what_it_is(three: Any) -> None:
    assert three.inner_text("#scene-name") == "crossing-1"
    facts = three.inner_text("#facts").replace("\n", " ")
    for fact in ("t0 41 (4.1 s)", "dt 0.100 s", "N 32", "K 64", "seed 7"):
        assert fact in facts
    assert numbers(three, "minJADE", "scene-table") == sorted(numbers(three, "minJADE", "scene-table"), reverse=True)
    assert three.evaluate("document.querySelectorAll('#plot .scatterlayer .trace').length") == 64


def test_equal_aspect_and_layers_in_register(three: Any, make_view: Callable[..., SceneView]) -> None:
    scale = three.evaluate(
        """() => { const f = document.getElementById('plot')._fullLayout;
        return [f.xaxis, f.yaxis].map(a => a._length / (a.range[1] - a.range[0])) }"""
    )
    assert scale[0] == pytest.approx(scale[1], rel=1e-6)
    now = make_view("crossing-1", k=64, a=32, seed=1).past[0, -1]
    assert box_at(three, "veh_0") == pytest.approx(pixel(three, now), abs=1.0)
    three.mouse.move(600, 400)
    three.mouse.wheel(0, -400)
    three.wait_for_timeout(600)
    assert box_at(three, "veh_0") == pytest.approx(pixel(three, now), abs=1.0)


def test_opacity_follows_probability(three: Any) -> None:
    traces = three.evaluate("document.getElementById('plot').data.map(t => [t.name, t.line.color])")
    opacity = {int(name.split()[1]): float(color.split(",")[3].rstrip(")")) for name, color in traces}
    p = dict(zip(ids(three), numbers(three, "probability")))
    by_p = [opacity[k] for k in sorted(p, key=lambda k: p[k])]
    assert by_p[0] < by_p[-1] and all(x <= y + 0.01 for x, y in pairwise(by_p))


def ids(page: Any) -> list[int]:
    return [int(v) for v in numbers(page, "id")]


def test_row_lights_up_all_agents_of_one_future(three: Any) -> None:
    three.click("#rank-table tbody tr[data-id='17']")
    assert at(three, "future") == 17
    assert lit(three) == [f"veh_{i}" for i in range(32)]
    assert (
        three.evaluate("new Set([...document.querySelectorAll('#picked path')].map(p => p.dataset.future)).size") == 1
    )
    three.keyboard.press("Escape")
    assert at(three, "future") == -1 and lit(three) == []


def test_click_on_a_line_picks_its_future(three: Any, make_view: Callable[..., SceneView]) -> None:
    view = make_view("crossing-1", k=64, a=32, seed=1)
    three.keyboard.press("Escape")
    ends = view.futures[:, :, -1, :2]
    gap = np.linalg.norm(ends[:, :, None, None] - ends[None, None], axis=-1)
    gap[np.arange(64), :, np.arange(64)] = np.inf
    k, a = divmod(int(gap.min((2, 3)).argmax()), 32)  # the loneliest end of a line
    x, y = pixel(three, ends[k, a])
    three.mouse.move(x - 1, y)
    three.mouse.click(x, y)
    assert at(three, "future") == k and len(lit(three)) == 32
    assert "on" in three.get_attribute(f"#rank-table tr[data-id='{k}']", "class")


def test_pick_is_quick(three: Any) -> None:
    js = """async () => { const out = []; const rows = document.querySelectorAll('#rank-table tbody tr');
        for (let i = 1; i < 16; i++) { const t = performance.now(); rows[i].click(); out.push(performance.now() - t) }
        return out.sort((a, b) => a - b)[7] }"""
    assert three.evaluate(js) < 100  # the script's share; measured 10 to 20 ms on a busy machine


def test_sort_reorders_and_keeps_unknown_last(three: Any) -> None:
    assert numbers(three, "probability") == sorted(numbers(three, "probability"), reverse=True)
    for key, falling in (("JADE", False), ("collision", False), ("log_prob", True)):
        three.click(f"#rank-table th[data-key='{key}'] button")
        assert numbers(three, key) == sorted(numbers(three, key), reverse=falling), key
        three.click(f"#rank-table th[data-key='{key}'] button")
        assert numbers(three, key) == sorted(numbers(three, key), reverse=not falling), key
    assert three.get_attribute("#rank-table tbody tr", "data-id") == "-1"  # the recorded truth stays on top


def test_slider_moves_the_boxes(three: Any, make_view: Callable[..., SceneView]) -> None:
    view = make_view("crossing-1", k=64, a=32, seed=1)
    three.click("#rank-table tbody tr[data-id='5']")
    three.evaluate(
        "(() => { const e = document.getElementById('time'); e.value = 30; e.dispatchEvent(new Event('input')) })()"
    )
    assert at(three, "step") == 30 and three.inner_text("#clock") == "+3.0 s"
    assert box_at(three, "veh_2") == pytest.approx(pixel(three, view.futures[5, 2, 29]), abs=1.0)
    three.keyboard.press("Escape")  # no future: the boxes follow the recorded truth
    assert view.truth is not None
    assert box_at(three, "veh_2") == pytest.approx(pixel(three, view.truth[2, 29] + [40, 0, 0]), abs=1.0)


def test_keys(three: Any) -> None:
    first = at(three, "future")
    three.keyboard.press("ArrowDown")
    assert at(three, "future") == ids(three)[1] != first
    three.keyboard.press("ArrowUp")
    assert at(three, "future") == first
    for key, step in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 60), ("Home", -20)):
        three.keyboard.press(key)
        assert at(three, "step") == step
    three.keyboard.press(" ")
    three.wait_for_function("Number(document.body.dataset.step) > -17")
    three.keyboard.press(" ")
    stopped = at(three, "step")
    three.wait_for_timeout(300)
    assert at(three, "step") == stopped


def test_marks_when_and_where(three: Any) -> None:
    three.click("#rank-table tbody tr[data-id='3']")  # veh_0 and veh_1 from step 13 to 17
    assert three.evaluate("document.querySelectorAll('#over .mark.collision').length") == 1
    item = three.locator("#incident-list li").first
    assert item.inner_text().split("\n") == ["+1.3 … +1.7 s", "collision", "veh_0 × veh_1"]
    hit = "[...document.querySelectorAll('#over .box.hit')].map(b => b.dataset.agent)"
    assert three.evaluate(hit) == []
    item.click()
    assert at(three, "step") == 13 and three.evaluate(hit) == ["veh_0", "veh_1"]
    assert three.evaluate("document.querySelectorAll('#over .mark.now').length") == 1
    three.keyboard.press("End")
    assert three.evaluate(hit) == []


def test_layers_switch(three: Any) -> None:
    def seen(css: str) -> bool:
        return three.evaluate(f"getComputedStyle(document.querySelector('{css}')).display !== 'none'")

    css = {
        "drivable": "#under .drivable_area",
        "lane_center": "#under .lane_center",
        "boundary": "#under .lane_boundary",
    }
    css |= {
        "crosswalk": "#under .crosswalk",
        "signal": "#under .signal",
        "truth": "#over .truth",
        "past": "#over .past",
    }
    for layer, selector in css.items():
        assert seen(selector), layer
        three.uncheck(f"input[data-layer='{layer}']")
        assert not seen(selector), layer
    assert not seen("#over text")
    three.check("input[data-layer='labels']")
    assert seen("#over text")


def test_hover_tells_agent_type_and_speed(three: Any) -> None:
    three.click("#rank-table tbody tr[data-id='5']")
    three.mouse.move(*box_at(three, "veh_7"))
    three.wait_for_selector("#tip:not([hidden])")
    lines = three.inner_text("#tip").split("\n")
    assert lines[0].startswith("veh_7 · vehicle · ") and lines[0].endswith(" m/s")
    assert 3.0 < float(lines[0].split(" · ")[2].removesuffix(" m/s")) < 13.0
    assert lines[1] == "+0.0 s · past" and lines[2] == "4.7 × 1.9 m"


def test_index_switches_the_scene(three: Any) -> None:
    three.locator("#scene-table tbody tr", has_text="crossing-2").click()
    three.wait_for_function(
        "document.getElementById('scene-name').textContent === 'crossing-2' && document.body.dataset.ready === '2'"
    )
    assert (
        len(lit(three)) == 12 and three.evaluate("document.querySelectorAll('#plot .scatterlayer .trace').length") == 12
    )
    three.click("#scene-table th[data-key='agents'] button")
    assert numbers(three, "agents", "scene-table") == [32, 12, 8]


def test_address_leads_back_to_the_same_view(browser: Browser, folder: Path) -> None:
    page = opened(browser, folder / "three.html", "#2,4,17")
    assert (at(page, "scene"), at(page, "future"), at(page, "step")) == (2, 4, 17)


def test_names_from_data_are_text(browser: Browser, folder: Path) -> None:
    page = opened(browser, folder / "evil.html")
    assert page.inner_text("#scene-name") == EVIL and page.title() == EVIL
    page.mouse.move(*box_at(page, EVIL))
    page.wait_for_selector("#tip:not([hidden])")
    assert page.inner_text("#tip").startswith(EVIL)
    page.click("#rank-table tbody tr[data-id='0']")
    assert EVIL in page.inner_text("#incident-list")
    page.check("input[data-layer='labels']")
    assert page.evaluate("document.querySelectorAll('img').length") == 0 and browser[1] == []


def test_one_agent_without_map_truth_or_scores(browser: Browser, folder: Path) -> None:
    page = opened(browser, folder / "bare.html")
    assert "map unknown" in page.inner_text("#layers") and "Map unknown" in page.inner_text("#notes")
    assert "off-road unknown: no map" in page.inner_text("#incident-list")
    assert page.get_attribute("body", "class") == "single" and lit(page) == ["veh_0"] and browser[1] == []


@pytest.mark.slow
def test_a_crowd_of_256(browser: Browser, folder: Path) -> None:
    page = opened(browser, folder / "crowd.html")
    assert len(lit(page)) == 256 and browser[1] == []


def test_picture(browser: Browser, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="seqdiff review"):
        screenshot(tmp_path / "gone.html", tmp_path / "a.png")
