"""The net u(z, t, s, cond): a diffusion transformer whose context is prepared once and shared by all samples and steps.

Blocks follow DiT (Peebles & Xie 2023, AdaLN-zero). Internally tokens are laid out b n k w: the queries of the k samples of a
token are neighbours, so that attention to the shared context is one matrix product per item and head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from seqdiff.types import Cond

NEG = -1e9  # added to scores of masked keys; finite, so that a row without any key stays finite


class PairFeatures(nn.Module):
    """What token i sees of token j: pair embedding b n m c of relative poses, invariant to turning and shifting the scene.

    Args:
        dim: c.
        length: metres; the scale at which positions are resolved. Near (length / 10) and far (5 x length) are seen too.
    """

    def __init__(self, dim: int, length: float = 10.0) -> None:
        super().__init__()
        self.length = length
        self.net = nn.Sequential(nn.Linear(13, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, pos_q: Tensor, pos_k: Tensor) -> Tensor:
        """pos_q b n 3, pos_k b m 3: x, y, heading."""
        d = pos_k[:, None, :, :2] - pos_q[:, :, None, :2]
        cos, sin = torch.cos(pos_q[..., 2])[..., None], torch.sin(pos_q[..., 2])[..., None]
        x = d[..., 0] * cos + d[..., 1] * sin
        y = d[..., 1] * cos - d[..., 0] * sin
        r = torch.sqrt(x * x + y * y + 1e-6)
        turn = pos_k[:, None, :, 2] - pos_q[:, :, None, 2]
        s = self.length
        feats = [
            x / (5 * s), y / (5 * s), torch.tanh(x / s), torch.tanh(y / s), torch.tanh(10 * x / s), torch.tanh(10 * y / s),
            torch.log1p(r / s), torch.exp(-r / s), torch.exp(-5 * r / s),
            x / (r + 0.1 * s), y / (r + 0.1 * s), torch.cos(turn), torch.sin(turn),
        ]  # fmt: skip
        return self.net(torch.stack(feats, dim=-1))


def rotary(x: Tensor, index: Tensor) -> Tensor:
    """Rotary embedding over a one-dimensional index (Su et al. 2021). x b n k h e, index b n."""
    half = x.shape[-1] // 2
    freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (index[..., None] * freq)[:, :, None, None, :]
    cos, sin = torch.cos(angle), torch.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def attend(q: Tensor, key: Tensor, value: Tensor, bias: Tensor, pair: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Attention of the k samples' queries to shared or per-sample keys.

    Args:
        q: b h n k e.
        key, value: b h m e (shared by all samples) or b h m k e.
        bias: b #h #n #k m, holds the mask.
        pair: b n m c or None.

    Returns:
        values b n k (h e), and the attended pair embedding b n k (h c).
    """
    b, h, n, k, e = q.shape
    scale = 1 / math.sqrt(e)
    if key.dim() == 4:  # shared: one product per item and head
        m = key.shape[2]
        scores = (q.reshape(b, h, n * k, e) @ key.transpose(-1, -2)).view(b, h, n, k, m)
        p = torch.softmax(torch.add(bias, scores, alpha=scale), dim=-1)
        out = (p.view(b, h, n * k, m) @ value).view(b, h, n, k, e).permute(0, 2, 3, 1, 4)
        p = p.permute(0, 2, 3, 1, 4)
    else:  # a product per sample; b h k n m throughout, so that nothing is copied between the steps
        scores = q.transpose(2, 3) @ key.permute(0, 1, 3, 4, 2)
        p = torch.softmax(torch.add(bias.transpose(2, 3), scores, alpha=scale), dim=-1)
        out = (p @ value.transpose(2, 3)).permute(0, 3, 2, 1, 4)
        p = p.permute(0, 3, 2, 1, 4)
    out = out.reshape(b, n, k, h * e)
    if pair is None:
        return out, None
    seen = p.reshape(b, n, k * h, -1) @ pair  # b n (k h) c
    return out, seen.view(b, n, k, -1)


class Attention(nn.Module):
    """Multi-head attention with a bias and a value from the pair embedding.

    The value that token i takes from j is v_j + W e_ij; since W is linear, e_ij is averaged first and projected once.
    """

    def __init__(self, width: int, heads: int, pair_dim: int, kv_width: int | None = None) -> None:
        super().__init__()
        if width % heads or (width // heads) % 2:
            raise ValueError(f"width {width} must be a multiple of 2 x heads ({heads})")
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(kv_width or width, 2 * width)
        self.out = nn.Linear(width, width)
        if pair_dim:
            self.pair_bias = nn.Linear(pair_dim, heads)
            self.pair_out = nn.Linear(heads * pair_dim, width, bias=False)

    def bias(self, mask: Tensor, pair: Tensor | None) -> Tensor:
        """b #h #n #k m from the key mask (b #k m) and the pair embedding (b n m c)."""
        out = (~mask).float()[:, None, None] * NEG
        if pair is None:
            return out
        # contiguous: what is added to it takes its memory order, and softmax wants keys innermost
        return (out + self.pair_bias(pair).permute(0, 3, 1, 2)[:, :, :, None]).contiguous()

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shared keys and values, b h m e each, from b m w."""
        b, m, _ = x.shape
        kv = self.kv(x).view(b, m, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        return kv[0], kv[1]

    def forward(
        self,
        x: Tensor,
        kv: tuple[Tensor, Tensor] | None,
        bias: Tensor,
        pair: Tensor | None,
        index: Tensor | None = None,
    ) -> Tensor:
        """x b n k w. kv None = attention among the tokens of each sample; index b n = rotary positions."""
        b, n, k, _ = x.shape
        q = self.q(x).view(b, n, k, self.heads, -1)
        if kv is None:
            both = self.kv(x).view(b, n, k, 2, self.heads, -1)
            key, value = both[:, :, :, 0], both[:, :, :, 1]
            if index is not None:
                q, key = rotary(q, index), rotary(key, index)
            kv = key.permute(0, 3, 1, 2, 4), value.permute(0, 3, 1, 2, 4)
        out, seen = attend(q.permute(0, 3, 1, 2, 4), kv[0], kv[1], bias, pair)
        y = self.out(out)
        return y if seen is None else y + self.pair_out(seen)


class MLP(nn.Sequential):
    def __init__(self, width: int, hidden: int, out: int | None = None) -> None:
        super().__init__(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, out or width))


class ContextLayer(nn.Module):
    """Pre-norm attention of queries to all context tokens, then an MLP. For encoders of the domains."""

    def __init__(self, width: int, heads: int, pair_dim: int, mlp_ratio: float = 2.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_q, self.norm_kv, self.norm_mlp = (nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width, heads, pair_dim)
        self.mlp = MLP(width, int(width * mlp_ratio))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, ctx: Tensor, mask: Tensor, pair: Tensor) -> Tensor:
        """x b n w, ctx b m w, mask b m, pair b n m c -> b n w."""
        a = self.attention
        y = a(self.norm_q(x)[:, :, None], a.keys(self.norm_kv(ctx)), a.bias(mask[:, None], pair), pair)[:, :, 0]
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class Block(nn.Module):
    """AdaLN-zero block: attention among tokens, attention to the context (where `cross`), MLP."""

    def __init__(
        self, width: int, heads: int, pair_dim: int, mlp_ratio: float, cross: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.cross = cross
        self.parts = 3 if cross else 2
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = Attention(width, heads, pair_dim)
        if cross:
            self.cross_attention = Attention(width, heads, pair_dim)
        self.mlp = MLP(width, int(width * mlp_ratio))
        self.dropout = nn.Dropout(dropout)
        self.time = nn.Linear(width, 3 * self.parts * width)
        self.tok = nn.Linear(width, 3 * self.parts * width, bias=False)
        nn.init.zeros_(self.time.weight)
        nn.init.zeros_(self.time.bias)
        nn.init.zeros_(self.tok.weight)

    def forward(self, x: Tensor, time: Tensor, tok: Tensor | None, p: PreparedBlock, shared: Prepared) -> Tensor:
        """x b n k w; time #b 1 #k w; tok b n 1 (3 parts w), already projected."""
        mod = self.time(time)
        if tok is not None:
            mod = mod + tok
        m = mod.chunk(3 * self.parts, dim=-1)

        def modulated(i: int) -> Tensor:
            return torch.addcmul(m[3 * i], self.norm(x), 1 + m[3 * i + 1])

        y = self.attention(modulated(0), None, p.self_bias, shared.self_pair, shared.index)
        x = torch.addcmul(x, m[2], self.dropout(y))
        if self.cross:
            assert p.cross_bias is not None
            y = self.cross_attention(modulated(1), p.cross_kv, p.cross_bias, shared.cross_pair)
            x = torch.addcmul(x, m[5], self.dropout(y))
        return torch.addcmul(x, m[3 * self.parts - 1], self.dropout(self.mlp(modulated(self.parts - 1))))


@dataclass(frozen=True)
class PreparedBlock:
    """Of one block: keys, values and biases that depend on the condition alone."""

    self_bias: Tensor
    cross_kv: tuple[Tensor, Tensor] | None
    cross_bias: Tensor | None
    tok: Tensor | None


@dataclass(frozen=True)
class Prepared:
    """All that `DiT.forward` needs of a condition. Computed once per scene."""

    blocks: tuple[PreparedBlock, ...]
    tok: Tensor | None  # b n 1 w
    self_pair: Tensor | None  # b n n c
    cross_pair: Tensor | None  # b n m c
    index: Tensor | None  # b n, rotary positions
    final: Tensor | None  # b n 1 2w
    known: Tensor | None = None  # b n #k w, embedding of given latents
    guidance: Tensor | None = None  # b 1 1 w, embedding of the guidance weight


class DiT(nn.Module):
    """Diffusion transformer over latent tokens.

    Args:
        latent_dim: d, equal to the adapter's.
        ctx_dim: c, equal to the adapter's.
        width, depth, heads, mlp_ratio: as usual; width is a multiple of 2 x heads.
        positions: "pose" (x, y, heading: relative poses) or "index" (rotary over one axis).
        pair_dim: channels of the relative-pose embedding.
        length: metres at which poses are resolved (about 10 for vehicles, 2 for pedestrians).
        cross_every: a block in so many attends to the context; the first one does.
        dropout: of every branch before it joins the residual stream, in training.
        inputs: what else the net takes: "known" (given latents: infilling), "guidance" (classifier-free weight). Both
        start from
            zero, so that a model trained without them can go on with them.
    """

    def __init__(
        self,
        latent_dim: int,
        ctx_dim: int,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        mlp_ratio: float = 3.0,
        positions: Literal["pose", "index"] = "pose",
        pair_dim: int = 16,
        length: float = 10.0,
        cross_every: int = 1,
        dropout: float = 0.0,
        inputs: tuple[Literal["known", "guidance"], ...] = (),
    ) -> None:
        super().__init__()
        self.latent_dim, self.ctx_dim, self.positions, self.inputs = latent_dim, ctx_dim, positions, tuple(inputs)
        pair_dim = pair_dim if positions == "pose" else 0
        self.input = nn.Linear(latent_dim, width)
        self.tok = nn.Linear(ctx_dim, width)
        self.ctx = nn.Sequential(nn.Linear(ctx_dim, width), nn.LayerNorm(width))
        self.null = nn.Parameter(torch.randn(width) * 0.02)  # the context token that is always there
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.pair = PairFeatures(pair_dim, length) if pair_dim else None
        self.blocks = nn.ModuleList(
            Block(width, heads, pair_dim, mlp_ratio, i % cross_every == 0, dropout) for i in range(depth)
        )
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.final = nn.Linear(width, 2 * width)
        self.final_tok = nn.Linear(width, 2 * width, bias=False)
        self.output = nn.Linear(width, latent_dim)
        for zero in (self.final.weight, self.final.bias, self.final_tok.weight, self.output.weight, self.output.bias):
            nn.init.zeros_(zero)
        if "known" in inputs:
            self.known = nn.Linear(2 * latent_dim, width, bias=False)
            nn.init.zeros_(self.known.weight)
        if "guidance" in inputs:
            self.guidance = nn.Linear(2, width, bias=False)
            nn.init.zeros_(self.guidance.weight)

    def embed_time(self, t: Tensor | float, s: Tensor | float, like: Tensor, guidance: Tensor | None = None) -> Tensor:
        """Embedding of (t, t - s) and of the guidance weight, #b 1 #k w. Low frequencies only: d u / d t stays exact and
        tame (mean flow needs it)."""
        t, s = (torch.as_tensor(v, dtype=torch.float32, device=like.device) for v in (t, s))
        shape = (t.shape[0], 1, t.shape[1] if t.dim() > 1 else 1) if t.dim() else (1, 1, 1)
        freq = torch.arange(8, device=like.device, dtype=torch.float32) * (math.pi / 2)
        angle = torch.cat([t.reshape(shape)[..., None] * freq, (t - s).reshape(shape)[..., None] * freq], dim=-1)
        time = self.time(torch.cat([torch.cos(angle), torch.sin(angle)], dim=-1).to(like.dtype))
        return nn.functional.silu(time if guidance is None else time + guidance)

    def prepare(self, cond: Cond) -> Prepared:
        """Project the context: keys, values, position biases of every block, once for all samples and steps."""
        ctx = self.ctx(cond.ctx)
        b, _, w = ctx.shape
        ctx = torch.cat([self.null.expand(b, 1, w), ctx], dim=1)
        ctx_mask = torch.cat([cond.ctx_mask.new_ones(b, 1), cond.ctx_mask], dim=1)
        self_pair = cross_pair = index = None
        if self.pair is not None:
            self_pair = self.pair(cond.pos, cond.pos)
            cross_pair = nn.functional.pad(self.pair(cond.pos, cond.ctx_pos), (0, 0, 1, 0))
        else:
            index = cond.pos[..., 0]
        tok = None if cond.tok is None else nn.functional.silu(self.tok(cond.tok))[:, :, None]
        blocks = []
        for block in self.blocks:
            assert isinstance(block, Block)
            kv = bias = None
            if block.cross:
                kv = block.cross_attention.keys(ctx)
                bias = block.cross_attention.bias(ctx_mask[:, None], cross_pair)
            blocks.append(
                PreparedBlock(
                    self_bias=block.attention.bias(cond.mask, self_pair),
                    cross_kv=kv,
                    cross_bias=bias,
                    tok=None if tok is None else block.tok(tok),
                )
            )
        final = None if tok is None else self.final_tok(tok)
        given = self._given(cond)
        return Prepared(tuple(blocks), tok, self_pair, cross_pair, index, final, *given)

    def _given(self, cond: Cond) -> tuple[Tensor | None, Tensor | None]:
        """Embeddings of given latents and of the guidance weight; zero where they say nothing (nothing given, weight 1)."""
        known = guidance = None
        for name, value in (("known", cond.known), ("guidance", cond.guidance)):
            if value is not None and name not in self.inputs:
                raise ValueError(
                    f"the condition has {name!r}, which this net does not take: train with model.net.init_args.inputs=[{name}]"
                )
        if cond.known is not None:
            assert cond.known_mask is not None
            mask = cond.known_mask.to(cond.known.dtype)
            known = self.known(torch.cat([cond.known * mask, mask], -1)).transpose(1, 2)
        if cond.guidance is not None:
            w = cond.guidance.clamp_min(1e-3)
            guidance = self.guidance(torch.stack([w - 1, w.log()], -1))[:, None, None]
        return known, guidance

    def forward(self, z: Tensor, t: Tensor | float, s: Tensor | float, prepared: Prepared) -> Tensor:
        """z b k n d -> b k n d. t and s are floats (sampling) or tensors b or b k (training)."""
        x = self.input(z.transpose(1, 2))
        if prepared.tok is not None:
            x = x + prepared.tok
        if prepared.known is not None:
            x = x + prepared.known
        time = self.embed_time(t, s, x, prepared.guidance)
        for block, p in zip(self.blocks, prepared.blocks, strict=True):
            x = block(x, time, p.tok, p, prepared)
        mod = self.final(time) if prepared.final is None else self.final(time) + prepared.final
        shift, scale = mod.chunk(2, dim=-1)
        return self.output(torch.addcmul(shift, self.norm(x), 1 + scale)).transpose(1, 2)
