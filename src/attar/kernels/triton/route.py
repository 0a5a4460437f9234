"""The choice of a mixture's experts in three launches: logits, the choice, and the pairs sorted by expert.

    logits    gemm.dense_product with the router's float32 weight
    choice    a program for each token: scores, groups, the k largest one after the other, shares
    order     of a pair: how many have a smaller expert, or the same one and a smaller number; nothing is
              sorted or added by atomics, and the host reads nothing

Letters: T tokens, E experts, k chosen, J parts of a shared expert, P = T (k + J) pairs, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attar.kernels.triton.gemm import dense_product

PAIRS = 64  # of a program, and compared at a time
GATE = 1024  # inputs of the shared expert's gate at a time
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def choice_kernel(
    logits, correction, x, gate, shares, chosen, share, E, H, scaling,
    K: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr,
    CORRECTED: tl.constexpr, GATED: tl.constexpr, GROUPS: tl.constexpr, ACTIVE: tl.constexpr,
    TOP: tl.constexpr, EXPERTS: tl.constexpr, PARTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Of a token; EXPERTS and PARTS: powers of two that hold E and the groups."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    inside = e < E
    z = tl.load(logits + token * E + e, mask=inside, other=LOWEST)
    if SIGMOID:
        scores = tl.where(inside, 1.0 / (1.0 + tl.exp(-z)), 0.0)
    else:
        scores = tl.exp(z - tl.max(z, 0))
        scores = tl.where(inside, scores / tl.sum(tl.where(inside, scores, 0.0), 0), 0.0)
    values = scores
    if CORRECTED:
        values += tl.load(correction + e, mask=inside, other=0.0)
    values = tl.where(inside, values, LOWEST)
    if GROUPS > 1:
        size = E // GROUPS
        part = tl.arange(0, PARTS)
        of_groups = tl.full((PARTS,), LOWEST, tl.float32)
        for group in tl.static_range(GROUPS):
            left = tl.where(e // size == group, values, LOWEST)
            total = 0.0
            for _ in tl.static_range(TOP):
                best = tl.argmax(left, 0, tie_break_left=True)
                total += tl.max(left, 0)
                left = tl.where(e == best, LOWEST, left)
            of_groups = tl.where(part == group, total, of_groups)
        kept = tl.zeros((EXPERTS,), tl.int1)
        for _ in tl.static_range(ACTIVE):
            best = tl.argmax(of_groups, 0, tie_break_left=True)
            of_groups = tl.where(part == best, LOWEST, of_groups)
            kept = kept | (e // size == best)
        values = tl.where(kept & inside, values, LOWEST)
    pairs = token * (K + SHARED)
    total = 0.0
    left = values
    for _ in tl.static_range(K):
        best = tl.argmax(left, 0, tie_break_left=True)
        total += tl.sum(tl.where(e == best, scores, 0.0), 0)
        left = tl.where(e == best, LOWEST, left)
    divisor = total + 1e-20 if NORMALIZED else 1.0
    left = values
    for j in tl.static_range(K):
        best = tl.argmax(left, 0, tie_break_left=True)
        score = tl.sum(tl.where(e == best, scores, 0.0), 0)
        left = tl.where(e == best, LOWEST, left)
        tl.store(chosen + pairs + j, best.to(tl.int32))
        tl.store(shares + pairs + j, score / divisor * scaling)
    of_shared = 1.0
    if GATED:
        product = tl.zeros((INPUTS,), tl.float32)
        for first in range(0, H, INPUTS):
            h = first + tl.arange(0, INPUTS)
            row = tl.load(x + token * H + h, mask=h < H, other=0.0).to(tl.float32)
            product += row * tl.load(gate + h, mask=h < H, other=0.0)
        of_shared = 1.0 / (1.0 + tl.exp(-tl.sum(product, 0)))
    tl.store(share + token, of_shared)
    for j in tl.static_range(SHARED):
        tl.store(chosen + pairs + K + j, E + j)
        tl.store(shares + pairs + K + j, of_shared)


@triton.jit
def order_kernel(chosen, order, ends, P, E, BLOCKS, PAIRS: tl.constexpr):
    """Places of some pairs, or in programs behind those, the ends of some experts."""
    program = tl.program_id(0)
    at = tl.arange(0, PAIRS)
    if program < BLOCKS:
        pairs = program * PAIRS + at
        expert = tl.load(chosen + pairs, mask=pairs < P, other=0)
        tl.store(order + before(chosen, P, expert, pairs, PAIRS), pairs, mask=pairs < P)
    else:
        expert = (program - BLOCKS) * PAIRS + at
        tl.store(ends + expert, before(chosen, P, expert, at * 0 + P, PAIRS), mask=expert < E)


@triton.jit
def before(chosen, P, expert, number, PAIRS: tl.constexpr):
    """int32 (PAIRS,): the pairs of smaller experts, and those of the same one with smaller numbers."""
    count = tl.zeros((PAIRS,), tl.int32)
    for first in range(0, P, PAIRS):
        other = first + tl.arange(0, PAIRS)
        experts = tl.load(chosen + other, mask=other < P, other=2147483647)[None, :]
        same = (experts == expert[:, None]) & (other[None, :] < number[:, None])
        count += tl.sum(((experts < expert[:, None]) | same).to(tl.int32), 1)
    return count


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
    """Shares (T, k + J), the order of pairs, ends of experts, and the shared expert's share (T,)."""
    (T, H), E = x.shape, len(router)
    pairs = T * (active + shared)
    logits = dense_product(x, router, bias, torch.float32)
    shares = torch.empty(T, active + shared, dtype=torch.float32, device=x.device)
    share = torch.empty(T, dtype=torch.float32, device=x.device)
    chosen, order = (torch.empty(pairs, dtype=torch.int32, device=x.device) for _ in range(2))
    ends = torch.empty(E + shared, dtype=torch.int32, device=x.device)
    optional = (logits if part is None else part for part in (correction, x, shared_gate))
    choice_kernel[(T,)](
        logits, *optional, shares, chosen, share, E, H, scaling,
        active, shared, scoring == "sigmoid", normalized, correction is not None, shared_gate is not None,
        groups, active_groups, group_scores, triton.next_power_of_2(E), triton.next_power_of_2(groups), GATE,
        num_warps=4,
    )  # fmt: skip
    blocks = triton.cdiv(pairs, PAIRS)
    order_kernel[(blocks + triton.cdiv(E + shared, PAIRS),)](
        chosen, order, ends, pairs, E + shared, blocks, PAIRS, num_warps=4
    )
    return shares, order, ends, share
