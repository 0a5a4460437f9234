"""Whether a checkpoint is a draft head. Free of torch."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from attar.checkpoint.draft_head import ARCHITECTURE as ARCHITECTURE
from attar.checkpoint.draft_head import MODEL_TYPE as MODEL_TYPE
from attar.errors import ModelError

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


def is_draft_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a draft head, and no model of its own."""
    return bool(checkpoint.config.get("model_type") == MODEL_TYPE)


def refuse_draft_head(checkpoint: Checkpoint) -> None:
    """Raises ModelError for a draft head, where a model is wanted."""
    if is_draft_head(checkpoint):
        target = shlex.quote(str(checkpoint.config.get("target") or "MODEL"))
        raise ModelError(
            f"{checkpoint.name} is a draft head, and no model of its own",
            hint=f"it drafts for its model: attar generate {target} --draft {checkpoint.name}",
        )
