"""SceneView: everything the review page shows of one scene, as plain numpy. It knows no file and no model.

Letters: k futures, a agents, h past steps (the last one is t0), t future steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from seqdiff.domains.trajectory.metrics import ade, displacement, fde
from seqdiff.domains.trajectory.scene import AGENT_TYPES, MapElement


@dataclass(frozen=True)
class Event:
    """Two agents that collide (b >= 0) or one off the road (b = -1), over steps first..last after t0 (1 = first)."""

    kind: str  # "collision" or "off_road"
    a: int
    b: int
    first: int
    last: int


@dataclass
class SceneView:
    """One scene with its joint futures. Positions are metres relative to `origin` (world frame), headings radians.

    Rows that are not valid hold NaN. `drivable` and `map` are None where no map was recorded: unknown, not empty.
    """

    scene_id: str
    t0: int
    dt: float
    agent_id: list[str]
    agent_type: list[str]
    size: np.ndarray  # a 2: length, width; the type's usual one where not recorded
    size_known: np.ndarray  # bool a
    scored: np.ndarray  # bool a
    past: np.ndarray  # a h 3
    futures: np.ndarray  # k a t 3
    truth: np.ndarray | None = None  # a t 3
    scores: dict[str, np.ndarray] = field(default_factory=dict)  # k each; NaN = unknown
    origin: tuple[float, float] = (0.0, 0.0)
    focal: int = -1
    map: list[MapElement] | None = None
    map_left_out: int = 0  # elements beyond the shown area
    drivable: object | None = None  # shapely geometry relative to origin
    signals: list[tuple[str, int, str]] = field(
        default_factory=list
    )  # map element id, step from t0 on which it holds, state
    events: list[list[Event]] | None = None  # k lists; None = not computed
    truth_events: list[Event] | None = None
    truth_scores: dict[str, float] = field(default_factory=dict)  # energies of the recorded future
    off_road_known: bool = False
    label: str = ""  # what these futures are called beside those of `compare`
    compare: SceneView | None = None  # the same window in another sample set, for a look before and after
    numbers: list[tuple[str, str, str]] = field(default_factory=list)  # name, there, here: the comparison in figures
    notes: list[str] = field(default_factory=list)  # what a reader of the page must know: counts left out, unknowns

    def __post_init__(self) -> None:
        a, k, t = len(self.agent_id), self.futures.shape[0], self.futures.shape[2]
        wants = {
            "futures": (self.futures.shape, (k, a, t, 3)),
            "past": (self.past.shape, (a, self.past.shape[1], 3)),
            "size": (self.size.shape, (a, 2)),
            "size_known": (self.size_known.shape, (a,)),
            "scored": (self.scored.shape, (a,)),
            "agent_type": ((len(self.agent_type),), (a,)),
        }
        if self.truth is not None:
            wants["truth"] = (self.truth.shape, (a, t, 3))
        wants.update({f"scores[{n!r}]": (v.shape, (k,)) for n, v in self.scores.items()})
        for name, (got, want) in wants.items():
            if tuple(got) != want:
                raise ValueError(f"scene {self.scene_id!r}: {name} has shape {tuple(got)}, expected {want}")
        if self.compare is not None and (self.compare.agent_id, self.compare.futures.shape[2:]) != (
            self.agent_id,
            (t, 3),
        ):
            raise ValueError(f"scene {self.scene_id!r}: the compared futures are of other agents or of another horizon")
        unknown = sorted(set(self.agent_type) - set(AGENT_TYPES))
        if unknown:
            raise ValueError(f"scene {self.scene_id!r}: agent types {unknown}, expected some of {AGENT_TYPES}")


def joint_errors(view: SceneView) -> dict[str, np.ndarray]:
    """JADE and JFDE of every joint future, metres, float64 [k] each: mean over scored agents, no minimum per agent.

    Displacements as in `seqdiff.domains.trajectory.metrics`. NaN without truth, or where a scored agent has none.
    """
    if view.truth is None or not view.scored.any():
        return {name: np.full(view.futures.shape[0], np.nan) for name in ("JADE", "JFDE")}
    truth = torch.from_numpy(view.truth[view.scored])[None]
    valid = torch.isfinite(truth[..., :2]).all(-1)
    error = displacement(torch.from_numpy(view.futures[:, view.scored])[None], truth)
    return {"JADE": ade(error, valid)[0].mean(-1).numpy(), "JFDE": fde(error, valid)[0].mean(-1).numpy()}
