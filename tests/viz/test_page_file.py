"""The page as a file: what is embedded, rounded, escaped, left out."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqdiff.viz.pack import CM, INVALID, Blob
from seqdiff.viz.page_file import PageText, summary, write_page
from seqdiff.viz.scene_view import joint_errors

EVIL = "<img src=x onerror=alert(1)>"


def unpack(blob: Blob, name: str) -> np.ndarray:
    """What page/decode.js does, in numpy."""
    entry, raw = blob.index[name], zlib.decompress(base64.b64decode(blob.text()))
    n = int(np.prod(entry["shape"]))
    planes = np.frombuffer(raw[entry["at"] : entry["at"] + 4 * n], np.uint8).reshape(4, n)
    whole = np.ascontiguousarray(planes.T).view(np.int32).reshape(entry["shape"])
    for _ in range(entry["order"]):
        whole = np.cumsum(whole, -1, dtype=np.int32)
    return np.where(whole == INVALID, np.nan, whole / entry["unit"])


def page_data(path: Path) -> dict:
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', path.read_text(), re.S)
    assert found
    return json.loads(found[1])


def test_pack_rounds_to_a_centimetre_and_keeps_holes() -> None:
    rng = np.random.default_rng(0)
    smooth = np.cumsum(rng.normal(0, 3, (5, 7, 60)), -1)
    holes = smooth[0].copy()
    holes[2, :4] = np.nan
    blob = Blob()
    blob.add("smooth", smooth, CM)
    blob.add("holes", holes, CM)
    assert np.abs(unpack(blob, "smooth") - smooth).max() <= 0.005 + 1e-9
    got = unpack(blob, "holes")
    assert np.array_equal(np.isnan(got), np.isnan(holes)) and np.nanmax(np.abs(got - holes)) <= 0.005 + 1e-9


def test_pack_wraps_around_without_loss_and_refuses_other_units() -> None:
    far = np.array([[0.0, 1e7, -1e7, 1e7]])
    blob = Blob()
    blob.add("far", far, CM)
    assert np.array_equal(unpack(blob, "far"), far)
    with pytest.raises(ValueError, match="wrong units"):
        blob.add("farther", far * 10, CM)


def test_joint_errors_by_hand(make_view) -> None:  # type: ignore[no-untyped-def]
    view = make_view(k=2, a=2, t=4)
    truth = np.zeros((2, 4, 3))
    futures = np.zeros((2, 2, 4, 3))
    futures[0, 0, :, 0] = [1, 2, 3, 4]  # agent 0: mean 2.5, end 4; agent 1: 0
    futures[1, 1, :, 1] = 6.0  # agent 1: mean 6, end 6
    view = replace(view, truth=truth, futures=futures, scored=np.array([True, True]))
    errors = joint_errors(view)
    assert errors["JADE"].tolist() == [1.25, 3.0] and errors["JFDE"].tolist() == [2.0, 3.0]
    only = joint_errors(replace(view, scored=np.array([False, True])))
    assert only["JADE"].tolist() == [0.0, 6.0]
    assert np.isnan(joint_errors(replace(view, truth=None))["JADE"]).all()


def test_summary_weighs_by_probability(make_view) -> None:  # type: ignore[no-untyped-def]
    view = make_view(k=2, a=2)
    view.scores = {
        "probability": np.array([0.75, 0.25]),
        "collision": np.array([0.0, 1.0]),
        "off_road": np.full(2, np.nan),
    }
    row = summary(view)
    assert row["collision"] == 0.25 and row["top_p"] == 0.75 and np.isnan(row["off_road"])


def test_large_scene_fits_ten_megabytes(make_view, tmp_path) -> None:  # type: ignore[no-untyped-def]
    report = write_page([make_view(k=64, a=32, t=60)], tmp_path / "page.html", PageText())
    assert report.bytes == (tmp_path / "page.html").stat().st_size < 10e6
    assert report.left_out == [] and report.shown == [("crossing-7", 40)]


def test_budget_leaves_out_with_a_count(make_view, tmp_path) -> None:  # type: ignore[no-untyped-def]
    views = [make_view(f"s{i}", k=64, a=16, seed=i) for i in range(5)]
    one = write_page(views[:1], tmp_path / "one.html", PageText()).bytes
    report = write_page(views, tmp_path / "page.html", PageText(total=9), budget_mb=(one + 400_000) / 1e6)
    assert 0 < len(report.left_out) < 5 and len(report.shown) + len(report.left_out) == 5
    data = page_data(tmp_path / "page.html")
    assert len(data["scenes"]) == len(report.shown)
    assert any(note.startswith(f"{len(report.left_out)} scenes left out") for note in data["notes"])
    assert data["scenes_note"] == f"{len(report.shown)} of 9, worst minJADE first"
    assert report.bytes < one + 400_000
    with pytest.raises(ValueError, match="raise budget_mb"):
        write_page(views, tmp_path / "none.html", PageText(), budget_mb=5.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.html", "page.html"]


def test_names_from_data_are_escaped(make_view, tmp_path) -> None:  # type: ignore[no-untyped-def]
    view = replace(make_view(EVIL, k=2, a=2), agent_id=[EVIL, "</script><script>alert(2)</script>"])
    out = tmp_path / "page.html"
    write_page([view], out, PageText(title=EVIL, head=[("store", EVIL, EVIL)], notes=[EVIL]))
    text = out.read_text()
    assert "<img src=x" not in text and "alert(2)</script" not in text
    assert page_data(out)["scenes"][0]["id"] == EVIL and page_data(out)["scenes"][0]["agents"]["id"][0] == EVIL


def test_unknown_is_said(make_view, tmp_path) -> None:  # type: ignore[no-untyped-def]
    view = make_view(k=3, a=1, with_map=False, with_truth=False)
    write_page([view], tmp_path / "page.html", PageText())
    scene = page_data(tmp_path / "page.html")["scenes"][0]
    assert scene["notes"][0].startswith("Map unknown") and "No recorded future for this scene." in scene["notes"]
    assert scene["scores"]["off_road"] == [None] * 3 and "JADE" not in scene["scores"]
    assert scene["row"]["minJADE"] is None and scene["map"] is None


def test_shapes_are_checked(make_view) -> None:  # type: ignore[no-untyped-def]
    view = make_view(k=3, a=2)
    with pytest.raises(ValueError, match=r"scores\['probability'\] has shape \(2,\), expected \(3,\)"):
        replace(view, scores={"probability": np.ones(2)})
    with pytest.raises(ValueError, match="agent types"):
        replace(view, agent_type=["vehicle", "horse"])


def test_no_scene_is_an_error(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="no scene to show"):
        write_page([], tmp_path / "page.html", PageText())
    assert list(tmp_path.iterdir()) == []
