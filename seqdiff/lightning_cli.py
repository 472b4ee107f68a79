"""LightningCLI with our checkpoints, bar and config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback

from seqdiff.fit import report_end
from seqdiff.run_files import RunCheckpoint, WholeCheckpointIO
from seqdiff.screen import StepBar


class RunEnd(L.Callback):
    """Says at the end where the run is and what to do next."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.done = trainer.global_step

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.is_global_zero and hasattr(self, "done"):
            report_end(self.run, self.done, True)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero and isinstance(exception, KeyboardInterrupt):
            report_end(self.run, trainer.global_step, False)


class CLI(LightningCLI):
    """The stock one, quiet, and with what every run has."""

    def parse_arguments(self, parser: Any, args: Any) -> None:
        self.config = parser.parse_args(args)  # the stock one warns about sys.argv, which DDP re-runs

    def before_fit(self) -> None:
        self._dump_config()
        text = yaml.safe_dump(self.config_dump | {"ckpt_path": None}, sort_keys=False)
        self.model.config_text = text

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        given = self._get(self.config_init, "trainer", default={})
        plugins = given.get("plugins") or []
        plugins = list(plugins) if isinstance(plugins, list) else [plugins]
        if not any(isinstance(p, CheckpointIO) for p in plugins):
            plugins.append(WholeCheckpointIO())
        callbacks = list(given.get("callbacks") or [])
        if given.get("enable_progress_bar") is not False:
            callbacks.append(StepBar())
        if any(isinstance(c, RunCheckpoint) for c in callbacks):
            callbacks.append(RunEnd(Path(given.get("default_root_dir") or ".")))
        return super().instantiate_trainer(plugins=plugins, callbacks=callbacks, **kwargs)


class SaveFitConfig(SaveConfigCallback):
    """config.yaml of fit alone, without the checkpoint that a resumed run went on from: the file replays the whole run."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.config = self.config.clone()
            self.config.ckpt_path = None
            super().setup(trainer, pl_module, stage)
