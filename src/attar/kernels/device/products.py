"""Products of the device runner: packed and dense weights, of one matrix or of a stack of experts.

    y = x W^T + bias                 W of codes: planes.py

Sums are float32, and a row's do not depend on the other rows. On a CPU the bodies therefore multiply ROWS
rows at a time, whatever their number: a matrix product divides its sums by the number of rows.

Letters: M rows, N outputs, K inputs, E experts, P pairs of a token and one of its k experts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from attar.kernels.device.planes import WORD, dense
from attar.kernels.device.registry import operator

ROWS = 8  # of a product on a CPU


def rows_times(x: Tensor, weight: Tensor) -> Tensor:
    """x (M, K) times weight (N, K), float32 (M, N)."""
    if x.device.type != "cpu":
        return x @ weight.T
    tiles = pad(x, (0, 0, 0, -len(x) % ROWS)).split(ROWS)
    products = [tile @ weight.T for tile in tiles]
    return torch.cat(products)[: len(x)] if products else x.new_empty(0, len(weight))


def _packed_product_shape(x: Tensor, codes: Tensor, bits: int, out_dtype: torch.dtype) -> Tensor:
    torch._check(x.shape[1] * bits == codes.shape[0] * WORD)
    return x.new_empty(x.shape[0], codes.shape[1], dtype=out_dtype)


@operator(_packed_product_shape)
def packed_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    bits: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """x (M, K) float times W^T of codes: (M, N).

    Args:
        codes: int32 (K bits / 32, N).
        scales: (K / G, N), float; G 16, 32, 64 or 128.
        zeros: (K / G, N), uint8 or float; None: the middle.
        bias: float32 (N,).
    """
    y = rows_times(x.float(), dense(codes, scales, zeros, bits))
    return (y if bias is None else y + bias).to(out_dtype)


def _dense_product_shape(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    torch._check(x.shape[1] == weight.shape[1])
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype)


@operator(_dense_product_shape)
def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x (M, K) times weight (N, K), of any float types, and bias float32 (N,): (M, N)."""
    y = rows_times(x.float(), weight.float())
    return (y if bias is None else y + bias).to(out_dtype)


def _experts_product_shape(x: Tensor, codes: Tensor, order: Tensor) -> Tensor:
    return x.new_empty(order.shape[0], codes.shape[2])


@operator(_experts_product_shape)
def experts_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    order: Tensor,
    ends: Tensor,
    bits: int,
    gather: int,
) -> Tensor:
    """The pairs' rows times their experts' W^T of codes: (P, N) of x's dtype.

    Args:
        x: (M, K).
        codes, scales, zeros: as of :func:`packed_product`, with a first dimension E.
        bias: float32 (E, N).
        order: int32 (P,), pairs sorted by expert; pair p is choice p % k of token p / k.
        ends: int32 (E,): expert e has the places [ends[e - 1], ends[e]) of ``order``.
        gather: k: place i reads row order[i] / k of x and is row i of the result; 0: place i reads row i, and
            is row order[i] of the result.
    """

    def weight(expert: int) -> Tensor:
        points = None if zeros is None else zeros[expert]
        return dense(codes[expert], scales[expert], points, bits)

    return _of_experts(x, weight, codes.shape[2], bias, order, ends, gather)


def _experts_dense_shape(x: Tensor, weight: Tensor, order: Tensor) -> Tensor:
    return x.new_empty(order.shape[0], weight.shape[1])


@operator(_experts_dense_shape)
def experts_dense(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, ends: Tensor, gather: int
) -> Tensor:
    """The same of dense weights (E, N, K)."""
    return _of_experts(x, lambda e: weight[e].float(), weight.shape[1], bias, order, ends, gather)


def _of_experts(
    x: Tensor,
    weight: Callable[[int], Tensor],
    outputs: int,
    bias: Tensor | None,
    order: Tensor,
    ends: Tensor,
    gather: int,
) -> Tensor:
    """Expert by expert; reads ``ends`` on the host."""
    result = x.new_empty(len(order), outputs)
    for expert, (first, last) in enumerate(pairwise([0, *ends.tolist()])):
        if last == first:
            continue
        pairs = order[first:last].long()
        y = rows_times(x[pairs // gather if gather else slice(first, last)].float(), weight(expert))
        y = y if bias is None else y + bias[expert]
        result[slice(first, last) if gather else pairs] = y.to(x.dtype)
    return result
