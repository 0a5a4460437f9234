"""/v1/models in Anthropic's form, for requests with its version header."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from attar.serving.http.bodies import ModelCard


def model_info(card: ModelCard) -> dict[str, Any]:
    """A model; of one that is not loaded the context is not known."""
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    info = {"type": "model", "id": card.id, "display_name": card.id, "created_at": created}
    return info | {"lifecycle": "active", "max_input_tokens": card.max_model_len}


def model_list(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """All models, as one page."""
    ends = {"first_id": cards[0].id, "last_id": cards[-1].id} if cards else {}
    return {"data": [model_info(card) for card in cards], "has_more": False, **ends}
