"""Error against steps of every sampler on every path, and the orders: `python -m seqdiff.tools.samplers`.

On the closed-form mixture .3 N(-1, .4^2) + .7 N(.8, .6^2): mean distance to where the exact flow carries the same noise for
ODE steps, energy distance of 2000 samples to the law (in 1e-3) for stochastic ones. Nothing is trained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from seqdiff.path import Path, time_grid
from seqdiff.sample import gaussian_noise, sample
from seqdiff.steps import STEPS
from seqdiff.testing import Mixture, energy_distance, order_of
from seqdiff.types import Draw, as_seeds

F64 = torch.float64
LAW = Mixture(
    torch.tensor([0.3, 0.7], dtype=F64), torch.tensor([-1.0, 0.8], dtype=F64), torch.tensor([0.4, 0.6], dtype=F64)
)
PATHS = ("linear", "cosine", "edm")


def ode_error(name: str, path: Path, steps: int, grid: str, worst: bool = False) -> float:
    """Mean (or largest) distance to the exact end points over 201 quantiles of the start noise."""
    p = (torch.arange(201, dtype=F64) + 0.5) / 201
    z = torch.special.ndtri(p).view(1, 1, 201, 1) * path.start_scale(1.0)
    times = time_grid(path, steps, grid)  # type: ignore[arg-type]
    end = sample(LAW.denoiser(path), Draw(z, torch.zeros(1, 1)), times, path=path, step=STEPS[name].step).z
    off = (end - LAW.flow(path, z, 1.0)).abs()
    return float(off.max() if worst else off.mean())


def law_error(name: str, path: Path, steps: int, grid: str) -> float:
    """Energy distance of 2000 samples to 2000 of the law."""
    seeds = as_seeds(0, 1, 20)
    z = gaussian_noise((100, 1), seeds).z.double() * path.start_scale(1.0)
    times = time_grid(path, steps, grid)  # type: ignore[arg-type]
    start = Draw(z, torch.zeros(seeds.shape))
    end = sample(LAW.denoiser(path), start, times, path=path, step=STEPS[name].step, seeds=seeds).z
    return energy_distance(end.view(-1, 1), _truth())


def _truth() -> Tensor:
    return LAW.sample((2000,), torch.Generator().manual_seed(1))


def default_grid(path: Path) -> str:
    """Even steps in sigma waste all but the last ones on the edm path."""
    return "karras" if path.kind == "edm" else "uniform"


def rows(steps: Sequence[int], grid: str | None, worst: bool, orders: bool) -> list[list[str]]:
    """Sampler, path, grid, order claimed and measured, evaluations at steps[-1], error at each number of steps."""
    out = []
    for name, claim in STEPS.items():
        if claim.student:
            continue
        for kind in PATHS:
            path = Path(kind)  # type: ignore[arg-type]
            chosen = grid or default_grid(path)
            if claim.stochastic:
                measured = "law"
                errors = [1e3 * law_error(name, path, n, chosen) for n in steps]
            else:
                measured = (
                    f"{order_of(claim.step, LAW, path, [64, 128], warm=claim.order or 1)[0]:.2f}" if orders else "-"
                )
                errors = [ode_error(name, path, n, chosen, worst) for n in steps]
            claimed = "-" if claim.order is None else str(claim.order)
            out.append(
                [name, kind, chosen, claimed, measured, str(claim.total(steps[-1])), *(f"{e:.4f}" for e in errors)]
            )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m seqdiff.tools.samplers", description=__doc__)
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[4, 8, 12, 24, 48], help="numbers of steps (default 4 8 12 24 48)"
    )
    parser.add_argument(
        "--grid", choices=["uniform", "logsnr", "karras"], help="default: uniform, karras on the edm path"
    )
    parser.add_argument("--max", action="store_true", help="largest error over the noise, not the mean")
    parser.add_argument("--no-orders", action="store_true", help="leave out the measured orders (half the time)")
    args = parser.parse_args(argv)
    if min(args.steps) < 1:
        parser.error(f"--steps got {min(args.steps)}; expected at least 1")
    torch.set_num_threads(1)
    what = "largest" if args.max else "mean"
    table = Table(title=f"{what} distance to the exact end points; stochastic: energy distance x 1e3")
    for title in (
        "sampler",
        "path",
        "grid",
        "claim",
        "order",
        f"evaluations at {args.steps[-1]}",
        *map(str, args.steps),
    ):
        table.add_column(title, justify="right" if title[0].isdigit() else "left")
    for row in rows(args.steps, args.grid, args.max, not args.no_orders):
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
