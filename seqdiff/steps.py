"""The table STEPS of all samplers with each one's claim. The steps themselves: singlestep.py, multistep.py."""

from __future__ import annotations

from dataclasses import dataclass

from seqdiff.multistep import ab2, dpmpp_2m, dpmpp_2m_sde, dpmpp_3m, ipndm_4, unipc_2
from seqdiff.singlestep import (
    Step,
    StepOut,
    ancestral,
    consistency,
    ddim,
    ddim_eta,
    euler,
    flow_map,
    heun,
    midpoint,
)

__all__ = [
    "FLOW_MAP_STEPS", "STEPS", "Claim", "Step", "StepOut", "ab2", "ancestral", "consistency", "ddim", "ddim_eta", "dpmpp_2m",
    "dpmpp_2m_sde", "dpmpp_3m", "euler", "find_step", "flow_map", "heun", "ipndm_4", "midpoint", "unipc_2",
]  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """What a step promises; the tests hold it to that.

    Args:
        step: the function.
        order: of convergence on the probability-flow ODE on smooth grids, once a multistep method has its past; None for
            stochastic steps, which are held to the law of their samples, and for students' jumps.
        evaluations: of the net in a step.
        evaluations_last: in the step that ends at t = 0; None = as many.
        cold_order: order from an empty memory, where the first steps are of lower order; None = `order`.
        stochastic: draws fresh noise, needs seeds.
        student: takes a FlowMap, not a Denoiser.
    """

    step: Step
    order: int | None
    evaluations: int = 1
    evaluations_last: int | None = None
    cold_order: int | None = None
    stochastic: bool = False
    student: bool = False

    def total(self, steps: int) -> int:
        """Evaluations of the net in a run of so many steps that ends at t = 0."""
        if steps < 1:
            raise ValueError(f"steps is {steps}; expected at least 1")
        last = self.evaluations if self.evaluations_last is None else self.evaluations_last
        return self.evaluations * (steps - 1) + last


STEPS: dict[str, Claim] = {
    "ddim": Claim(ddim, order=1),
    "euler": Claim(euler, order=1),
    "heun": Claim(heun, order=2, evaluations=2, evaluations_last=1),
    "midpoint": Claim(midpoint, order=2, evaluations=2),
    "ab2": Claim(ab2, order=2),
    "dpmpp_2m": Claim(dpmpp_2m, order=2),
    "dpmpp_3m": Claim(dpmpp_3m, order=3, cold_order=2),
    "unipc_2": Claim(unipc_2, order=3),
    "ipndm_4": Claim(ipndm_4, order=2),
    "ancestral": Claim(ancestral, order=None, stochastic=True),
    "dpmpp_2m_sde": Claim(dpmpp_2m_sde, order=None, stochastic=True),
    "consistency": Claim(consistency, order=None, stochastic=True, student=True),  # type: ignore[arg-type]
    "flow_map": Claim(flow_map, order=None, student=True),  # type: ignore[arg-type]
}

FLOW_MAP_STEPS: tuple[Step, ...] = tuple(claim.step for claim in STEPS.values() if claim.student)


def find_step(name: str) -> Claim:
    """The claim by name.

    Raises:
        ValueError: no such step; the text lists those there are.
    """
    if name not in STEPS:
        raise ValueError(f"unknown sampler {name!r}; one of {', '.join(STEPS)}")
    return STEPS[name]
