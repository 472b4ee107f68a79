"""What a run leaves in its folder: metrics.csv, whole over resumes, and checkpoints/last.ckpt, whole or not at all."""

from __future__ import annotations

import csv
import io
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


def replace_file(path: Path, content: bytes) -> None:
    """Write beside and rename, so that a kill in between leaves the earlier file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class WholeCheckpointIO(TorchCheckpointIO):
    """Checkpoints appear whole or not at all (Lightning's own way copies from the temporary folder, which is not atomic where
    that is another disk), and are read with weights only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), buffer.getvalue())

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return super().load_checkpoint(path, map_location, weights_only=True)


class CurveLogger(Logger):
    """metrics.csv: a row for each time something was logged. A resumed run goes on in the same file.

    Args:
        save_dir: folder of the run.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self._dir = Path(save_dir)
        self.path = self._dir / "metrics.csv"
        self._columns: list[str] = []

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self._dir)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        row = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        if set(row) - set(self._columns):
            self._rewrite(self._rows(), list(row))
        self._dir.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    @rank_zero_only
    def keep_before(self, step: int) -> None:
        """Forget what was logged from `step` on: a run that goes on from there logs it again."""
        rows = [row for row in self._rows() if int(row["step"]) < step]
        if rows:
            self._rewrite(rows, [])
        else:
            self.path.unlink(missing_ok=True)

    def _rows(self) -> list[dict[str, str]]:
        if not self.path.is_file():
            return []
        with self.path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        # a kill may have cut the last line: it has fewer cells, of which csv makes None
        return [row for row in rows if None not in row.values() and row["step"].isdigit()]

    def _rewrite(self, rows: list[dict[str, str]], more: list[str]) -> None:
        columns = [*(rows[0] if rows else []), *self._columns, *more]
        self._columns = ["step", *sorted(set(columns) - {"step"})]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        self._dir.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, text.getvalue().encode())


class RunCheckpoint(Checkpoint):
    """Keeps `dirpath`/last.ckpt: every so many steps, at the end, and on Ctrl-C once the step at hand is done.

    Args:
        dirpath: the folder.
        every_n_steps: optimizer steps between two checkpoints.
    """

    def __init__(self, dirpath: str, every_n_steps: int = 250) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; expected at least 1 step between checkpoints")
        self.path, self.every = Path(dirpath) / "last.ckpt", every_n_steps
        self.saved = -1  # step of the newest checkpoint
        self._asked = False
        self._handler: Any = None

    def save(self, trainer: L.Trainer) -> None:
        """Write now, unless this step is written already."""
        if trainer.global_step != self.saved:
            trainer.save_checkpoint(self.path)
            self.saved = trainer.global_step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.saved = trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, CurveLogger):
                logger.keep_before(trainer.global_step)
        # several processes may be a step apart when the signal comes, and would wait for each other: Lightning's way there
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        print("\nstopping after this step; Ctrl-C once more stops at once", file=sys.stderr)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        last = trainer.should_stop or step == trainer.max_steps
        if self._asked or last or step % self.every == 0:
            self.save(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self._asked:  # here, when the last step was logged and validated
            raise KeyboardInterrupt

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        ends = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
        if trainer.should_stop or ends:
            self.save(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._give_back()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._give_back()

    def _give_back(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None
