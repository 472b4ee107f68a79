"""Measures of forecasts: pure functions of tensors, value and validity side by side.

Letters: b scenes (windows), k samples or worlds, a agents, t steps. Metres. `count` (bool [b, a]) says which agents are
scored; whatever is not counted never enters a mean, and a NaN in what is counted stays a NaN in the result.

Marginal measures let every agent pick its own sample; joint ones pick ONE sample for the whole scene. minADE and minFDE
are each minimised on their own. Sums over data: marginal = mean over all agents of all windows; joint = mean over the
agents of a window, minimum over k, mean over windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seqdiff.score import scene_distance

MISS_M = 2.0  # an end point further away than this is a miss
MODE_M = 2.0  # samples whose most different agent is further apart than this (mean over time) are different modes
COLLAPSE_M = 0.05  # mean distance between samples below which they are called collapsed
DIVERSITY_STEPS = 12
PEDESTRIAN_RADIUS_M = 0.1


@dataclass(frozen=True)
class Forecast:
    """All displacement measures of a batch. Agents: [b, a], meaningful where count; windows: [b], NaN where no agent
    counts.
    """

    count: Tensor  # bool b a
    min_ade: Tensor  # b a
    min_fde: Tensor  # b a
    missed: Tensor  # b a: 0, 1, or NaN
    brier_min_fde: Tensor  # b a
    min_jade: Tensor  # b
    min_jfde: Tensor  # b
    joint_miss: Tensor  # b: share of the agents that the world of minJFDE misses
    brier_min_jfde: Tensor  # b
    best_world: Tensor  # int64 b: the world of minJADE


def displacement(pred: Tensor, truth: Tensor) -> Tensor:
    """Distance to the recording. pred: [b, k, a, t, 2 or more], truth: [b, a, t, 2 or more] -> [b, k, a, t]."""
    return torch.linalg.vector_norm(pred[..., :2] - truth[:, None, ..., :2], dim=-1)


def ade(error: Tensor, valid: Tensor) -> Tensor:
    """Mean displacement over the valid steps. error: [b, k, a, t], valid: [b, a, t] -> [b, k, a]; NaN where none is
    valid.
    """
    v = valid[:, None]
    return torch.where(v, error, torch.zeros_like(error)).sum(-1) / v.sum(-1).to(error.dtype)


def fde(error: Tensor, valid: Tensor) -> Tensor:
    """Displacement at the last step of the horizon -> [b, k, a]; NaN where that step is not valid."""
    return torch.where(valid[:, None, :, -1], error[..., -1], torch.full_like(error[..., -1], torch.nan))


def misses(final: Tensor, threshold: float = MISS_M) -> Tensor:
    """1 where an end point lies further than `threshold` metres away, else 0; NaN stays NaN. Any shape."""
    return torch.where(final.isnan(), final, (final > threshold).to(final.dtype))


def world_mean(value: Tensor, count: Tensor) -> Tensor:
    """Mean over the counted agents of a scene. value: [b, k, a], count: [b, a] -> [b, k]; NaN where no agent counts."""
    c = count[:, None]
    return torch.where(c, value, torch.zeros_like(value)).sum(-1) / c.sum(-1).to(value.dtype)


def check_probability(p: Tensor) -> Tensor:
    """Probabilities of the k samples of each scene, [b, k], returned unchanged.

    Raises ValueError unless they are finite, not negative and sum to one (within 1e-6): a Brier score of anything else
    means nothing.
    """
    if p.dim() != 2 or not bool(torch.isfinite(p).all()) or bool((p < 0).any()):
        raise ValueError(f"got probabilities of shape {tuple(p.shape)}; they must be [b, k], finite and not negative")
    off = (p.sum(-1) - 1).abs()
    if bool((off > 1e-6).any()):
        i = int(off.argmax())
        raise ValueError(f"probabilities of scene {i} sum to {float(p[i].sum())}; divide each scene's by their sum")
    return p


def brier_at_best(value: Tensor, p: Tensor) -> Tensor:
    """Value of the best sample plus the Brier penalty (1 - p)^2 of that sample (Argoverse 2).

    value: [b, k] or [b, k, a]; p: [b, k] -> [b] or [b, a]; NaN where a value is NaN.
    """
    penalty = (1 - check_probability(p).to(value.dtype)) ** 2
    best, i = value.min(1)  # NaN wins, and stays
    penalty = penalty if value.dim() == 2 else penalty[..., None].expand_as(value)
    return best + penalty.gather(1, i[:, None])[:, 0]


def forecast(pred: Tensor, truth: Tensor, valid: Tensor, scored: Tensor, probability: Tensor | None = None) -> Forecast:
    """Every displacement measure of k samples against the recorded future.

    pred: [b, k, a, t, 2 or more]; truth: [b, a, t, 2 or more]; valid: bool [b, a, t]; scored: bool [b, a]; probability:
    [b, k] or None (1/k each). Counted are scored agents whose last step is valid; ADE is taken over their valid steps.
    """
    b, k = pred.shape[:2]
    if (
        k == 0
        or truth.shape[:3] != (b, *pred.shape[2:4])
        or valid.shape != truth.shape[:3]
        or scored.shape != valid.shape[:2]
    ):
        shapes = [tuple(x.shape) for x in (pred, truth, valid, scored)]
        raise ValueError(
            f"got pred, truth, valid, scored of shapes {shapes}; expected bkat2, bat2, bat, ba with k >= 1"
        )
    p = torch.full((b, k), 1 / k, dtype=torch.float64, device=pred.device) if probability is None else probability
    count = scored & valid[..., -1]
    error = displacement(pred, truth)
    a, f = ade(error, valid), fde(error, valid)
    wa, wf = world_mean(a, count), world_mean(f, count)
    min_jade, best_world = wa.min(1)
    min_jfde, at = wf.min(1)
    world_missed = world_mean(misses(f), count)
    min_fde = f.amin(1)
    return Forecast(
        count=count,
        min_ade=a.amin(1),
        min_fde=min_fde,
        missed=misses(min_fde),
        brier_min_fde=brier_at_best(f, p),
        min_jade=min_jade,
        min_jfde=min_jfde,
        joint_miss=world_missed.gather(1, at[:, None])[:, 0],
        brier_min_jfde=brier_at_best(wf, p),
        best_world=best_world,
    )


def energy_score(
    pred: Tensor, truth: Tensor, valid: Tensor, count: Tensor, probability: Tensor | None = None
) -> Tensor:
    """Energy score of the k samples as forecasts of the whole scene, a proper score (Gneiting and Raftery 2007, eq. 21)
    -> [b].

    sum_k p_k |X_k - y| - 1/2 sum_kj p_k p_j |X_k - X_j|, the norm over all valid (agent, step, coordinate) of the
    counted agents, divided by sqrt(number of (agent, step)) so that it reads as metres. pred: [b, k, a, t, 2 or more],
    truth: [b, a, t, 2 or more], valid: [b, a, t], count: [b, a], probability: [b, k] or None (1/k each, right for
    i.i.d. samples). NaN where nothing counts. With k = 1 it is the root mean square displacement.
    """
    b, k = pred.shape[:2]
    p = pred.new_full((b, k), 1 / k) if probability is None else check_probability(probability).to(pred.dtype)
    v = (valid & count[..., None]).reshape(b, -1)  # b at
    zero = torch.zeros((), dtype=pred.dtype, device=pred.device)
    x = torch.where(v[:, None, :, None], pred[..., :2].flatten(2, 3), zero).flatten(2)  # b k 2at
    y = torch.where(v[..., None], truth[..., :2].flatten(1, 2).to(pred.dtype), zero).flatten(1)  # b 2at
    to_truth = (p * torch.linalg.vector_norm(x - y[:, None], dim=-1)).sum(-1)
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    between = torch.einsum("bi,bij,bj->b", p, apart, p)
    return (to_truth - 0.5 * between) / v.sum(-1).to(pred.dtype).sqrt().masked_fill(~v.any(-1), torch.nan)


def sample_energy_score(sample: Tensor, truth: Tensor, look: Tensor) -> Tensor:
    """`energy_score` of i.i.d. samples as an estimate for their law, b: without the bias that the samples' distance 0 to themselves
    brings, so that it does not depend on k. The norm goes over all agents and steps at once, so that it sees
    which agent's future goes with which other's; a mean of the agents' own distances would not.

    sample: b k a t 3, truth: b a t 3, look: bool b a t; k >= 2. Metres."""
    b, k = sample.shape[:2]
    v = look.reshape(b, 1, -1, 1)
    zero = torch.zeros((), dtype=torch.float64)
    x = torch.where(v, sample[..., :2].reshape(b, k, -1, 2).double(), zero).flatten(2)
    y = torch.where(v, truth[..., :2].reshape(b, 1, -1, 2).double(), zero).flatten(2)
    error = (x - y).norm(dim=-1).mean(-1)
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").sum((1, 2)) / (k * (k - 1))
    return (error - 0.5 * apart) / look.sum((1, 2)).clamp_min(1).sqrt()


def spread(pred: Tensor, valid: Tensor) -> Tensor:
    """Diversity: mean scene distance between two different samples, metres -> float64 [b]; NaN with fewer than two.

    Over at most DIVERSITY_STEPS evenly spaced steps, the last among them. pred: [b, k, a, t, 2 or more]; valid: bool
    [b, a, t].
    """
    k = pred.shape[1]
    total = scene_distance(*_thin(pred, valid)).sum((1, 2))
    return total / (k * (k - 1)) if k > 1 else torch.full_like(total, torch.nan)


def modes(pred: Tensor, valid: Tensor, radius: float = MODE_M) -> Tensor:
    """Number of modes: how many samples can be kept so that any two differ by more than `radius` metres -> int64 [b].

    Two samples differ by the mean distance over time of the agent that differs most, so that one agent that turns makes
    a mode in a scene of many. Samples are kept greedily, the one with most neighbours first. Arguments and steps as in
    `spread`.
    """
    near = scene_distance(*_thin(pred, valid), agents="max") <= radius  # b k k
    left = torch.ones(near.shape[:2], dtype=torch.bool, device=near.device)
    n = torch.zeros(len(near), dtype=torch.long, device=near.device)
    weight = near.sum(-1)
    while bool(left.any()):
        i = weight.masked_fill(~left, -1).argmax(-1)
        n += left.any(-1)
        left &= ~near.gather(1, i[:, None, None].expand(-1, 1, near.shape[2]))[:, 0]
    return n


def _thin(pred: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    t = pred.shape[3]
    steps = torch.linspace(t - 1, 0, min(t, DIVERSITY_STEPS), device=pred.device).round().long()
    return pred[:, :, :, steps, :2].to(torch.float32), valid[..., steps]


def pedestrian_collisions(pred: Tensor, count: Tensor, radius: float = PEDESTRIAN_RADIUS_M) -> Tensor:
    """Share of a scene's pedestrians that meet another one, in each sample; CR_mean is its mean over samples, then
    windows.

    Two meet where the straight relative motion between two frames passes strictly closer than 2 * radius (Weng et al.
    2023, "Joint Metrics Matter"). pred: [b, k, a, t, 2 or more]; count: bool [b, a] -> [b, k]; 0 with one pedestrian,
    NaN with none and where a counted position is not finite.
    """
    x = pred[..., :2]
    first, second = torch.triu_indices(x.shape[2], x.shape[2], 1, device=x.device)
    d = x[:, :, first] - x[:, :, second]  # b k p t 2
    start, move = d[..., :-1, :], d[..., 1:, :] - d[..., :-1, :]
    along = -(start * move).sum(-1) / move.square().sum(-1).clamp_min(torch.finfo(x.dtype).tiny)
    closest = (start + along.clamp(0, 1)[..., None] * move).norm(dim=-1) if x.shape[3] > 1 else d.norm(dim=-1)
    meets = (closest < 2 * radius).any(-1) & (count[:, first] & count[:, second])[:, None]  # b k p
    hit = torch.zeros(x.shape[:3], dtype=torch.bool, device=x.device)
    b, k, p = meets.nonzero(as_tuple=True)
    hit[b, k, first[p]] = True
    hit[b, k, second[p]] = True
    share = world_mean(hit.to(x.dtype), count)
    broken = (~torch.isfinite(x).all(-1).all(-1) & count[:, None]).any(-1)
    return share.masked_fill(broken, torch.nan)
