"""Whether a checkpoint is a draft head. Free of torch."""

from __future__ import annotations

import shlex

from attar.checkpoint.draft_head import ARCHITECTURE as ARCHITECTURE
from attar.checkpoint.draft_head import MODEL_TYPE as MODEL_TYPE
from attar.checkpoint.draft_head import published_layout, published_target
from attar.checkpoint.open import Checkpoint
from attar.errors import ModelError


def is_draft_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a draft head, ours or in a published layout, and no model of its own."""
    ours = checkpoint.config.get("model_type") == MODEL_TYPE
    return ours or bool(published_layout(checkpoint.config, checkpoint.tensors))


def refuse_draft_head(checkpoint: Checkpoint) -> None:
    """Raises ModelError for a draft head, where a model is wanted."""
    if is_draft_head(checkpoint):
        stated = checkpoint.config.get("target") or published_target(checkpoint.config) or "MODEL"
        target = shlex.quote(str(stated))
        raise ModelError(
            f"{checkpoint.name} is a draft head, and no model of its own",
            hint=f"it drafts for its model: attar generate {target} --draft {checkpoint.name}",
        )
