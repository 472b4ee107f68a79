"""The only LightningModule: objective in training, samples in validation and use."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from seqdiff import checkpoint
from seqdiff.dit import DiT
from seqdiff.guidance import ClassifierFree, EnergyDescent, Infill
from seqdiff.objectives import Objective
from seqdiff.path import Grid, Path, time_grid
from seqdiff.sample import gaussian_noise, sample
from seqdiff.steps import find_step
from seqdiff.types import Cond, Denoiser, DomainModule, Draw, Guide, as_seeds


@dataclass(frozen=True)
class Sampler:
    """How samples are drawn.

    Args:
        step: name in seqdiff.steps.STEPS.
        steps: number of steps; evaluations of the net follow from the step.
        grid, shift, t_max: see seqdiff.path.time_grid.
        temperature: scale of the start noise; 1 = the training law, 0 = identical samples.
        guidance: classifier-free weight; 1 = off. Needs a model trained with objective.context_drop > 0.
        energy_iterations: descent of so many steps on the adapter's energy near the end (collisions, leaving the road);
            0 = off. Costs a gradient of the energy each, no evaluation of the net.
    """

    step: str = "dpmpp_2m"
    steps: int = 4
    grid: Grid = "uniform"
    shift: float = 1.0
    t_max: float = 1.0
    temperature: float = 1.0
    guidance: float = 1.0
    energy_iterations: int = 0

    def __post_init__(self) -> None:
        find_step(self.step)  # a wrong setting is refused now, not at the first validation
        time_grid(Path(), self.steps, self.grid, self.shift, self.t_max)
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; expected 0 (identical samples) or more")

    @property
    def evaluations(self) -> int:
        """Evaluations of the net per sample: two-stage steps spend one on the last step."""
        return find_step(self.step).evaluations * (self.steps - 1) + 1 if self.steps > 1 else 1


@dataclass(frozen=True)
class Optimizer:
    """AdamW with linear warm-up and cosine decay to `final` of the rate.

    Args:
        lr: peak rate.
        weight_decay: on matrices only.
        warmup_steps: of linear growth.
        final: share of the peak rate at the last step.
    """

    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    warmup_steps: int = 200
    final: float = 0.02


class Task(L.LightningModule):
    """Latent diffusion of one domain.

    Args:
        adapter: the domain's adapter.
        net: u(z, t, s, cond).
        objective: training objective.
        sampler: used in validation, and the default of `seqdiff sample`.
        optimizer: AdamW and its schedule.
        val_samples: k in validation.
        init: run or checkpoint whose weights and codec training starts from (fine-tuning); its sizes must be the same.
    """

    def __init__(
        self,
        adapter: DomainModule,
        net: DiT,
        objective: Objective,
        sampler: Sampler = Sampler(),
        optimizer: Optimizer = Optimizer(),
        val_samples: int = 20,
        init: str | None = None,
    ) -> None:
        super().__init__()
        for name in ("latent_dim", "ctx_dim"):
            if getattr(adapter, name) != getattr(net, name):
                raise ValueError(
                    f"model.net has {name} {getattr(net, name)} and model.adapter {getattr(adapter, name)}; set them alike"
                )
        self.adapter: Any = adapter
        self.net, self.objective = net, objective
        self.sampler, self.optimizer_config, self.val_samples = sampler, optimizer, val_samples
        self.init = init
        self.config_text = ""  # resolved config, set by the command line, kept in checkpoints

    # ---- training --------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.init is not None:
            path = checkpoint.find(pathlib.Path(self.init))
            try:
                self.load_state_dict(checkpoint.read(path)["state_dict"])
            except RuntimeError as error:
                raise checkpoint.CheckpointError(f"init={path} has weights of other sizes: {error}") from error
            self.print(f"weights and codec from {path}")
        if stage == "fit" and not bool(self.adapter.codec.fitted):
            if self.trainer.is_global_zero:
                report = self.adapter.fit(self.trainer.datamodule)  # type: ignore[attr-defined]
                self.print(
                    "codec fitted on the training split: " + ", ".join(f"{k} {v:.4g}" for k, v in report.items())
                )
            for value in self.adapter.codec.buffers():
                value.copy_(self.trainer.strategy.broadcast(value, src=0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self._full_precision():
            z0, weight = self.adapter.encode(batch)
        # by step and rank alone, so that a resumed run draws what the killed one would have drawn
        seed = torch.initial_seed() % 2**31
        generator = torch.Generator(self.device).manual_seed(
            seed * 1_000_003 + self.global_step * 64 + self.global_rank
        )
        loss = self.objective(self.net, z0, weight, self.adapter.context(batch), generator)
        learned = weight.sum(-1)
        mean = (loss * learned).sum() / learned.sum().clamp_min(1)
        self.log("train/loss", mean, prog_bar=True, batch_size=len(loss))
        return mean

    def _full_precision(self) -> torch.autocast:
        """Between metres and latents: half a precision there is metres lost, and no time won."""
        return torch.autocast(self.device.type, enabled=False)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        c = self.optimizer_config
        matrices = [p for p in self.parameters() if p.requires_grad and p.dim() >= 2]
        others = [p for p in self.parameters() if p.requires_grad and p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": c.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=c.lr,
            betas=c.betas,
            foreach=True,
        )
        total = self.trainer.estimated_stepping_batches
        end = float(total) if math.isfinite(total) and total > 0 else math.inf

        def rate(step: int) -> float:
            warm = min(1.0, (step + 1) / max(1, c.warmup_steps))
            done = min(1.0, step / end)
            return warm * (c.final + (1 - c.final) * 0.5 * (1 + math.cos(math.pi * done)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---- validation ------------------------------------------------------------------------------------------------

    def _evaluate(self, batch: Any, batch_idx: int, stage: str) -> None:
        items = len(batch.scene_id)
        draw = self.draw(batch, k=self.val_samples, seed=0, first_item=batch_idx * 4096)
        with self._full_precision():
            measured = self.adapter.validate(self.adapter.decode(draw.z.float(), batch), batch)
        for name, value in measured.items():
            self.log(f"{stage}/{name}", value.mean(), prog_bar=name == "energy_score", batch_size=items, sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "test")

    # ---- sampling --------------------------------------------------------------------------------------------------

    def denoiser(self, cond: Cond) -> Denoiser:
        """(z, t) -> E[x0 | z_t, cond]; the condition is prepared here, once."""
        prepared = self.net.prepare(cond)

        def denoise(z: Tensor, t: float) -> Tensor:
            return self.objective.denoise(self.net(z, t, t, prepared), z, t)

        return denoise

    @torch.no_grad()
    def draw(
        self,
        batch: Any,
        *,
        k: int,
        seed: int,
        first_item: int = 0,
        sampler: Sampler | None = None,
        known: tuple[Tensor, Tensor] | None = None,
        guides: Sequence[Callable[[Denoiser], Denoiser]] = (),
    ) -> Draw:
        """k samples per item in latents.

        Args:
            batch: of the domain's data module.
            k: samples per item.
            seed, first_item: sample j of item i has noise by (seed, first_item + i, j) alone, whatever the batch split.
            sampler: overrides the model's own.
            known: latents (b #k n d) and mask (b #k n d) of what is given; exact in the result.
            guides: further ones, outermost last.

        Raises:
            ValueError: classifier-free guidance on a model trained without dropping the context.
        """
        c = sampler or self.sampler
        cond = self.adapter.context(batch)
        seeds = as_seeds(seed, len(cond.ctx), k, first_item)
        noise = gaussian_noise((cond.pos.shape[1], self.adapter.latent_dim), seeds, c.temperature)
        noise = replace(noise, z=noise.z.to(self.device))
        times = time_grid(self.objective.path, c.steps, c.grid, c.shift, c.t_max)
        all_guides: list[Guide] = []
        if c.guidance != 1:
            if self.objective.context_drop == 0:
                raise ValueError(
                    f"sampler.guidance is {c.guidance:g}, but the model never saw a dropped context in training: train with "
                    "model.objective.init_args.context_drop=0.1, or leave guidance at 1"
                )
            all_guides.append(ClassifierFree(self.denoiser(cond.drop()), c.guidance))
        all_guides += list(guides)
        descent = None
        if c.energy_iterations:
            # the last evaluation is always guided, however few steps there are
            descent = EnergyDescent(self.adapter.energy(batch), c.energy_iterations, below=max(0.3, times[-2]))
            all_guides.append(descent)
        if known is not None:
            all_guides.append(Infill(known[0], known[1], noise.z, self.objective.path))
        out = sample(
            self.denoiser(cond), noise, times, path=self.objective.path, step=find_step(c.step).step,
            guides=all_guides, seeds=seeds,
        )  # fmt: skip
        if descent is None or descent.before is None or descent.after is None:
            return out
        return replace(out, energy=(descent.before, descent.after))

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, ckpt: dict[str, Any]) -> None:
        ckpt[checkpoint.KEY] = checkpoint.header(self.config_text)
