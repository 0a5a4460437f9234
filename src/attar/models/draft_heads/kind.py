"""Whether a checkpoint is a draft head. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attar.formats.draft_heads.recognise import published_layout

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

MODEL_TYPE, ARCHITECTURE = "attar_draft_head", "AttarDraftHead"


def is_draft_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a draft head, ours or in a published layout, and no model of its own."""
    ours = checkpoint.config.get("model_type") == MODEL_TYPE
    return ours or bool(published_layout(checkpoint.config, checkpoint.tensors))
