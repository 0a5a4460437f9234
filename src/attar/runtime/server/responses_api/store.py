"""Responses that a next request may go on from: in memory, of this process, the oldest forgotten first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

MAX_RESPONSES = 1024
MAX_BYTES = 32 << 20


@dataclass(frozen=True)
class StoredResponse:
    """A finished response.

    Attributes:
        owner: its caller: nobody else sees it.
        items: the whole conversation up to its end, as input items; without instructions.
        answer: as it was returned.
        size: bytes of both in JSON.
    """

    owner: str
    items: tuple[dict[str, Any], ...]
    answer: dict[str, Any]
    size: int


class ResponseStore:
    """The responses of a server; threads may share it.

    Args:
        most: responses; bytes: of all of them.
    """

    def __init__(self, most: int = MAX_RESPONSES, bytes: int = MAX_BYTES) -> None:
        self._most, self._most_bytes = most, bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes, self._lock = 0, Lock()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, owner: str, items: Sequence[dict[str, Any]], answer: dict[str, Any]) -> None:
        """Keep a response, unless it alone is too large."""
        size = len(json.dumps([items, answer]))
        if size > self._most_bytes:
            return
        with self._lock:
            self._stored[answer["id"]] = StoredResponse(owner, tuple(items), answer, size)
            self._bytes += size
            while len(self._stored) > self._most or self._bytes > self._most_bytes:
                _, oldest = self._stored.popitem(last=False)
                self._bytes -= oldest.size

    def get(self, owner: str, id: str) -> StoredResponse | None:
        """A response of a caller; None: there is none, or it is another's."""
        stored = self._stored.get(id)
        return stored if stored is not None and stored.owner == owner else None

    def delete(self, owner: str, id: str) -> bool:
        """Forget a response; whether there was one."""
        with self._lock:
            stored = self.get(owner, id)
            if stored is not None:
                del self._stored[id]
                self._bytes -= stored.size
            return stored is not None
