"""Codecs between data and latents. LinearCodec: whitened principal components, with a scale of its own for each group."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class LinearCodec(nn.Module):
    """x = mean + (z * scale[group]) @ basis. The basis has orthonormal rows; z has unit variance in every group.

    Exactly invertible on its range and differentiable; log|det| follows from `scale`. What lies outside the range is described
    by a Gaussian of independent directions (the principal ones that were cut off) with standard deviations of each group, so
    that data vectors have a density in the full space: log p(x) = log p(z) - log_det + log_density_residual. Fitted on the
    training split alone and kept in the checkpoint.

    Args:
        features: D, length of a data vector.
        latent_dim: d <= D.
        groups: number of groups with a scale of their own.
    """

    mean: Tensor  # D
    basis: Tensor  # d D
    scale: Tensor  # groups d
    residual: Tensor  # D: standard deviation that the truncation leaves
    cut_basis: Tensor  # D-d D: orthonormal complement of the basis, by falling variance
    cut_std: Tensor  # groups D-d: root mean square of what the group's data have there
    cut_fitted: Tensor  # false: of a checkpoint from before this was fitted, or nothing is cut off the data: unknown
    fitted: Tensor

    def __init__(self, features: int, latent_dim: int, groups: int = 1) -> None:
        super().__init__()
        if not 1 <= latent_dim <= features:
            raise ValueError(f"latent_dim is {latent_dim}; expected 1 to {features}, the length of a data vector")
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("basis", torch.eye(latent_dim, features))
        self.register_buffer("scale", torch.ones(groups, latent_dim))
        self.register_buffer("residual", torch.ones(features))
        self.register_buffer("cut_basis", torch.eye(features)[latent_dim:].clone())
        self.register_buffer("cut_std", torch.ones(groups, features - latent_dim))
        self.register_buffer("cut_fitted", torch.zeros((), dtype=torch.bool))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Checkpoints from before the residual's law was kept load as well; it is unknown then."""
        if f"{prefix}basis" in state_dict and f"{prefix}cut_fitted" not in state_dict:
            own = {
                "cut_basis": self.cut_basis,
                "cut_std": self.cut_std,
                "cut_fitted": torch.zeros_like(self.cut_fitted),
            }
            state_dict = {**state_dict, **{prefix + name: value.clone() for name, value in own.items()}}
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def fit(self, x: Tensor, group: Tensor | None = None, min_group: int = 50) -> dict[str, float]:
        """Fit on x (N D), float64 inside. The basis comes from all rows after dividing each group by its own size, so that
        slow groups have a say in it; groups with fewer than `min_group` rows take the scale of all.

        Returns:
            rows, share of variance kept, root mean square and largest error of the reconstruction, in data units, and the
            share of the residual's standard deviations that were below the floor.

        Raises:
            ValueError: fewer rows than latent dimensions, values that are not finite, or data without variation.
        """
        d = self.basis.shape[0]
        if len(x) <= d:
            raise ValueError(
                f"the codec was given {len(x)} complete futures to fit {d} dimensions; it needs more than {d}"
            )
        if not torch.isfinite(x).all():
            raise ValueError("the codec was given values that are not finite; the data module must mask them")
        x = x.double()
        group = torch.zeros(len(x), dtype=torch.long) if group is None else group
        mean = x.mean(0)
        y = x - mean
        size = y.square().mean().sqrt()
        if not size > 1e-9 * x.abs().amax():
            raise ValueError(
                f"the codec was given {len(x)} vectors that are all alike (trajectories: every future follows constant velocity "
                "exactly): there is nothing to learn; train on recordings that vary"
            )
        large = {int(g): group == g for g in group.unique() if (group == g).sum() >= min_group}
        weight = torch.ones(len(x), dtype=torch.float64)
        for rows in large.values():
            weight[rows] = 1 / (y[rows].square().mean().sqrt() + 0.05 * size)
        w = y * weight[:, None]
        vectors = torch.linalg.eigh(w.T @ w / len(w))[1].flip(1).T
        basis = vectors[:d]
        z = y @ basis.T
        scale = z.square().mean(0).sqrt().clamp_min(1e-6).expand_as(self.scale).clone()
        for g, rows in large.items():
            scale[g] = torch.maximum(z[rows].square().mean(0).sqrt(), 0.01 * scale[g])
        error = y - z @ basis
        for name, value in [
            ("mean", mean),
            ("basis", basis),
            ("scale", scale),
            ("residual", error.square().mean(0).sqrt()),
        ]:
            getattr(self, name).copy_(value)
        floored = self._fit_cut(y, vectors[d:], large, size)
        self.fitted.fill_(True)
        return {
            "rows": float(len(x)),
            "variance_kept": float(1 - error.square().sum() / y.square().sum()),
            "rms_error": float(error.square().mean().sqrt()),
            "max_error": float(error.abs().max()),
            "residual_floored": floored,
        }

    def _fit_cut(self, y: Tensor, basis: Tensor, large: dict[int, Tensor], size: Tensor) -> float:
        """The Gaussian outside the range, and the share of its standard deviations that are at the floor: a hundredth of the
        whole residual's root mean square. A residual that is zero but for rounding is no law with a density: unknown.
        """
        cut = y @ basis.T
        rms = cut.square().mean().sqrt() if cut.numel() else torch.zeros((), dtype=y.dtype)
        std = cut.square().mean(0).sqrt().expand(len(self.cut_std), -1).clone()
        for g, rows in large.items():
            std[g] = cut[rows].square().mean(0).sqrt()
        floor = 0.01 * rms
        self.cut_basis.copy_(basis)
        self.cut_std.copy_(std.clamp_min(float(floor)))
        self.cut_fitted.fill_(bool(rms > 1e-6 * size) or not cut.numel())
        return float((std < floor).double().mean()) if cut.numel() else 0.0

    def _scale(self, group: Tensor | None) -> Tensor:
        return self.scale[0] if group is None else self.scale[group]

    def encode(self, x: Tensor, group: Tensor | None = None) -> Tensor:
        """... D -> ... d; group ... long."""
        return (x - self.mean) @ self.basis.T / self._scale(group)

    def decode(self, z: Tensor, group: Tensor | None = None) -> Tensor:
        """... d -> ... D."""
        return torch.addmm(self.mean, (z * self._scale(group)).flatten(0, -2), self.basis).view(*z.shape[:-1], -1)

    def encode_partial(self, x: Tensor, valid: Tensor, group: Tensor | None = None, noise: float = 0.05) -> Tensor:
        """Latents of vectors that are known in part: the mean of z ~ N(0, 1) given the valid entries, seen with
        Gaussian noise of standard deviation `noise` (data units). Nothing valid gives 0, the mean of the prior.

        Args:
            x: ... D; entries that are not valid are ignored.
            valid: ... D bool.
        """
        a = self.basis * self._scale(group)[..., None]  # ... d D
        a = a * valid[..., None, :]
        y = torch.where(valid, x - self.mean, 0)
        gram = a @ a.transpose(-1, -2) / noise**2
        gram = gram + torch.eye(gram.shape[-1], device=x.device, dtype=gram.dtype)
        return torch.linalg.solve(gram, (a @ y[..., None]) / noise**2)[..., 0]

    def log_det(self, group: Tensor | None = None) -> Tensor:
        """log |d x / d z| on the range of the codec, per vector."""
        return self._scale(group).log().sum(-1)

    def log_density_residual(self, x: Tensor, group: Tensor | None = None) -> Tensor:
        """Log-density, in nats, of what the codec cuts off a data vector: the Gaussian that was fitted to it on the training rows.

        With it log p(x) = log p(z) - log_det + log_density_residual is a density in all D dimensions; without it the number is
        that of the latents. A sample has no such part: its decoded vector lies on the codec's range.

        Args:
            x: ... D. group: ... long.

        Returns:
            float64 ...; 0 where nothing is cut off (d = D), NaN where the law is unknown: a checkpoint from before it was kept,
            or training data without a residual, for which a density in D dimensions does not exist.
        """
        std = (self.cut_std[0] if group is None else self.cut_std[group]).double()
        u = ((x - self.mean).double() @ self.cut_basis.double().T) / std
        out = -0.5 * (u.square() + math.log(2 * math.pi)).sum(-1) - std.log().sum(-1)
        known = self.cut_fitted if self.cut_std.shape[1] else self.fitted
        return torch.where(known, out, torch.nan)
