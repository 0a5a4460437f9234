"""Two checkpoints compared block by block: the drift of their hidden states, and the KL of their outputs.

    drift_b = || h'_b - h_b ||^2 / || h_b ||^2        h_b, h'_b: hidden states after block b
    KL = mean over tokens of sum_v p_v (log p_v - log p'_v)

As in the sweep, one block of each is in memory, and at the end one head and the logits of some tokens
(:data:`KEPT`), so that a model too large for memory can be compared with its compressed form. Where the
result is bad, look at the block at which the drift jumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.progress import SILENT, Progress
from attar.walks.objectives import DistanceSum
from attar.walks.offloaded_model import HiddenStates, OffloadedModel

KEPT = 2**28  # bytes of the original's logits in memory at a time
CHUNK = 2**25  # bytes of logits that one pass through a head makes
LOGIT = 650  # multiplications that take as long as the softmax, its logarithm and the KL of one logit


@dataclass(frozen=True)
class Comparison:
    """How a changed model differs from the original.

    Attributes:
        kl: mean KL(original || changed) per token, in nats; None for a model without a head; NaN or infinite
            where the changed model's logits are.
        top1: fraction of tokens with the same likeliest next token; None without a head.
        blind: KL(original || its average distribution), which ignores the context; None without a head.
        drift: relative squared error of the hidden states after each block.
    """

    kl: float | None
    top1: float | None
    blind: float | None
    tokens: int
    drift: tuple[float, ...]

    @property
    def worst(self) -> int:
        """The block at which the drift grows by the greatest factor, or is first not finite."""
        for number, value in enumerate(self.drift):
            if not value < float("inf"):
                return number
        floor = 1e-12
        growth = [
            value / max(before, floor) if number else value / max(self.drift[-1] / len(self.drift), floor)
            for number, (before, value) in enumerate(zip((0.0, *self.drift), self.drift, strict=False))
        ]
        return max(range(len(growth)), key=growth.__getitem__)


def compare(
    original: Any,
    changed: Any,
    batches: Sequence[Tensor],
    *,
    work: Path,
    device: str | torch.device = "cpu",
    spill_bytes: int = 2**30,
    prepare: Any = None,
    prepare_original: Any = None,
    progress: Progress = SILENT,
) -> Comparison:
    """Run both checkpoints over some tokens.

    Args:
        original, changed: checkpoints with dense tensors, or views that decode packed ones; equal shapes
            outside the quantized weights.
        batches: int64 (B, S) token batches, none padded.
        work: folder for hidden states beyond the limit.
        prepare: called with the changed model (parameters on meta) before it runs, to attach the rounding of
            activations of its scheme.
        prepare_original: likewise, with the original.
    """
    sides = [OffloadedModel(checkpoint, torch.device(device)) for checkpoint in (original, changed)]
    for side, attach in zip(sides, (prepare_original, prepare), strict=True):
        if attach is not None:
            attach(side.model)
    stores = [HiddenStates(work / f"compare-{number}", spill_bytes) for number in range(2)]
    drift = []
    head = _head_units(sides[0])
    with torch.no_grad(), progress.task("compare", total=len(sides[0].blocks) + head) as task:
        calls = [side.trace(batches, store) for side, store in zip(sides, stores, strict=True)]
        for index in range(len(sides[0].blocks)):
            for side, store, block_calls in zip(sides, stores, calls, strict=True):
                side.advance(index, store, block_calls)
            drift.append(_drift(*stores))
            task.advance(drift=drift[-1])
        result = _output_distance(sides, stores, batches)
        task.advance(head)
    for store in stores:
        store.clear()
    return Comparison(*result, tuple(drift))


def _head_units(side: OffloadedModel) -> int:
    """About how many blocks take as long as the head and the statistics of its logits; at least 1."""
    head = side.anatomy.head
    if not head:
        return 1
    block = sum(parameter.numel() for parameter in side.blocks[0].module.parameters())
    vocabulary, hidden = side.model.get_submodule(head).weight.shape
    return max(int(vocabulary * (hidden + LOGIT) / max(block, 1) + 0.5), 1)


def _drift(original: HiddenStates, changed: HiddenStates) -> float:
    error = energy = 0.0
    for number in range(len(original)):
        h, other = original[number].double(), changed[number].double()
        error += float((other - h).square().sum())
        energy += float(h.square().sum())
    return error / max(energy, 1e-30)


def _output_distance(
    sides: Sequence[OffloadedModel], stores: Sequence[HiddenStates], batches: Sequence[Tensor]
) -> tuple[float | None, float | None, float | None, int]:
    """KL, agreement and the blind KL of the logits; one head in memory at a time. The original's logits of
    as many tokens as fit in :data:`KEPT` bytes are computed, then the changed model's of the same tokens,
    and so on."""
    width = min(_vocabulary(side) for side in sides)
    tokens = sum(batch.numel() for batch in batches)
    if not width:
        return None, None, None, tokens
    total = DistanceSum()
    for spans in _rounds(batches, width):
        used = torch.cat([batches[number][rows, columns].flatten() for number, rows, columns in spans])
        with sides[0].with_lm_head(used.unique()):
            kept = [_logits(sides[0], stores[0], batches, span) for span in spans]
        with sides[1].with_lm_head(used.unique()):
            for span in spans:
                total.add(kept.pop(0)[:, :width], _logits(sides[1], stores[1], batches, span)[:, :width])
    return (*total.distance()[:3], tokens)


LogitSpan = tuple[int, slice, slice]
"""Number of a batch, rows and columns of it."""


def _rounds(batches: Sequence[Tensor], vocabulary: int) -> list[list[LogitSpan]]:
    """All tokens, cut into spans whose logits take :data:`CHUNK` bytes at most, and these into rounds of
    :data:`KEPT` bytes."""
    step = max(1, CHUNK // (4 * vocabulary))
    spans = [
        (number, slice(top, top + max(step // batch.shape[1], 1)), slice(left, left + step))
        for number, batch in enumerate(batches)
        for top in range(0, batch.shape[0], max(step // batch.shape[1], 1))
        for left in range(0, batch.shape[1], step)
    ]
    together = max(1, KEPT // (4 * vocabulary * step))
    return [spans[start : start + together] for start in range(0, len(spans), together)]


def _vocabulary(side: OffloadedModel) -> int:
    """Logits per token; 0 for a model without a head."""
    head = side.anatomy.head
    return int(side.model.get_submodule(head).weight.shape[0]) if head else 0


def _logits(side: OffloadedModel, store: HiddenStates, batches: Sequence[Tensor], span: LogitSpan) -> Tensor:
    """Logits (tokens, V) of a span, float32: after the blocks, tokens are independent."""
    number, rows, columns = span
    logits = side.logits(batches[number][rows, columns], store[number][rows, columns].to(side.device))
    assert logits is not None, "a model with a head gives logits"
    return logits.flatten(0, 1).float()
