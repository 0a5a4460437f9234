"""What a checkpoint that is a draft head says of itself, for descriptions; its module is in ``models/``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from attar.checkpoint.published_head import MODEL_TYPE, published_head, published_layout

ARCHITECTURE = "AttarDraftHead"


def draft_head_of(config: dict[str, Any], names: Collection[str] = ()) -> dict[str, Any] | None:
    """``kind``, ``target``, ``drafts``, ``layers``, ``hidden``, ``vocabulary`` and ``draft_vocabulary`` of a
    draft head's ``config.json``; None for a model.

    Args:
        names: of the tensors, by which published layouts are recognised that the config does not tell.
    """
    if layout := published_layout(config, names):
        return published_head(config, layout)
    head = config.get("head")
    if config.get("model_type") != MODEL_TYPE or not isinstance(head, dict):
        return None
    names = ("kind", "drafts", "layers", "hidden", "vocabulary", "draft_vocabulary")
    return {"target": config.get("target") or "MODEL"} | {name: head.get(name) for name in names}
