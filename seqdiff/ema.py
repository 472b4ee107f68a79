"""Exponential moving average of the weights, used for validation and kept in checkpoints as the weights to sample from."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor


class EMA(WeightAveraging):
    """Lightning's weight averaging with a decay that grows with the number of updates, so that short runs average too:
    decay_i = min(decay, (1 + i) / (10 + i)).

    Args:
        decay: of the average once it is warm.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA decay is {decay}; expected a number in [0, 1)")

        def average(old: Tensor, new: Tensor, updates: Tensor) -> Tensor:
            i = int(updates)
            return old.lerp(new, 1 - min(decay, (1 + i) / (10 + i))) if old.is_floating_point() else new

        super().__init__(avg_fn=average)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The average starts from the module as it is once the codec was fitted. A resumed run has its own already (its
        number of steps is restored after this hook, so that it says nothing here)."""
        if self._average_model is not None and int(self._average_model.n_averaged) == 0:
            self._average_model.module.load_state_dict(pl_module.state_dict())
