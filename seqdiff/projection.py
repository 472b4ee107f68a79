"""Hard constraints on samples: sets with a projection each, and the guide that holds a run to them.

A set has `project(x) -> x`, the nearest point of the set (or a near one where it says so), and `violation(x) -> b k`, the
largest breach of each sample, 0 where it holds. Arithmetic is in float64 inside; what rounding back leaves is in the violation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from seqdiff.types import Denoiser, Draw, FlowMap


@runtime_checkable
class Constraint(Protocol):
    """A set of samples."""

    def project(self, x: Tensor) -> Tensor: ...

    def violation(self, x: Tensor) -> Tensor: ...


@dataclass
class Projection:
    """Hold samples to a hard constraint: each estimate E[x0 | z_t] is projected on the way, so that the rest of the sample can
    follow, and the result once more, so that it ends in the set (projection of the estimated data as in Chung et al. 2022).

    For a convex set this is sound at any t: the mean of data that lie in the set lies in it. For others use `below`.

    Valid for a student: each jump to 0, a finished sample, is projected; a jump to s > 0 is left alone, since what it points to
    is no sample.

    Args:
        constraint: in latents; `InData` takes one in domain units.
        below: only at times t <= below, and at the end in any case.

    After a run (b k each; None before):
        before: violation of the last estimate, as the model gave it.
        after: violation of the finished sample, after all guides.
        moved: root mean square by which the last word alone moved a sample, in latents.
    """

    constraint: Constraint
    below: float = 1.0
    before: Tensor | None = field(default=None, init=False)
    after: Tensor | None = field(default=None, init=False)
    moved: Tensor | None = field(default=None, init=False)

    def begin(self, draw: Draw, times: Sequence[float], step: Any) -> None:
        """Forget the run before."""
        self.before = self.after = self.moved = None

    def __call__(self, denoiser: Denoiser) -> Denoiser:
        def guided(z: Tensor, t: float) -> Tensor:
            x0 = denoiser(z, t)
            if t > self.below:
                return x0
            self.before = self.constraint.violation(x0)
            return self.constraint.project(x0)

        return guided

    def on_flow_map(self, student: FlowMap) -> FlowMap:
        def jump(z: Tensor, t: float, s: float) -> Tensor:
            end = student(z, t, s)
            if s > 0:
                return end
            self.before = self.constraint.violation(end)
            return self.constraint.project(end)

        return FlowMap(jump)

    def finish(self, z: Tensor) -> Tensor:
        """The last word."""
        x = self.constraint.project(z)
        self.moved = (x - z).square().mean((-2, -1)).sqrt()
        return x

    def report(self, z: Tensor) -> None:
        self.after = self.constraint.violation(z)


@dataclass(frozen=True)
class Box:
    """low <= x <= high, entry by entry. -inf and inf where there is no bound: also at padding, which has none.

    Args:
        low, high: broadcast against b k n d.

    Raises:
        ValueError: low above high somewhere.
    """

    low: Tensor
    high: Tensor

    def __post_init__(self) -> None:
        if not bool((self.low <= self.high).all()):
            raise ValueError("Box got low > high (or NaN) in some entry; no sample lies between them")

    def project(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, self.low), self.high)

    def violation(self, x: Tensor) -> Tensor:
        return torch.maximum(self.low - x, x - self.high).clamp_min(0).flatten(2).amax(-1)


@dataclass(frozen=True)
class Equality:
    """matrix x = value for each item, x the latents of a sample as one vector: the nearest such x by least squares.

    Args:
        matrix: b m q, q = n d (zero at padding).
        value: b m or b k m.

    Raises:
        ValueError: shapes that do not fit, or equations of an item that contradict each other.
    """

    matrix: Tensor
    value: Tensor
    _inverse: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        b, m, _ = self.matrix.shape
        value = self.value.double() if self.value.dim() == 3 else self.value.double()[:, None]
        if (value.shape[0], value.shape[-1]) != (b, m):
            raise ValueError(
                f"value has shape {tuple(self.value.shape)}; a matrix of {b} items and {m} equations asks for {(b, m)} or b k m"
            )
        matrix = self.matrix.double()
        inverse = torch.linalg.pinv(matrix)
        left = (value @ inverse.mT @ matrix.mT - value).abs().amax((-2, -1))
        size = value.abs().amax((-2, -1)).clamp_min(1)
        bad = (left > 1e-6 * size).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"equations of items {bad[:5]} contradict each other: {left[bad[0]]:.3g} remains; drop some"
            )
        for name, x in [("matrix", matrix), ("value", value), ("_inverse", inverse)]:
            object.__setattr__(self, name, x)

    @classmethod
    def of(cls, function: Callable[[Tensor], Tensor], shape: tuple[int, int, int], value: Tensor) -> Equality:
        """function(z) = value for an affine function of the latents, for example the first point of a linear codec.

        Args:
            function: b k n d -> b k m, affine.
            shape: (b, n, d).
            value: b m or b k m.

        Raises:
            ValueError: the function is not affine.
        """
        b, n, d = shape
        q = n * d
        points = torch.cat([torch.eye(q), torch.zeros(1, q), torch.linspace(-1.5, 2, q)[None]]).to(value.device)
        out = function(points.view(1, q + 2, n, d).expand(b, -1, -1, -1)).double()
        offset = out[:, q]
        matrix = (out[:, :q] - offset[:, None]).mT
        expect = matrix @ points[-1].double() + offset
        error = (out[:, -1] - expect).abs().max()
        if not error <= 1e-4 * out.abs().max().clamp_min(1):
            raise ValueError(
                f"the function is not affine: it is {error:.3g} off a linear one; use Projector with a projection"
            )
        return cls(matrix, value - (offset if value.dim() == 2 else offset[:, None]).to(value))

    def project(self, x: Tensor) -> Tensor:
        flat = x.double().flatten(2)
        for _ in range(2):  # the second takes away what rounding left of the first
            flat = flat - (flat @ self.matrix.mT - self.value) @ self._inverse.mT
        return flat.view_as(x).to(x.dtype)

    def violation(self, x: Tensor) -> Tensor:
        return (x.double().flatten(2) @ self.matrix.mT - self.value).abs().amax(-1).to(x.dtype)


@dataclass(frozen=True)
class Projector:
    """A set given by its projection alone. Its violation is how far the projection would still move an entry."""

    function: Callable[[Tensor], Tensor]

    def project(self, x: Tensor) -> Tensor:
        return self.function(x)

    def violation(self, x: Tensor) -> Tensor:
        return (self.function(x) - x).abs().flatten(2).amax(-1)


@dataclass(frozen=True)
class InData:
    """A constraint on decoded samples, reached by alternating projections between it and what the codec can write.

    With a codec that keeps all dimensions one round is exact; with a truncated one the rest after `rounds` stands in the
    violation, which is that of the decoded sample.

    Args:
        decode: b k n d -> sample in domain units, b k first.
        encode: back to latents.
        inner: the constraint in domain units.
        rounds: of alternation.
    """

    decode: Callable[[Tensor], Tensor]
    encode: Callable[[Tensor], Tensor]
    inner: Constraint
    rounds: int = 10

    def project(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            data = self.decode(x)
            x = x + self.encode(self.inner.project(data)) - self.encode(data)  # what the codec cannot write stays put
        return x

    def violation(self, x: Tensor) -> Tensor:
        return self.inner.violation(self.decode(x))


@dataclass(frozen=True)
class AllOf:
    """Several constraints at once, by Dykstra's algorithm (Boyle & Dykstra 1986): for convex parts the nearest point of their
    intersection in the limit of many rounds. The last part has the last word; what remains of the others is in the violation."""

    parts: Sequence[Constraint]
    rounds: int = 30

    def project(self, x: Tensor) -> Tensor:
        pull = [torch.zeros_like(x) for _ in self.parts]
        for _ in range(self.rounds):
            for i, part in enumerate(self.parts):
                pulled = x + pull[i]
                x = part.project(pulled)
                pull[i] = pulled - x
        return x

    def violation(self, x: Tensor) -> Tensor:
        return torch.stack([part.violation(x) for part in self.parts]).amax(0)
