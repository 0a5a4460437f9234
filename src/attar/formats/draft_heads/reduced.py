"""The reduced vocabulary in published layouts: d2t and t2d.

d2t int64 (v,) is an offset: target token = draft token + d2t[draft token]. t2d bool (V,) says which of the
target's tokens there are; engines ignore it, trainers want it. A reduced head has a separate matrix, too.

Letters: V tokens of the target, v of the head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attar.errors import CheckpointError


def with_mask(tensors: Mapping[str, Tensor], vocabulary: int) -> dict[str, Tensor]:
    """Tensors with t2d, where there is d2t."""
    if "d2t" not in tensors:
        return dict(tensors)
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[_tokens(tensors["d2t"])] = True
    return {**tensors, "t2d": mask}


def without_mask(tensors: Mapping[str, Tensor], vocabulary: int, where: str) -> dict[str, Tensor]:
    """Tensors without t2d; without d2t, too, where it leaves nothing out.

    Raises:
        CheckpointError: d2t or its matrix is missing, or d2t names tokens that are not the target's.
    """
    kept = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    head, offsets = kept.get("lm_head.weight"), kept.get("d2t")
    if offsets is None:
        if head is not None and len(head) < vocabulary:
            raise CheckpointError(
                f"{where}: lm_head.weight has {len(head)} rows of {vocabulary}, without d2t"
            )
        return kept
    tokens = _tokens(offsets)
    if head is None or len(head) != len(tokens):
        raise CheckpointError(f"{where}: d2t without an lm_head.weight of {len(tokens)} rows")
    if len(tokens) == vocabulary and not offsets.any():
        return {name: tensor for name, tensor in kept.items() if name != "d2t"}
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary or len(tokens.unique()) < len(tokens):
        raise CheckpointError(f"{where}: d2t names tokens that are not the target's, or one of them twice")
    kept["d2t"] = offsets.to(torch.int64)
    return kept


def _tokens(offsets: Tensor) -> Tensor:
    """int64 (v,)."""
    return offsets.to(torch.int64) + torch.arange(len(offsets))
