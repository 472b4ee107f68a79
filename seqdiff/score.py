"""Joint scores of samples: distance between whole scenes, K worlds of S samples with probability mass.

Letters: b items, k or S samples, n agents (or tokens), t steps, K worlds. Everything here sees samples only, never the
truth.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

_CHUNK = 1 << 18  # pairwise distances held at once: stays in the processor's cache


class Worlds(NamedTuple):
    """K worlds chosen out of S samples, most probable first."""

    medoid: Tensor  # int64 b K: index on the sample axis
    probability: Tensor  # float64 b K: mass of the world's cluster, sums to one
    cluster: Tensor  # int64 b S: which world each sample belongs to


def scene_distance(
    x: Tensor, valid: Tensor, weight: Tensor | None = None, agents: Literal["mean", "max"] = "mean"
) -> Tensor:
    """Distance between whole scenes: how far apart two samples of one item are, averaged over agents and time.

    x: [b, k, n, t, c] positions (any unit, e.g. metres); valid: bool [b, n, t] or [b, n]; weight: [t], how much each
    step counts (None = all the same). Each agent's mean over its valid steps is taken first, then `agents`: the mean
    over agents that have a valid step, or the agent that differs most ("max"). Returns float64 [b, k, k] in the unit of
    x, symmetric, zero diagonal; an item without a valid agent has distance 0 everywhere (its samples do not differ).
    """
    if x.dim() != 5:
        raise ValueError(
            f"scene_distance got x of shape {tuple(x.shape)}; it takes [b, k, n, t, c]: add the missing axis"
        )
    b, k, n, t, _ = x.shape
    if valid.dim() == 2:
        valid = valid[..., None].expand(b, n, t)
    if valid.shape != (b, n, t):
        raise ValueError(f"scene_distance got valid of shape {tuple(valid.shape)}; x asks for {(b, n, t)} or {(b, n)}")
    if agents not in ("mean", "max"):
        raise ValueError(f"scene_distance got agents={agents!r}; write 'mean' or 'max'")
    w = torch.ones(t, dtype=torch.float64, device=x.device) if weight is None else weight.to(x.device, torch.float64)
    if w.shape != (t,) or not bool((w >= 0).all()):
        raise ValueError(
            f"scene_distance got weight of shape {tuple(w.shape)}; it takes {t} numbers that are not negative"
        )
    wt = valid.to(torch.float64) * w  # b n t
    wt = wt / wt.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    out = torch.zeros(b, k, k, dtype=torch.float64, device=x.device)
    for i in range(b):
        rows = torch.nonzero((wt[i] > 0).any(-1)).flatten()
        if not len(rows):
            continue
        for part in rows.split(max(1, _CHUNK // max(1, t * k * k))):
            d = _agent_distances(x[i][:, part], wt[i, part])
            out[i] = torch.maximum(out[i], d.amax(0)) if agents == "max" else out[i] + d.sum(0) / len(rows)
    if not bool(torch.isfinite(out).all()):
        raise ValueError(
            "scene_distance got a position that is not finite where valid is True; mask it or repair the sample"
        )
    return out


def _agent_distances(x: Tensor, weight: Tensor) -> Tensor:
    """Each agent's distance between samples, averaged over time. x: [k, n, t, c]; weight: [n, t], sums to one over t ->
    float64 [n, k, k]. By differences: matrix products would lose the digits of samples that nearly coincide."""
    k, n, t, _ = x.shape
    x = torch.where((weight > 0)[None, ..., None], x, torch.zeros_like(x))  # what is not valid may hold anything
    square = torch.zeros((), dtype=x.dtype, device=x.device)
    for axis in x.permute(3, 1, 2, 0).contiguous().unbind(0):  # n t k
        diff = axis[..., :, None] - axis[..., None, :]
        square = torch.addcmul(square, diff, diff)
    d = square.sqrt_().view(n, t, k * k)
    return torch.bmm(weight[:, None].to(x.dtype), d).view(n, k, k).to(torch.float64)


def choose_worlds(dist: Tensor, k: int, mass: Tensor | None = None) -> Worlds:
    """K worlds that stand for S samples: k-medoids of their distances, each with the mass of its cluster.

    dist: [b, S, S], symmetric, zero diagonal; mass: [b, S], the probability that each sample stands for (None = 1/S
    each, right for i.i.d. samples). With k = S every sample is its own world and keeps its mass (uniform for i.i.d.
    samples). Deterministic: greedy build, then the best single swap until none lowers the cost (PAM of Kaufman and
    Rousseeuw 1990, swaps evaluated together as in FastPAM of Schubert and Rousseeuw 2019). Apart from exact ties the
    result does not depend on the order of the samples. Worlds come most probable first, ties in the order of their
    samples.
    """
    dist, mass = _checked(dist, mass)
    b, s, _ = dist.shape
    if not 1 <= k <= s:
        raise ValueError(f"choose_worlds got k = {k} with {s} samples; ask for 1 to {s} worlds, or draw more samples")
    medoid = torch.arange(s, device=dist.device).expand(b, s) if k == s else _swap(dist, mass, _build(dist, mass, k))
    medoid, _ = medoid.sort(-1)
    cluster = _assign(dist, medoid)
    probability = torch.zeros(b, k, dtype=torch.float64, device=dist.device).scatter_add_(1, cluster, mass)
    order = probability.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(k, device=dist.device).expand(b, k))
    return Worlds(medoid.gather(1, order), probability.gather(1, order), rank.gather(1, cluster))


def sample_probability(dist: Tensor, cluster: Tensor, mass: Tensor | None = None) -> Tensor:
    """Probability of every sample: the mass of its cluster, spread inside the cluster by kernel density. -> float64 [b,
    S].

    dist: [b, S, S]; cluster: int [b, S]; mass: [b, S] or None (1/S each). The kernel is Gaussian in the scene distance;
    its width is the item's mean distance from a sample to its round(sqrt(S))-th nearest other one. Where the width is
    zero (the samples coincide) the density is uniform. Sums to one over S.
    """
    dist, mass = _checked(dist, mass)
    s = dist.shape[1]
    near = dist.sort(-1).values[..., min(s - 1, max(1, round(s**0.5)))]  # b S; column 0 is the sample itself
    width = near.mean(-1)[:, None, None]
    kernel = torch.where(width > 0, torch.exp(-0.5 * (dist / width.clamp_min(1e-300)) ** 2), torch.ones_like(dist))
    same = (cluster[:, :, None] == cluster[:, None, :]).to(torch.float64)
    density = mass * torch.einsum("bij,bij,bj->bi", kernel, same, mass)
    cluster_mass = torch.einsum("bij,bj->bi", same, mass)
    cluster_density = torch.einsum("bij,bj->bi", same, density)
    p = torch.where(
        cluster_density > 0, cluster_mass * density / cluster_density.clamp_min(1e-300), torch.zeros_like(mass)
    )
    return p / p.sum(-1, keepdim=True)


def score_samples(x: Tensor, valid: Tensor, k: int = 6, mass: Tensor | None = None) -> dict[str, Tensor]:
    """What scores.parquet says of each sample: its scene-level cluster (of min(k, S), 0 = most probable) and its
    probability.

    x: [b, S, n, t, 2]; valid: bool [b, n, t] or [b, n]; mass: [b, S] or None (i.i.d.). -> {"cluster": int64 b S,
    "probability": float64 b S}. With k >= S each sample is its own cluster and the probability is its mass.
    """
    dist = scene_distance(x, valid)
    worlds = choose_worlds(dist, min(k, x.shape[1]), mass)
    return {"cluster": worlds.cluster, "probability": sample_probability(dist, worlds.cluster, mass)}


def _checked(dist: Tensor, mass: Tensor | None) -> tuple[Tensor, Tensor]:
    if dist.dim() != 3 or dist.shape[1] != dist.shape[2] or dist.shape[1] == 0:
        raise ValueError(f"got distances of shape {tuple(dist.shape)}; they must be [b, S, S] with S >= 1")
    dist = dist.to(torch.float64)
    if not bool(torch.isfinite(dist).all()):
        raise ValueError("got a distance that is not finite; look for NaN in the samples")
    b, s, _ = dist.shape
    if mass is None:
        return dist, torch.full((b, s), 1.0 / s, dtype=torch.float64, device=dist.device)
    mass = mass.to(dist.device, torch.float64)
    ok = mass.shape == (b, s) and bool((mass >= 0).all()) and bool(((mass.sum(-1) - 1).abs() < 1e-6).all())
    if not ok:
        raise ValueError(
            f"got masses of shape {tuple(mass.shape)}; they must be {(b, s)}, finite, not negative, and sum to one"
        )
    return dist, mass


def _build(dist: Tensor, mass: Tensor, k: int) -> Tensor:
    """Greedy start: add the sample that lowers the cost most, k times. -> int64 [b, k]"""
    near = torch.full_like(mass, torch.inf)  # b S: distance to the nearest medoid so far
    chosen: list[Tensor] = []
    taken = torch.zeros_like(mass, dtype=torch.bool)
    for _ in range(k):
        cost = torch.einsum("bo,boc->bc", mass, torch.minimum(near[..., None], dist))
        c = cost.masked_fill(taken, torch.inf).argmin(-1)
        taken.scatter_(1, c[:, None], True)
        near = torch.minimum(near, dist.gather(2, c[:, None, None].expand(-1, dist.shape[1], 1))[..., 0])
        chosen.append(c)
    return torch.stack(chosen, 1)


def _swap(dist: Tensor, mass: Tensor, medoid: Tensor) -> Tensor:
    """Replace one medoid by one other sample, the best of all pairs, until nothing improves. -> int64 [b, k]"""
    b, s, _ = dist.shape
    k = medoid.shape[1]
    medoid = medoid.clone()
    rows = torch.arange(b, device=dist.device)
    for _ in range(10 * s):  # each swap lowers the cost, so this ends long before
        dm = dist.gather(2, medoid[:, None, :].expand(b, s, k))  # b o m
        near, who = dm.topk(min(2, k), -1, largest=False)
        d1 = near[..., :1]
        d2 = near[..., 1:] if k > 1 else torch.full_like(d1, torch.inf)
        gain = torch.einsum("bo,boc->bc", mass, torch.minimum(dist - d1, torch.zeros_like(d1)))  # b c
        loss = mass[..., None] * (torch.minimum(dist, d2) - torch.minimum(dist, d1))  # b o c
        own = torch.nn.functional.one_hot(who[..., 0], k).to(dist.dtype)  # b o m
        delta = gain[:, None, :] + torch.einsum("bom,boc->bmc", own, loss)  # b m c
        delta.scatter_(2, medoid[:, None, :].expand(b, k, k), torch.inf)
        best, where = delta.flatten(1).min(-1)
        better = best < -1e-12 * (1.0 + (mass * d1[..., 0]).sum(-1))
        if not bool(better.any()):
            break
        r, w = rows[better], where[better]
        medoid[r, w // s] = w % s
    return medoid


def _assign(dist: Tensor, medoid: Tensor) -> Tensor:
    """Nearest medoid of each sample; a medoid belongs to itself even where another one coincides with it. -> int64 [b,
    S]
    """
    b, s, _ = dist.shape
    k = medoid.shape[1]
    cluster = dist.gather(2, medoid[:, None, :].expand(b, s, k)).argmin(-1)
    return cluster.scatter(1, medoid, torch.arange(k, device=dist.device).expand(b, k))
