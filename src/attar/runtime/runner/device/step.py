"""A step as the device reads it: one int32 tensor, copied at once, of which the operators get views.

A token sees the entries of its sequence before ``lengths``, and of its tree those behind, by the bits of its
words (kernels/device/attention.py). Of a chain ``lengths`` includes the token itself, and there are no bits.

A shape may have room for more tokens, spans, blocks and rows than the step has, so that a captured graph
serves several steps: padding is written to a block that no sequence has, and attends to it.

Letters: T tokens, S spans, X blocks of a table, W rows of logits, V words of a tree's bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attar.kernels.device.planes import WORD
from attar.runtime.step import StepInput, ancestors

PER_TOKEN = ("ids", "positions", "slots", "spans", "lengths", "firsts")


@dataclass(frozen=True)
class StepShape:
    """T, S, X, W and V."""

    tokens: int
    spans: int
    blocks: int
    rows: int
    words: int = 0

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts, in their order."""
        parts: dict[str, tuple[int, ...]] = dict.fromkeys(PER_TOKEN, (self.tokens,))
        return parts | {
            "rows": (self.rows,),
            "tables": (self.spans, self.blocks),
            "tree": (self.tokens, self.words),
        }

    @property
    def numbers(self) -> int:
        """Of all parts."""
        return sum(math.prod(size) for size in self.sizes().values())


def shape_of(step: StepInput) -> StepShape:
    """The shape without spare room."""
    longest = max((len(span.blocks) for span in step.spans), default=1)
    nodes = max((span.count for span, tree in step.trees() if tree is not None), default=0)
    return StepShape(step.count, len(step.spans), longest, step.wants, -(-nodes // WORD))


@dataclass(frozen=True)
class StepTensors:
    """Views of the staged tensor: int32 (T,), but tables (S, X), rows (W,) and tree (T, V)."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: Tensor
    lengths: Tensor
    firsts: Tensor
    rows: Tensor
    tables: Tensor
    tree: Tensor


def views(staged: Tensor, shape: StepShape) -> StepTensors:
    """Of a tensor int32 (shape.numbers,)."""
    return StepTensors(**dict(_parts(staged, shape)))


def stage(step: StepInput, block_size: int, shape: StepShape, spare: int) -> Tensor:
    """The numbers of a step, int32 (shape.numbers,) on the CPU.

    Args:
        shape: has room for the step.
        spare: a block that no sequence has.
    """
    numbers = np.zeros(shape.numbers, dtype=np.int32)
    part = dict(_arrays(numbers, shape))
    T, spans = step.count, len(step.spans)
    assert shape.tokens >= T and (spans < shape.spans or shape.tokens == T), "no span for padding"
    part["slots"][:], part["spans"][:], part["lengths"][:] = spare * block_size, spans, 1
    part["tables"][:] = spare
    part["ids"][:T], part["positions"][:T] = step.tokens, step.positions
    part["slots"][:T] = step.slots(block_size)
    part["rows"][: step.wants] = step.rows
    for number, ((span, tree), start) in enumerate(zip(step.trees(), step.offsets, strict=False)):
        tokens = slice(start, start + span.count)
        part["spans"][tokens], part["firsts"][tokens] = number, start
        part["tables"][number, : len(span.blocks)] = span.blocks
        if tree is None:
            part["lengths"][tokens] = np.arange(span.offset + 1, span.end + 1)
        else:
            part["lengths"][tokens] = span.offset
            part["tree"][tokens] = _words(ancestors(tree), shape.words)
    return torch.from_numpy(numbers)


def _words(seen: NDArray[np.bool_], words: int) -> NDArray[np.int32]:
    """Bits (n, n) as words (n, V)."""
    padded = np.zeros((len(seen), words * WORD), dtype=np.bool_)
    padded[:, : len(seen)] = seen
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def _parts(staged: Tensor, shape: StepShape) -> Iterator[tuple[str, Tensor]]:
    first = 0
    for name, size in shape.sizes().items():
        count = math.prod(size)
        yield name, staged[first : first + count].view(size)
        first += count


def _arrays(numbers: NDArray[np.int32], shape: StepShape) -> Iterator[tuple[str, NDArray[np.int32]]]:
    first = 0
    for name, size in shape.sizes().items():
        count = math.prod(size)
        yield name, numbers[first : first + count].reshape(size)
        first += count
