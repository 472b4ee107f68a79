"""Sample files: what is written comes back; what is broken is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from seqdiff.domains.trajectory.io import RUN_KEYS, SampleError, SampleWriter, read_samples

K, T = 3, 5


def run_info(**given):
    run = {key: None for key in RUN_KEYS} | {"n_samples": K, "dt": 0.1, "store": {"path": "x", "content_hash": "h"}}
    return run | given


@pytest.fixture
def batch(make_batch):
    b, a = 3, 4
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    return make_batch(
        torch.zeros(b, a, 2, 3),
        torch.zeros(b, a, T, 3),
        mask=mask,
        agent_id=[["a", "b", "c", "d"], ["a"], ["né<e>", "7"]],
        origin=torch.tensor([[0.0, 0.0], [500_000.25, 5_400_000.5], [-3.0, 4.0]], dtype=torch.float64),
        scene_id=["s", "s", "ü/2"],
        t0=[0, 10, 0],
    )


def futures(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, K, 4, T, 3, generator=torch.Generator().manual_seed(seed))


def scores(b: int = 3) -> dict[str, torch.Tensor]:
    return {
        "probability": torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).expand(b, K),
        "cluster": torch.tensor([0, 1, 1]).expand(b, K),
        "collision": torch.rand(b, K, generator=torch.Generator().manual_seed(1)),
        "off_road": torch.full((b, K), torch.nan),
    }


def write(out: Path, batch, overwrite: bool = False) -> Path:
    with SampleWriter(out, overwrite) as w:
        w.add(batch, futures(), scores())
        return w.close(run_info())


def test_round_trip(tmp_path, batch):
    out = write(tmp_path / "deep" / "out", batch)
    assert sorted(p.name for p in out.iterdir()) == ["run.json", "samples.parquet", "scores.parquet"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    got = read_samples(out)
    windows = list(got.windows())
    assert [(w.scene_id, w.t0) for w in windows] == [("s", 0), ("s", 10), ("ü/2", 0)] == got.keys
    for i, w in enumerate(windows):
        n = int(batch.mask[i].sum())
        want = futures()[i, :, :n].double()
        want[..., :2] += batch.origin[i]
        assert w.agent_ids == batch.agent_id[i] and w.xyh.dtype == np.float64
        np.testing.assert_array_equal(w.xyh, want.numpy())
        np.testing.assert_array_equal(w.scores["probability"], [0.5, 0.25, 0.25])
        np.testing.assert_array_equal(w.scores["collision"], scores()["collision"][i].double().numpy())
        assert np.isnan(w.scores["off_road"]).all() and np.isnan(w.scores["log_prob"]).all()
    np.testing.assert_array_equal(got.window("s", 10).xyh, windows[1].xyh)
    assert got.run["format"] == "seqdiff-samples" and got.run["n_windows"] == 3


def test_columns_are_the_pinned_ones(tmp_path, batch):
    out = write(tmp_path / "out", batch)
    t = pq.read_table(out / "samples.parquet")
    assert t.num_rows == K * (4 + 1 + 2)
    assert [str(f.type) for f in t.schema] == [
        "string", "int32", "int32", "string", "list<element: double>", "list<element: double>", "list<element: float>",
        "double",
    ]  # fmt: skip
    s = pq.read_table(out / "scores.parquet")
    assert s.column_names == ["scene_id", "t0", "sample", "log_prob", "probability", "cluster", "collision", "off_road"]
    assert s["log_prob"].null_count == 9 and str(s["cluster"].type) == "int32" and s["off_road"].null_count == 0


def test_batches_and_batch_sizes_do_not_matter(tmp_path, batch):
    whole = write(tmp_path / "a", batch)
    with SampleWriter(tmp_path / "b") as w:
        for i in range(3):
            fields = {
                name: v[i : i + 1] if isinstance(v, torch.Tensor | list) else v for name, v in vars(batch).items()
            }
            w.add(type(batch)(**fields), futures()[i : i + 1], {n: v[i : i + 1] for n, v in scores().items()})
        w.close(run_info())
    for x, y in zip(read_samples(whole).windows(), read_samples(tmp_path / "b").windows(), strict=True):
        np.testing.assert_array_equal(x.xyh, y.xyh)
        assert x.agent_ids == y.agent_ids


def test_nothing_appears_when_writing_fails(tmp_path, batch):
    with pytest.raises(RuntimeError, match="power cut"), SampleWriter(tmp_path / "out") as w:
        w.add(batch, futures(), scores())
        raise RuntimeError("power cut")
    with pytest.raises(SampleError, match="close"), SampleWriter(tmp_path / "out") as w:
        w.add(batch, futures(), scores())
    with pytest.raises(SampleError, match="run lacks split"), SampleWriter(tmp_path / "out") as w:
        w.add(batch, futures(), scores())
        w.close({k: v for k, v in run_info().items() if k != "split"})
    assert list(tmp_path.iterdir()) == []


def test_overwrite_replaces_samples_and_nothing_else(tmp_path, batch):
    out = write(tmp_path / "out", batch)
    (out / "metrics.json").write_text("{}")
    with pytest.raises(SampleError, match="overwrite=True"):
        write(out, batch)
    write(out, batch, overwrite=True)
    assert not (out / "metrics.json").exists() and len(read_samples(out)) == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(SampleError, match="choose another folder"):
        write(tmp_path / "mine", batch, overwrite=True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f, s: (f[:, :, :3], s), "futures have shape"),
        (lambda f, s: (f.masked_fill(torch.ones_like(f, dtype=torch.bool), torch.nan), s), "not finite"),
        (lambda f, s: (f, s | {"probability": s["probability"] * 2}), "sum to one"),
        (lambda f, s: (f, s | {"probability": s["probability"] * torch.nan}), "finite"),
        (lambda f, s: (f, {"probability": s["probability"]}), "wrong: cluster"),
        (lambda f, s: (f, s | {"collision": s["collision"][:, :1]}), "'collision' has shape"),
        (lambda f, s: (f, s | {"t0": s["collision"]}), "wrong: t0"),
    ],
)
def test_bad_input_is_refused(tmp_path, batch, change, match):
    with pytest.raises(SampleError, match=match), SampleWriter(tmp_path / "out") as w:
        w.add(batch, *change(futures(), scores()))


def test_a_window_twice_is_refused(tmp_path, batch):
    with pytest.raises(SampleError, match="added twice"), SampleWriter(tmp_path / "out") as w:
        w.add(batch, futures(), scores())
        w.add(batch, futures(), scores())


def edit(file: Path, change) -> None:
    pq.write_table(change(pq.read_table(file)), file)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("samples.parquet", lambda t: t.slice(1), "samples of the same agents"),
        ("samples.parquet", lambda t: t.drop_columns("x"), "column 'x' is missing"),
        ("samples.parquet", lambda t: t.slice(0, 4 * K), "1 windows in samples.parquet, 3 in scores.parquet"),
        ("scores.parquet", lambda t: t.slice(1), "rows are not 3 samples"),
        ("scores.parquet", lambda t: t.slice(0, K), "1 windows in scores.parquet, 3 in run.json"),
        ("scores.parquet", lambda t: t.set_column(4, "probability", pa.array([0.5] * 9)), "sum to 1.5, not to one"),
        ("scores.parquet", lambda t: t.drop_columns("cluster"), "lacks the columns cluster"),
    ],
)
def test_damaged_files_are_named(tmp_path, batch, name, change, match):
    out = write(tmp_path / "out", batch)
    edit(out / name, change)
    with pytest.raises(SampleError, match=match):
        list(read_samples(out).windows())


def test_run_json_is_checked(tmp_path, batch):
    out = write(tmp_path / "out", batch)
    run = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(run | {"version": 2}))
    with pytest.raises(SampleError, match="'seqdiff-samples', 2"):
        read_samples(out)
    with pytest.raises(SampleError, match="name the folder"):
        read_samples(tmp_path)
    (out / "run.json").write_text("{")
    with pytest.raises(SampleError, match="not JSON"):
        read_samples(out)
    (out / "run.json").write_text(json.dumps(run))
    (out / "samples.parquet").write_bytes((out / "samples.parquet").read_bytes()[:100])
    with pytest.raises(SampleError, match="cannot read"):
        read_samples(out)
