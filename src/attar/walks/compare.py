"""Two checkpoints side by side, block by block: how far apart they drift, and how far apart they end.

    drift_b = || h'_b - h_b ||^2 / || h_b ||^2        h_b, h'_b: hidden states after block b
    KL = mean over tokens of sum_v p_v (log p_v - log p'_v)

Like the sweep it never holds more than a block of each, so that a model too large for memory can be compared
with what was made of it. Where the result is bad, the block at which the drift jumps is the one to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.walks.activations import Activations
from attar.walks.passes import arithmetic
from attar.walks.skeleton import Call, Skeleton


@dataclass(frozen=True)
class Compared:
    """How a changed model differs from the original.

    Attributes:
        kl: mean KL(original || changed) per token, in nats; None for a model without a head; NaN or infinite
            where the changed model's logits are.
        top1: fraction of tokens where both would choose the same one; None without a head.
        tokens: tokens compared.
        drift: relative squared error of the hidden states after each block.
    """

    kl: float | None
    top1: float | None
    tokens: int
    drift: tuple[float, ...]

    @property
    def worst(self) -> int:
        """The block at which the drift grows by the greatest factor, or is no number first."""
        for number, value in enumerate(self.drift):
            if not value < float("inf"):
                return number
        floor = 1e-12
        grown = [
            value / max(before, floor) if number else value / max(self.drift[-1] / len(self.drift), floor)
            for number, (before, value) in enumerate(zip((0.0, *self.drift), self.drift, strict=False))
        ]
        return max(range(len(grown)), key=grown.__getitem__)


def compare(
    original: Any,
    changed: Any,
    batches: Sequence[Tensor],
    *,
    work: Path,
    device: str | torch.device = "cpu",
    spill_bytes: int = 2**30,
    prepare: Any = None,
) -> Compared:
    """Run both checkpoints over some tokens.

    Args:
        original, changed: checkpoints with dense tensors, or views that decode packed ones; of one shape
            outside the quantized weights.
        batches: int64 (B, S) token batches, none padded.
        work: folder for hidden states beyond the limit.
        prepare: called with the changed model (parameters on meta) before it runs, to attach what its scheme
            does to activations.
    """
    place = torch.device(device)
    sides = [Skeleton(checkpoint, place) for checkpoint in (original, changed)]
    if prepare is not None:
        prepare(sides[1].model)
    stores = [Activations(work / f"compare-{number}", spill_bytes) for number in range(2)]
    drift = []
    with torch.no_grad():
        calls = [side.trace(batches, store) for side, store in zip(sides, stores, strict=True)]
        for index in range(len(sides[0].blocks)):
            for side, store, how in zip(sides, stores, calls, strict=True):
                _advance(side, store, how, index)
            drift.append(_drift(*stores))
        result = _end(sides, stores, batches)
    for store in stores:
        store.clear()
    return Compared(*result, tuple(drift))


def _advance(
    side: Skeleton, store: Activations, calls: dict[tuple[int, ...], list[Call]], index: int
) -> None:
    block = side.blocks[index]
    with side.loaded(block), arithmetic(side.device, False):
        for number in range(len(store)):
            hidden = store[number].to(side.device)
            output = calls[tuple(hidden.shape[:2])][index](block.module, hidden)
            store[number] = output if isinstance(output, Tensor) else output[0]


def _drift(theirs: Activations, ours: Activations) -> float:
    lost = whole = 0.0
    for number in range(len(theirs)):
        h, changed = theirs[number].double(), ours[number].double()
        lost += float((changed - h).square().sum())
        whole += float(h.square().sum())
    return lost / max(whole, 1e-30)


def _end(
    sides: Sequence[Skeleton], stores: Sequence[Activations], batches: Sequence[Tensor]
) -> tuple[float | None, float | None, int]:
    """KL and agreement of the logits; one head in memory at a time, the original's logits kept."""
    used = torch.cat([batch.flatten() for batch in batches]).unique()
    kept: list[Tensor | None] = []
    with sides[0].headed(used):
        for number, batch in enumerate(batches):
            kept.append(_log_probabilities(sides[0], batch, stores[0][number]))
    total = agreed = 0.0
    tokens = 0
    with sides[1].headed(used):
        for number, batch in enumerate(batches):
            theirs, ours = kept[number], _log_probabilities(sides[1], batch, stores[1][number])
            if theirs is None or ours is None:
                return None, None, sum(batch.numel() for batch in batches)
            width = min(theirs.shape[-1], ours.shape[-1])
            p, q = theirs[..., :width], ours[..., :width]
            total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            agreed += float((p.argmax(-1) == q.argmax(-1)).sum())
            tokens += batch.numel()
    return total / tokens, agreed / tokens, tokens


def _log_probabilities(side: Skeleton, batch: Tensor, hidden: Tensor) -> Tensor | None:
    logits = side.logits(batch, hidden.to(side.device))
    return None if logits is None else torch.log_softmax(logits.float(), -1)
