"""Responses that a next request may go on from: in memory, of this process.

Each is its caller's alone, and the caller that has most of them loses its oldest first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attar.runtime.fair_cache import FairCache

MAX_RESPONSES = 1024
MAX_BYTES = 32 << 20


@dataclass(frozen=True)
class StoredResponse:
    """A finished response.

    Attributes:
        items: the whole conversation up to its end, as input items; without instructions.
        answer: as it was returned.
    """

    items: tuple[dict[str, Any], ...]
    answer: dict[str, Any]


class ResponseStore(FairCache[StoredResponse]):
    """The responses of a server.

    Args:
        most: responses; bytes: of all of them in JSON.
    """

    def __init__(self, most: int = MAX_RESPONSES, bytes: int = MAX_BYTES) -> None:
        super().__init__(most, bytes)

    def keep(self, owner: str, items: Sequence[dict[str, Any]], answer: dict[str, Any]) -> None:
        """Keep a response, unless it alone is too large."""
        size = len(json.dumps([items, answer]))
        self.put(owner, answer["id"], StoredResponse(tuple(items), answer), size)
