"""Where the lights that are red at t0 make road users stop."""

from __future__ import annotations

import torch
from torch import Tensor

from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.scene import MAP_KINDS, SIGNAL_STATES

LINE_HALF = 2.0  # metres to each side of a lane's centre that its stop line reaches
JOINED = 0.5  # metres within which lanes start at one stop line


def red_lines(scene: SceneBatch) -> list[Tensor]:
    """Stop lines [2, 2] (left, right end) of a batch of one scene: where lanes begin that are all red at t0."""
    lane = scene.seg_mask[0] & (scene.seg_kind[0] == MAP_KINDS.index("lane_center"))
    lit = lane & (scene.seg_signal[0] != SIGNAL_STATES.index("none"))
    first, last, state = scene.seg[0, lit, 0], scene.seg[0, lit, -1], scene.seg_signal[0, lit]
    begins = [i for i in range(len(first)) if not len(last) or float((last - first[i]).norm(dim=-1).amin()) > JOINED]
    lines: list[Tensor] = []
    done = torch.zeros(0, 2, device=first.device)
    for i in begins:
        if len(done) and float((done - first[i]).norm(dim=-1).amin()) <= JOINED:
            continue
        done = torch.cat([done, first[i : i + 1]])
        here = [m for m in begins if float((first[m] - first[i]).norm()) <= JOINED]
        if any(int(state[m]) != SIGNAL_STATES.index("red") for m in here):
            continue
        ways = torch.stack([scene.seg[0, lit, 1][m] - first[m] for m in here])
        way = (ways / ways.norm(dim=-1, keepdim=True).clamp_min(1e-6)).mean(0)
        way = way / way.norm().clamp_min(1e-6)
        left = torch.stack([-way[1], way[0]])
        lines.append(torch.stack([first[i] + LINE_HALF * left, first[i] - LINE_HALF * left]))
    return lines
