"""Whether a checkpoint is a draft head. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

MODEL_TYPE, ARCHITECTURE = "attar_draft_head", "AttarDraftHead"


def is_draft_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a draft head, and no model of its own."""
    return bool(checkpoint.config.get("model_type") == MODEL_TYPE)
