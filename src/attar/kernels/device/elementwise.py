"""What lies between the products of the device runner: sums and norms, activations, the choice of experts.

Letters: T tokens, H hidden, n neurons, E experts, k experts of a token, J parts of a shared expert.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attar.kernels.device.products import rows_times
from attar.kernels.device.registry import operator

LIMIT, ALPHA = 7.0, 1.702  # of gpt-oss's activation
GELU = math.sqrt(2 / math.pi)


def _add_norm_shape(x: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=out_dtype)


@operator(_add_norm_shape, mutates=("x",))
def add_norm(
    x: Tensor,
    y: Tensor | None,
    share: Tensor | None,
    routed: Tensor | None,
    shares: Tensor | None,
    post: Tensor | None,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """Adds what a layer's part computed to the residual stream x float32 (T, H), and norms it: (T, H).

        sum = sum_i shares_i routed_i + share y;   x += post norm(sum), or sum;   x / rms(x) weight

    Args:
        y: (T, H); None: nothing.
        share: float32 (T,); None: 1.
        routed: (T, k, H), outputs of a token's experts; None: none.
        shares: float32 (T, k).
        post, weight: float32 (H,).
    """
    total = None
    if routed is not None and shares is not None:
        total = routed[:, 0].float() * shares[:, :1]
        for i in range(1, routed.shape[1]):
            total = total + routed[:, i].float() * shares[:, i : i + 1]
    if y is not None:
        part = y.float() if share is None else y.float() * share[:, None]
        total = part if total is None else total + part
    if total is not None:
        x += total if post is None else rms_norm(total, post, eps)
    return rms_norm(x, weight, eps).to(out_dtype)


def _gated_shape(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@operator(_gated_shape)
def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) up: (rows, n) of (rows, 2 n), gates first.

    Args:
        activation: silu, gelu_tanh or clamped_swiglu (gpt-oss).
    """
    gate, up = gate_up.float().chunk(2, dim=1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (gate * sigmoid(gate * ALPHA) * (up + 1)).to(gate_up.dtype)
    if activation == "gelu_tanh":
        inner = GELU * (gate + 0.044715 * gate * gate * gate)
        return (0.5 * gate * (1 + tanh(inner)) * up).to(gate_up.dtype)
    assert activation == "silu", f"an activation {activation!r}"
    return (gate * sigmoid(gate) * up).to(gate_up.dtype)


def _route_shape(
    x: Tensor, router: Tensor, active: int, shared: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, pairs = x.shape[0], active + shared
    return (
        x.new_empty(tokens, pairs, dtype=torch.float32),
        x.new_empty(tokens * pairs, dtype=torch.int32),
        x.new_empty(len(router) + shared, dtype=torch.int32),
        x.new_empty(tokens, dtype=torch.float32),
    )


@operator(_route_shape)
def route(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    shared_gate: Tensor | None,
    active: int,
    scoring: str,
    normalized: bool,
    scaling: float,
    groups: int,
    active_groups: int,
    group_scores: int,
    shared: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The experts of every token; :class:`attar.kernels.experts.Routing` has the words of the choice.

    Args:
        x: (T, H) float.
        router: float32 (E, H).
        bias: float32 (E,), of the logits.
        correction: float32 (E,), added to scores for the choice alone.
        shared_gate: float32 (H,), of the expert that all tokens share.
        active: k.
        scoring: softmax or sigmoid.
        shared: J, the parts of the shared expert that follow the others: every token has them too.

    Returns:
        Shares float32 (T, k + J); the order int32 (T (k + J),) of pairs by expert; ends int32 (E + J,) of
        each expert's pairs in it; the shared expert's share float32 (T,), ones without a gate. Of equal
        scores the first is chosen.
    """
    x, experts = x.float(), len(router)
    logits = rows_times(x, router)
    logits = logits if bias is None else logits + bias
    scores = sigmoid(logits) if scoring == "sigmoid" else logits.softmax(-1)
    values = scores if correction is None else scores + correction
    if groups > 1:
        grouped = values.unflatten(1, (groups, -1))
        best = grouped.topk(group_scores, dim=2).values.sum(2)
        kept = torch.zeros_like(best).scatter_(1, _largest(best, active_groups), 1.0)
        values = grouped.masked_fill(kept[..., None] == 0, -torch.inf).flatten(1)
    chosen = _largest(values, active)
    shares = scores.gather(1, chosen)
    if normalized:
        shares = shares / (shares.sum(1, keepdim=True) + 1e-20)
    share = torch.ones(len(x), device=x.device)
    if shared_gate is not None:
        share = sigmoid((x * shared_gate).sum(1))
    parts = torch.arange(experts, experts + shared, device=x.device).expand(len(x), shared)
    shares = torch.cat([shares * scaling, share[:, None].expand(len(x), shared)], dim=1)
    pairs = torch.cat([chosen, parts], dim=1).flatten()
    order = pairs.argsort(stable=True).int()
    counts = torch.zeros(experts + shared, dtype=torch.int32, device=x.device)
    ends = counts.index_add_(0, pairs, torch.ones_like(pairs, dtype=torch.int32)).cumsum(0).int()
    return shares, order, ends, share


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) weight along the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def sigmoid(x: Tensor) -> Tensor:
    """torch's own depends on where in a tensor a number lies, on a CPU, by its last bit."""
    return 1 / (1 + (-x).exp())


def tanh(x: Tensor) -> Tensor:
    """In double, rounded; likewise."""
    return torch.tanh(x.double()).float()


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the largest, the first of equal ones: int64 (T, count)."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
