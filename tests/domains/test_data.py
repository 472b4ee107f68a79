"""The data module: order by seed and epoch, resuming in the middle of an epoch, named splits, the embedded store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from seqdiff.domains.trajectory import data as data_module
from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.data import TrajectoryData, WindowSampler, embedded_store
from seqdiff.domains.trajectory.scene import Drop, Scene, Track
from seqdiff.domains.trajectory.store import Store, StoreWriter
from seqdiff.domains.trajectory.windows import WindowSpec

SPEC = WindowSpec(history_s=0.5, horizon_s=1.0, stride_s=0.2, radius_m=50.0)


def scenes() -> Iterator[Scene]:
    rng = np.random.default_rng(0)
    for k, split in enumerate(["learn", "learn", "check"]):
        tracks = []
        for i in range(4):
            xyh = np.column_stack([rng.uniform(-9, 9) + 0.5 * np.arange(60), np.full(60, 3.0 * i), np.zeros(60)])
            tracks.append(Track(f"{k}_{i}", "vehicle", 0, xyh, np.ones(60, bool), (4.0, 2.0)))
        yield Scene(f"scene{k}", 0.1, split, tracks)


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("data") / "s"
    with StoreWriter(out, "lanes", "made up") as writer:
        for scene in scenes():
            writer.add(scene)
    return str(out)


def made(where: str, **changes: Any) -> TrajectoryData:
    splits = {"train": "learn", "val": "check", "test": None}
    return TrajectoryData(where, SPEC, **{"batch_size": 8, "splits": splits, "random_focal": True, **changes})


def told(batches: Any) -> list[list[tuple[str, int, str]]]:
    return [list(zip(b.scene_id, b.t0, (ids[0] for ids in b.agent_id))) for b in batches]


def test_loaders_hand_out_whole_batches(where: str) -> None:
    data = made(where, eval_batch_size=16, train_stride_s=0.1)
    train, val = data.dataset("train", training=True), data.dataset("val")
    assert len(train) == 2 * (60 - 10 - 5) and len(val) == 23  # t0 at 5 ... 49, every step and every second one
    batches = list(data.val_dataloader())
    assert [type(b) for b in batches] == [SceneBatch, SceneBatch]
    assert [b.n_scenes for b in batches] == [16, 7]
    assert [t0 for b in batches for t0 in b.t0] == list(range(5, 50, 2))
    assert data.test_dataloader() == [] and data.dataset("check") is val


def test_order_depends_on_seed_and_epoch_alone(where: str) -> None:
    loader, again, other = (made(where, seed=s).train_dataloader() for s in (1, 1, 2))
    first = told(loader)
    assert first == told(again) and first != told(other)
    windows = sorted(w[:2] for batch in first for w in batch)
    assert windows == sorted((f"scene{k}", t0) for k in (0, 1) for t0 in range(5, 50, 2))
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    second = told(loader)
    assert second != first and sorted(w[:2] for batch in second for w in batch) == windows
    focal = [{w[:2]: w[2] for batch in run for w in batch} for run in (first, second)]
    assert sum(focal[0][w] != focal[1][w] for w in windows) > 10  # drawn anew in each epoch


def test_workers_change_nothing(where: str) -> None:
    assert told(made(where, num_workers=1).train_dataloader()) == told(made(where).train_dataloader())


def test_processes_share_the_windows(where: str) -> None:
    data = made(where).dataset("train", training=True)
    parts = [list(WindowSampler(data, 8, 0, replicas=4, rank=r)) for r in range(4)]
    assert [len(p) for p in parts] == [12] * 4  # 46 windows, two of them repeated
    assert sorted({i for part in parts for i in part}) == list(range(46))


class Recorder(LightningModule):
    """A model of one weight that notes which windows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[tuple[str, int, str]]] = []

    def training_step(self, batch: SceneBatch, index: int) -> torch.Tensor:
        self.seen += told([batch])
        return (self.weight - batch.hist.mean()).square().sum()

    def validation_step(self, batch: SceneBatch, index: int) -> None:
        assert set(batch.scene_id) == {"scene2"}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*LeafSpec.*:FutureWarning", "ignore:.*exists and is not empty"
)
def test_training_resumes_in_the_middle_of_an_epoch(where: str, tmp_path: Path) -> None:
    def fit(start: Path | None) -> Recorder:
        keep = ModelCheckpoint(
            tmp_path, "at-{step}", every_n_train_steps=4, save_top_k=-1, auto_insert_metric_name=False
        )
        model = Recorder()
        trainer = Trainer(
            max_steps=15,
            accelerator="cpu",
            logger=False,
            callbacks=[keep],
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
        )
        trainer.fit(model, datamodule=made(where), ckpt_path=start, weights_only=True)
        return model

    whole = fit(None)
    assert len(whole.seen) == 15 and len(whole.seen[5]) == 46 - 5 * 8  # an epoch is 6 batches, the last one short
    for step in (4, 8, 12):  # within the first and second epoch, and at the end of one
        rest = fit(tmp_path / f"at-{step}.ckpt")
        assert rest.seen == whole.seen[step:]
        assert torch.equal(rest.weight, whole.weight)


def test_wrong_names_are_explained(where: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match=r"no split 'train' for train; it has learn, check"):
        TrajectoryData(where, SPEC).train_dataloader()
    with pytest.raises(ValueError, match=r"data.splits names dev"):
        TrajectoryData(where, SPEC, splits={"dev": "check"})
    long = WindowSpec(history_s=0.5, horizon_s=9.0, stride_s=0.2)
    with pytest.raises(ValueError, match=r"no window \(scenes shorter than a window: 2\)"):
        TrajectoryData(where, long, splits={"train": "learn"}).train_dataloader()
    with pytest.raises(ValueError, match=r"the lower first"):
        made(where, scale_augment=(1.5, 0.7))


def test_configured_from_the_command_line(where: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrajectoryData, "data")
    given = [f"--data.store={where}", "--data.windows.radius_m=null", "--data.windows.focal=all"]
    given += ["--data.splits={train: learn, val: null}", "--data.scale_augment=[0.7,1.5]", "--data.windows.horizon_s=1"]
    config = parser.parse_args(given)
    again = ArgumentParser(exit_on_error=False)
    again.add_class_arguments(TrajectoryData, "data")
    build = getattr(again, "instantiate", None) or again.instantiate_classes
    data = build(again.parse_string(json.dumps(config.as_dict()))).data  # a written config replays
    assert data.windows == WindowSpec(focal="all", radius_m=None, horizon_s=1.0) and data.vary.scale == (0.7, 1.5)
    assert data.splits == {"train": "learn", "val": None, "test": "test"}
    with pytest.raises(Exception, match="history_z"):
        parser.parse_args([f"--data.store={where}", "--data.windows.history_z=2"])


class FakeRecordings:
    """Stands for the package's recordings: a file to hash, scenes, and something dropped."""

    name, source = "fake", "/home/someone/fake.npz"

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Scene | Drop]:
        yield from scenes()
        yield Drop("lost", "cut short")


def test_embedded_store_is_written_once_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqdiff.domains.trajectory.readers import recordings

    (tmp_path / "fake.npz").write_bytes(b"one")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        recordings.Recordings, "embedded", classmethod(lambda cls: FakeRecordings(tmp_path / "fake.npz"))
    )
    data = TrajectoryData("embedded", SPEC, splits={"train": "learn"})
    data.prepare_data()
    out = data.path()
    assert out.parent == tmp_path / "cache" / "seqdiff" and len(data.dataset("train")) == 46
    assert data.store.manifest["source"] == "fake.npz" and data.store.manifest["dropped"][0]["count"] == 1
    before = (out / "manifest.json").stat().st_mtime_ns
    assert embedded_store() == out and (out / "manifest.json").stat().st_mtime_ns == before
    (tmp_path / "fake.npz").write_bytes(b"two")
    newer = embedded_store()
    assert newer != out and Store(newer).content_hash == Store(out).content_hash
    assert sorted(p.name for p in out.parent.iterdir()) == sorted([out.name, newer.name])


def test_two_processes_may_unpack_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqdiff.domains.trajectory.readers import recordings

    (tmp_path / "fake.npz").write_bytes(b"one")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake = FakeRecordings(tmp_path / "fake.npz")
    monkeypatch.setattr(recordings.Recordings, "embedded", classmethod(lambda cls: fake))

    class Late(StoreWriter):
        """Finds, when it is done, that another process has written the same store."""

        def close(self) -> Path:
            with StoreWriter(self.out, "fake", "fake.npz") as other:
                for scene in scenes():
                    other.add(scene)
            return super().close()

    # the other writer of this one process needs a folder of its own for the parts
    pids = iter(range(1, 9))
    monkeypatch.setattr("seqdiff.domains.trajectory.store_write.os.getpid", lambda: next(pids))
    monkeypatch.setattr(data_module, "StoreWriter", Late)
    out = embedded_store()
    assert Store(out).n_scenes == 3 and list(out.parent.iterdir()) == [out]
    assert json.loads((out / "manifest.json").read_text())["name"] == "fake"
