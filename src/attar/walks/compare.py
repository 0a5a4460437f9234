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
from attar.walks.objectives import token_kl
from attar.walks.passes import arithmetic
from attar.walks.skeleton import Call, Skeleton


@dataclass(frozen=True)
class Compared:
    """How a changed model differs from the original.

    Attributes:
        kl: mean KL(original || changed) per token, in nats; None for a model without a head; NaN or infinite
            where the changed model's logits are.
        top1: fraction of tokens where both would choose the same one; None without a head.
        blind: the KL of the one distribution that knows the original's average but nothing of the context;
            None without a head.
        tokens: tokens compared.
        drift: relative squared error of the hidden states after each block.
    """

    kl: float | None
    top1: float | None
    blind: float | None
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
) -> tuple[float | None, float | None, float | None, int]:
    """KL, agreement and the blind KL of the logits; one head in memory at a time, the original's logits
    kept."""
    used = torch.cat([batch.flatten() for batch in batches]).unique()
    with sides[0].headed(used):
        kept = [_logits(sides[0], batch, stores[0][number]) for number, batch in enumerate(batches)]
    tokens = sum(batch.numel() for batch in batches)
    total = same = entropy = 0.0
    mean: Tensor | float = 0.0
    with sides[1].headed(used):
        for number, batch in enumerate(batches):
            p, q = kept[number], _logits(sides[1], batch, stores[1][number])
            if p is None or q is None:
                return None, None, None, tokens
            width = min(p.shape[-1], q.shape[-1])
            p, q = p[:, :width], q[:, :width]
            total += float(token_kl(p, q).sum())
            same += float((p.argmax(-1) == q.argmax(-1)).sum())
            known = p.softmax(-1)
            entropy -= float(torch.special.xlogy(known, known).sum(dtype=torch.float64))
            mean = mean + known.sum(0, dtype=torch.float64)
    assert isinstance(mean, Tensor)
    average = mean / tokens
    blind = -float(torch.special.xlogy(average, average).sum()) - entropy / tokens
    return total / tokens, same / tokens, max(blind, 0.0), tokens


def _logits(side: Skeleton, batch: Tensor, hidden: Tensor) -> Tensor | None:
    """Logits (B * S, V), float32."""
    logits = side.logits(batch, hidden.to(side.device))
    return None if logits is None else logits.flatten(0, 1).float()
