"""A tiny packed store and a tiny model of it, for tests of the command line, checkpoints and resuming."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from seqdiff.cli import main
from seqdiff.domains.trajectory.scene import MapElement, RoadMap, Scene, Track
from seqdiff.domains.trajectory.store import StoreWriter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start

# 8 windows of 5 + 10 frames a training scene; 2 scenes; batches of 4: an epoch has 4 steps
TINY = [
    "windows.history_s=0.4", "windows.horizon_s=1.0", "windows.stride_s=0.5", "windows.max_agents=8",
    "windows.max_segments=8", "data.init_args.batch_size=4", "data.init_args.eval_batch_size=4",
    "data.init_args.train_stride_s=0.5", "model.adapter.init_args.latent_dim=4", "model.adapter.init_args.ctx_dim=16",
    "model.adapter.init_args.layers=1", "model.adapter.init_args.heads=2", "model.adapter.init_args.pair_dim=4",
    "model.net.init_args.width=16", "model.net.init_args.depth=1", "model.net.init_args.heads=2",
    "model.net.init_args.pair_dim=4", "model.val_samples=2", "model.optimizer.warmup_steps=2",
    "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false",
]  # fmt: skip


def write_store(out: Path) -> Path:
    """Scenes of 6 s at 0.1 s, 5 agents on straight lanes and gentle arcs, with a map; two for training, one each for the rest."""
    rng = np.random.default_rng(0)
    with StoreWriter(out, "lanes", "made up") as writer:
        for n, split in enumerate(["train", "train", "val", "test"]):
            t = np.arange(60) * 0.1
            tracks = []
            for i in range(5):
                speed, turn = rng.uniform(3, 12), rng.uniform(-0.1, 0.1)
                heading = turn * t
                step = speed * 0.1 * np.column_stack([np.cos(heading), np.sin(heading)])
                xyh = np.column_stack([np.array([-20.0, 4.0 * i]) + np.cumsum(step, 0), heading])
                tracks.append(Track(f"{n}_{i}", "vehicle", 0, xyh, np.ones(60, bool), (4.5, 1.9)))
            lanes = [
                MapElement(f"l{i}", "lane_center", np.column_stack([np.linspace(-30, 90, 25), np.full(25, 4.0 * i)]))
                for i in range(5)
            ]
            road = np.array([[-40.0, -30.0], [120.0, -30.0], [120.0, 50.0], [-40.0, 50.0]])
            lanes.append(MapElement("road", "drivable_area", road))
            writer.add(Scene(f"scene{n}", 0.1, split, tracks, RoadMap(f"map{n}", lanes)))
    return out


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("tiny") / "store")


@pytest.fixture(scope="session")
def tiny_args(tiny_store: Path) -> list[str]:
    """Overrides of a fit of seconds."""
    return [f"store={tiny_store}", *TINY]


@pytest.fixture(scope="session")
def tiny_run(tiny_args: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with a validation after the 3rd and 6th, and a checkpoint every 4 steps."""
    run = tmp_path_factory.mktemp("runs") / "a"
    assert (
        fit([*tiny_args, "trainer.max_steps=6", "trainer.val_check_interval=3", "checkpoint_every=4", f"run={run}"])
        == 0
    )
    return run


def fit(args: list[str]) -> int:
    """`seqdiff fit` in this process."""
    return main(["fit", *args])
