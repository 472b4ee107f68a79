"""Sample files: samples.parquet, scores.parquet, run.json in one folder that appears whole or not at all.

samples.parquet  one row per (scene_id, t0, sample, agent_id): x, y list<float64> (metres, world frame), heading
list<float32> (radians), dt float64 (seconds). The rows of one (scene_id, t0) lie together, sample after sample.
scores.parquet   one row per (scene_id, t0, sample): log_prob float64 or null (nats per metre on the codec's range),
probability float64 (sums to one per (scene_id, t0)), cluster int32, then one float64 column per energy (NaN = unknown);
with likelihood=true record_log_prob (of the recorded future, the same in all rows of a window, NaN = not recorded whole);
where wishes were given satisfied_KIND: 1 or 0, NaN = not asked there.
run.json         how the samples were made and from which store (RUN_KEYS).

This module needs numpy and pyarrow only, so that readers of sample files need no torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from torch import Tensor

    from seqdiff.domains.trajectory.batch import SceneBatch

FORMAT, VERSION = "seqdiff-samples", 1
RUN_KEYS = (
    "store", "split", "windows", "checkpoint", "commit", "seed", "n_samples", "steps", "evaluations", "sampler",
    "temperature", "dt", "seconds", "config",
)  # fmt: skip
SAMPLES, SCORES, RUN = "samples.parquet", "scores.parquet", "run.json"
NUMBERS = "numbers.json"  # rows of a comparison with another folder, shown on the page: name, before, after, unit
RESERVED = ("scene_id", "t0", "sample", "log_prob", "probability", "cluster")
_ROWS = 4096  # smallest row group, in (sample, agent) rows; a window never straddles two
_SAMPLE_SCHEMA = pa.schema(
    [
        ("scene_id", pa.string()),
        ("t0", pa.int32()),
        ("sample", pa.int32()),
        ("agent_id", pa.string()),
        ("x", pa.list_(pa.float64())),
        ("y", pa.list_(pa.float64())),
        ("heading", pa.list_(pa.float32())),
        ("dt", pa.float64()),
    ]
)
_FLOATS = ["x.list.element", "y.list.element", "heading.list.element"]


class SampleError(ValueError):
    """Sample files that cannot be written or read as they stand; the text says what was got and what was expected."""


class Window(NamedTuple):
    """All samples of one (scene, t0)."""

    scene_id: str
    t0: int
    agent_ids: list[str]
    xyh: np.ndarray  # float64 [k, a, t, 3], world frame
    scores: dict[str, np.ndarray]  # name -> float64 [k]; NaN = unknown


class SampleWriter:
    """Writes the samples of one run, batch by batch; nothing is at `out` before `close`.

        with SampleWriter(out) as w:
            w.add(batch, futures, {"probability": p, "cluster": c, "collision": e})
            w.close(run)

    `out` must not exist or be an empty folder; with overwrite=True an earlier samples folder is replaced whole.
    """

    def __init__(self, out: Path | str, overwrite: bool = False) -> None:
        self.out = Path(out)
        self.overwrite = overwrite
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            known = (self.out / RUN).is_file() and (self.out / SAMPLES).is_file()
            if not overwrite or not known:
                hint = "pass overwrite=True, or choose another folder" if known else "choose another folder"
                raise SampleError(f"{self.out} exists and is not empty: {hint}")
        self._tmp = self.out.parent / f".{self.out.name}.partial-{os.getpid()}"
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._tmp.mkdir(parents=True)
        self._samples: pq.ParquetWriter | None = None
        self._scores: list[dict[str, Any]] = []
        self._names: tuple[str, ...] | None = None
        self._seen: set[tuple[str, int]] = set()
        self._dt: float | None = None
        self._k: int | None = None

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self._tmp.exists():  # an error, or no close(run): leave nothing behind
            self._abort()
            if kind is None:
                raise SampleError(f"{self.out} was not written: call close(run) before leaving the writer's block")

    def add(self, batch: SceneBatch, futures: Tensor, scores: dict[str, Tensor]) -> None:
        """Append the windows of one batch.

        futures: [b, k, a, t, 3] (x, y, heading) relative to batch.origin, metres and radians, the same k for the whole
        run; scores: name -> [b, k], with "probability" (sums to one over k) and "cluster"; "log_prob" if known; every
        other name is an energy, NaN = unknown. The same names in every batch.
        """
        xyh = _numpy(futures)
        b, a = tuple(batch.mask.shape)
        if xyh.ndim != 5 or (xyh.shape[0], xyh.shape[2], xyh.shape[4]) != (b, a, 3):
            raise SampleError(f"futures have shape {xyh.shape}; the batch asks for ({b}, k, {a}, t, 3)")
        k = xyh.shape[1]
        if self._k not in (None, k) or self._dt not in (None, batch.dt):
            raise SampleError(
                f"got k = {k}, dt = {batch.dt} after k = {self._k}, dt = {self._dt}: one run has one of each"
            )
        self._k, self._dt = k, batch.dt
        table = self._checked_scores(scores, b, k)
        mask, origin = _numpy(batch.mask), _numpy(batch.origin)
        parts: list[pa.Table] = []
        for i in range(b):
            key = (batch.scene_id[i], int(batch.t0[i]))
            if key in self._seen:
                raise SampleError(
                    f"scene {key[0]!r} at t0 = {key[1]} was added twice; a window is sampled once per run"
                )
            self._seen.add(key)
            ids, rows = batch.agent_id[i], np.flatnonzero(mask[i])
            if len(ids) != len(rows) or len(set(ids)) != len(ids) or not ids:
                raise SampleError(
                    f"scene {key[0]!r}: {len(rows)} agents in the mask, {len(set(ids))} distinct agent ids"
                )
            part = xyh[i][:, rows].astype(np.float64)
            if not np.isfinite(part).all():
                raise SampleError(
                    f"scene {key[0]!r} at t0 = {key[1]}: {int((~np.isfinite(part)).sum())} numbers not finite"
                )
            part[..., :2] += origin[i]
            parts.append(_rows(key, ids, part, batch.dt))
            if sum(p.num_rows for p in parts) >= _ROWS:
                self._write(parts)
                parts = []
        self._write(parts)
        self._scores.append(
            {
                "scene_id": [s for s in batch.scene_id for _ in range(k)],
                "t0": np.repeat(np.asarray(batch.t0, np.int32), k),
                "sample": np.tile(np.arange(k, dtype=np.int32), b),
                **{
                    name: v.reshape(-1).astype(np.int32 if name == "cluster" else np.float64)
                    for name, v in table.items()
                },
            }
        )

    def close(self, run: dict[str, Any]) -> Path:
        """Write scores and run.json and move the folder into place. run: RUN_KEYS at least; returns `out`."""
        try:
            missing = [key for key in RUN_KEYS if key not in run]
            if missing:
                raise SampleError(
                    f"run lacks {', '.join(missing)}; it needs {', '.join(RUN_KEYS)} (None where unknown)"
                )
            if not self._scores:
                raise SampleError("no window was added: there is nothing to write")
            if run["n_samples"] != self._k or not np.isclose(run["dt"], self._dt or 0.0):
                raise SampleError(
                    f"run says n_samples = {run['n_samples']}, dt = {run['dt']}; added were {self._k}, {self._dt}"
                )
            head = {"format": FORMAT, "version": VERSION, "domain": "trajectory", "n_windows": len(self._seen)}
            assert self._samples is not None
            self._samples.close()
            self._samples = None
            pq.write_table(self._score_table(), self._tmp / SCORES, compression="zstd")
            text = json.dumps({**run, **head}, indent=1, allow_nan=False, default=str)
            (self._tmp / RUN).write_text(text + "\n", encoding="utf-8")
            self._move()
        finally:
            if self._tmp.exists():
                self._abort()
        return self.out

    def _move(self) -> None:
        if self.out.exists() and any(self.out.iterdir()):
            old = self.out.parent / f".{self.out.name}.old-{os.getpid()}"
            os.replace(self.out, old)
            os.replace(self._tmp, self.out)
            shutil.rmtree(old)
        else:
            os.replace(self._tmp, self.out)

    def _abort(self) -> None:
        if self._samples is not None:
            self._samples.close()
            self._samples = None
        shutil.rmtree(self._tmp, ignore_errors=True)

    def _write(self, parts: list[pa.Table]) -> None:
        if not parts:
            return
        if self._samples is None:
            self._samples = pq.ParquetWriter(
                self._tmp / SAMPLES,
                _SAMPLE_SCHEMA,
                compression="zstd",
                use_dictionary=["scene_id", "t0", "sample", "agent_id", "dt"],
                use_byte_stream_split=_FLOATS,
            )
        table = pa.concat_tables(parts)
        self._samples.write_table(table, row_group_size=max(1, table.num_rows))

    def _checked_scores(self, scores: dict[str, Tensor], b: int, k: int) -> dict[str, np.ndarray]:
        names = tuple(sorted(scores))
        if self._names not in (None, names):
            raise SampleError(f"scores {names} after {self._names}: every batch must carry the same ones")
        self._names = names
        bad = [n for n in ("probability", "cluster") if n not in scores] or [n for n in names if n in RESERVED[:3]]
        if bad:
            raise SampleError(
                f"scores must hold 'probability' and 'cluster' and no key column; wrong: {', '.join(bad)}"
            )
        out = {name: _numpy(v) for name, v in scores.items()}
        for name, v in out.items():
            if v.shape != (b, k):
                raise SampleError(f"score {name!r} has shape {v.shape}; the futures ask for {(b, k)}")
        p = out["probability"].astype(np.float64)
        if not (np.isfinite(p).all() and (p >= 0).all() and np.allclose(p.sum(1), 1.0, atol=1e-6)):
            raise SampleError(
                "probabilities must be finite, not negative and sum to one over the samples of each window"
            )
        return out

    def _score_table(self) -> pa.Table:
        assert self._names is not None
        head = pa.schema([("scene_id", pa.string()), ("t0", pa.int32()), ("sample", pa.int32())])
        columns: dict[str, Any] = {
            f.name: pa.array([v for part in self._scores for v in part[f.name]], f.type) for f in head
        }
        nan = np.full(len(columns["t0"]), np.nan)
        energies = [name for name in self._names if name not in RESERVED]
        for name in (*RESERVED[3:], *energies):
            v = np.concatenate([part[name] for part in self._scores]) if name in self._names else nan
            null = np.isnan(v) if name == "log_prob" else None
            columns[name] = pa.array(v, pa.int32() if name == "cluster" else pa.float64(), mask=null)
        return pa.table(columns)


class SampleSet:
    """A samples folder, opened for reading; futures are read window by window."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.run = _read_run(self.path)
        try:
            self._file = pq.ParquetFile(self.path / SAMPLES)
            scores = pq.read_table(self.path / SCORES)
        except (OSError, pa.ArrowInvalid) as e:
            raise SampleError(f"{self.path}: cannot read {SAMPLES} or {SCORES}: {e}") from e
        _same_columns(self._file.schema_arrow, self.path / SAMPLES)
        self.n_samples = int(self.run["n_samples"])
        self.dt = float(self.run["dt"])
        self.keys, self.scores = _read_scores(scores, self.n_samples, self.path / SCORES)
        if len(self.keys) != self.run["n_windows"]:
            raise SampleError(f"{self.path}: {len(self.keys)} windows in {SCORES}, {self.run['n_windows']} in {RUN}")
        self._at = {key: i for i, key in enumerate(self.keys)}
        self._group: dict[tuple[str, int], int] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def windows(self) -> Iterator[Window]:
        """Every window in the order of the file; holds one row group in memory."""
        n = 0
        for g in range(self._file.num_row_groups):
            for window in self._read_group(g):
                n += 1
                yield window
        if n != len(self.keys):
            raise SampleError(f"{self.path}: {n} windows in {SAMPLES}, {len(self.keys)} in {SCORES}")

    def window(self, scene_id: str, t0: int) -> Window:
        """The window of one (scene, t0); reads one row group."""
        if self._group is None:
            self._group = {}
            for g in range(self._file.num_row_groups):
                t = self._file.read_row_group(g, columns=["scene_id", "t0"])
                for s, i in set(zip(t["scene_id"].to_pylist(), t["t0"].to_pylist(), strict=True)):
                    self._group[(s, i)] = g
        if (scene_id, t0) not in self._group:
            raise SampleError(f"{self.path} holds no samples of scene {scene_id!r} at t0 = {t0}")
        return next(w for w in self._read_group(self._group[scene_id, t0]) if (w.scene_id, w.t0) == (scene_id, t0))

    def _read_group(self, g: int) -> Iterator[Window]:
        t = self._file.read_row_group(g)
        where = f"{self.path / SAMPLES}, row group {g}"
        scene, t0 = np.array(t["scene_id"].to_pylist()), t["t0"].to_numpy()
        sample, agent = t["sample"].to_numpy(), t["agent_id"].to_pylist()
        lists = {name: t[name].combine_chunks() for name in ("x", "y", "heading")}
        steps = np.stack([v.value_lengths().to_numpy(zero_copy_only=False) for v in lists.values()])
        if any(t[c].null_count for c in t.column_names) or not np.allclose(t["dt"].to_numpy(), self.dt):
            raise SampleError(f"{where}: a null cell, or a dt that is not the {self.dt} of {RUN}")
        if (steps != steps[0, 0]).any():
            raise SampleError(f"{where}: lists x, y, heading of different lengths; one window grid has one horizon")
        xyh = np.stack([v.flatten().to_numpy().astype(np.float64).reshape(len(t0), -1) for v in lists.values()], -1)
        if not np.isfinite(xyh).all():
            raise SampleError(f"{where}: {int((~np.isfinite(xyh)).sum())} numbers are not finite")
        cuts = np.flatnonzero((scene[1:] != scene[:-1]) | (t0[1:] != t0[:-1])) + 1
        for lo, hi in zip([0, *cuts.tolist()], [*cuts.tolist(), len(t0)], strict=True):
            key = (str(scene[lo]), int(t0[lo]))
            i, a = self._at.get(key), (hi - lo) // self.n_samples
            ids = agent[lo : lo + a]
            whole = a * self.n_samples == hi - lo and agent[lo:hi] == ids * self.n_samples and len(set(ids)) == a
            if i is None or not whole or not np.array_equal(sample[lo:hi], np.repeat(np.arange(self.n_samples), a)):
                want = f"{self.n_samples} samples of the same agents in order, and a window that {SCORES} has too"
                raise SampleError(f"{where}, {key}: got {hi - lo} rows from row {lo}; expected {want}")
            part = xyh[lo:hi].reshape(self.n_samples, a, -1, 3)
            yield Window(*key, ids, part, {name: v[i] for name, v in self.scores.items()})


def read_samples(path: Path | str) -> SampleSet:
    """Open a samples folder; checks run.json, the columns, the keys and that probabilities sum to one.

    Raises SampleError with what was got and what was expected.
    """
    return SampleSet(path)


def _numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)


def _rows(key: tuple[str, int], ids: list[str], xyh: np.ndarray, dt: float) -> pa.Table:
    """Rows of one window. xyh: float64 [k, a, t, 3], world frame."""
    k, a, t, _ = xyh.shape
    n = k * a
    offsets = np.arange(0, n * t + 1, t, dtype=np.int32) if t else np.zeros(n + 1, np.int32)

    def lists(i: int, dtype: Any) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, np.ascontiguousarray(xyh[..., i].reshape(-1), dtype))

    agent = pa.DictionaryArray.from_arrays(np.tile(np.arange(a, dtype=np.int32), k), pa.array(ids, pa.string()))
    columns = [
        pa.repeat(pa.scalar(key[0], pa.string()), n),
        pa.repeat(pa.scalar(key[1], pa.int32()), n),
        pa.array(np.repeat(np.arange(k, dtype=np.int32), a)),
        agent.cast(pa.string()),
        lists(0, np.float64),
        lists(1, np.float64),
        lists(2, np.float32),
        pa.repeat(pa.scalar(dt, pa.float64()), n),
    ]
    return pa.Table.from_arrays(columns, schema=_SAMPLE_SCHEMA)


def _read_run(path: Path) -> dict[str, Any]:
    file = path / RUN
    if not file.is_file():
        raise SampleError(f"{path} holds no {RUN}: name the folder that `seqdiff sample out=...` wrote")
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise SampleError(f"{file} is not JSON: {e}") from e
    if not isinstance(run, dict) or run.get("format") != FORMAT or run.get("version") != VERSION:
        got = (run.get("format"), run.get("version")) if isinstance(run, dict) else type(run).__name__
        raise SampleError(f"{file}: got format, version = {got}; expected {(FORMAT, VERSION)}")
    missing = [key for key in (*RUN_KEYS, "n_windows") if key not in run]
    if missing:
        raise SampleError(f"{file} lacks {', '.join(missing)}")
    return run


def _same_columns(schema: pa.Schema, file: Path) -> None:
    for f in _SAMPLE_SCHEMA:
        got = schema.field(f.name).type if f.name in schema.names else "missing"
        if got != f.type:
            raise SampleError(f"{file}: column {f.name!r} is {got}; expected {f.type}")


def _read_scores(t: pa.Table, k: int, file: Path) -> tuple[list[tuple[str, int]], dict[str, np.ndarray]]:
    """Keys in the order of the file and each score as float64 [windows, k]."""
    missing = [c for c in RESERVED if c not in t.column_names]
    if missing:
        raise SampleError(f"{file} lacks the columns {', '.join(missing)}")
    scene, t0 = t["scene_id"].to_pylist(), t["t0"].to_pylist()
    keys = list(zip(scene[::k], t0[::k], strict=True))
    same = t.num_rows == k * len(keys) and all(
        a == b for a, b in zip(zip(scene, t0), (key for key in keys for _ in range(k)))
    )
    if not same or len(set(keys)) != len(keys) or t["sample"].to_pylist() != list(range(k)) * len(keys):
        raise SampleError(f"{file}: rows are not {k} samples, 0 to {k - 1} in order, for each (scene_id, t0) once")
    names = [c for c in t.column_names if c not in RESERVED[:3]]
    scores = {c: t[c].cast(pa.float64()).to_numpy().reshape(-1, k) for c in names}
    if not np.allclose(scores["probability"].sum(1), 1.0, atol=1e-6):
        worst = int(np.abs(scores["probability"].sum(1) - 1.0).argmax())
        total = scores["probability"][worst].sum()
        raise SampleError(f"{file}: probabilities of {keys[worst]} sum to {total}, not to one")
    return keys, scores
