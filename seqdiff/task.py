"""The only LightningModule: objective in training, samples in validation and use."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from seqdiff import checkpoint
from seqdiff.dit import DiT
from seqdiff.edit import Sampling
from seqdiff.guidance import ClassifierFree, EnergyDescent, Infill, weighted
from seqdiff.noise import find_noise
from seqdiff.objectives import Objective
from seqdiff.path import Grid, Path, check_times, time_grid
from seqdiff.steps import find_step
from seqdiff.types import Cond, Denoiser, DomainModule, Draw, FlowMap, Guide, as_seeds


@dataclass(frozen=True)
class Sampler:
    """How samples are drawn.

    Args:
        step: name in seqdiff.steps.STEPS. consistency and flow_map take a few-step student (objective mean_flow, distill,
            best_of_k), all others a model or a student's instantaneous field.
        steps: number of steps; evaluations of the net follow from the step.
        grid, shift, t_max: see seqdiff.path.time_grid; or grid "learned", from `seqdiff tune`.
        times: instead of a grid, steps + 1 times that decrease strictly to 0.
        noise: name in seqdiff.noise.NOISE.
        temperature: scale of the start noise; 1 = the training law, 0 = identical samples.
        guidance: classifier-free weight; 1 = off. Needs a model trained with objective.context_drop > 0 (a second pass), or one
            that takes the weight as an input (objective=distill with guidance).
        guidance_interval: times between which it acts.
        guidance_rescale: 0 to 1, how far the guided x0 is scaled back to the spread of the conditional one.
        energy_iterations: descent of so many steps on the adapter's energy near the end (collisions, leaving the road);
            0 = off. Costs a gradient of the energy each, no evaluation of the net.
    """

    step: str = "dpmpp_2m"
    steps: int = 4
    grid: Grid | Literal["learned"] = "uniform"
    shift: float = 1.0
    t_max: float = 1.0
    times: tuple[float, ...] | None = None
    noise: str = "gaussian"
    temperature: float = 1.0
    guidance: float = 1.0
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    guidance_rescale: float = 0.0
    energy_iterations: int = 0

    def __post_init__(self) -> None:
        find_step(self.step)  # a wrong setting is refused now, not at the first validation
        time_grid(Path(), self.steps, "uniform" if self.grid == "learned" else self.grid, self.shift, self.t_max)
        if self.times is not None and (len(check_times(self.times)) != self.steps + 1 or self.times[-1] != 0):
            raise ValueError(f"times are {self.times}; expected steps + 1 = {self.steps + 1} of them, the last one 0")
        find_noise(self.noise)
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; expected 0 (identical samples) or more")

    @property
    def evaluations(self) -> int:
        """Evaluations of the net per sample."""
        return find_step(self.step).total(self.steps)


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
        if find_step(sampler.step).student and not objective.few_step:
            raise ValueError(
                f"sampler.step is {sampler.step}, but {type(objective).__name__} trains no jumps: set objective=mean_flow, "
                "distill or best_of_k, or another sampler"
            )
        self.adapter: Any = adapter
        self.net, self.objective = net, objective
        self.sampler, self.optimizer_config, self.val_samples = sampler, optimizer, val_samples
        self.init = init
        objective.attach(net)
        self.grids: dict[str, dict[int, list[float]]] = {}  # learned times: step -> steps -> times
        self.config_text = ""  # resolved config, set by the command line, kept in checkpoints

    # ---- training --------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.init is not None:
            path = checkpoint.find(pathlib.Path(self.init))
            checkpoint.load_start(self, path)
            self.print(f"weights and codec from {path}")
        if stage == "fit":
            self.objective.begin(self.net, continued=self.init is not None)
            self.adapter.requires_grad_(not self.objective.frozen_context)
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
        with torch.set_grad_enabled(not self.objective.frozen_context):
            cond = self.adapter.context(batch)
        loss = self.objective(self.net, z0, weight, cond, generator)
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

    def denoiser(self, cond: Cond, teacher: bool = False) -> Denoiser:
        """(z, t) -> E[x0 | z_t, cond]; the condition is prepared here, once. Of a student: its instantaneous field.

        Args:
            teacher: of the teacher that the objective keeps.
        """
        net: Any = self.objective.teacher if teacher else self.net
        if net is None:
            raise ValueError(f"{type(self.objective).__name__} keeps no teacher: take the model's own field")
        prepared = net.prepare(cond)

        def denoise(z: Tensor, t: float) -> Tensor:
            return self.objective.denoise(self.objective.output(net, z, t, t, prepared), z, t)

        return denoise

    def flow_map(self, cond: Cond) -> FlowMap:
        """(z, t, s) -> z_s of a few-step student.

        Raises:
            ValueError: the model was not trained to jump.
        """
        if not self.objective.few_step:
            raise ValueError(
                f"{type(self.objective).__name__} trains no jumps: take a step like dpmpp_2m, or train a student with "
                "objective=mean_flow, distill or best_of_k and init=RUN"
            )
        prepared = self.net.prepare(cond)
        of = self.objective
        return FlowMap(lambda z, t, s: of.jump(of.output(self.net, z, t, s, prepared), z, t, s))

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
        constraints: Any = None,
        guides: Sequence[Guide] = (),
    ) -> Draw:
        """k samples per item in latents. Arguments and errors as in `sampling`."""
        again, start = self.sampling(
            batch, k=k, seed=seed, first_item=first_item, sampler=sampler, known=known, constraints=constraints,
            guides=guides,
        )  # fmt: skip
        out = again.run(start)
        descent = next((g for g in reversed(again.guides) if isinstance(g, EnergyDescent)), None)
        if descent is None or descent.before is None or descent.after is None:
            return out
        return replace(out, energy=(descent.before, descent.after))

    @torch.no_grad()
    def sampling(
        self,
        batch: Any,
        *,
        k: int,
        seed: int,
        first_item: int = 0,
        sampler: Sampler | None = None,
        known: tuple[Tensor, Tensor] | None = None,
        constraints: Any = None,
        guides: Sequence[Guide] = (),
    ) -> tuple[Sampling, Draw]:
        """How k samples per item are drawn, and the noise they start from: what `seqdiff.edit` takes; `run` draws them.

        Args:
            batch: of the domain's data module.
            k: samples per item.
            seed, first_item: sample j of item i has noise by (seed, first_item + i, j) alone, whatever the batch split.
            sampler: overrides the model's own.
            known: latents (b #k n d) and mask (b #k n d) of what is given; exact in the result.
            constraints: the user's wishes, as the domain's reader gives them.
            guides: further ones, outermost last.

        Raises:
            ValueError: classifier-free guidance on a model trained without dropping the context; jumps of a model that has none.
        """
        c = sampler or self.sampler
        cond = self.adapter.context(batch)
        seeds = as_seeds(seed, len(cond.ctx), k, first_item)
        start = self._start((cond.pos.shape[1], self.adapter.latent_dim), seeds, c)
        inputs = getattr(self.net, "inputs", ())
        if known is not None and "known" in inputs:
            cond = replace(cond, known=known[0], known_mask=known[1].expand(known[0].shape))
        all_guides: list[Guide] = []
        if c.guidance != 1 and self._takes_weight(c):
            cond = replace(cond, guidance=torch.full((len(cond.ctx),), c.guidance, device=self.device))
        elif c.guidance != 1:
            all_guides.append(self._classifier_free(cond, c))
        times = self.times(c)
        all_guides += [*guides, *self._descents(batch, c, times, constraints)]
        if known is not None:
            all_guides.append(Infill(known[0], known[1], start.z, self.objective.path))
        claim = find_step(c.step)
        model = self.flow_map(cond) if claim.student else self.denoiser(cond)
        return Sampling(model, self.objective.path, claim.step, times, all_guides, seeds), start

    def times(self, c: Sampler) -> list[float]:
        """The sampler's times, from t_max to 0.

        Raises:
            ValueError: a learned grid that the checkpoint does not hold.
        """
        if c.times is not None:
            return list(c.times)
        if c.grid != "learned":
            return time_grid(self.objective.path, c.steps, c.grid, c.shift, c.t_max)
        found = self.grids.get(c.step, {}).get(c.steps)
        if found is None:
            have = "; ".join(f"{step}: {', '.join(map(str, sorted(of)))}" for step, of in self.grids.items()) or "none"
            raise ValueError(
                f"the checkpoint holds no learned grid for {c.step} in {c.steps} steps (it has {have}): learn it with "
                f"`seqdiff tune ckpt=RUN sampler={c.step} steps={c.steps}`, or take sampler.grid=uniform"
            )
        return list(found)

    def _start(self, shape: tuple[int, int], seeds: Tensor, c: Sampler) -> Draw:
        if self.objective.learned_starts:
            start = self.objective.starts(shape, seeds, c.temperature)
        else:
            start = find_noise(c.noise)(shape, seeds, c.temperature)
        scale = self.objective.path.start_scale(self.times(c)[0])
        return Draw(start.z.to(self.device) * scale, start.log_weight.to(self.device))

    def _takes_weight(self, c: Sampler) -> bool:
        """Whether the guidance weight is an input that the net was trained with.

        Raises:
            ValueError: it is, but asked for what such a net cannot do.
        """
        taught = getattr(self.objective, "guidance", None)
        if taught is None or "guidance" not in getattr(self.net, "inputs", ()):
            return False
        low, high = taught
        if not low <= c.guidance <= high:
            raise ValueError(
                f"sampler.guidance is {c.guidance:g}, but this net was taught weights from {low:g} to {high:g}: take one of "
                "those, or distill again with another model.objective.init_args.guidance"
            )
        if c.guidance_interval != (0.0, 1.0) or c.guidance_rescale:
            raise ValueError(
                "guidance_interval and guidance_rescale act on a second pass, and this net takes the weight as an input: "
                "leave them at [0, 1] and 0"
            )
        return True

    def _classifier_free(self, cond: Cond, c: Sampler) -> ClassifierFree:
        if self.objective.context_drop == 0:
            raise ValueError(
                f"sampler.guidance is {c.guidance:g}, but the model never saw a dropped context in training: train with "
                "model.objective.init_args.context_drop=0.1, or leave guidance at 1"
            )
        return ClassifierFree(
            self.denoiser(cond.drop()), c.guidance, c.guidance_interval, c.guidance_rescale, cond.mask
        )

    def _descents(self, batch: Any, c: Sampler, times: list[float], constraints: Any) -> list[EnergyDescent]:
        """The wishes, which leave items that none is for as they are, then what guides every item near the end."""
        out: list[EnergyDescent] = []
        energy = self.adapter.energy(batch) if c.energy_iterations else None
        if constraints is not None:
            # which future it is to be is decided near noise already, and the others are to follow
            wishes = self.adapter.energy(batch, constraints)
            out.append(EnergyDescent(wishes, 12, max_step=1.0, below=1.0, through_net=True))
            out.append(EnergyDescent(wishes, 40, max_step=1.0, below=1.0))  # what is left, each agent by itself
            energy = energy and weighted([energy, wishes], [1.0, 1.0])
        if energy is not None:
            # the last evaluation is always guided, however few steps there are
            out.append(EnergyDescent(energy, c.energy_iterations, below=max(0.3, times[-2])))
        return out

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, ckpt: dict[str, Any]) -> None:
        ckpt[checkpoint.KEY] = checkpoint.header(self.config_text)
