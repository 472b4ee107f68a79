"""Present motion from a history with holes."""

from __future__ import annotations

import torch
from torch import Tensor


def velocity(hist: Tensor, valid: Tensor, dt: float, frames: int = 3) -> Tensor:
    """Velocity at t0 from a straight line through the last valid frames.

    Args:
        hist: ... h 3, the last frame is t0; frames that are not valid hold anything finite.
        valid: ... h bool.
        dt: seconds a frame.
        frames: how far back the line is fitted; an agent with one valid frame among them falls back to its last two valid
            frames anywhere in the history, and with one frame in all to zero.

    Returns:
        ... 2, m/s.
    """
    h = hist.shape[-2]
    t = (torch.arange(h, device=hist.device, dtype=hist.dtype) - (h - 1)) * dt
    rank = valid.flip(-1).cumsum(-1).flip(-1)  # 1 at the last valid frame, 2 at the one before, ...
    near = valid & (t > -(frames - 0.5) * dt)
    use = torch.where(near.sum(-1, keepdim=True) >= 2, near, valid & (rank <= 2))
    w = use.to(hist.dtype)
    n = w.sum(-1).clamp_min(1)
    mean_t = (w * t).sum(-1) / n
    xy = torch.where(use[..., None], hist[..., :2], 0.0)
    mean_xy = xy.sum(-2) / n[..., None]
    ct = (t - mean_t[..., None]) * w
    var = (ct * ct).sum(-1)
    slope = (ct[..., None] * (xy - mean_xy[..., None, :])).sum(-2) / var.clamp_min(1e-9)[..., None]
    return torch.where((use.sum(-1) >= 2)[..., None], slope, 0.0)
