"""What each guide reaches and what it costs, where the right answer is known: `python -m seqdiff.tools.guides`.

The law is a Gaussian sequence of 8 numbers, neighbours correlated by .9; the wish is that the last one is >= 1, or 1.5.
Printed are the
share of samples that hold it, and the energy distance to the exact law given the wish (for classifier-free guidance: to
the conditional
law itself, since it asks for nothing that has a law). Nothing is trained.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from seqdiff.guidance import ClassifierFree, EnergyDescent, Infill
from seqdiff.noise import gaussian_noise
from seqdiff.path import Path, time_grid
from seqdiff.projection import Box, Equality, Projection
from seqdiff.resampling import Resample
from seqdiff.sample import sample
from seqdiff.steps import STEPS
from seqdiff.testing import CorrelatedGaussian
from seqdiff.types import Draw, Guide, as_seeds

PATH, LENGTH, LEAST, VALUE = Path(), 8, 1.0, 1.5
COV = 0.9 ** (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs().double()
LAW = CorrelatedGaussian(torch.zeros(LENGTH).double(), COV)
LEADING = CorrelatedGaussian(COV[:, -1], COV)  # a condition that lifts the end by 1


@dataclass(frozen=True)
class Case:
    """A guided run and what it is held to."""

    name: str
    guides: Sequence[Guide]
    reference: Tensor  # N d, draws of the law that a perfect guide would give
    holds: Callable[[Tensor], Tensor]  # samples k d -> bool k
    step: str = "dpmpp_2m"
    law: CorrelatedGaussian = LAW


def at_least(x: Tensor) -> Tensor:
    return x[:, -1] >= LEAST - 1e-5


def equal(x: Tensor) -> Tensor:
    return (x[:, -1] - VALUE).abs() < 1e-5


def weighted_distance(x: Tensor, y: Tensor, weight: Tensor) -> float:
    """Energy distance of weighted samples x (k d, weights sum to one) to draws y (m d); no sample is its own pair."""
    own = 1 - weight.square().sum()
    within = (weight[:, None] * weight * torch.cdist(x, x)).sum() / own
    return float(2 * (weight @ torch.cdist(x, y).mean(1)) - within - torch.pdist(y).mean())


def cases(start: Draw, steps: int, draws: int) -> list[Case]:
    """All guides at one number of steps."""
    generator = torch.Generator().manual_seed(0)
    pool = LAW.sample((draws * 40,), generator)
    above = pool[at_least(pool)][:draws]
    given = LAW.sample((draws,), generator)
    given = given + COV[:, -1] * (VALUE - given[:, -1:])
    last = max(0.3, time_grid(PATH, steps)[-2])
    low = torch.full((1, LENGTH), -math.inf).double()
    low[0, -1] = LEAST
    row = torch.zeros(1, 1, LENGTH).double()
    row[..., -1] = 1
    known = torch.full((1, 1, 1, LENGTH), VALUE).double()
    mask = torch.zeros(1, 1, 1, LENGTH, dtype=torch.bool)
    mask[..., -1] = True

    def energy(x: Tensor) -> Tensor:
        return (LEAST - x[..., -1]).clamp_min(0).square()

    def reward(x: Tensor) -> Tensor:
        return -4 * (LEAST - x[..., 0, -1]).clamp_min(0)

    tilt = torch.exp(reward(pool[:, None]))
    tilted = pool[torch.multinomial(tilt, draws, generator=generator)]
    conditional = LEADING.sample((draws,), generator)
    top, free = torch.full((1, LENGTH), math.inf).double(), LAW.denoiser(PATH)
    out = [Case("none, against the free law", [], pool[:draws], at_least)]
    for below in (last, 0.6, 1.0):
        if below >= last:
            descent = EnergyDescent(energy, 16, max_step=0.3, below=below)
            out.append(Case(f"energy descent, t <= {below:g}", [descent], above, at_least))
    for step in (0.3, 2.0):
        descent = EnergyDescent(energy, 16, max_step=step, below=1.0, through_net=True)
        out.append(Case(f"the same through the net, steps <= {step:g}", [descent], above, at_least))
    aim = EnergyDescent(lambda x: (x[..., -1] - VALUE).square(), 8, 2.0, 2.0, 1.0, through_net=True)
    final = Projection(Equality(row, torch.full((1, 1), VALUE).double()), below=0.0)
    out += [
        Case("equality through the net, projected at the end", [aim, final], given, equal),
        Case("projection onto a box", [Projection(Box(low, top))], above, at_least),
        Case(
            "projection onto an equality", [Projection(Equality(row, torch.full((1, 1), VALUE).double()))], given, equal
        ),
        Case("infilling by replacement", [Infill(known, mask, start.z, PATH)], given, equal),
        Case("importance weights", [Resample(reward, threshold=0.0)], tilted, at_least, "ancestral"),
        Case("resampling, threshold .5", [Resample(reward, threshold=0.5)], tilted, at_least, "ancestral"),
    ]
    for weight, rescale in ((1.0, 0.0), (2.0, 0.0), (2.0, 0.7), (4.0, 0.0), (4.0, 0.7)):
        guide = ClassifierFree(free, weight, rescale=rescale)
        name = f"classifier-free, weight {weight:g}, rescale {rescale:g}"
        out.append(Case(name, [guide], conditional, at_least, law=LEADING))
    return out


def rows(steps: int, k: int = 1000, draws: int = 1500) -> list[tuple[str, float, float]]:
    """Name, share that holds the wish, energy distance, for each guide."""
    seeds = as_seeds(0, 1, k)
    start = gaussian_noise((1, LENGTH), seeds)
    start = Draw(start.z.double(), start.log_weight.double())
    out = []
    for case in cases(start, steps, draws):
        run = sample(
            case.law.denoiser(PATH), start, time_grid(PATH, steps), path=PATH, step=STEPS[case.step].step,
            guides=case.guides, seeds=seeds,
        )  # fmt: skip
        x, weight = run.z[0, :, 0], torch.softmax(run.log_weight[0], 0)
        held = float(weight @ case.holds(x).double())
        out.append((case.name, held, weighted_distance(x, case.reference, weight)))
    return out


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--k", type=int, default=1000, help="samples")
    args = parser.parse_args(argv)
    found = [rows(n, args.k) for n in args.steps]
    table = Table(title=f"{args.k} samples: wish held %, and energy distance to the law that was asked for")
    table.add_column("guide")
    for n in args.steps:
        table.add_column(f"{n} steps: held %", justify="right")
        table.add_column("distance", justify="right")
    for line in zip(*found, strict=True):
        table.add_row(line[0][0], *(text for _, held, far in line for text in (f"{100 * held:.1f}", f"{far:.3f}")))
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
