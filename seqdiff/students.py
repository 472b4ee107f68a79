"""Objectives of few-step students: one net u(z, t, s) whose jump from t to s is trained, while u(z, t, t) stays the flow's
velocity.

MeanFlow needs data alone, Distill a teacher, BestOfK scores sets of end points. Each can start from nothing or, by init=RUN,
from a model trained with FlowMatching.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seqdiff.noise import gaussian_noise
from seqdiff.objectives import Density, Objective, sample_times, token_mean
from seqdiff.path import Path, Prediction, time_grid
from seqdiff.steps import find_step
from seqdiff.types import Cond, Draw, Net, Seeds


def _normal(like: Tensor, k: int, generator: torch.Generator | None) -> Tensor:
    b, _, n, d = like.shape
    return torch.randn((b, k, n, d), generator=generator, device=like.device, dtype=like.dtype)


class MeanFlow(Objective):
    """Mean flow in its improved form (Geng et al. 2025, "Mean Flows for One-step Generative Modeling" and "Improved Mean
    Flows"): the compound u + (t - s) sg[du/dt] is regressed on the conditional velocity, where du/dt is the total
    derivative along the net's own instantaneous velocity u(z, t, t). Linear path, prediction v.

    Args:
        path, context_drop, known: see Objective.
        density: of the times; of two draws t is the later and s the earlier one.
        draws: pairs (t, s) per item and step.
        instant: share of the draws with s = t, plain flow matching.
        whole: share of the others that go from `t_max` to 0, the one-step jump.
        t_max: where sampling will start.
    """

    few_step = True

    def __init__(
        self,
        path: Path = Path(),  # noqa: B008 (frozen)
        density: Density = "logit_normal",
        draws: int = 4,
        instant: float = 0.5,
        whole: float = 0.25,
        t_max: float = 1.0,
        context_drop: float = 0.0,
        known: float = 0.0,
    ) -> None:
        if path.kind != "linear":
            raise ValueError(
                f"mean flow is defined on the linear path here, got {path.kind!r}: set path: {{kind: linear}}"
            )
        if not (draws >= 2 and 0 < instant < 1 and 0 <= whole <= 1):
            raise ValueError(
                f"draws is {draws}, instant {instant}, whole {whole}; expected at least 2 draws and shares in (0, 1) and [0, 1]"
            )
        super().__init__(path, "v", context_drop, known)
        self.density, self.draws, self.t_max, self.whole = density, draws, t_max, whole
        self.n_instant = min(max(1, round(draws * instant)), draws - 1)

    def times(self, b: int, generator: torch.Generator | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """t, s of shape b draws; the first n_instant columns have s = t."""
        m = self.draws - self.n_instant
        instant = sample_times((b, self.n_instant), self.density, generator, device)
        pair = sample_times((2, b, m), self.density, generator, device)[:, :, torch.randperm(m, generator=generator)]
        pair[1] = pair[1][:, torch.randperm(m, generator=generator)]
        t, s = torch.maximum(pair[0], pair[1]), torch.minimum(pair[0], pair[1])
        whole = torch.rand((b, m), generator=generator, device=device) < self.whole
        t, s = torch.where(whole, self.t_max, t), torch.where(whole, 0.0, s)
        return torch.cat([instant, t], 1), torch.cat([instant, s], 1)

    def forward(
        self, net: Net, z0: Tensor, weight: Tensor, cond: Cond, generator: torch.Generator | None = None
    ) -> Tensor:
        """z0 b 1 n d, weight b n -> loss b."""
        cond, weight = self.condition(z0, weight, cond, generator)
        t, s = self.times(len(z0), generator, z0.device)
        eps = _normal(z0, self.draws, generator)
        z = self.path.mix(z0, eps, t[:, :, None, None])
        prepared = net.prepare(cond)
        out = net(z, t, s, prepared)
        m = self.n_instant
        with torch.no_grad():
            slope = self.slope(net, z[:, m:], t[:, m:], s[:, m:], prepared)
        compound = torch.cat([out[:, :m], out[:, m:] + (t - s)[:, m:, None, None] * slope], 1)
        error = (compound - (eps - z0)).square().mean(-1)  # b k n
        return token_mean(error.mean(1), weight)

    @staticmethod
    def slope(net: Net, z: Tensor, t: Tensor, s: Tensor, prepared: object) -> Tensor:
        """du/dt along the flow: the Jacobian-vector product of u with (u(z, t, t), 1, 0), by forward differentiation (the net's
        attention is plain matrix products, so that it has one)."""
        velocity = net(z, t, t, prepared)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual
            out = net(dual(z, velocity), dual(t, torch.ones_like(t)), s, prepared)
            slope = torch.autograd.forward_ad.unpack_dual(out).tangent
        assert slope is not None
        return slope


class Distill(Objective):
    """Regression on a teacher's own trajectories (Luhman & Luhman 2021; jumps between any two of their points as in flow map
    matching, Boffi et al. 2024). The teacher is the model that training starts from (init=RUN): its net is kept in the
    checkpoint, so that a likelihood can still be asked of it, and the context encoder keeps its weights.

    Args:
        path, prediction, known: see Objective; path and prediction are the teacher's.
        step, steps: the teacher's sampler. Its trajectories start from pure noise at `t_max`, so that the student meets
            the inputs that it will meet in use.
        t_max: where sampling will start.
        draws: trajectories per item and step.
        pairs: jumps learned of each trajectory: the whole way from t_max to 0, and by turns one between two of its
            points (in a third of the cases of length 0, the teacher's velocity, so that the instantaneous field stays
            the teacher's).
        guidance: None, or (low, high): the teacher is guided with a weight drawn from that range for each item, which
            the net takes as an input ("guidance"), so that guided sampling costs one pass (Meng et al. 2023).
    """

    few_step = True
    frozen_context = True

    def __init__(
        self,
        path: Path = Path(),  # noqa: B008 (frozen)
        prediction: Prediction = "v",
        step: str = "ab2",
        steps: int = 8,
        t_max: float = 1.0,
        draws: int = 4,
        pairs: int = 2,
        guidance: tuple[float, float] | None = None,
        known: float = 0.0,
    ) -> None:
        if steps < 2 or draws < 1 or pairs < 1:
            raise ValueError(f"steps is {steps}, draws {draws}, pairs {pairs}; expected at least 2, 1 and 1")
        super().__init__(path, prediction, 0.0, known)
        self.step, self.steps, self.t_max, self.draws, self.pairs = find_step(step).step, steps, t_max, draws, pairs
        self.guidance = guidance

    def attach(self, net: nn.Module) -> None:
        self.teacher = copy.deepcopy(net).requires_grad_(False)

    def begin(self, net: nn.Module, continued: bool) -> None:
        """Raises ValueError without a teacher."""
        assert self.teacher is not None
        if not continued:
            raise ValueError("Distill needs a teacher: init=RUN of a model trained with objective=flow")
        self.teacher.load_state_dict(net.state_dict())

    @torch.no_grad()
    def trajectory(
        self, z: Tensor, times: list[float], cond: Cond, weight: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The teacher's points z at each of the times, from z at the first one, and its E[x0 | z] at all but the last.

        weight: b, of its guidance."""
        teacher: Any = self.teacher
        teacher.eval()
        plain = replace(cond, guidance=None)
        prepared = teacher.prepare(plain)
        without = None if weight is None else teacher.prepare(plain.drop())

        def denoise(z: Tensor, t: float) -> Tensor:
            x = self.denoise(self.output(teacher, z, t, t, prepared), z, t)
            if without is None:
                return x
            assert weight is not None
            other = self.denoise(self.output(teacher, z, t, t, without), z, t)
            return other + weight[:, None, None, None] * (x - other)

        points, means, memory = [z], [], None
        for t, s in zip(times[:-1], times[1:], strict=True):
            z, x0, memory = self.step(denoise, self.path, z, t, s, memory, None)
            points.append(z)
            means.append(x0)
        return points, means

    def forward(
        self, net: Net, z0: Tensor, weight: Tensor, cond: Cond, generator: torch.Generator | None = None
    ) -> Tensor:
        """z0 b 1 n d (only its known parts are used), weight b n -> loss b."""
        cond, weight = self.condition(z0, weight, cond, generator)
        guided = None
        if self.guidance is not None:
            low, high = self.guidance
            guided = low + (high - low) * torch.rand(len(z0), generator=generator, device=z0.device)
            cond = replace(cond, guidance=guided)
        # one grid for the whole batch, another one each time: all times are met
        bend = float(torch.rand((), generator=generator))
        times = time_grid(self.path, self.steps, "uniform", shift=2.0 ** (2 * bend - 1), t_max=self.t_max)
        z = _normal(z0, self.draws, generator) * self.path.start_scale(self.t_max)
        if cond.known is not None and cond.known_mask is not None:
            z = torch.where(cond.known_mask, self.path.mix(cond.known, z, self.t_max), z)
        points, means = self.trajectory(z, times, cond, guided)
        prepared = net.prepare(cond)
        total = z0.new_zeros(len(z0))
        for pair in range(self.pairs):
            i, j = self._jump(pair, generator)
            t, s = times[i], times[j]
            x0 = means[i]
            if j > i:
                ratio = self.path.sigma(s) / self.path.sigma(t)
                x0 = (points[j] - ratio * points[i]) / (self.path.alpha(s) - ratio * self.path.alpha(t))
            out = self.output(net, points[i], t, s, prepared)
            error = (out - self.path.from_x0(x0, points[i], t, self.prediction)).square().mean(-1).mean(1)
            total = total + token_mean(error, weight) / self.pairs
        return total

    def _jump(self, pair: int, generator: torch.Generator | None) -> tuple[int, int]:
        """Between which points of the trajectory a pair jumps."""
        if pair % 2 == 0 and (self.pairs > 1 or float(torch.rand((), generator=generator)) < 0.5):
            return 0, self.steps
        if float(torch.rand((), generator=generator)) < 1 / 3:
            i = int(torch.randint(self.steps, (), generator=generator))
            return i, i
        i, j = sorted(torch.randperm(self.steps + 1, generator=generator)[:2].tolist())
        return i, j


class BestOfK(Objective):
    """Sets of end points scored against what happened. k starts are carried to 0 in one or two jumps, through which the loss is
    differentiated; the loss is

        energy x energy score + best x error of the best of k + instant x flow matching.

    The energy score (Gneiting & Raftery 2007) is strictly proper: its minimum over laws is the true one, which keeps the
    diversity that the best of k alone would give up for coverage. Distances are Euclidean, in data units where
    `cond.scale` is known.

    Args:
        path, prediction, context_drop, known: see Objective.
        k: end points of each item.
        joint: True: half of the energy score is that of the item as a whole, with one distance over all its tokens,
            which alone sees what goes with what; the other half is the tokens' mean, better conditioned where there are
            many. One end point has to be the best for the whole item. False: every token by itself: better marginal
            coverage, wrong combinations.
        starts: 0 = drawn noise; m > 0 = m learned starts with learned masses, the same for every token of an item, at
            most m samples.
        best, energy, instant: weights of the three terms.
        t_max: where sampling will start.
    """

    few_step = True

    def __init__(
        self,
        path: Path = Path(),  # noqa: B008 (frozen)
        prediction: Prediction = "v",
        k: int = 6,
        joint: bool = True,
        starts: int = 0,
        best: float = 0.0,
        energy: float = 1.0,
        instant: float = 0.3,
        t_max: float = 1.0,
        context_drop: float = 0.0,
        known: float = 0.0,
    ) -> None:
        if k < 2 or min(best, energy, instant) < 0 or not best + energy > 0 or (starts and starts < k):
            raise ValueError(
                f"k is {k}, starts {starts}, best {best}, energy {energy}, instant {instant}; expected k >= 2, no or at least k "
                "starts, and weights that are not negative with best + energy > 0"
            )
        super().__init__(path, prediction, context_drop, known)
        self.k, self.joint, self.learned_starts, self.t_max = k, joint, starts, t_max
        self.best, self.energy, self.instant = best, energy, instant
        if starts:
            self.mass = nn.Parameter(torch.zeros(starts))

    def attach(self, net: nn.Module) -> None:
        if self.learned_starts:
            generator = torch.Generator().manual_seed(0)
            width = (self.learned_starts, int(net.latent_dim))  # type: ignore[arg-type]
            self.start = nn.Parameter(torch.randn(width, generator=generator))

    def forward(
        self, net: Net, z0: Tensor, weight: Tensor, cond: Cond, generator: torch.Generator | None = None
    ) -> Tensor:
        """z0 b 1 n d, weight b n -> loss b."""
        cond, weight = self.condition(z0, weight, cond, generator)
        prepared = net.prepare(cond)
        z, chosen = self._drawn(z0, generator)
        if cond.known is not None and cond.known_mask is not None:
            z = torch.where(cond.known_mask, self.path.mix(cond.known, z, self.t_max), z)
        # one jump or two, by turns at random: both are used
        times = [self.t_max, 0.0]
        if float(torch.rand((), generator=generator)) < 0.5:
            times.insert(1, self.t_max * (0.25 + 0.5 * float(torch.rand((), generator=generator))))
        for now, then in zip(times[:-1], times[1:], strict=True):
            z = self.jump(self.output(net, z, now, then, prepared), z, now, then)
        loss = self.of_set(z, z0, weight, cond.scale, chosen)
        if self.instant:
            t = self.path.train_time(sample_times((len(z0), 2), "logit_normal", generator, z0.device))
            eps = _normal(z0, 2, generator)
            tt = t[:, :, None, None]
            mixed = self.path.mix(z0, eps, tt)
            out = self.output(net, mixed, t, t, prepared)
            error = (out - self.path.target(z0, eps, tt, self.prediction)).square().mean(-1).mean(1)
            loss = loss + self.instant * token_mean(error, weight)
        return loss

    def of_set(
        self, z: Tensor, z0: Tensor, weight: Tensor, scale: Tensor | None = None, chosen: Tensor | None = None
    ) -> Tensor:
        """The set's part of the loss: z b k n d against z0 b 1 n d, weight b n -> b.

        scale: b n d, size of a unit of each channel in data units. chosen: b k, which learned starts z came from.
        """
        if scale is not None:
            size = (scale.square().mean(-1) * weight).sum() / weight.sum().clamp_min(1e-9)
            unit = (scale / size.sqrt().clamp_min(1e-9))[:, None]
            z, z0 = z * unit, z0 * unit
        off, apart = (z - z0).square().mean(-1), (z[:, :, None] - z[:, None]).square().mean(-1)  # b k n, b k k n
        score = self._energy_score(_root(off), _root(apart), weight)
        if self.joint:
            whole = weight[:, None].expand_as(off)
            pairs = weight[:, None, None].expand_as(apart)
            both = self._energy_score(
                _root(token_mean(off, whole))[..., None], _root(token_mean(apart, pairs))[..., None],
                torch.ones_like(weight[:, :1])
            )  # fmt: skip
            score = 0.5 * (score + both)
            least, which = token_mean(_root(off), whole).min(1)
        else:
            least, which = token_mean(_root(off).amin(1), weight), None
        loss = self.energy * score + self.best * least
        if chosen is not None and which is not None:
            log_mass = torch.log_softmax(self.mass, 0)[chosen]
            loss = loss - 0.1 * log_mass.gather(1, which[:, None])[:, 0]
        return loss

    @staticmethod
    def _energy_score(error: Tensor, apart: Tensor, weight: Tensor) -> Tensor:
        """Mean error less half the mean distance of different end points: error b k n, apart b k k n, weight b n -> b."""
        k = error.shape[1]
        spread = token_mean(apart.sum((1, 2)), weight) / (k * (k - 1))
        return token_mean(error.mean(1), weight) - 0.5 * spread

    def _drawn(self, z0: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        """Starts b k n d and, where they are learned, which ones."""
        if not self.learned_starts:
            return _normal(z0, self.k, generator), None
        b, _, n, d = z0.shape
        order = torch.rand((b, self.learned_starts), generator=generator, device=z0.device).argsort(-1)
        chosen = order[:, : self.k]
        return self.start[chosen][:, :, None].expand(b, self.k, n, d), chosen

    def starts(self, shape: tuple[int, int], seeds: Seeds, temperature: float = 1.0) -> Draw:
        """Learned starts, most probable first, with their log masses; or i.i.d. noise.

        Raises:
            ValueError: more samples than learned starts.
        """
        if not self.learned_starts:
            return gaussian_noise(shape, seeds, temperature)
        b, k = seeds.shape
        if k > self.learned_starts:
            raise ValueError(f"k is {k}, but the model learned {self.learned_starts} starts: ask for at most as many")
        log_mass = torch.log_softmax(self.mass, 0)
        order = log_mass.argsort(descending=True)[:k]
        n, d = shape
        z = self.start[order][None, :, None].expand(b, k, n, d) * temperature
        log_weight = log_mass[order] - torch.logsumexp(log_mass[order], 0) + torch.log(torch.tensor(float(k)))
        return Draw(z.detach().clone(), log_weight.detach().expand(b, k).clone())


def _root(square: Tensor) -> Tensor:
    """Square root with a gradient at 0."""
    return (square + 1e-8).sqrt()
