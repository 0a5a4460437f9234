"""The mean keys of each layer and head over fixed tokens: what ``kv_dtype="int4"`` subtracts from keys.

The tokens are the same for every request, process and runner, so that seeded text does not depend on what a
server answered before. They are spread over the vocabulary, and over POSITIONS, because the rotary embedding
turns the mean of a head's keys from one position to the next. The first token of a sequence has a mean of its
own, over tokens that are alone at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.runtime.kv.blocks import blocks_for
from attar.runtime.step import StepInput, TokenSpan

TOKENS = 256
SEQUENCES = 8  # of as many tokens each
POSITIONS = 8192
FIRST = 16  # sequences of one token, in front of the others
STRIDE = 7919  # prime: between neighbours, modulo the vocabulary


def calibration_step(
    vocabulary: int, context: int | None, block_size: int, *, windowed: bool = False
) -> StepInput:
    """Fixed tokens in the first blocks of an empty pool; no logits are wanted.

    Args:
        windowed: a layer has a sliding window, so that entries are positions: one sequence from position 0.
    """
    last = min(POSITIONS, context or POSITIONS)
    sequences = 1 if windowed or last < TOKENS else SEQUENCES
    count = min(TOKENS, last) // sequences
    tokens = [(13 + STRIDE * index) % vocabulary for index in range(max(sequences * count, FIRST))]
    held = blocks_for(count, block_size)
    spans = [TokenSpan(index, 0, 1, (index,)) for index in range(FIRST)]
    for index in range(sequences):
        start = index * (last - count) // max(sequences - 1, 1)
        blocks = tuple(range(FIRST + index * held, FIRST + (index + 1) * held))
        spans.append(TokenSpan(FIRST + index, start, start + count, blocks, kept=0 if start else None))
    return StepInput([*tokens[-FIRST:], *tokens[: sequences * count]], tuple(spans))


def key_centers(sequences: Sequence[Tensor]) -> Tensor:
    """float32 (2, layers, kv_heads, head_dim) of each sequence's keys (layers, n, kv_heads, head_dim): the
    mean of those of the long sequences without the first of each, or with it where there is no other, and the
    mean of the tokens that are alone. Zero where it is not finite."""
    longer = [keys[:, min(1, keys.shape[1] - 1) :] for keys in sequences[FIRST:]]
    centers = torch.stack([torch.cat([*some], 1).float().mean(1) for some in (longer, sequences[:FIRST])])
    return centers.where(centers.isfinite(), 0.0)
