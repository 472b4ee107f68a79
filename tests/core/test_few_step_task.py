"""Students through the command line and the Lightning module: training from a teacher, jumps, known parts, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seqdiff.checkpoint import CheckpointError, find, load_start, load_task
from seqdiff.cli import main
from seqdiff.dit import DiT
from seqdiff.domains.trajectory.adapter import TrajectoryAdapter
from seqdiff.domains.trajectory.data import TrajectoryData
from seqdiff.domains.trajectory.windows import WindowSpec
from seqdiff.edit import redraw
from seqdiff.objectives import FlowMatching
from seqdiff.students import Distill, MeanFlow
from seqdiff.task import Sampler, Task

STUDENTS = ["mean_flow", "distill", "best_of_k"]


@pytest.fixture(scope="module")
def students(tiny_args: list[str], tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each kind of student, 3 steps from the tiny run, with the inputs that the teacher has not."""
    runs = {}
    for name in STUDENTS:
        run = tmp_path_factory.mktemp("students") / name
        args = [*tiny_args, f"objective={name}", "sampler=flow_map", f"init={tiny_run}", f"run={run}"]
        args += ["trainer.max_steps=3", "trainer.val_check_interval=3", "model.net.init_args.inputs=[known,guidance]"]
        args += ["model.objective.init_args.known=0.5"]
        if name == "distill":
            args += ["model.objective.init_args.guidance=[1.0,3.0]"]
        assert main(["fit", *args]) == 0
        runs[name] = run
    return runs


def batch_of(config: dict, store: Path):
    windows = WindowSpec(**config["data"]["init_args"]["windows"])
    return TrajectoryData(str(store), windows).dataset("test").batch([0, 1])


@pytest.mark.parametrize("name", STUDENTS)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_student_trained_from_the_command_line_jumps(students, tiny_store, name, steps):
    task, config = load_task(find(students[name]))
    batch = batch_of(config, tiny_store)
    calls = []
    task.net.register_forward_hook(lambda *_: calls.append(1))
    z = task.draw(batch, k=3, seed=0, sampler=replace(task.sampler, steps=steps)).z
    assert torch.isfinite(z).all() and len(calls) == steps == replace(task.sampler, steps=steps).evaluations
    assert z.std(1).mean() > 0.05
    # the same net is a Denoiser too
    own = task.draw(batch, k=3, seed=0, sampler=Sampler("dpmpp_2m", 4)).z
    assert torch.isfinite(own).all()


@pytest.mark.parametrize("name", STUDENTS)
def test_what_is_given_to_a_student_stays_to_the_last_bit(students, tiny_store, name):
    task, config = load_task(find(students[name]))
    batch = batch_of(config, tiny_store)
    known = torch.randn(2, 1, batch.mask.shape[1], 4)
    mask = torch.zeros_like(known, dtype=torch.bool)
    mask[:, :, 0] = True
    z = task.draw(batch, k=3, seed=0, known=(known, mask)).z
    assert torch.equal(z[:, :, 0], known[:, :, 0].expand(-1, 3, -1))
    free = task.draw(batch, k=3, seed=0).z
    assert not torch.equal(z[:, :, 1:], free[:, :, 1:])  # the others know of it


def test_the_teacher_is_in_the_students_checkpoint_and_the_encoder_is_its_own(students, tiny_run):
    teacher, _ = load_task(find(tiny_run))
    student, _ = load_task(find(students["distill"]))
    kept = student.objective.teacher.state_dict()
    for key, value in teacher.net.state_dict().items():
        assert torch.equal(kept[key], value), key
    for key, value in teacher.adapter.state_dict().items():
        assert torch.equal(student.adapter.state_dict()[key], value), key
    assert not torch.equal(student.net.output.weight, teacher.net.output.weight)


def test_the_teachers_own_denoiser_is_there_for_a_likelihood(students, tiny_store, tiny_run):
    student, config = load_task(find(students["distill"]))
    teacher, _ = load_task(find(tiny_run))
    batch = batch_of(config, tiny_store)
    z = torch.randn(2, 3, batch.mask.shape[1], 4)
    with torch.no_grad():
        kept = student.denoiser(student.adapter.context(batch), teacher=True)(z, 0.5)
        torch.testing.assert_close(kept, teacher.denoiser(teacher.adapter.context(batch))(z, 0.5))
    with pytest.raises(ValueError, match="keeps no teacher"):
        teacher.denoiser(teacher.adapter.context(batch), teacher=True)


def test_guidance_as_an_input_costs_one_pass(students, tiny_store):
    task, config = load_task(find(students["distill"]))
    batch, calls = batch_of(config, tiny_store), []
    task.net.register_forward_hook(lambda *_: calls.append(1))
    guided = task.draw(batch, k=2, seed=0, sampler=replace(task.sampler, steps=2, guidance=2.0)).z
    assert len(calls) == 2
    assert not torch.equal(guided, task.draw(batch, k=2, seed=0, sampler=replace(task.sampler, steps=2)).z)


def test_a_guidance_weight_that_the_net_was_not_taught_is_refused(students, tiny_store):
    task, config = load_task(find(students["distill"]))
    batch = batch_of(config, tiny_store)
    for changed, text in [
        ({"guidance": 5.0}, "taught weights from 1 to 3"),
        ({"guidance": 2.0, "guidance_interval": (0.2, 0.8)}, "second pass"),
        ({"guidance": 2.0, "guidance_rescale": 0.5}, "second pass"),
    ]:
        with pytest.raises(ValueError, match=text):
            task.draw(batch, k=2, seed=0, sampler=replace(task.sampler, **changed))
    # the input alone is not enough: nothing taught this one's net what a weight means
    other, _ = load_task(find(students["mean_flow"]))
    with pytest.raises(ValueError, match="never saw a dropped context"):
        other.draw(batch, k=2, seed=0, sampler=replace(other.sampler, guidance=2.0))


def test_jumps_of_a_model_that_has_none_are_refused(tiny_run, tiny_store):
    task, config = load_task(find(tiny_run))
    with pytest.raises(ValueError, match=r"FlowMatching trains no jumps.*objective=mean_flow"):
        task.draw(batch_of(config, tiny_store), k=2, seed=0, sampler=Sampler("flow_map", 1))
    adapter = TrajectoryAdapter(5, 10, 0.1, latent_dim=4, ctx_dim=16, layers=1, heads=2, pair_dim=4)
    net = DiT(4, 16, width=16, depth=1, heads=2, pair_dim=4)
    with pytest.raises(ValueError, match=r"sampler\.step is flow_map"):
        Task(adapter, net, FlowMatching(), Sampler("flow_map", 1))
    assert Task(adapter, net, MeanFlow(), Sampler("flow_map", 1)).sampler.evaluations == 1


def test_distilling_without_a_teacher_is_refused_at_the_command_line(tiny_args, tmp_path, capsys):
    run = [f"run={tmp_path / 'x'}", "objective=distill", "sampler=flow_map", "trainer.max_steps=1"]
    assert main(["fit", *tiny_args, *run]) == 2
    assert "init=RUN" in capsys.readouterr().err


def test_classifier_free_guidance_of_a_student_says_why_not(students, tiny_store):
    task, config = load_task(find(students["mean_flow"]))
    task.net.inputs, task.objective.context_drop = (), 0.1
    with pytest.raises(ValueError, match=r"ClassifierFree does not guide a few-step student.*end point"):
        task.draw(batch_of(config, tiny_store), k=2, seed=0, sampler=replace(task.sampler, guidance=2.0))


def test_starting_weights_of_another_model_are_refused(tiny_run):
    adapter = TrajectoryAdapter(5, 10, 0.1, latent_dim=4, ctx_dim=16, layers=2, heads=2, pair_dim=4)
    other = Task(adapter, DiT(4, 16, width=16, depth=1, heads=2, pair_dim=4), Distill(), Sampler("flow_map", 1))
    with pytest.raises(CheckpointError, match="another model"):
        load_start(other, find(tiny_run))


def test_explicit_times_reach_the_net_as_given(tiny_run, tiny_store):
    task, config = load_task(find(tiny_run))
    seen = []
    task.net.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    task.draw(batch_of(config, tiny_store), k=2, seed=0, sampler=Sampler("ddim", 3, times=(1.0, 0.7, 0.123, 0.0)))
    assert seen == [1.0, 0.7, 0.123]
    with pytest.raises(ValueError, match="expected steps"):
        Sampler("ddim", 3, times=(1.0, 0.5, 0.0))
    with pytest.raises(ValueError, match="decrease strictly"):
        Sampler("ddim", 2, times=(1.0, 1.0, 0.0))


def test_a_drawn_scene_is_edited_with_the_same_noise(tiny_run, tiny_store):
    """The public way from a task to `seqdiff.edit`: one agent's latent is changed and kept, the others are drawn again."""
    task, config = load_task(find(tiny_run))
    batch = batch_of(config, tiny_store)
    again, start = task.sampling(batch, k=3, seed=0)
    plain = task.draw(batch, k=3, seed=0).z
    assert torch.equal(again.run(start).z, plain)
    mask = torch.zeros_like(plain, dtype=torch.bool)
    mask[:, :, 0] = True
    before, after = redraw(again, start, plain + 0.5, mask)
    torch.testing.assert_close(before.z, plain)
    assert torch.equal(after.z[:, :, 0], plain[:, :, 0] + 0.5)
    same, unchanged = redraw(again, start, plain, mask)
    assert torch.equal(same.z, unchanged.z)
