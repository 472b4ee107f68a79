"""Learned grids of a trained model: fitted, checked on other scenes, kept in the checkpoint, used by name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from seqdiff.checkpoint import find, load_task
from seqdiff.cli import main
from seqdiff.domains.trajectory.data import TrajectoryData
from seqdiff.domains.trajectory.windows import WindowSpec
from seqdiff.task import Sampler
from seqdiff.tune import tune


@pytest.fixture
def copied(tiny_run: Path, tmp_path: Path) -> Path:
    """The tiny run, free to be written to."""
    shutil.copytree(tiny_run, tmp_path / "run")
    return tmp_path / "run"


def test_a_grid_is_learned_kept_and_found_by_name(copied, capsys):
    task, _ = load_task(find(copied))
    with pytest.raises(ValueError, match=r"no learned grid for ab2 in 3 steps.*seqdiff tune"):
        task.times(Sampler("ab2", 3, grid="learned"))
    before = {k: v.clone() for k, v in task.state_dict().items()}
    assert main(["tune", f"ckpt={copied}", "sampler=ab2", "steps=[2,3]", "k=2", "scenes=2", "budget=4"]) == 0
    assert "learned" in capsys.readouterr().out
    assert main(["tune", f"ckpt={copied}", "sampler=ddim", "steps=[2]", "k=2", "scenes=2", "budget=2"]) == 0
    task, _ = load_task(find(copied))
    assert sorted(task.grids) == ["ab2", "ddim"] and sorted(task.grids["ab2"]) == [2, 3]
    times = task.times(Sampler("ab2", 3, grid="learned"))
    assert len(times) == 4 and times[0] == 1.0 and times[-1] == 0.0 and times == task.grids["ab2"][3]
    assert all((task.state_dict()[k] == v).all() for k, v in before.items())
    assert main(["sample", f"ckpt={copied}", "sampler=ab2", "grid=learned", "steps=3", "k=2", "limit=2",
                 f"out={copied / 's'}"]) == 0  # fmt: skip
    assert main(["sample", f"ckpt={copied}", "sampler=ab2", "grid=learned", "steps=5", "k=2", "limit=2",
                 f"out={copied / 't'}"]) == 2  # fmt: skip
    assert "it has ab2: 2, 3; ddim: 2" in capsys.readouterr().err and not (copied / "t").exists()


@pytest.mark.slow
def test_learned_is_never_worse_than_the_fixed_grids_where_it_was_fitted(tiny_run, tiny_store):
    task, config = load_task(find(tiny_run))
    data = TrajectoryData(str(tiny_store), WindowSpec(**config["data"]["init_args"]["windows"]), eval_batch_size=2)
    batches = list(data.eval_batches("val", 4))
    (found,) = tune(task, batches, "dpmpp_2m", [3], k=2, budget=10)
    assert found.error["learned"] <= min(found.error[name] for name in ("uniform", "logsnr", "karras"))
    assert set(found.error_unseen) == set(found.error) and all(v > 0 for v in found.error_unseen.values())
    # the sampler's own settings do not leak into the search
    task.sampler = replace(task.sampler, energy_iterations=3, temperature=1.0)
    (again,) = tune(task, batches, "dpmpp_2m", [3], k=2, budget=10)
    assert again.times == found.times


@pytest.mark.parametrize("step, why", [("ancestral", "draws noise"), ("flow_map", "student's jumps")])
def test_steps_without_an_error_to_lower_are_refused(tiny_run, step, why):
    task, _ = load_task(find(tiny_run))
    with pytest.raises(ValueError, match=why):
        tune(task, [None, None], step, [2])
