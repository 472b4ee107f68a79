"""The Lightning module: learning rate, clipping, precision, averaged weights in validation, two processes."""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning import Trainer

from seqdiff.checkpoint import find, load_task, read
from seqdiff.cli import main
from seqdiff.dit import DiT
from seqdiff.domains.trajectory.adapter import TrajectoryAdapter
from seqdiff.objectives import FlowMatching
from seqdiff.task import Optimizer, Sampler, Task

ROOT = Path(__file__).resolve().parents[2]


def small_task(**changes) -> Task:
    adapter = TrajectoryAdapter(5, 10, 0.1, latent_dim=4, ctx_dim=16, layers=1, heads=2, pair_dim=4)
    return Task(adapter, DiT(4, 16, width=16, depth=1, heads=2, pair_dim=4), FlowMatching(), **changes)


def scheduled(steps: int, optimizer: Optimizer) -> list[float]:
    """Learning rates at the steps 0, 1, ... of a run of so many."""
    task = small_task(optimizer=optimizer)
    task.trainer = Trainer(max_steps=steps, logger=False, enable_checkpointing=False, accelerator="cpu")
    task.trainer.fit_loop.setup_data = lambda: None
    type(task.trainer).estimated_stepping_batches  # noqa: B018
    built = task.configure_optimizers()
    rates = []
    for _ in range(steps):
        rates.append(built["optimizer"].param_groups[0]["lr"])
        built["optimizer"].step()
        built["lr_scheduler"]["scheduler"].step()
    return rates


def test_the_learning_rate_warms_up_and_decays(monkeypatch):
    monkeypatch.setattr(Trainer, "estimated_stepping_batches", 100)
    rates = scheduled(100, Optimizer(lr=2e-3, warmup_steps=10, final=0.1))

    def decay(i: int) -> float:
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 100))

    assert rates[0] == pytest.approx(2e-4 * decay(0)) and rates[4] == pytest.approx(1e-3 * decay(4))
    assert rates[50] == pytest.approx(2e-3 * decay(50)) and rates[99] == pytest.approx(2e-3 * decay(99))
    assert all(a < b for a, b in zip(rates[:9], rates[1:10])) and all(a > b for a, b in zip(rates[10:], rates[11:]))


def test_weight_decay_is_on_matrices_alone(monkeypatch):
    monkeypatch.setattr(Trainer, "estimated_stepping_batches", 10)
    task = small_task(optimizer=Optimizer(weight_decay=0.3))
    task.trainer = Trainer(max_steps=10, logger=False, enable_checkpointing=False, accelerator="cpu")
    groups = task.configure_optimizers()["optimizer"].param_groups
    assert [g["weight_decay"] for g in groups] == [0.3, 0.0]
    assert all(p.dim() >= 2 for p in groups[0]["params"]) and all(p.dim() < 2 for p in groups[1]["params"])
    assert sum(len(g["params"]) for g in groups) == len(list(task.parameters()))


def test_parts_that_do_not_fit_each_other_are_refused():
    adapter = TrajectoryAdapter(5, 10, 0.1, latent_dim=4, ctx_dim=16, layers=1, heads=2, pair_dim=4)
    for net, text in [(DiT(5, 16, 16, 1, 2), "latent_dim 5 and model.adapter 4"), (DiT(4, 8, 16, 1, 2), "ctx_dim 8")]:
        with pytest.raises(ValueError, match=re.escape(text)):
            Task(adapter, net, FlowMatching())


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"step": "eulr"}, "eulr"),
        ({"steps": 0}, "steps is 0"),
        ({"t_max": 1.5}, "t_max is 1.5"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
    ],
)
def test_sampler_settings_are_checked_at_once(wrong, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Sampler(**wrong)


def losses(run: Path) -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(r["train/loss"]) for r in csv.DictReader(file) if r["train/loss"]]


@pytest.mark.slow
def test_clipping_and_precision_come_from_trainer_flags(tiny_args, tiny_run, tmp_path):
    """bf16 follows fp32 closely, and is not it; the weights stay float32. Clipped to nothing, the weights stay."""
    rest = [*tiny_args, "trainer.val_check_interval=3"]
    assert main(["fit", *rest, "trainer.max_steps=6", "trainer.precision=bf16-mixed", f"run={tmp_path / 'half'}"]) == 0
    half, full = losses(tmp_path / "half"), losses(tiny_run)
    assert half != full and half == pytest.approx(full, rel=0.05)
    weights = read(find(tmp_path / "half"))["state_dict"]
    assert {v.dtype for v in weights.values() if v.is_floating_point()} == {torch.float32}

    def change(clip: str) -> float:
        run = tmp_path / f"clip{clip}"
        args = ["trainer.max_steps=3", "model.optimizer.weight_decay=0", f"trainer.gradient_clip_val={clip}"]
        assert main(["fit", *rest, *args, f"run={run}"]) == 0
        return float(read(find(run))["current_model_state"]["net.output.weight"].abs().max())

    assert change("1e-12") < 1e-3 * change("1.0")  # AdamW's eps of 1e-8 is far above such gradients


@pytest.mark.slow
def test_the_loss_falls(tiny_args, tmp_path):
    args = [
        "trainer.max_steps=120",
        "model.optimizer.lr=1e-2",
        "trainer.val_check_interval=1000",
        f"run={tmp_path / 'r'}",
    ]
    assert main(["fit", *tiny_args, *args]) == 0
    curve = losses(tmp_path / "r")
    assert sum(curve[-10:]) < 0.8 * sum(curve[:10])


@pytest.mark.slow
def test_two_processes_share_the_windows_of_the_same_fit(tiny_args, tmp_path):
    run = tmp_path / "run"
    spy = tmp_path / "spy"
    spy.mkdir()
    (spy / "sitecustomize.py").write_text(SPY)
    args = ["trainer.max_steps=5", "trainer.devices=2", "trainer.strategy=ddp", "data.init_args.batch_size=2",
            "trainer.val_check_interval=5", f"run={run}"]  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-m", "seqdiff.cli", "fit", *tiny_args, *args], cwd=ROOT, capture_output=True, text=True,
        timeout=400, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{spy}:{ROOT}", "SPY": str(spy)},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    seen = [set((spy / f"rank{rank}").read_text().split()) for rank in (0, 1)]
    assert len(seen[0]) == len(seen[1]) == 10 and not seen[0] & seen[1]  # an epoch of 20 windows, 5 batches of 2 each
    curve = losses(run)
    assert len(curve) == 5 and all(math.isfinite(x) for x in curve)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["last.ckpt"]
    content = read(find(run))
    assert content["global_step"] == 5
    task, _ = load_task(find(run))
    assert all(torch.isfinite(p).all() for p in task.parameters())
    ends = [torch.load(spy / f"end{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert torch.equal(*ends)  # both processes hold the same weights and codec
    assert main(["sample", f"ckpt={run}", "k=2", "limit=2", f"out={tmp_path / 'samples'}"]) == 0


SPY = """
import os
import seqdiff.task as task
step, end = task.Task.training_step, task.Task.on_train_end
def training_step(self, batch, batch_idx):
    with open(f"{os.environ['SPY']}/rank{self.global_rank}", "a") as file:
        file.write("".join(f"{s}@{t}\\n" for s, t in zip(batch.scene_id, batch.t0)))
    return step(self, batch, batch_idx)
def on_train_end(self):
    import torch
    from torch.nn.utils import parameters_to_vector
    basis = self.adapter.codec.basis.flatten()
    whole = torch.cat([parameters_to_vector(self.parameters()).detach(), basis])
    torch.save(whole, f"{os.environ['SPY']}/end{self.global_rank}.pt")
task.Task.training_step, task.Task.on_train_end = training_step, on_train_end
"""
