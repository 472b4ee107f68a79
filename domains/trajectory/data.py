"""The Lightning data module of a packed store: shuffled training windows, pinned evaluation windows.

Whole batches come out of the data set (`__getitems__`), so one process feeds a training run; workers are optional.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.scene import Drop
from seqdiff.domains.trajectory.store import Store, StoreWriter
from seqdiff.domains.trajectory.store_write import VERSION
from seqdiff.domains.trajectory.windows import Vary, WindowDataset, WindowSpec

log = logging.getLogger(__name__)
STAGES = ("train", "val", "test")
BLOCK = 16  # batches within which windows are sorted by their number of agents
Anything = TypeVar("Anything")


def identity(batch: Anything) -> Anything:
    """collate_fn of a data set that builds whole batches itself."""
    return batch


class WindowSampler(DistributedSampler[Any]):
    """Shuffles by (seed, epoch), shares the windows among processes and can start in the middle of an epoch.

    Windows with about as many agents share a batch (sorted within blocks of batches), so that little is padding.

    A DistributedSampler by type, so that Lightning leaves it in place. The first windows are repeated to give each
    process the same number.
    """

    data: WindowDataset
    skip: int = 0  # windows of this process to leave out at the start of the next pass

    def __init__(self, data: WindowDataset, batch_size: int, seed: int, replicas: int = 1, rank: int = 0) -> None:
        super().__init__(data, num_replicas=replicas, rank=rank, shuffle=True, seed=seed)
        self.data, self.batch_size = data, batch_size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order, and the data set's own draws, of the pass that begins next."""
        super().set_epoch(epoch)
        self.data.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.data), generator=draw).numpy()
        own = np.resize(order, self.total_size)[self.rank :: self.num_replicas]  # resize repeats from the front
        start, self.skip = self.skip, 0
        block = BLOCK * self.batch_size
        for lo in range(start // block * block, len(own), block):
            for i in self._alike(own[lo : lo + block])[max(0, start - lo) :]:
                yield int(i)

    def _alike(self, part: np.ndarray) -> np.ndarray:
        """The same windows, batch by batch of about equal crowds, the batches in random order."""
        part = part[np.argsort(self.data.crowd(part), kind="stable")]
        whole = len(part) // self.batch_size * self.batch_size
        batches = part[:whole].reshape(-1, self.batch_size)
        seed = self.seed + self.epoch + int(part[0])
        batches = batches[np.random.default_rng(seed).permutation(len(batches))]
        return np.concatenate([batches.reshape(-1), part[whole:]])


class WindowLoader(DataLoader[SceneBatch]):
    """A DataLoader that knows how far it got: Lightning saves and restores that with a checkpoint."""

    _done: int = 0
    _resume: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator starts at its first batch, when Lightning has told the sampler the epoch.
        state, self._resume, self._done = self._resume, None, 0
        sampler = self.sampler
        if state is not None and isinstance(sampler, WindowSampler) and state["epoch"] == sampler.epoch:
            self._done = state["batches"]
            sampler.skip = self._done * int(self.batch_size or 1)
        for batch in super().__iter__():
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Epoch and batches handed out in it."""
        epoch = self.sampler.epoch if isinstance(self.sampler, WindowSampler) else 0
        return {"epoch": epoch, "batches": self._done % max(len(self), 1)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next pass over the same epoch goes on after the batches already seen."""
        self._resume = dict(state)


class EvalBatches:
    """Batches of chosen windows, in order."""

    def __init__(self, data: WindowDataset, index: np.ndarray, batch_size: int) -> None:
        self.data, self.index, self.batch_size = data, index, batch_size
        self.n_items = len(index)

    def __iter__(self) -> Iterator[SceneBatch]:
        for start in range(0, self.n_items, self.batch_size):
            yield self.data.batch(self.index[start : start + self.batch_size])


class TrajectoryData(LightningDataModule):
    """Windows of a packed store for training, validation and test.

    store: folder that `seqdiff prepare` wrote, or "embedded" = the traffic recordings inside this package.
    windows: what a window is; the same for every split.
    train_stride_s: seconds between two t0 in training (None = as in `windows`).
    seed: order and draws of training.
    splits: the store's own split names for train, val and test; null = none.
    scale_augment: (low, high) random scale of training windows, for pedestrians.
    random_focal: training draws each window's focal agent anew each epoch.
    mirror: half of the training windows with left and right exchanged, for pedestrians.
    train_max_agents: fewer agents in training windows than `windows.max_agents`; null = the same.
    """

    def __init__(
        self,
        store: str,
        windows: WindowSpec,
        batch_size: int = 64,
        eval_batch_size: int = 64,
        train_stride_s: float | None = None,
        num_workers: int = 0,
        seed: int = 0,
        splits: dict[str, str | None] | None = None,
        scale_augment: tuple[float, float] | None = None,
        random_focal: bool = False,
        train_max_agents: int | None = None,
        mirror: bool = False,
    ) -> None:
        super().__init__()
        unknown = sorted(set(splits or {}) - set(STAGES))
        if unknown:
            raise ValueError(f"data.splits names {', '.join(unknown)}; write the store's split for train, val and test")
        if batch_size < 1 or eval_batch_size < 1:
            raise ValueError(f"batch_size {batch_size} and eval_batch_size {eval_batch_size} must be at least 1")
        self.where, self.windows, self.num_workers, self.seed = store, windows, num_workers, seed
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.splits: dict[str, str | None] = {"train": "train", "val": "val", "test": "test", **(splits or {})}
        scale = None if scale_augment is None else (float(scale_augment[0]), float(scale_augment[1]))
        self.vary = Vary(train_stride_s, random_focal, scale, seed, train_max_agents, mirror)
        self._datasets: dict[tuple[str, bool], WindowDataset] = {}

    def prepare_data(self) -> None:
        """Unpacks the embedded recordings once (Lightning calls this in one process of a machine)."""
        self.path()

    def path(self) -> Path:
        """Folder of the store; writes the embedded one if it is not there yet."""
        return embedded_store() if self.where == "embedded" else Path(self.where).expanduser()

    @cached_property
    def store(self) -> Store:
        return Store(self.path())

    def dataset(self, split: str, training: bool = False) -> WindowDataset:
        """Windows of a split (train, val, test, or a name of the store's own); `training` varies them as set.

        Raises KeyError for a split that is not there, ValueError for one without a window.
        """
        name = self.splits.get(split, split)
        if name not in self.store.splits:
            raise KeyError(
                f"{self.store.path} has no split {name!r} for {split}; it has {', '.join(self.store.splits)}; "
                f"write e.g. data.splits={{{split}: {self.store.splits[0]}}}, or null for none"
            )
        key = (name, training)
        if key not in self._datasets:
            data = WindowDataset(self.store, self.windows, name, self.vary if training else None)
            left = "; ".join(f"{reason}: {count}" for reason, count in data.left.items())
            if not len(data):
                raise ValueError(
                    f"split {name!r} of {self.store.path} has no window ({left}); "
                    "write a shorter data.windows.history_s or horizon_s, or fewer min_agents"
                )
            log.info("%s: %d windows of split %s; left out: %s", self.store.path, len(data), name, left or "none")
            self._datasets[key] = data
        return self._datasets[key]

    def train_dataloader(self) -> WindowLoader:
        data = self.dataset("train", training=True)
        world, rank, epoch = 1, 0, 0
        if self.trainer is not None:
            world, rank, epoch = self.trainer.world_size, self.trainer.global_rank, self.trainer.current_epoch
        sampler = WindowSampler(data, self.batch_size, self.seed, world, rank)
        sampler.set_epoch(epoch)
        return WindowLoader(
            dataset=data,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=identity,
        )

    def _eval_loader(self, stage: str) -> Any:
        if self.splits[stage] is None:
            return []
        return DataLoader(
            dataset=self.dataset(stage),
            batch_size=self.eval_batch_size,
            shuffle=False,
            num_workers=self.num_workers,
            collate_fn=identity,
        )

    # ---- what the core asks of a data module ----------------------------------------------------------------------

    domain = "trajectory"

    def train_batches(self) -> Iterator[SceneBatch]:
        """Training windows without variation, in a fixed random order: what codecs and normalisers are fitted on."""
        data = self.dataset("train")
        order = np.random.default_rng(self.seed).permutation(len(data))
        for start in range(0, len(order), self.eval_batch_size):
            yield data.batch(order[start : start + self.eval_batch_size])

    def eval_batches(self, split: str, limit: int | None = None) -> EvalBatches:
        """All windows of a split in order, or `limit` of them evenly spread."""
        data = self.dataset(split)
        n = len(data) if limit is None else min(limit, len(data))
        if n < 1:
            raise ValueError(f"limit is {limit}; expected at least 1 window")
        index = np.unique(np.linspace(0, len(data) - 1, n).round().astype(np.int64))
        return EvalBatches(data, index, self.eval_batch_size)

    def describe(self, split: str) -> dict[str, Any]:
        """This data's part of run.json."""
        return {
            "domain": self.domain,
            "store": {
                "path": str(self.store.path.resolve()),
                "content_hash": self.store.content_hash,
                "name": self.store.manifest["name"],
            },
            "split": self.splits.get(split, split),
            "windows": asdict(self.windows),
            "dt": self.store.dt,
        }

    def val_dataloader(self) -> Any:
        return self._eval_loader("val")

    def test_dataloader(self) -> Any:
        return self._eval_loader("test")


def embedded_store() -> Path:
    """The packed store of the package's own traffic recordings, written to the user's cache at first use.

    The folder's name holds the recordings' hash and the store's version, so neither an update nor a copy goes stale.
    """
    from seqdiff.domains.trajectory.readers.recordings import Recordings

    reader = Recordings.embedded()
    digest = hashlib.sha256(Path(reader.path).read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqdiff"
    out = cache / f"traffic-{digest}-v{VERSION}"
    if out.exists():
        return out
    writer = StoreWriter(out, name=reader.name, source=Path(reader.source).name)
    try:
        for item in tqdm(reader, desc="unpacking the embedded traffic", unit="scene", delay=2, leave=False):
            if isinstance(item, Drop):
                writer.drop(item)
            else:
                writer.add(item)
        writer.close()
    except FileExistsError:  # another process was faster; both wrote the same
        writer.abort()
    except BaseException:
        writer.abort()
        raise
    return out
