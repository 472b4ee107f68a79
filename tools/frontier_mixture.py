"""Teacher and students on a law that is known: distance to it against evaluations of the net.

The law: two tokens with two channels each. Each token sits at one of four modes, and only 8 of the 16 pairs of modes happen,
so that a model that gets each token right alone still gets the pairs wrong.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from seqdiff.dit import DiT
from seqdiff.objectives import FlowMatching, Objective
from seqdiff.path import time_grid
from seqdiff.sample import sample
from seqdiff.steps import find_step
from seqdiff.students import BestOfK, Distill, MeanFlow
from seqdiff.testing import MixtureND, energy_distance
from seqdiff.types import Cond, Denoiser, Draw, FlowMap, as_seeds

TEACHER = "flow matching"
TEACHER_STEPS = ("ddim", "dpmpp_2m", "ab2", "heun")
TEACHER_EVALUATIONS = (1, 2, 4, 8, 32)
STUDENT_EVALUATIONS = (1, 2, 4, 8)
TOKENS, CHANNELS, MODES = 2, 2, 4
STARTS = 64  # learned ones


@dataclass(frozen=True)
class Setup:
    """Sizes. teacher, student: training steps of the teacher, and of a student that goes on from it; a student from nothing
    gets both. n: samples of each row. pairs: of true samples, for the noise floor."""

    teacher: int = 1200
    student: int = 600
    batch: int = 64
    width: int = 48
    depth: int = 2
    n: int = 4096
    pairs: int = 8
    lr: float = 2e-3


@dataclass(frozen=True)
class Student:
    """One row of the comparison. make: its objective; from_teacher: goes on from the teacher's weights."""

    name: str
    make: Callable[[], Objective]
    from_teacher: bool = True


STUDENTS: tuple[Student, ...] = (
    Student("mean flow", lambda: MeanFlow()),
    Student("distilled", lambda: Distill()),
    Student("best of k", lambda: BestOfK(k=8)),
    Student("best of k, learned starts", lambda: BestOfK(k=8, starts=STARTS)),
    Student("best of k, each token alone", lambda: BestOfK(k=8, joint=False)),
    Student("best error of k alone", lambda: BestOfK(k=8, best=1.0, energy=0.0)),
    Student("mean flow, from nothing", lambda: MeanFlow(), from_teacher=False),
    Student("best of k, from nothing", lambda: BestOfK(k=8), from_teacher=False),
)


# ---- the law --------------------------------------------------------------------------------------------------------


def centres() -> Tensor:
    """The four modes of a token, 4 2."""
    angle = (torch.arange(MODES) + 0.5) * (2 * math.pi / MODES)
    return 1.3 * torch.stack([angle.cos(), angle.sin()], -1)


def pairs() -> Tensor:
    """Probability of (mode of the first token, mode of the second): the second is the next one or the one after, 4 4."""
    p = torch.zeros(MODES, MODES)
    for i, share in enumerate((0.4, 0.3, 0.2, 0.1)):
        p[i, (i + 1) % MODES] = 0.6 * share
        p[i, (i + 2) % MODES] = 0.4 * share
    return p


def law() -> MixtureND:
    """Over both tokens, 4 channels: first token's two, then the second's. Within a mode the tokens move together."""
    p, at = pairs(), centres()
    first, second = p.nonzero(as_tuple=True)
    together = torch.kron(torch.tensor([[1.0, 0.7], [0.7, 1.0]]), torch.eye(CHANNELS))
    cov = (0.2**2 * together).expand(len(first), -1, -1)
    return MixtureND(p[first, second], torch.cat([at[first], at[second]], -1), cov)


# ---- distances ------------------------------------------------------------------------------------------------------


def sliced_wasserstein(x: Tensor, y: Tensor, directions: int = 256, seed: int = 0) -> float:
    """Mean over random directions of the 1-Wasserstein distance between the projections (Rabin et al. 2012, with the
    first power). x, y: N d, as many points each. The same directions for all of the same d.

    Raises:
        ValueError: samples of different sizes.
    """
    if x.shape != y.shape or x.dim() != 2:
        raise ValueError(f"got samples of shapes {tuple(x.shape)} and {tuple(y.shape)}; expected two of the same N d")
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn((directions, x.shape[1]), generator=generator, dtype=torch.float64)
    u = (u / u.norm(dim=-1, keepdim=True)).to(x.dtype)
    return float(((x @ u.T).sort(0).values - (y @ u.T).sort(0).values).abs().mean())


def wrong_pairs(x: Tensor) -> float:
    """Share of samples (N 4) whose nearest pair of modes never happens."""
    at = centres().to(x.dtype)
    first, second = (torch.cdist(part, at).argmin(-1) for part in x.split(CHANNELS, -1))
    return float((pairs()[first, second] == 0).double().mean())


def measure(x: Tensor, true: Tensor, spread: float) -> dict[str, float]:
    """x, true: N 4; spread: mean distance between two samples of the law."""
    return {
        "sliced_wasserstein": sliced_wasserstein(x, true),
        "energy_distance": energy_distance(x, true),
        "spread_ratio": float(torch.pdist(x).mean()) / spread,
        "wrong_pairs": wrong_pairs(x),
    }


def floor(setup: Setup) -> dict[str, float]:
    """What two true samples of n points are apart: mean, and for the energy distance (0 in the mean) the standard
    deviation. Also of n draws with replacement from 64 true points, the most that 64 learned starts could be mistaken for."""
    found, few = [], []
    for i in range(setup.pairs):
        g = torch.Generator().manual_seed(1000 + i)
        x, y = (law().sample((setup.n,), g).float() for _ in range(2))
        found.append((sliced_wasserstein(x, y), energy_distance(x, y), wrong_pairs(x)))
        again = x[torch.randint(STARTS, (setup.n,), generator=g)]
        few.append((sliced_wasserstein(again, y), energy_distance(again, y)))
    t, f = torch.tensor(found), torch.tensor(few)
    return {
        "sliced_wasserstein": float(t[:, 0].mean()),
        "energy_distance": float(t[:, 1].square().mean().sqrt()),
        "wrong_pairs": float(t[:, 2].mean()),
        "sliced_wasserstein_of_64": float(f[:, 0].mean()),
        "energy_distance_of_64": float(f[:, 1].mean()),
    }


# ---- training and sampling ------------------------------------------------------------------------------------------


def condition(b: int) -> Cond:
    """Of b items that know nothing."""
    return Cond(
        mask=torch.ones(b, 1, TOKENS, dtype=torch.bool),
        pos=torch.arange(TOKENS, dtype=torch.float32).view(1, TOKENS, 1).expand(b, TOKENS, 1),
        group=torch.zeros(b, TOKENS, dtype=torch.int64),
        ctx=torch.zeros(b, 1, 4),
        ctx_pos=torch.zeros(b, 1, 1),
        ctx_mask=torch.zeros(b, 1, dtype=torch.bool),
    )


def new_net(setup: Setup) -> DiT:
    torch.manual_seed(0)
    return DiT(CHANNELS, 4, setup.width, setup.depth, heads=4, mlp_ratio=2.0, positions="index", cross_every=99)


def train(net: DiT, objective: Objective, steps: int, setup: Setup, name: str) -> DiT:
    """AdamW with warm-up and cosine decay, always new data of the law; returns the averaged net (decay .998)."""
    average = copy.deepcopy(net).eval()
    averages: list[Tensor] = [*average.parameters()]
    own: list[Tensor] = [*net.parameters()]
    parameters = [*own, *(p for p in objective.parameters() if p.requires_grad)]
    optimizer = torch.optim.AdamW(parameters, lr=setup.lr, weight_decay=0.0, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(1)
    data = law().sample((steps, setup.batch, 1), generator).float().view(steps, setup.batch, 1, TOKENS, CHANNELS)
    cond, weight = condition(setup.batch), torch.ones(setup.batch, TOKENS)
    for i in tqdm(range(steps), desc=name, delay=2, leave=False):
        for group in optimizer.param_groups:
            group["lr"] = setup.lr * min(1.0, (i + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * i / steps)))
        loss = objective(net, data[i], weight, cond, generator).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, own, 1 - min(0.998, (1 + i) / (10 + i)))
    return average


@torch.no_grad()
def draw(net: DiT, objective: Objective, step: str, steps: int, n: int) -> Tensor:
    """n samples, n 4. Those of learned starts are n draws from them by their masses."""
    claim = find_step(step)
    learned = objective.learned_starts
    rows = 1 if learned else max(1, n // 1024)
    seeds = as_seeds(0, rows, learned or n // rows)
    start = objective.starts((TOKENS, CHANNELS), seeds)
    prepared = net.prepare(condition(rows))
    model: Denoiser | FlowMap
    if claim.student:
        model = FlowMap(lambda z, t, s: objective.jump(net(z, t, s, prepared), z, t, s))
    else:
        model = lambda z, t: objective.denoise(net(z, t, t, prepared), z, t)  # noqa: E731
    times = time_grid(objective.path, steps)
    z = sample(model, Draw(start.z, start.log_weight), times, path=objective.path, step=claim.step, seeds=seeds).z
    if learned:
        mass = start.log_weight[0].exp()
        z = z[0][torch.multinomial(mass, n, True, generator=torch.Generator().manual_seed(2))]
    return z.reshape(-1, TOKENS * CHANNELS)


def compare(setup: Setup = Setup(), students: tuple[Student, ...] = STUDENTS) -> dict[str, Any]:
    """Train teacher and students, measure each at its evaluations.

    Returns:
        rows, the noise floor, the settings, seconds of each training.
    """
    true = law().sample((setup.n,), torch.Generator().manual_seed(7)).float()
    spread = float(torch.pdist(true).mean())
    rows: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}

    def add(net: DiT, objective: Objective, step: str, steps: int, name: str, trained: int) -> None:
        x = draw(net, objective, step, steps, setup.n)
        row = {"method": name, "step": step, "steps": steps, "evaluations": find_step(step).total(steps)}
        rows.append(row | {"trained": trained} | measure(x, true, spread))

    flow = FlowMatching()
    begin = time.perf_counter()
    teacher = train(new_net(setup), flow, setup.teacher, setup, TEACHER)
    seconds[TEACHER] = time.perf_counter() - begin
    for step in TEACHER_STEPS:
        for steps in sorted({_steps_within(step, n) for n in TEACHER_EVALUATIONS}):
            add(teacher, flow, step, steps, f"{TEACHER}, {step}", setup.teacher)
    for student in tqdm(students, desc="students", unit="student"):
        begin = time.perf_counter()
        objective, net = student.make(), copy.deepcopy(teacher).train() if student.from_teacher else new_net(setup)
        objective.attach(net)
        objective.begin(net, continued=student.from_teacher)
        steps = setup.student + (0 if student.from_teacher else setup.teacher)
        net = train(net, objective, steps, setup, student.name)
        seconds[student.name] = time.perf_counter() - begin
        for n in STUDENT_EVALUATIONS:
            add(net, objective.eval(), "flow_map", n, student.name, setup.teacher + setup.student)
    return {"set": "mixture", "setup": vars(setup), "rows": rows, "floor": floor(setup), "seconds": seconds}


def _steps_within(step: str, evaluations: int) -> int:
    """The most steps that spend no more than so many evaluations, at least one."""
    steps = 1
    while find_step(step).total(steps + 1) <= evaluations:
        steps += 1
    return steps
