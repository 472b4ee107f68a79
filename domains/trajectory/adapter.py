"""Trajectories on the core: scene context, futures <-> latents, scores of whole scenes.

Each agent is described in its own frame at t0 and related to the others by relative poses, so that turning or shifting the
scene turns and shifts the futures. A future is encoded as its difference to constant velocity.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from seqdiff.codec import LinearCodec
from seqdiff.dit import MLP, ContextLayer, PairFeatures
from seqdiff.domains.trajectory.batch import SceneBatch
from seqdiff.domains.trajectory.constraints import Constraints
from seqdiff.domains.trajectory.energies import energies
from seqdiff.domains.trajectory.guides import Validity
from seqdiff.domains.trajectory.kinematics import velocity
from seqdiff.domains.trajectory.metrics import sample_energy_score
from seqdiff.domains.trajectory.scene import AGENT_TYPES, MAP_KINDS, SIGNAL_STATES
from seqdiff.types import Cond, DomainModule


def wrap(angle: Tensor) -> Tensor:
    """Angle in [-pi, pi)."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


class SceneEncoder(nn.Module):
    """History, type, size and map to context tokens: agents first, then map pieces, each in its own frame.

    Args:
        history: h, frames up to and including t0.
        points: l, points of a map piece.
        dim: channels of a context token.
        layers: of the attention of agents to everything.
        pair: relative poses of agents and map pieces.
        speed: m/s that becomes 1 in the features.
    """

    def __init__(
        self,
        history: int,
        points: int,
        dim: int,
        layers: nn.ModuleList,
        pair: PairFeatures,
        speed: float,
    ) -> None:
        super().__init__()
        self.length, self.speed = pair.length, speed
        self.agent = MLP(history * 7, dim, dim)
        self.kind = nn.Embedding(len(AGENT_TYPES), dim)
        self.size = nn.Linear(3, dim)
        self.piece = MLP(points * 2, dim, dim)
        self.piece_kind = nn.Embedding(len(MAP_KINDS), dim)
        self.signal = nn.Embedding(len(SIGNAL_STATES), dim)
        self.pair, self.layers = pair, layers
        self.norm = nn.LayerNorm(dim)

    def agents(self, batch: SceneBatch) -> tuple[Tensor, Tensor]:
        """Tokens b a c and poses b a 3."""
        pose = batch.hist[:, :, -1]
        valid = batch.hist_valid
        local = to_local(batch.hist, pose) * valid[..., None]
        both = (valid[:, :, 1:] & valid[:, :, :-1])[..., None]
        step = torch.nn.functional.pad((local[:, :, 1:, :2] - local[:, :, :-1, :2]) * both, (0, 0, 1, 0))
        feats = torch.cat(
            [
                local[..., :2] / self.length,
                step / (batch.dt * self.speed),
                torch.cos(local[..., 2:]) * valid[..., None],
                torch.sin(local[..., 2:]) * valid[..., None],
                valid[..., None].to(local.dtype),
            ],
            dim=-1,
        )
        size = torch.cat([batch.size / 5, batch.size_known[..., None].to(feats.dtype)], dim=-1)
        return self.agent(feats.flatten(2)) + self.kind(batch.type) + self.size(size), pose

    def pieces(self, batch: SceneBatch) -> tuple[Tensor, Tensor]:
        """Tokens b s c and poses b s 3 of the map pieces: the pose is the middle point and the direction there."""
        points = batch.seg
        mid = points.shape[2] // 2
        d = points[:, :, mid] - points[:, :, mid - 1]
        pose = torch.cat([points[:, :, mid], torch.atan2(d[..., 1:], d[..., :1])], dim=-1)
        xy = torch.nn.functional.pad(points, (0, 1))
        local = to_local(xy, pose)[..., :2] / self.length
        return self.piece(local.flatten(2)) + self.piece_kind(batch.seg_kind) + self.signal(batch.seg_signal), pose

    def forward(self, batch: SceneBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens b (a s) c, poses b (a s) 3, mask b (a s)."""
        x, pose = self.agents(batch)
        lanes, lane_pose = self.pieces(batch)
        poses = torch.cat([pose, lane_pose], dim=1)
        mask = torch.cat([batch.mask, batch.seg_mask], dim=1)
        pair = self.pair(pose, poses)
        for layer in self.layers:
            x = layer(x, torch.cat([x, lanes], dim=1), mask, pair)
        return self.norm(torch.cat([x, lanes], dim=1)), poses, mask


def to_local(xyh: Tensor, pose: Tensor) -> Tensor:
    """x, y, heading (... n 3) in the frame of pose (... 3); heading wrapped."""
    d = xyh[..., :2] - pose[..., None, :2]
    cos, sin = torch.cos(pose[..., 2])[..., None], torch.sin(pose[..., 2])[..., None]
    x, y = d[..., 0] * cos + d[..., 1] * sin, d[..., 1] * cos - d[..., 0] * sin
    return torch.stack([x, y, wrap(xyh[..., 2] - pose[..., None, 2])], dim=-1)


def to_world(xyh: Tensor, pose: Tensor) -> Tensor:
    """Inverse of `to_local`."""
    cos, sin = torch.cos(pose[..., 2])[..., None], torch.sin(pose[..., 2])[..., None]
    x = xyh[..., 0] * cos - xyh[..., 1] * sin + pose[..., None, 0]
    y = xyh[..., 0] * sin + xyh[..., 1] * cos + pose[..., None, 1]
    return torch.stack([x, y, wrap(xyh[..., 2] + pose[..., None, 2])], dim=-1)


class TrajectoryAdapter(DomainModule):
    """Vehicle and pedestrian scenes on the core. One latent token per agent.

    Args:
        history: h, frames of history including t0 (windows.history_s / dt + 1).
        horizon: t, future steps (windows.horizon_s / dt).
        dt: seconds a step; a batch with another one is refused.
        latent_dim: d, principal components of an agent's future.
        ctx_dim: c, channels of a context token.
        layers, heads, pair_dim: of the scene encoder.
        points: l, points of a map piece (fixed by the data module).
        length: metres at which poses are resolved: 10 for vehicles, 2 for pedestrians.
        speed: m/s that becomes 1 in the features: 10 for vehicles, 1.5 for pedestrians.
        lever: metres by which a radian of heading counts in the codec; 0 = heading follows the direction of motion.
        velocity_frames: frames over which the present velocity is fitted, for the constant-velocity reference.
        speed_bins: m/s; agents are whitened by type and bin of present speed, so that parked ones stay put.
        dropout: in the scene encoder, in training.
        tilt: nats by which each agent that collides or is off the road lowers the mass of a sample; 0 = i.i.d. masses.
        reference: "velocity" or "none": what is subtracted from a future before it is encoded.
    """

    def __init__(
        self,
        history: int,
        horizon: int,
        dt: float,
        latent_dim: int = 12,
        ctx_dim: int = 128,
        layers: int = 2,
        heads: int = 4,
        pair_dim: int = 16,
        points: int = 10,
        length: float = 10.0,
        speed: float = 10.0,
        lever: float = 2.0,
        velocity_frames: int = 3,
        speed_bins: tuple[float, ...] = (0.2, 2.0, 6.0, 12.0),
        reference: str = "velocity",
        dropout: float = 0.0,
        tilt: float = 0.0,
    ) -> None:
        super().__init__()
        if reference not in ("velocity", "none"):
            raise ValueError(f"reference is {reference!r}; expected velocity or none")
        self.history, self.horizon, self.dt = history, horizon, dt
        self.latent_dim, self.ctx_dim = latent_dim, ctx_dim
        self.lever, self.velocity_frames, self.reference, self.tilt = lever, velocity_frames, reference, tilt
        self.speed_bins = tuple(speed_bins)
        blocks = nn.ModuleList(ContextLayer(ctx_dim, heads, pair_dim, dropout=dropout) for _ in range(layers))
        self.encoder = SceneEncoder(history, points, ctx_dim, blocks, PairFeatures(pair_dim, length), speed)
        self.codec = LinearCodec(
            horizon * (3 if lever > 0 else 2), latent_dim, len(AGENT_TYPES) * (len(speed_bins) + 1)
        )

    def check(self, batch: SceneBatch) -> None:
        """Refuse a batch of other length or dt than the adapter was built for."""
        got = (batch.hist.shape[2], batch.fut.shape[2], batch.dt)
        if got[:2] != (self.history, self.horizon) or abs(got[2] - self.dt) > 1e-6:
            raise ValueError(
                f"the data give {got[0]} history frames, {got[1]} future steps, dt {got[2]:g} s; the model was built for "
                f"{self.history}, {self.horizon}, {self.dt:g} s: set data.windows and model.adapter alike"
            )

    # ---- condition -------------------------------------------------------------------------------------------------

    def context(self, batch: SceneBatch) -> Cond:
        self.check(batch)
        ctx, pos, mask = self.encoder(batch)
        a = batch.mask.shape[1]
        return Cond(
            mask=batch.mask[:, None],
            pos=pos[:, :a],
            group=torch.arange(a, device=pos.device).expand(len(pos), a),
            ctx=ctx,
            ctx_pos=pos,
            ctx_mask=mask,
            tok=ctx[:, :a],
            scale=self.codec.scale[self.group(batch)],
        )

    # ---- codec -----------------------------------------------------------------------------------------------------

    def group(self, batch: SceneBatch) -> Tensor:
        """Whitening group of each agent, b a: type and bin of present speed."""
        speed = velocity(batch.hist, batch.hist_valid, batch.dt, self.velocity_frames).norm(dim=-1)
        bins = torch.bucketize(speed, torch.tensor(self.speed_bins, device=speed.device, dtype=speed.dtype))
        return batch.type * (len(self.speed_bins) + 1) + bins

    def _reference(self, batch: SceneBatch) -> Tensor:
        """What a future is measured against, in the agent's frame: b a t 2."""
        t = torch.arange(1, self.horizon + 1, device=batch.hist.device, dtype=batch.hist.dtype) * batch.dt
        v = velocity(batch.hist, batch.hist_valid, batch.dt, self.velocity_frames)
        if self.reference == "none":
            v = torch.zeros_like(v)
        pose = batch.hist[:, :, -1]
        cos, sin = torch.cos(pose[..., 2]), torch.sin(pose[..., 2])
        local = torch.stack([v[..., 0] * cos + v[..., 1] * sin, v[..., 1] * cos - v[..., 0] * sin], dim=-1)
        return local[:, :, None] * t[:, None]

    def features(self, batch: SceneBatch) -> tuple[Tensor, Tensor]:
        """Futures as vectors in metres, b a D, and which entries are known."""
        local = to_local(batch.fut, batch.hist[:, :, -1])
        xy = local[..., :2] - self._reference(batch)
        valid = batch.fut_valid[..., None].expand_as(xy)
        parts, known = [xy.flatten(2)], [valid.flatten(2)]
        if self.lever > 0:
            first = local[..., :1, 2]
            turned = first + torch.cat(
                [torch.zeros_like(first), wrap(local[..., 1:, 2] - local[..., :-1, 2])], -1
            ).cumsum(-1)
            # unwrapped along the valid steps only: a hole would break the sum, so there the wrapped angle stands
            whole = batch.fut_valid.all(-1, keepdim=True)
            parts.append(torch.where(whole, turned, local[..., 2]) * self.lever)
            known.append(batch.fut_valid)
        x, ok = torch.cat(parts, -1), torch.cat(known, -1)
        return torch.where(ok, x, 0.0), ok

    def fit(self, data: object, limit: int = 60_000) -> dict[str, float]:
        """Fit the codec on complete futures of the training split (`data.train_batches()`), at most `limit` of them."""
        rows, groups, n = [], [], 0
        for batch in data.train_batches():  # type: ignore[attr-defined]
            self.check(batch)
            x, ok = self.features(batch)
            whole = ok.all(-1) & batch.mask
            rows.append(x[whole])
            groups.append(self.group(batch)[whole])
            n += len(rows[-1])
            if n >= limit:
                break
        if not rows:
            raise ValueError(
                "the training split has no windows to fit the codec on; check data.windows and the store's splits"
            )
        return self.codec.fit(torch.cat(rows)[:limit], torch.cat(groups)[:limit])

    def encode(self, batch: SceneBatch) -> tuple[Tensor, Tensor]:
        x, ok = self.features(batch)
        group = self.group(batch)
        whole = ok.all(-1) & batch.mask
        z = self.codec.encode(x, group)
        part = batch.mask & ~whole
        if part.any():
            z = z.clone()
            z[part] = self.codec.encode_partial(x[part], ok[part], group[part])
        return (z * batch.mask[..., None])[:, None], whole.to(z.dtype)

    def decode(self, z: Tensor, batch: SceneBatch) -> Tensor:
        """Latents b k a d to futures b k a t 3, metres and radians, relative to batch.origin."""
        b, k, a, _ = z.shape
        x = self.codec.decode(z, self.group(batch)[:, None].expand(b, k, a))
        xy = x[..., : 2 * self.horizon].view(b, k, a, self.horizon, 2) + self._reference(batch)[:, None]
        if self.lever > 0:
            heading = x[..., 2 * self.horizon :] / self.lever
        else:
            heading = motion_heading(xy, 0.05 * self.dt)
        pose = batch.hist[:, :, -1][:, None].expand(b, k, a, 3)
        return to_world(torch.cat([xy, heading[..., None]], -1), pose)

    # ---- densities -------------------------------------------------------------------------------------------------

    def log_volume(self, batch: SceneBatch) -> Tensor:
        """log |d(futures) / d(latents)| over the real agents of each scene, float64 b, in nats. A latent log-density minus this is
        per metre of the futures' coordinates on the codec's range (heading counts as an arc of `lever` metres), so that models
        with other scales can be compared; within a scene it is the same for all samples."""
        return (self.codec.log_det(self.group(batch)).double() * batch.mask).sum(-1)

    def residual_log_density(self, batch: SceneBatch) -> Tensor:
        """Log-density of what the codec cuts off the recorded futures, float64 b, in nats: added to a density on the codec's range
        it gives that of the record in all its coordinates. NaN = unknown: a checkpoint without the residual's law, or an
        agent whose future is not recorded whole. Samples have no such part, so compare them with the record without it.
        """
        x, ok = self.features(batch)
        each = self.codec.log_density_residual(x, self.group(batch))
        whole = (ok.all(-1) | ~batch.mask).all(-1)
        return torch.where(whole, torch.where(batch.mask, each, 0.0).sum(-1), torch.nan)

    # ---- scores ----------------------------------------------------------------------------------------------------

    def coordinates(self, sample: Tensor, batch: SceneBatch) -> tuple[Tensor, Tensor]:
        """Positions of all real agents."""
        return sample[..., :2], batch.mask

    def energy(self, batch: SceneBatch, constraints: object = None) -> Callable[[Tensor], Tensor]:
        """Latents b k a d -> what is wrong with each agent's future (b k a): overlaps and leaving the road. Agents that
        hardly move take no part as movers: nobody pushes a parked car aside.

        With `constraints` (a `seqdiff.domains.trajectory.constraints.Constraints`): of the agents that wishes are for, what
        the wishes find wrong is added; everybody else, and scenes without a wish, have none."""
        if constraints is not None and not isinstance(constraints, Constraints):
            raise TypeError(f"constraints is a {type(constraints).__name__}; expected what read_constraints gives")
        with torch.inference_mode(False):  # its rasters are saved for the backward pass
            who = None if constraints is None else constraints.agents(batch)
            valid = Validity(batch, who=who)
            wishes = None if constraints is None else constraints.energy(batch)

        def of(z: Tensor) -> Tensor:
            futures = self.decode(z, batch)
            gone = (futures[..., -1, :2] - batch.hist[:, None, :, -1, :2]).detach().norm(dim=-1)
            hold = (gone < 0.5)[..., None, None]
            wrong = valid(torch.where(hold, futures.detach(), futures))
            return wrong if wishes is None else wrong + wishes(futures)

        return of

    def score(self, sample: Tensor, batch: SceneBatch) -> dict[str, Tensor]:
        return energies(sample, batch)

    def mass(self, energies: dict[str, Tensor], batch: SceneBatch) -> Tensor:
        """Share of the law that each sample stands for: p(x) tilted by exp(-tilt x agents that collide or are off the road).
        An unknown energy (no map) counts as none."""
        agents = batch.mask.sum(-1, keepdim=True)
        wrong = sum(torch.nan_to_num(energies[name].double(), nan=0.0) for name in ("collision", "off_road"))
        return torch.softmax(-self.tilt * agents * wrong, dim=-1)

    def validate(self, sample: Tensor, batch: SceneBatch) -> dict[str, Tensor]:
        """Marginal and joint minimum errors over all k samples, and the energy score of the joint samples (Gneiting &
        Raftery 2007; one norm over the steps of all scored agents, so that it sees who goes with whom; k >= 2): metres, lower is
        better, b."""
        error = (sample[..., :2] - batch.fut[:, None, ..., :2]).norm(dim=-1)
        weight = batch.scored[:, None].to(error.dtype)
        agents = weight.sum(-1).clamp_min(1)
        ade, fde = error.mean(-1), error[..., -1]
        look = batch.scored[..., None].expand(batch.fut.shape[:3])
        return {
            "minADE": (ade.amin(1) * weight[:, 0]).sum(-1) / agents[:, 0],
            "minFDE": (fde.amin(1) * weight[:, 0]).sum(-1) / agents[:, 0],
            "minJADE": ((ade * weight).sum(-1) / agents).amin(1),
            "minJFDE": ((fde * weight).sum(-1) / agents).amin(1),
            "energy_score": sample_energy_score(sample, batch.fut, look),
        }


def motion_heading(xy: Tensor, still: float) -> Tensor:
    """Heading from displacements (... t 2) that start at the origin facing 0; steps shorter than `still` keep the last one."""
    step = torch.diff(xy, dim=-2, prepend=torch.zeros_like(xy[..., :1, :]))
    angle = torch.atan2(step[..., 1], step[..., 0])
    moving = step.norm(dim=-1) > still
    index = torch.where(moving, torch.arange(xy.shape[-2], device=xy.device), -1).cummax(dim=-1).values
    held = torch.gather(angle, -1, index.clamp_min(0))
    return torch.where(index >= 0, held, 0.0)
