"""`prepare`: sources and their errors, what is printed, and a store that appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from seqdiff.domains.trajectory import prepare as module
from seqdiff.domains.trajectory.prepare import SOURCES, prepare, report
from seqdiff.domains.trajectory.scene import Drop, Scene, SceneError, Track
from seqdiff.domains.trajectory.store import Store


def track(name: str, speed: float = 1.0, kind: str = "vehicle") -> Track:
    xyh = np.column_stack([np.arange(11) * speed * 0.1, np.zeros(11), np.zeros(11)])
    return Track(name, kind, 0, xyh, np.ones(11, bool), scored=name == "a")


class Fake:
    """A reader of given items; an exception among them is raised in its place."""

    name, source = "fake", "fake:here"

    def __init__(self, *items: Scene | Drop | BaseException) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Scene | Drop]:
        for item in self.items:
            if isinstance(item, BaseException):
                raise item
            yield item


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    def use(*items: Scene | Drop | BaseException) -> Fake:
        reader = Fake(*items)
        monkeypatch.setattr(module, "reader_of", lambda source, options: reader)
        return reader

    return use  # type: ignore[return-value]


def test_unknown_sources_list_the_choices_with_the_nearest_spelling(tmp_path: Path) -> None:
    with pytest.raises(SceneError, match=r"unknown kind 'comonroad'. did you mean commonroad:PATH\?") as error:
        prepare("comonroad:x", tmp_path / "out")
    assert all(f"  {kind}" in str(error.value) for kind in SOURCES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("av2", r"expected av2:PATH"),
        ("av2:", r"expected av2:PATH"),
        ("embedded:x", r"expected embedded\. Sources"),
        ("", r"unknown kind ''"),
        ("trajdata:eupeds_zara1", r"needs data_dir=FOLDER"),
        ("ethucy:zara1", r"needs data_dir=FOLDER"),
        ("trajdata:eupeds_zar1", r"did you mean trajdata:eupeds_zara1"),
        ("commonroad:/no/where", r"does not exist"),
    ],
)
def test_sources_that_miss_something(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(SceneError, match=message):
        prepare(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_came_in_and_what_was_left_out(
    tmp_path: Path, fake: type[Fake], capsys: pytest.CaptureFixture[str]
) -> None:
    fake(
        Scene("s1", 0.1, "train", [track("a"), track("b", kind="bus"), track("fast", 200.0)]),
        Drop("s2", "altered scenario", "s2.xml"),
        Scene("s3", 0.1, "test", [track("a")], meta={"av2_static": 3, "recording": "r", "true_dt": 0.5}),
        Scene("s4", 0.1, "test", []),
        Scene("s5", 0.1, "val", [track("a")], meta={"group": 3}),
        Scene("s6", 0.1, "val", [track("a")], meta={"group": 3}),
        Scene("s1", 0.1, "test", [track("a")]),
    )
    out = prepare("av2:x", tmp_path / "out")
    store = Store(out)
    assert store.scene_ids == ["s1", "s3", "s5", "s6"]
    assert store.tracks(0).id == ["a", "b"]
    assert {d["reason"]: d["count"] for d in store.manifest["dropped"]} == {
        "faster than 100 m/s": 1,
        "altered scenario": 1,
        "scene without tracks": 1,
        "scene that the store refuses": 1,  # s1 a second time
    }
    printed = " ".join(capsys.readouterr().out.split())
    for text in (
        "fake: dt 0.1 s, 4 scenes",
        "note (val): 2 scenes in 1 groups that share no recorded moment with another",
        "note (test): Argoverse type static kept as 'other' (tracks): 3",
        "note (test): r: recorded every 0.5 s, kept as 0.1 s as in published tables (scenes): 1",
        "faster than 100 m/s",
        "s1: fast: 200 m/s",
        store.content_hash[:12],
    ):
        assert text in printed


def test_the_table_holds_tracks_and_agent_seconds_of_each_class(tmp_path: Path, fake: type[Fake]) -> None:
    fake(Scene("[b]s1[/b]", 0.1, "train", [track("a"), track("b"), track("c", kind="bus")]))
    console = Console(file=StringIO(), width=120)
    report(Store(prepare("av2:x", tmp_path / "out")), {}, 0.0, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in lines if "vehicle" in line or "bus" in line]
    assert cells == [["train", "1", "none", "vehicle", "2", "1", "2"], ["", "", "", "bus", "1", "", "1"]]
    assert "left out: nothing" in "\n".join(lines)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((Scene("s1", 0.1, "train", [track("a")]), SceneError("half way")), "half way"),
        (
            (Scene("s1", 0.1, "train", [track("a")]), Scene("s2", 0.2, "train", [track("a")])),
            "dt is 0.2 s, the store's is 0.1 s",
        ),
        ((Scene("s1", 0.1, "train", [track("a", 500.0), track("b", 500.0)]),), "2 of 2 tracks move faster"),
        (
            (Drop("s1", "scenario file that cannot be read", "row 7"),),
            r"nothing to write.*s1: .*cannot be read \(row 7\)",
        ),
        ((Scene("s1", 0.1, "train", []),), "nothing to write.*scene without tracks"),
        ((), "the source gave no scene"),
        ((Scene("s1", 0.1, "train", [track("a")]), KeyboardInterrupt()), None),
    ],
)
def test_the_store_appears_whole_or_not_at_all(
    tmp_path: Path, fake: type[Fake], items: tuple[Scene, ...], message: str | None
) -> None:
    fake(*items)
    with pytest.raises(SceneError if message else KeyboardInterrupt, match=message):
        prepare("av2:x", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path: Path, fake: type[Fake]) -> None:
    fake(Scene("s1", 0.1, "train", [track("a")]))
    prepare("av2:x", tmp_path / "out")
    before = Store(tmp_path / "out").content_hash
    with pytest.raises(FileExistsError, match="exists already"):
        prepare("av2:x", tmp_path / "out")
    assert Store(tmp_path / "out").content_hash == before


def test_the_same_source_gives_the_same_store(tmp_path: Path, fake: type[Fake]) -> None:
    fake(Scene("s1", 0.1, "train", [track("a"), track("b", 3.0)]))
    hashes = [Store(prepare("av2:x", tmp_path / name)).content_hash for name in ("one", "two")]
    assert hashes[0] == hashes[1]


def test_an_eth_file_with_the_wrong_row_step_stops_prepare(tmp_path: Path) -> None:
    from seqdiff.domains.trajectory.readers.ethucy import FILES

    for folder, tail in (("all_data", ""), ("train", "_train"), ("val", "_val")):
        (tmp_path / folder).mkdir()
        for name in FILES:
            step = 6 if name == "biwi_eth" else 10
            (tmp_path / folder / f"{name}{tail}.txt").write_text(
                "".join(f"{k * step}\t1\t{k * 0.5}\t0\n" for k in range(5))
            )
    with pytest.raises(SceneError, match=r"biwi_eth_train\.txt: rows of one pedestrian are 6 frames x 4 apart"):
        prepare("ethucy:zara1", tmp_path / "out", data_dir=tmp_path)
    assert not (tmp_path / "out").exists()
