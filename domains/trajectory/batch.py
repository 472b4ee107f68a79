"""SceneBatch: what the data module yields and everything in the trajectory domain takes.

Letters: b scenes, a agents (padded), h history steps (the last one is t0), t future steps, s map segments, l points a segment.
Every position is relative to `origin` (added back when files are written), so float32 keeps millimetres in any world frame.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass
class SceneBatch:
    hist: Tensor  # float32 b a h 3: x, y, heading at t0-h+1 .. t0; 0 where not valid
    hist_valid: Tensor  # bool b a h
    fut: Tensor  # float32 b a t 3: x, y, heading at t0+1 .. t0+t; 0 where not valid
    fut_valid: Tensor  # bool b a t
    mask: Tensor  # bool b a: True = a real agent, present at t0
    scored: Tensor  # bool b a: counts in metrics
    type: Tensor  # int64 b a: index into scene.AGENT_TYPES
    size: Tensor  # float32 b a 2: length, width; the type's default where not recorded
    size_known: Tensor  # bool b a
    seg: Tensor  # float32 b s l 2: map polylines chopped into pieces of l points
    seg_mask: Tensor  # bool b s
    seg_kind: Tensor  # int64 b s: index into scene.MAP_KINDS
    seg_signal: Tensor  # int64 b s: index into scene.SIGNAL_STATES at t0
    map_known: Tensor  # bool b: False = no map was recorded
    origin: Tensor  # float64 b 2
    scene_id: list[str]
    t0: list[int]  # scene step of the present
    agent_id: list[list[str]]  # ids of the real agents, in the order of the a axis
    focal: Tensor  # int64 b: index of the focal agent on the a axis, -1 = none
    left_out: Tensor  # int64 b: agents present at t0 but beyond the limit of agents
    drivable: list[Any]  # b shapely geometries relative to origin, or None = unknown
    dt: float

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SceneBatch:
        """A copy with every tensor on `device` (Lightning calls this)."""
        moved: dict[str, Any] = {
            f.name: v.to(device, non_blocking=non_blocking) if isinstance(v := getattr(self, f.name), Tensor) else v
            for f in fields(self)
        }
        return SceneBatch(**moved)

    @property
    def n_scenes(self) -> int:
        return self.hist.shape[0]
