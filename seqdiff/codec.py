"""Codecs between data and latents. LinearCodec: whitened principal components, with a scale of its own for each group."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LinearCodec(nn.Module):
    """x = mean + (z * scale[group]) @ basis. The basis has orthonormal rows; z has unit variance in every group.

    Exactly invertible on its range and differentiable; log|det| follows from `scale`. Fitted on the training split alone and
    kept in the checkpoint.

    Args:
        features: D, length of a data vector.
        latent_dim: d <= D.
        groups: number of groups with a scale of their own.
    """

    mean: Tensor  # D
    basis: Tensor  # d D
    scale: Tensor  # groups d
    residual: Tensor  # D: standard deviation that the truncation leaves
    fitted: Tensor

    def __init__(self, features: int, latent_dim: int, groups: int = 1) -> None:
        super().__init__()
        if not 1 <= latent_dim <= features:
            raise ValueError(f"latent_dim is {latent_dim}; expected 1 to {features}, the length of a data vector")
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("basis", torch.eye(latent_dim, features))
        self.register_buffer("scale", torch.ones(groups, latent_dim))
        self.register_buffer("residual", torch.ones(features))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))

    @torch.no_grad()
    def fit(self, x: Tensor, group: Tensor | None = None, min_group: int = 50) -> dict[str, float]:
        """Fit on x (N D), float64 inside. The basis comes from all rows after dividing each group by its own size, so that
        slow groups have a say in it; groups with fewer than `min_group` rows take the scale of all.

        Returns:
            rows, share of variance kept, root mean square and largest error of the reconstruction, in data units.

        Raises:
            ValueError: fewer rows than latent dimensions, or values that are not finite.
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
        weight = torch.ones(len(x), dtype=torch.float64)
        for g in group.unique():
            rows = group == g
            if rows.sum() >= min_group:
                weight[rows] = 1 / (y[rows].square().mean().sqrt() + 0.05 * y.square().mean().sqrt())
        w = y * weight[:, None]
        _, vectors = torch.linalg.eigh(w.T @ w / len(w))
        basis = vectors.flip(1)[:, :d].T
        z = y @ basis.T
        scale = z.square().mean(0).sqrt().clamp_min(1e-6).expand_as(self.scale).clone()
        for g in group.unique():
            rows = group == g
            if rows.sum() >= min_group:
                own = z[rows].square().mean(0).sqrt()
                scale[g] = torch.maximum(own, 0.01 * scale[g])
        error = y - z @ basis
        for name, value in [
            ("mean", mean),
            ("basis", basis),
            ("scale", scale),
            ("residual", error.square().mean(0).sqrt()),
        ]:
            getattr(self, name).copy_(value)
        self.fitted.fill_(True)
        return {
            "rows": float(len(x)),
            "variance_kept": float(1 - error.square().sum() / y.square().sum()),
            "rms_error": float(error.square().mean().sqrt()),
            "max_error": float(error.abs().max()),
        }

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
