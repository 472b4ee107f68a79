"""The review page: sampled joint futures of some scenes in one HTML file that opens from disk, without a network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqdiff.viz.load import Source, read_metrics, worst_first
from seqdiff.viz.page_file import PageReport, PageText, summary, write_page


def review(
    samples: Path | str,
    out: Path | str,
    store: Path | str | None = None,
    max_scenes: int = 12,
    rank_by: str = "minJADE",
    scenes: Sequence[str] | None = None,
    budget_mb: float = 10.0,
    *,
    compare: Path | str | None = None,
) -> Path:
    """Write a review page of a samples folder: one HTML file that opens without a network.

    Args:
        samples: folder of samples.parquet, scores.parquet and run.json.
        out: the page.
        store: where the packed store lies; default: as run.json says; another store's content is refused.
        max_scenes: how many of the windows, the worst by `rank_by` first.
        rank_by: a column of the page's scene index.
        scenes: show these instead, each "SCENE_ID" (all its windows) or "SCENE_ID@T0".
        budget_mb: largest size in 10^6 bytes; windows beyond it are counted on stderr and on the page.
        compare: another samples folder of the same windows, to look at one and the other in turn (before and after).

    Returns:
        the page's path.
    """
    report = review_report(samples, out, store, max_scenes, rank_by, scenes, budget_mb, compare=compare)
    print(f"{report.path}: {len(report.shown)} scenes, {report.bytes / 1e6:.1f} MB", file=sys.stderr)
    if report.left_out:
        print(f"{len(report.left_out)} scenes left out, since the page would pass {budget_mb:g} MB", file=sys.stderr)
    return report.path


def review_report(
    samples: Path | str,
    out: Path | str,
    store: Path | str | None,
    max_scenes: int,
    rank_by: str,
    scenes: Sequence[str] | None,
    budget_mb: float,
    *,
    compare: Path | str | None = None,
) -> PageReport:
    """As `review`, without a word on stderr: returns what was shown and what was left out."""
    if max_scenes < 1:
        raise ValueError(f"max_scenes is {max_scenes}; write 1 or more")
    source = Source(samples, store)
    other = None if compare is None else _other(source, compare, store)
    keys = worst_first(source, rank_by, summary) if scenes is None else _asked(source, scenes)
    chosen = keys[:max_scenes] if scenes is None else keys
    metrics = read_metrics(source.samples.path)
    text = PageText(
        title=f"{source.store.manifest['name']} · seqdiff review",
        head=_head(source),
        total=len(source.samples),
        rank_by=rank_by,
        metrics=metrics,
        notes=[*(metrics or {}).get("warnings", []), *_wishes(source.run)],
    )
    return write_page(source.views(chosen, other), Path(out), text, budget_mb)


def _other(source: Source, samples: Path | str, store: Path | str | None) -> Source:
    """The samples to compare with: of the same windows of the same store."""
    other = Source(samples, store)
    lacking = [key for key in source.samples.keys if key not in set(other.samples.keys)]
    if other.store.content_hash != source.store.content_hash or lacking:
        what = f"{len(lacking)} windows are missing, e.g. {lacking[0][0]}@{lacking[0][1]}" if lacking else "other store"
        raise ValueError(f"compare={samples} is not of the same windows as {source.samples.path}: {what}")
    return other


def _asked(source: Source, scenes: Sequence[str]) -> list[tuple[str, int]]:
    keys = []
    for name in scenes:
        found = [k for k in source.samples.keys if name in (k[0], f"{k[0]}@{k[1]}")]
        if not found:
            some = ", ".join(f"{s}@{t}" for s, t in source.samples.keys[:3])
            raise ValueError(f"scenes: no samples of {name!r}; there are {len(source.samples)} windows: {some}, ...")
        keys += [k for k in found if k not in keys]
    if not keys:
        raise ValueError("scenes is empty: name at least one, or leave it out for the worst ones")
    return keys


def _wishes(run: dict[str, Any], most: int = 8) -> list[str]:
    """The wishes that the samples were drawn with, each as a line."""
    found = (run.get("constraints") or {}).get("wishes", [])
    lines = []
    for w in found[:most]:
        told = ", ".join(
            f"{k} {v}" for k, v in w.items() if k not in ("kind", "n_windows", "unknown", "satisfied", "weight")
        )
        met = "not asked" if w["satisfied"] is None else f"met by {100 * w['satisfied']:.0f} %"
        lines.append(f"Wish: {w['kind'].replace('_', ' ')}, {told}: {met}.")
    return lines + ([f"{len(found) - most} more wishes in run.json."] if len(found) > most else [])


def _head(source: Source) -> list[tuple[str, str, str]]:
    run = source.run
    checkpoint: dict[str, Any] = (
        run["checkpoint"] if isinstance(run["checkpoint"], dict) else {"path": run["checkpoint"]}
    )
    sha = str(checkpoint.get("sha256") or "")
    evaluations = f", {run['evaluations']} evaluations" if run["evaluations"] not in (None, run["steps"]) else ""
    head = [
        ("steps", f"{run['steps']}{evaluations}", "steps of the sampler, evaluations of the network"),
        ("sampler", run["sampler"], "sampler"),
        ("seed", run["seed"], "seed of the noise"),
        ("temperature", run["temperature"], "scale of the starting noise"),
        ("checkpoint", sha[:8] or checkpoint.get("path"), f"{checkpoint.get('path')}, sha256 {sha or 'unknown'}"),
        ("store", source.store.manifest["name"], f"content {source.store.content_hash[:16]}"),
        ("split", run["split"], "split of the store"),
    ]
    return [(label, str(value), title) for label, value, title in head if value is not None]
