"""Work in pieces: elementwise arithmetic over a few hundred kilobytes at a time, and sums in a fixed order.

A merge is a handful of elementwise operations over tensors of millions of numbers. Cut into flat pieces, the
intermediate results stay in the processor's cache, and the memory is that of the inputs and the output. The
bits of an elementwise operation do not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

SIZE = 1 << 17  # numbers in a piece


def spans(count: int, unit: int = 1) -> Iterator[slice]:
    """Slices over ``count`` numbers, of about ``SIZE`` each, and multiples of ``unit`` (but for the last)."""
    step = max(SIZE // unit, 1) * unit
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def elementwise(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """``function(*tensors)``, piece by piece into a new tensor of the first one's shape.

    Args:
        function: elementwise; gets 1-D pieces of all tensors, and must not modify them.
        tensors: of one shape.
        dtype: of the result; None: of the first tensor.
    """
    out = torch.empty(tensors[0].shape, dtype=dtype or tensors[0].dtype)
    flat, target = [t.reshape(-1) for t in tensors], out.view(-1)
    for span in spans(out.numel()):
        target[span] = function(*(t[span] for t in flat))
    return out


def keep_(values: Tensor, mask: Tensor) -> Tensor:
    """Set entries of a contiguous tensor to +0 where the mask is False, in place, by a bitwise AND."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int16
    values.view(integer).bitwise_and_(mask.to(integer).neg_())
    return values


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch sums in one thread: the order, and so the last bit, depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def total(values: Tensor) -> float:
    """Sum of a piece in float64, in an order that does not depend on the number of threads."""
    return float(np.add.reduce(values.double().reshape(-1).numpy()))
