"""What a training shows: one bar of steps, a line for each validation, no remarks that are not the user's business."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

NOT_THE_USERS = (
    ".*does not have many workers.*",  # batches are built faster than they are used
    ".*LeafSpec.*",
    ".*number of training batches.*smaller than the logging interval.*",
    ".*callbacks used to create the checkpoint.*",  # validate and test need none
)


def quiet() -> None:
    """Leave out Lightning's advertisements and the warnings of its own parts; everything else stays."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.simplefilter("ignore", DeprecationWarning)  # between Lightning and its parts
    for message in NOT_THE_USERS:
        warnings.filterwarnings("ignore", message=message)


def text_of(metrics: dict[str, Any]) -> str:
    """Name and value of each, in a line."""
    return ", ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())


class StepBar(ProgressBar):
    """Steps done of max_steps, on stderr, with the loss; a line for each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.bar: Any = None
        self._on = True

    @property
    def is_enabled(self) -> bool:
        return self._on

    def disable(self) -> None:
        self._on = False

    def enable(self) -> None:
        self._on = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)), file=sys.stderr)

    def _open(self, what: str, total: float | None, done: int, unit: str, leave: bool) -> Any:
        slow = 0.2 if sys.stderr.isatty() else 30.0  # seconds: a log file is not filled with bars
        known = int(total) if total is not None and 0 <= total < float("inf") else None
        return tqdm(
            desc=what, total=known, initial=done, unit=unit, leave=leave, mininterval=slow, maxinterval=2 * slow,
            disable=not self._on, dynamic_ncols=True, file=sys.stderr,
        )  # fmt: skip

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step:
            self.print(f"going on from step {trainer.global_step}")
        self.bar = self._open("training", trainer.estimated_stepping_batches, trainer.global_step, " step", True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % 10 == 0 and (loss := trainer.callback_metrics.get("train/loss")) is not None:
            self.bar.set_postfix_str(f"loss {float(loss):.4g}", refresh=False)
        self.bar.update(step - self.bar.n)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bar.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.bar is not None:
            self.bar.close()

    # ---- validation, test ------------------------------------------------------------------------------------------

    def _start(self, trainer: L.Trainer, what: str, batches: Any) -> None:
        total = sum(batches) if isinstance(batches, list) else batches
        self.measuring = self._open(what, total, 0, " batch", False)

    def _stop(self, trainer: L.Trainer, stage: str) -> None:
        self.measuring.close()
        values = {k: v for k, v in trainer.callback_metrics.items() if k.startswith(stage + "/")}
        # validate and test have Lightning's table
        if self._on and values and not trainer.sanity_checking and trainer.state.fn == "fit":
            self.print(f"step {trainer.global_step}: {text_of(values)}")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start(trainer, "validating", trainer.num_val_batches)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.measuring.update()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop(trainer, "val")

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start(trainer, "testing", trainer.num_test_batches)

    def on_test_batch_end(self, *args: Any) -> None:
        self.measuring.update()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop(trainer, "test")
