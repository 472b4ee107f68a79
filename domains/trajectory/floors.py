"""Forecasts without learning: constant velocity, constant turn rate, and K samples of each with speed and heading
noise.

Letters: b scenes, k samples, a agents, h history steps, t future steps. All return [b, k, a, t, 3] relative to
batch.origin, as a model does. The history alone is looked at; agents that are not in batch.mask get zeros.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from tqdm import tqdm

from seqdiff.domains.trajectory.batch import SceneBatch

TURN_S = 0.5  # headings carry noise that one step of 0.1 s would make a turn rate of; velocity is best over one step
SLOW = 0.1  # m/s; the heading of slower agents does not tell a turn: their turn rate is zero
STILL = 1e-3  # m/s; the direction of motion of slower agents is their heading

Measure = Literal["minJADE", "minADE"]


@dataclass(frozen=True)
class Noise:
    """How K samples differ: standard deviations of independent normal draws, one per agent and sample, held over the
    horizon.
    """

    relative: float = 0.0  # of the speed, as a share of it
    absolute: float = 0.0  # of the speed, m/s; added in quadrature; the sampled speed stays above zero
    heading: float = 0.0  # of the direction of motion, rad
    turn: float = 0.0  # of the turn rate, rad/s

    def describe(self) -> str:
        """In words, for print."""
        speed = f"speed {self.relative:.0%} and {self.absolute:g} m/s"
        return f"{speed}, direction {self.heading:g} rad, turn rate {self.turn:g} rad/s"


class Motion(NamedTuple):
    """State at t0, from the history."""

    xy: Tensor  # b a 2
    speed: Tensor  # b a, m/s
    course: Tensor  # b a, direction of motion, rad
    heading: Tensor  # b a
    turn: Tensor  # b a, rad/s


@runtime_checkable
class Windows(Protocol):
    """What fitting needs of a data set: WindowDataset has it."""

    def __len__(self) -> int: ...

    def batch(self, indices: list[int]) -> SceneBatch: ...


def motion(batch: SceneBatch) -> Motion:
    """Position, speed, direction and turn rate at t0.

    Velocity is the difference to the latest valid frame before t0, turn rate the difference of headings over TURN_S (to
    the latest valid frame at least that long before t0; if there is none, to the earliest). An agent with one frame
    stands still.
    """
    now = batch.hist[:, :, -1]
    then, span = _before(batch, 1)
    velocity = (now[..., :2] - then[..., :2]) / span[..., None]
    earlier, span = _before(batch, max(1, round(TURN_S / batch.dt)))
    diff = now[..., 2] - earlier[..., 2]
    turn = torch.atan2(diff.sin(), diff.cos()) / span
    speed = velocity.norm(dim=-1)
    course = torch.where(speed > STILL, torch.atan2(velocity[..., 1], velocity[..., 0]), now[..., 2])
    return Motion(now[..., :2], speed, course, now[..., 2], torch.where(speed > SLOW, turn, torch.zeros_like(turn)))


def _before(batch: SceneBatch, steps: int) -> tuple[Tensor, Tensor]:
    """The latest valid frame at least `steps` before t0, or the earliest valid one -> its pose [b, a, 3], seconds ago
    [b, a].

    Without any earlier frame: the pose at t0, one step ago.
    """
    h = batch.hist.shape[2]
    index = torch.arange(h, device=batch.hist.device)
    past = batch.hist_valid & (index < h - 1)
    far = torch.where(past & (index <= h - 1 - steps), index, -1).amax(-1)
    first = torch.where(past, index, h - 1).amin(-1)
    at = torch.where(far >= 0, far, first)
    pose = batch.hist.gather(2, at[..., None, None].expand(*at.shape, 1, 3))[:, :, 0]
    return pose, ((h - 1 - at) * batch.dt).clamp_min(batch.dt)


def constant_velocity(batch: SceneBatch) -> Tensor:
    """Every agent keeps its velocity and heading -> float32 [b, 1, a, t, 3]."""
    m = motion(batch)
    return _masked(_roll(m._replace(turn=torch.zeros_like(m.turn)), _times(batch))[:, None], batch)


def constant_turn_rate(batch: SceneBatch) -> Tensor:
    """Every agent keeps its speed and turn rate, on a circle -> float32 [b, 1, a, t, 3]."""
    return _masked(_roll(motion(batch), _times(batch))[:, None], batch)


def sampled(batch: SceneBatch, k: int, noise: Noise, turning: bool, seed: int = 0) -> Tensor:
    """K samples of constant velocity (turning=False) or constant turn rate with noise -> float32 [b, k, a, t, 3].

    Agents draw independently. The draws of a window depend on (seed, scene_id, t0) alone, not on its place in a batch.
    """
    m = Motion(*(x[:, None] for x in motion(batch)))  # b 1 a
    return _masked(_roll(_noisy(m, _draws(batch, k, seed), noise, turning), _times(batch)), batch)


def _noisy(m: Motion, e: Tensor, noise: Noise, turning: bool) -> Motion:
    """m: [..., a] that broadcasts with the draws e: [..., a, 3]."""
    scale = torch.hypot(noise.relative * m.speed, torch.full_like(m.speed, noise.absolute))
    swing = noise.heading * e[..., 1]
    return Motion(
        xy=m.xy,
        speed=(m.speed + scale * e[..., 0]).clamp_min(0.0),
        course=m.course + swing,
        heading=m.heading + swing,
        turn=(m.turn if turning else torch.zeros_like(m.turn)) + noise.turn * e[..., 2],
    )


def _draws(batch: SceneBatch, k: int, seed: int) -> Tensor:
    """Standard normal [b, k, a, 3]."""
    b, a = batch.mask.shape
    out = torch.zeros(b, k, a, 3)
    for i in range(b):
        n = len(batch.agent_id[i])
        key = zlib.crc32(f"{seed}/{batch.scene_id[i]}/{batch.t0[i]}".encode())
        out[i, :, :n] = torch.randn(n, k, 3, generator=torch.Generator().manual_seed(key)).transpose(0, 1)
    return out.to(batch.hist.device)


def _times(batch: SceneBatch) -> Tensor:
    """Seconds from t0 to each future step, [t]."""
    return batch.dt * torch.arange(1, batch.fut.shape[2] + 1, device=batch.hist.device, dtype=batch.hist.dtype)


def _roll(m: Motion, times: Tensor) -> Tensor:
    """Circular arcs, exactly. m: [...], times: [t] seconds -> [..., t, 3]."""
    x, y = _path(m, times)
    return torch.stack([x, y, m.heading[..., None] + m.turn[..., None] * times], -1)


def _path(m: Motion, times: Tensor) -> tuple[Tensor, Tensor]:
    """x and y [..., t] along the arcs: the chord after time t is v t sin(u) / u long, u = half the angle turned."""
    half = 0.5 * m.turn[..., None] * times
    length = m.speed[..., None] * times * torch.sinc(half / torch.pi)
    along = m.course[..., None] + half
    return m.xy[..., None, 0] + length * along.cos(), m.xy[..., None, 1] + length * along.sin()


def _masked(out: Tensor, batch: SceneBatch) -> Tensor:
    return torch.where(batch.mask[:, None, :, None, None], out, torch.zeros_like(out))


# ---- fitting the noise, on training windows only -----------------------------------------------------------------

STARTS = (Noise(relative=0.1, absolute=0.25, heading=0.1, turn=0.02), Noise())
GRID: dict[str, tuple[float, ...]] = {
    "relative": (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8),
    "absolute": (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0),
    "heading": (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5),
    "turn": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2),
}
FIT_WINDOWS = 160  # training windows looked at, evenly spaced
_FIT_STEPS = 6  # of the horizon, evenly spaced, the last among them


class _Train(NamedTuple):
    """Scored agents of the training windows in one row: no padding."""

    motion: Motion  # N
    draws: Tensor  # k N 3
    truth: Tensor  # N t 2
    valid: Tensor  # N t
    times: Tensor  # t
    window: Tensor  # int64 N
    share: Tensor  # N: 1 / agents of its window


def fit_noise(
    train: Windows, k: int, turning: bool, measure: Measure = "minJADE", max_windows: int = FIT_WINDOWS, seed: int = 0
) -> Noise:
    """The noise on GRID that makes the K-sample floor best on training windows, by coordinate descent from STARTS.

    train: windows of the TRAINING split; max_windows of them, evenly spaced, and 6 of their future steps are used.
    measure: "minJADE" (best of k, one sample for the scene; mean over windows) or "minADE" (each agent its own sample;
    mean over agents). Raises ValueError where no training window has an agent that counts.
    """
    data = _collect(train, k, max_windows, seed)
    known: dict[Noise, float] = {}

    def cost(noise: Noise) -> float:
        if noise not in known:
            known[noise] = _cost(data, noise, turning, measure)
        return known[noise]

    with tqdm(desc=f"fit {k}-sample floor ({measure})", unit=" trials", leave=False, delay=2) as bar:

        def descend(best: Noise) -> Noise:
            moved = True
            while moved:
                moved = False
                for name, values in GRID.items():
                    trial = min((replace(best, **{name: v}) for v in values), key=cost)
                    bar.update(len(values))
                    if cost(trial) < cost(best):
                        best, moved = trial, True
            return best

        return min((descend(start) for start in STARTS), key=cost)


def _collect(train: Windows, k: int, max_windows: int, seed: int) -> _Train:
    n = min(len(train), max_windows)
    index = [i * len(train) // n for i in range(n)]
    rows: list[tuple[Tensor, ...]] = []
    times = torch.zeros(0)
    for lo in range(0, n, 32):
        batch = train.batch(index[lo : lo + 32])
        t = batch.fut.shape[2]
        steps = torch.linspace(0, t - 1, min(t, _FIT_STEPS)).round().long()
        times = _times(batch)[steps]
        count = batch.scored & batch.mask & batch.fut_valid[..., -1]
        window = torch.arange(lo, lo + batch.n_scenes)[:, None].expand_as(count)[count]
        share = (1.0 / count.sum(-1, keepdim=True)).expand_as(count)[count]
        draws = _draws(batch, k, seed).transpose(1, 2)[count]  # N k 3
        truth, valid = batch.fut[count][:, steps, :2], batch.fut_valid[count][:, steps]
        rows.append((*(x[count] for x in motion(batch)), draws, truth, valid, window, share))
    if not rows or not sum(len(r[0]) for r in rows):
        raise ValueError(
            f"fit_noise got {len(train)} training windows without an agent scored over the horizon; "
            "the floors' noise is fitted on the train split of the samples' own store"
        )
    *m, draws, truth, valid, window, share = (torch.cat(column) for column in zip(*rows))
    return _Train(Motion(*m), draws.transpose(0, 1).contiguous(), truth, valid, times, window, share)


def _cost(data: _Train, noise: Noise, turning: bool, measure: Measure) -> float:
    x, y = _path(_noisy(data.motion, data.draws, noise, turning), data.times)  # k N t
    error = torch.hypot(x - data.truth[..., 0], y - data.truth[..., 1])
    ade = (error * data.valid).sum(-1) / data.valid.sum(-1)  # k N
    if measure == "minADE":
        return float(ade.amin(0).mean())
    world = torch.zeros(len(ade), int(data.window.max()) + 1).index_add_(1, data.window, ade * data.share)
    return float(world.amin(0)[data.window.unique()].mean())
