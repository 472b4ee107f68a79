"""The fifteen known ways in which sampler code goes wrong, by number; each test says the right behaviour."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from seqdiff.guidance import Infill
from seqdiff.noise import gaussian_noise
from seqdiff.path import Path, min_snr_weight, time_grid
from seqdiff.sample import sample
from seqdiff.steps import STEPS, StepOut, heun
from seqdiff.testing import Mixture
from seqdiff.types import Draw, FlowMap, as_seeds

F64 = torch.float64
MIXTURE = Mixture(
    torch.tensor([0.3, 0.7], dtype=F64), torch.tensor([-1.0, 0.8], dtype=F64), torch.tensor([0.4, 0.6], dtype=F64)
)
PATHS = [Path("linear"), Path("cosine"), Path("edm")]
STOCHASTIC = [name for name, claim in STEPS.items() if claim.stochastic]
DENOISED = [name for name, claim in STEPS.items() if not claim.student]

every_step = pytest.mark.parametrize("name", STEPS)
every_path = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.kind)


def model_for(name: str, path: Path, seen: list | None = None, law=MIXTURE):
    """What the step takes: the mixture's denoiser, or a student that jumps as one DDIM step does. Writes down the times."""
    truth = law.denoiser(path)

    def denoise(z, t):
        if seen is not None:
            seen.append(t)
        return truth(z, t)

    def jump(z, t, s):
        ratio = path.sigma(s) / path.sigma(t)
        return ratio * z + (path.alpha(s) - ratio * path.alpha(t)) * denoise(z, t)

    return FlowMap(jump) if STEPS[name].student else denoise


def start(path: Path, items: int = 2, samples: int = 3, tokens: int = 4, first: int = 0):
    seeds = as_seeds(7, items, samples, first)
    noise = gaussian_noise((tokens, 1), seeds)
    return Draw(noise.z.double() * path.start_scale(1.0), noise.log_weight), seeds


def run(name: str, path: Path, times, draw: Draw, seeds=None, model=None):
    model = model or model_for(name, path)
    return sample(model, draw, times, path=path, step=STEPS[name].step, seeds=seeds).z


@every_path
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_case_1_karras_grid_ends_at_sigma_min_and_then_at_0_without_a_repeated_value(path, steps):
    times = time_grid(path, steps, "karras", sigma_min=0.002)
    assert len(times) == steps + 1 and all(a > b for a, b in zip(times[:-1], times[1:]))
    if steps > 1:
        assert path.sigma(times[-2]) / path.alpha(times[-2]) == pytest.approx(0.002, rel=1e-9)
    draw, _ = start(path)
    moved = [draw.z]
    for t, s in zip(times[:-1], times[1:]):
        moved.append(STEPS["ddim"].step(MIXTURE.denoiser(path), path, moved[-1], t, s, None, None).z)
    assert all((a - b).abs().max() > 1e-9 for a, b in zip(moved[:-1], moved[1:]))  # every step does something


def test_case_2_a_step_goes_to_the_schedule_s_next_entry():
    times, pairs = [float(t) for t in np.linspace(1.0, 0.0, 11) ** 2], []

    def spy(model, path, z, t, s, memory, seeds):
        pairs.append((t, s))
        return StepOut(z, z, None)

    sample(lambda z, t: z, start(Path())[0], times, path=Path(), step=spy)
    assert pairs == list(zip(times[:-1], times[1:]))


def test_case_3_a_shift_is_applied_once():
    plain, shifted = time_grid(Path(), 5), time_grid(Path(), 5, shift=3.0)
    assert shifted == pytest.approx([3 * t / (1 + 2 * t) for t in plain])
    assert time_grid(Path(), 5, shift=3.0) == shifted and time_grid(Path(), 5) == plain  # no call leaves a trace
    again = time_grid(Path(), 5, "karras", shift=2.0)
    assert again == pytest.approx([2 * t / (1 + t) for t in time_grid(Path(), 5, "karras")])


@every_step
@every_path
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_case_4_one_two_and_three_steps_are_finite_and_counted(name, path, steps):
    if steps == 1:
        assert time_grid(path, 1) == [1.0, 0.0]
    draw, seeds = start(path)
    for grid in ("uniform", "logsnr", "karras"):
        calls: list[float] = []
        out = run(name, path, time_grid(path, steps, grid), draw, seeds, model_for(name, path, calls))
        assert torch.isfinite(out).all()
        assert len(calls) == STEPS[name].total(steps)
        assert min(calls) > 0  # nothing divides by sigma = 0


@every_path
def test_case_4_one_step_is_the_mean_of_the_data(path):
    draw, seeds = start(path)
    for name in DENOISED:
        if name != "midpoint":  # evaluates at t / 2 as well
            out = run(name, path, [1.0, 0.0], draw, seeds)
            x0 = MIXTURE.denoiser(path)(draw.z, 1.0)
            if path.kind == "cosine" and name in ("ab2", "euler"):
                x0 = draw.z + math.pi / 2 * x0  # by hand: dz/dt = -pi / 2 x0 there, and what is left of the noise stays
            torch.testing.assert_close(out, x0, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_case_5_eps_prediction_at_zero_terminal_snr_is_refused(kind):
    path, (draw, _) = Path(kind), start(Path())

    def denoise(z, t):
        return path.to_x0(z, z, t, "eps")

    with pytest.raises(ValueError, match="start sampling at t_max < 1"):
        sample(denoise, draw, time_grid(path, 4), path=path, step=STEPS["ddim"].step)
    ok = sample(denoise, draw, time_grid(path, 4, t_max=0.995), path=path, step=STEPS["ddim"].step).z
    assert torch.isfinite(ok).all()


@every_step
def test_case_6_the_model_is_told_exactly_the_times_that_the_user_gave(name):
    times, calls = [0.9371, 0.61803398875, 1 / 3, 0.1, 0.0], []
    draw, seeds = start(Path())
    run(name, Path(), times, draw, seeds, model_for(name, Path(), calls))
    if name == "midpoint":
        assert calls[::2] == times[:-1] and calls[1::2] == [0.5 * (a + b) for a, b in zip(times[:-1], times[1:])]
    elif name == "heun":
        assert calls[::2] == times[:-1] and calls[1::2] == times[1:-1]
    else:
        assert calls == times[:-1]


@every_step
def test_case_7_times_that_round_to_the_same_value_are_steps_of_their_own(name):
    """Equal in single precision, equal as indices of a table of 1000."""
    times = [1.0, 0.5 + 2e-9, 0.5 + 1e-9, 0.5, 0.25, 0.0]
    assert np.float32(times[1]) == np.float32(times[3])
    calls: list[float] = []
    draw, seeds = start(Path())
    out = run(name, Path(), times, draw, seeds, model_for(name, Path(), calls))
    assert len(calls) == STEPS[name].total(5) and torch.isfinite(out).all()


@pytest.mark.parametrize("name", DENOISED)
@every_path
def test_case_8_x0_eps_and_v_give_the_same_trajectory(name, path):
    draw, seeds = start(path)
    times, ends = time_grid(path, 5, "logsnr", t_max=0.99), []
    for prediction in ("x0", "v", "eps"):

        def through(z, t, prediction=prediction):
            x0 = MIXTURE.denoiser(path)(z, t)
            return path.to_x0(path.from_x0(x0, z, t, prediction), z, t, prediction)

        ends.append(run(name, path, times, draw, seeds, through))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-8)
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-8)


def test_case_8_heun_s_second_stage_is_at_the_second_time():
    """On the linear path with constant v = c (x0 = z - t c) any step is exact; with v = t, v(s) enters by the trapezoid."""
    path, z = Path(), torch.full((1, 1, 1, 1), 2.0, dtype=F64)
    out = heun(lambda z, t: z - t * t, path, z, 0.8, 0.2).z.item()  # v = t
    assert out == pytest.approx(2.0 - 0.6 * (0.8 + 0.2) / 2, abs=1e-12)


@pytest.mark.parametrize("name", ["heun", "midpoint"])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_case_9_two_stage_methods_with_an_odd_number_of_steps(name, steps):
    calls: list[float] = []
    draw, _ = start(Path())
    out = run(name, Path(), time_grid(Path(), steps), draw, None, model_for(name, Path(), calls))
    assert torch.isfinite(out).all() and min(calls) > 0
    assert len(calls) == {"heun": 2 * steps - 1, "midpoint": 2 * steps}[name]


@every_step
def test_case_10_memory_starts_empty_in_every_run(name):
    path, (draw, seeds) = Path(), start(Path())
    fresh = run(name, path, time_grid(path, 5), draw, seeds)
    run(name, path, time_grid(path, 3), Draw(draw.z + 5, draw.log_weight), seeds)  # something else in between
    assert torch.equal(run(name, path, time_grid(path, 5), draw, seeds), fresh)


@every_step
def test_case_10_a_step_changes_neither_its_input_nor_the_memory_it_is_given(name):
    path, (draw, seeds) = Path(), start(Path())
    model, step = model_for(name, path), STEPS[name].step
    memory = None
    for t, s in ((0.9, 0.6), (0.6, 0.4), (0.4, 0.2)):
        out = step(model, path, draw.z, t, s, memory, seeds)
        assert torch.equal(step(model, path, draw.z, t, s, memory, seeds).z, out.z)  # same call, same answer
        memory = out.memory
    assert torch.equal(draw.z, start(path)[0].z)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_case_11_noise_of_a_stochastic_step_is_a_sample_s_own(name):
    path, (draw, seeds) = Path(), start(Path(), items=5)
    times = time_grid(path, 4)
    whole = run(name, path, times, draw, seeds)
    for i in (0, 3):
        for j in (0, 2):
            alone = Draw(draw.z[i : i + 1, j : j + 1], draw.log_weight[i : i + 1, j : j + 1])
            one = run(name, path, times, alone, seeds[i : i + 1, j : j + 1])
            assert torch.equal(one, whole[i : i + 1, j : j + 1])
    other = run(name, path, times, draw, as_seeds(8, 5, 3))
    assert (other != whole).all()  # the seeds are heard
    with pytest.raises(ValueError, match=f"{name} draws fresh noise"):
        run(name, path, times, draw)


@every_step
def test_case_11_any_batch_split_gives_the_same_samples(name):
    path, (draw, seeds) = Path("cosine"), start(Path(), items=5)
    times = time_grid(path, 3)
    whole = run(name, path, times, draw, seeds)
    parts = [run(name, path, times, Draw(draw.z[a:b], draw.log_weight[a:b]), seeds[a:b]) for a, b in ((0, 2), (2, 5))]
    assert torch.equal(torch.cat(parts), whole)


# Case 12 (Hutchinson probes against the exact trace): test_likelihood.py,
# test_probes_are_unbiased_and_their_variance_falls_with_their_number.


@every_path
def test_case_13_snr_weighting_is_finite_where_the_snr_is_0_or_infinite(path):
    t = torch.tensor([0.0, 1e-12, 0.5, 1.0])
    for prediction in ("x0", "eps", "v"):
        weight = min_snr_weight(path, t, prediction)
        assert torch.isfinite(weight).all() and (weight >= 0).all()
    if path.kind == "linear":
        assert min_snr_weight(path, t, "x0").tolist() == [5, 5, 1, 0]
        assert min_snr_weight(path, t, "eps").tolist() == pytest.approx([0, 0, 1, 1], abs=1e-6)


@every_path
def test_case_14_the_known_part_is_at_its_noise_level_on_the_way_and_exact_at_the_end(path):
    draw, _ = start(path)
    known, mask = (
        torch.randn(2, 1, 4, 1, dtype=F64),
        torch.tensor([True, False, True, False]).view(1, 1, 4, 1).expand(2, 1, 4, 1),
    )
    eps, seen = draw.z / path.start_scale(1.0), []

    def spy(z, t):
        seen.append((t, z))
        return MIXTURE.denoiser(path)(z, t)

    times = time_grid(path, 4, "logsnr")
    out = sample(spy, draw, times, path=path, step=STEPS["dpmpp_2m"].step, guides=[Infill(known, mask, eps, path)])
    assert [t for t, _ in seen] == times[:-1]
    for t, z in seen:
        want = path.alpha(t) * known + path.sigma(t) * eps  # sigma, not its square; at t, not a step off
        torch.testing.assert_close(z[:, :, [0, 2]], want[:, :, [0, 2]], rtol=0, atol=1e-12)
    assert (out.z - known)[:, :, [0, 2]].abs().max() == 0.0


@every_step
def test_case_15_one_item_one_sample_one_token(name):
    path, (draw, seeds) = Path(), start(Path(), 1, 1, 1)
    assert run(name, path, time_grid(path, 4), draw, seeds).shape == (1, 1, 1, 1)


@pytest.mark.parametrize("name", [name for name, claim in STEPS.items() if not claim.stochastic])
@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 1, 3, 4, 5)])
def test_case_15_steps_that_draw_nothing_take_any_rank(name, shape):
    path, z, memory = Path(), torch.randn(shape, dtype=F64), None
    times = time_grid(path, 4)
    flat = run(name, path, times, Draw(z.reshape(1, 1, -1, 1), torch.zeros(1, 1)))
    for t, s in zip(times[:-1], times[1:]):
        z, _, memory = STEPS[name].step(model_for(name, path), path, z, t, s, memory, None)
    torch.testing.assert_close(z, flat.view(shape), rtol=0, atol=1e-12)
