"""Exact zeros of a pruned model: which of them later stages keep.

    true    every zero of the Linears of the blocks
    false   none
    auto    every zero of a model that was pruned to zeros, by its card or its lineage; of other models, the
            zeros of a weight that has more than 10 % of them; of a quantized model that was not pruned none:
            its zeros are small weights that were rounded

A weight of an unpruned model in float has next to no exact zero, so ``auto`` changes nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from attar.checkpoint.card import Card, Parent
from attar.checkpoint.open import Checkpoint
from attar.formats.readers import as_stored, quant_method
from attar.sparsity import STORED

AUTO = "auto"
STATED = {"fraction": float, "of": int, "stored": str, "speed": str}  # of what a card says of its zeros
MANY = 0.1  # fraction of a weight above which its zeros are no accident


def resolve_zeros(checkpoint: Checkpoint, keep: str) -> str:
    """What ``auto`` means for a checkpoint: ``true``, ``false``, or ``auto`` where each weight decides."""
    if keep != AUTO:
        return keep
    if pruned_to_zeros(checkpoint):
        return "true"
    return "false" if _quantized(checkpoint) else AUTO


def zero_mask(weight: Tensor, keep: str) -> Tensor | None:
    """bool (N, K), False where a weight stays zero; None where none does.

    Args:
        keep: as :func:`resolve_zeros` returns it.
    """
    if keep == "false":
        return None
    mask = weight != 0
    zeros = mask.numel() - int(mask.count_nonzero())
    return mask if zeros > (MANY * mask.numel() if keep == AUTO else 0) else None


def pruned_to_zeros(checkpoint: Checkpoint) -> bool:
    """Whether the card or its lineage says that weights were set to zero."""
    return any(_sets_zeros(record) for record in _history(checkpoint))


def stated_zeros(checkpoint: Checkpoint, stored: str = STORED) -> dict[str, Any]:
    """What a card says of its zeros, as ``zeros``, for the card of a result that keeps them; else empty, also
    where another program wrote something else there.

    Args:
        stored: how the result stores them.
    """
    zeros = None if checkpoint.card is None else checkpoint.card.details.get("zeros")
    complete = isinstance(zeros, dict) and all(isinstance(zeros.get(key), STATED[key]) for key in STATED)
    return {"zeros": {**zeros, "stored": stored}} if isinstance(zeros, dict) and complete else {}


def _quantized(checkpoint: Checkpoint) -> bool:
    """Whether the weights are rounded, or were once."""
    stored = as_stored(checkpoint)
    packed = quant_method(stored) is not None or any(info.block for info in stored.tensors.values())
    return packed or any(record.stage == "quantize" for record in _history(checkpoint))


def _sets_zeros(record: Card | Parent) -> bool:
    settings: dict[str, Any] = record.settings
    return record.stage in ("prune", "quantize") and str(settings.get("sparsity", 0)) not in ("0", "0.0")


def _history(checkpoint: Checkpoint) -> Iterator[Card | Parent]:
    """The records of the stages that made the weights: the card and its parents by weights."""
    records: list[Card | Parent] = [] if checkpoint.card is None else [checkpoint.card]
    while records:
        record = records.pop()
        yield record
        records += [parent for parent in record.parents if parent.role == "weights"]
