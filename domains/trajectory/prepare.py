"""`seqdiff prepare`: recorded traffic -> a packed store, with a table of what came in and what was left out."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from seqdiff.domains.trajectory.readers.vet import vet
from seqdiff.domains.trajectory.scene import Drop, Reader, Scene, SceneError
from seqdiff.domains.trajectory.store import Store, StoreWriter


@dataclass(frozen=True)
class Options:
    """What a reader may be told besides its name: see `prepare`."""

    data_dir: Path | None
    cache: Path | None
    split: str | None
    fractions: tuple[float, float, float]
    seed: int


def _data_dir(source: str, options: Options) -> Path:
    if options.data_dir is None:
        raise SceneError(f"source={source} needs data_dir=FOLDER, where the data set's files lie")
    return options.data_dir


def _trajdata(name: str, o: Options) -> Reader:
    from seqdiff.domains.trajectory.readers.trajdata import TrajdataReader
    from seqdiff.domains.trajectory.readers.trajdata_compat import known

    known(name)
    return TrajdataReader(name, _data_dir(f"trajdata:{name}", o), o.cache)


def _ethucy(name: str, o: Options) -> Reader:
    from seqdiff.domains.trajectory.readers.ethucy import EthUcyReader

    return EthUcyReader(name, _data_dir(f"ethucy:{name}", o))


def _av2(name: str, o: Options) -> Reader:
    from seqdiff.domains.trajectory.readers.av2 import Av2Reader

    return Av2Reader(Path(name), o.split or "test")


def _commonroad(name: str, o: Options) -> Reader:
    from seqdiff.domains.trajectory.readers.commonroad import CommonRoadReader

    return CommonRoadReader(Path(name), o.fractions, o.seed)


def _recordings(name: str, o: Options) -> Reader:
    from seqdiff.domains.trajectory.readers.recordings import Recordings

    return Recordings(Path(name))


def _embedded(_: str, o: Options) -> Reader:
    from seqdiff.domains.trajectory.readers.recordings import Recordings

    return Recordings.embedded()


# kind: (what stands after the colon, what it reads, how to make the reader)
SOURCES: dict[str, tuple[str, str, Callable[[str, Options], Reader]]] = {
    "trajdata": ("NAME", "a data set that trajdata reads, e.g. trajdata:eupeds_zara1 (with data_dir=)", _trajdata),
    "ethucy": ("FOLD", "an ETH/UCY fold from its text files: eth, hotel, univ, zara1, zara2 (with data_dir=)", _ethucy),
    "av2": ("PATH", "Argoverse 2 motion-forecasting scenarios", _av2),
    "commonroad": ("PATH", "CommonRoad XML scenarios: one file or a folder", _commonroad),
    "recordings": ("PATH", "our own traffic recordings (tools/record_traffic.py)", _recordings),
    "embedded": ("", "the traffic set inside the package", _embedded),
}


def reader_of(source: str, options: Options) -> Reader:
    """The reader that `source` names. SceneError listing the choices, with the nearest spelling, otherwise."""
    kind, colon, rest = source.partition(":")
    choices = "\n".join(f"  {k}:{arg}  {text}" if arg else f"  {k}  {text}" for k, (arg, text, _) in SOURCES.items())
    if kind not in SOURCES:
        near = difflib.get_close_matches(kind, SOURCES, 1, cutoff=0.5)
        hint = f"did you mean {near[0]}{':' + SOURCES[near[0]][0] if SOURCES[near[0]][0] else ''}? " if near else ""
        raise SceneError(f"source={source!r}: unknown kind {kind!r}. {hint}Sources are:\n{choices}")
    arg, _, make = SOURCES[kind]
    if bool(arg) != bool(colon and rest):
        raise SceneError(f"source={source!r}: expected {kind}{':' + arg if arg else ''}. Sources are:\n{choices}")
    return make(rest, options)


def prepare(
    source: str,
    out: Path,
    data_dir: Path | None = None,
    cache: Path | None = None,
    split: str | None = None,
    fractions: tuple[float, float, float] = (0.7, 0.1, 0.2),
    seed: int = 0,
) -> Path:
    """Read recorded data into a packed store, and print what came in and what was left out.

    Args:
        source: KIND:ARGUMENT: trajdata:NAME and ethucy:FOLD (with data_dir=), av2:PATH, commonroad:PATH, recordings:PATH, or
            embedded.
        out: the store's folder; must not exist yet; appears whole or not at all.
        data_dir: files of a trajdata or ethucy source.
        cache: a folder to keep trajdata's cache in; default: a temporary one.
        split: split of Argoverse 2 scenarios that lie in no train/val/test folder.
        fractions: train, val and test shares of CommonRoad scenarios.
        seed: order in which groups of CommonRoad scenarios are dealt to the splits.

    Raises:
        SceneError: a source that can't be read as it stands.
        FileExistsError: `out` exists.
    """
    options = Options(_path(data_dir), _path(cache), split, tuple(fractions), int(seed))  # type: ignore[arg-type]
    reader = reader_of(source, options)
    began = time.monotonic()
    notes: dict[str, dict[str, int]] = {}
    drops: list[Drop] = []
    with StoreWriter(Path(out), reader.name, reader.source) as writer:
        for item in tqdm(
            reader, total=len(reader) or None, desc=reader.source, unit=" scenes", mininterval=1.0, leave=False
        ):
            drops += _take(item, writer, notes)[: 3 - len(drops)]
        if writer.dt is None:
            why = "; ".join(f"{d.scene_id}: {d.reason} ({d.detail})" for d in drops) or "the source gave no scene"
            raise SceneError(f"source={source}: nothing to write to {out}: {why}")
    report(Store(Path(out)), notes, time.monotonic() - began, Console())
    return Path(out)


def _path(value: Path | str | None) -> Path | None:
    return None if value is None else Path(value).expanduser()


def _take(item: Scene | Drop, writer: StoreWriter, notes: dict[str, dict[str, int]]) -> list[Drop]:
    """Packs one item; gives back what was left out of it (already counted in the store)."""
    scene, drops = (None, [item]) if isinstance(item, Drop) else vet(item)
    kept = False
    if scene is not None:
        try:
            kept = writer.add(scene)
        except SceneError as error:
            if writer.dt is not None and abs(scene.dt - writer.dt) > 1e-6 * writer.dt:
                raise
            drops = [*drops, Drop(scene.id, "scene that the store refuses", str(error))]
    for drop in drops:
        writer.drop(drop)
    if scene is not None and kept:
        _note(scene, notes.setdefault(scene.split, {}))
    return drops


def _note(scene: Scene, count: dict[str, int]) -> None:
    for key, value in scene.meta.items():
        if key == "true_dt":
            name = scene.meta.get("recording", scene.id)
            note, n = f"{name}: recorded every {value} s, kept as {scene.dt:g} s as in published tables (scenes)", 1
        elif key == "row_step_frames":
            note, n = f"rows are {value} video frames = {scene.dt:g} s apart in the whole file (scenes)", 1
        elif key.startswith("av2_"):
            note, n = f"Argoverse type {key.removeprefix('av2_')} kept as 'other' (tracks)", int(value)
        else:
            continue
        count[note] = count.get(note, 0) + n


def report(store: Store, notes: dict[str, dict[str, int]], seconds: float, console: Console) -> None:
    """Prints tracks and agent-seconds by split and class, notes, and everything left out with an example."""
    manifest: dict[str, Any] = store.manifest
    table = Table(
        title=f"{escape(manifest['name'])}: dt {store.dt:g} s, {store.n_scenes} scenes, written in {seconds:.1f} s"
    )
    for column in ("split", "scenes", "maps", "agent class"):
        table.add_column(column, justify="right" if column in ("scenes", "maps") else "left")
    for column in ("tracks", "scored", "agent-seconds"):
        table.add_column(column, justify="right")
    for split, count in sorted(manifest["counts"].items(), key=lambda kv: _split_order(kv[0])):
        first = (split, f"{count['scenes']:,}", str(count["maps"]) if count["maps"] else "none")
        for n, (kind, tracks) in enumerate(sorted(count["tracks"].items(), key=lambda kv: -kv[1])):
            lead = first if n == 0 else ("", "", "")
            scored = f"{count['scored_tracks']:,}" if n == 0 and count["scored_tracks"] else ""
            table.add_row(*map(escape, lead), kind, f"{tracks:,}", scored, f"{count['agent_seconds'][kind]:,.0f}")
        table.add_section()
    console.print(table)
    for split in manifest["splits"]:
        metas = [store.meta(i) for i in store.scenes(split)]
        if groups := {m["group"] for m in metas if "group" in m}:
            text = f"{len(metas)} scenes in {len(groups)} groups that share no recorded moment with another"
            console.print(f"note ({escape(split)}): {text}", soft_wrap=True)
    for split, counts in notes.items():
        for note, n in counts.items():
            console.print(f"note ({escape(split)}): {escape(note)}: {n}", soft_wrap=True)
    if manifest["dropped"]:
        left = Table(title="left out")
        for column in ("count", "why", "for example"):
            left.add_column(column, justify="right" if column == "count" else "left")
        for drop in sorted(manifest["dropped"], key=lambda d: -d["count"]):
            left.add_row(f"{drop['count']:,}", escape(drop["reason"]), escape(drop["examples"][0][:160]))
        console.print(left)
    else:
        console.print("left out: nothing")
    console.print(f"store: {escape(str(store.path))} ({store.content_hash[:12]})", soft_wrap=True)


def _split_order(split: str) -> tuple[int, str]:
    order = ("train", "val", "test")
    return (order.index(split) if split in order else len(order), split)
