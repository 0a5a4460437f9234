"""Multi-head latent attention (MLA) on a cache of latents: what DeepSeek V2 and its successors cache a token.

The keys and values of all heads are products of one latent c and of a rotated key r that the heads share:

    k_h = [U_h c | r]        v_h = V_h c

so that the cache keeps [r | c] of a token, one key head whose last numbers are its value, and attention has
two forms of the same result:

    absorbed    q_h' = [r_h | U_h^T n_h];  o_h = V_h (softmax(scaling q_h' [r | c]^T) c)    q_h = [n_h | r_h]
    expanded    k_h and v_h of every entry, then attention of h heads

The absorbed form reads a cache that all heads share, and does most for a few tokens; the expanded one has
narrower products, and does most for many. A span takes the form with fewer multiplications.

Source: DeepSeek-V2 (2024, arXiv 2405.04434), section 2.1, appendix C for the absorption.

Letters: t tokens of a span, n entries, h heads; c (rank,), r (rope,), U (h, nope, rank), V (h, wide, rank).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from attar.runtime.runner.packed_model import DecodedLinear, PackedLinear

LINEARS = (nn.Linear, PackedLinear, DecodedLinear)


class LatentProducts:
    """U (``up_keys``) and V (``up_values``) of a layer, and of the adapters that change them.

    Args:
        weight: of ``kv_b_proj`` (h (nope + wide), rank); U and V are views of it.
    """

    def __init__(self, weight: Tensor, *, nope: int, wide: int, rope: int) -> None:
        self.weight, self.nope, self.wide, self.rope = weight, nope, wide, rope
        self.heads, self.rank = len(weight) // (nope + wide), weight.shape[1]
        self.adapted: dict[str, LatentProducts] = {}  # by key

    @property
    def up_keys(self) -> Tensor:
        return self.weight.unflatten(0, (self.heads, -1))[:, : self.nope]

    @property
    def up_values(self) -> Tensor:
        return self.weight.unflatten(0, (self.heads, -1))[:, self.nope :]

    def adapt(self, key: str, update: Tensor) -> None:
        """Have spans with the adapter ``key`` use the weight and ``update``, of its shape."""
        weight = (self.weight.float() + update).to(self.weight.dtype)
        self.adapted[key] = LatentProducts(weight, nope=self.nope, wide=self.wide, rope=self.rope)

    def absorbed(self, q: Tensor) -> Tensor:
        """Queries (t, h, nope + rope) as those of the one key head: (t, h, rope + rank)."""
        n, r = q.split([self.nope, self.rope], dim=-1)
        return torch.cat([r, (n.transpose(0, 1) @ self.up_keys).transpose(0, 1)], dim=-1)

    def values(self, c: Tensor) -> Tensor:
        """Latents (t, h, rank), averaged by attention, as values (t, h, wide)."""
        return (c.transpose(0, 1) @ self.up_values.transpose(1, 2)).transpose(0, 1)

    def expanded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (n, h, nope + rope) and values (n, h, wide) of cached rows (n, 1, rope + rank)."""
        r, c = rows.split([self.rope, self.rank], dim=-1)
        both = (c @ self.weight.T).unflatten(-1, (self.heads, -1))[:, 0]
        k, v = both.split([self.nope, self.wide], dim=-1)
        return torch.cat([k, r.expand(-1, self.heads, -1)], dim=-1), v

    def expands(self, t: int, n: int) -> bool:
        """Whether the expanded form has fewer multiplications for t queries over n entries."""
        products = self.rank * (self.nope + self.wide)
        absorbed = t * (products + n * (self.rope + 2 * self.rank))
        expanded = n * (products + t * (self.nope + self.rope + self.wide))
        return bool(expanded < absorbed)

    def attend(self, q: Tensor, rows: Tensor, mask: Tensor | None, scaling: float, causal: bool) -> Tensor:
        """Attention of one sequence in the form that is cheaper.

        Args:
            q: (t, h, nope + rope).
            rows: (n, 1, rope + rank), cached.
            mask: bool (t, n), True where seen; None: everything, or with ``causal`` the lower triangle.

        Returns:
            (t, h, wide).
        """
        if self.expands(len(q), len(rows)):
            k, v = self.expanded(rows)
            same = pad(v, (0, k.shape[-1] - self.wide))  # torch's fused attention asks for equal widths
            q, k, same = (x.transpose(0, 1)[None] for x in (q, k, same))
            causal = causal and mask is None
            out = scaled_dot_product_attention(q, k, same, attn_mask=mask, scale=scaling, is_causal=causal)
            return out[0].transpose(0, 1)[..., : self.wide]
        if mask is None and causal:
            mask = torch.ones(len(q), len(rows), dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            mask = mask.repeat_interleave(self.heads, 0)
        queries = self.absorbed(q).flatten(0, 1)[None, None]  # heads are rows: the cache is read once
        keys = rows[:, 0][None, None]  # and values: their last numbers
        out = scaled_dot_product_attention(queries, keys, keys, attn_mask=mask, scale=scaling)
        return self.values(out[0, 0, :, self.rope :].unflatten(0, (-1, self.heads)))


def cache_latents(model: Any) -> bool:
    """Have the attention modules of a model pass [r | c] and c on as key and value, one head, and keep their
    :class:`LatentProducts` as ``latent``. Returns whether every attention with latents does; a module whose
    keys and values are something else, or whose projection is hooked, stays as it is, and so do all.
    """
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    if modules and all(hasattr(module, "latent") for module in modules):
        return True
    with torch.no_grad():
        built = [_latent_attention(module) for module in modules]
    if not modules or any(products is None for products in built):
        return False
    for module, latent in zip(modules, built, strict=True):
        module.latent, module.expand_kv = latent, _rows
    return True


def _rows(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of transformers' ``expand_kv``: c (1, 1, T, rank), r (1, 1, T, rope)."""
    return torch.cat([r, c], dim=-1), c


def _latent_attention(module: Any) -> LatentProducts | None:
    """Of an attention module, checked against its own ``expand_kv``; None where it is something else."""
    linear = module.kv_b_proj
    hooked = linear._forward_pre_hooks or linear._forward_hooks
    if type(linear) not in LINEARS or hooked or getattr(linear, "bias", None) is not None:
        return None
    weight = linear.weight if isinstance(linear, nn.Linear) else _weight(linear, module)
    sizes = {"nope": module.qk_nope_head_dim, "wide": module.v_head_dim, "rope": module.qk_rope_head_dim}
    latent = LatentProducts(weight, **sizes)
    drawn = torch.randn(3, 1, latent.rope + latent.rank, generator=torch.Generator().manual_seed(0))
    r, c = (x.transpose(0, 1)[None] for x in drawn.to(weight).split([latent.rope, latent.rank], dim=-1))
    ours = latent.expanded(torch.cat([r, c], dim=-1)[0].transpose(0, 1))
    for mine, expanded in zip(ours, module.expand_kv(c, r), strict=True):
        close = 1e-4 if weight.dtype == torch.float32 else 0.02
        if mine.shape != expanded[0].transpose(0, 1).shape:
            return None
        if not mine.is_meta and (mine - expanded[0].transpose(0, 1)).norm() > close * expanded.norm():
            return None
    return latent


def _weight(linear: Any, module: Any) -> Tensor:
    """What unit vectors become: codes decoded, in the type of the module's norm."""
    like = module.kv_a_layernorm.weight
    unit = torch.eye(linear.in_features, dtype=like.dtype, device=like.device)
    return linear(unit).T.contiguous()
