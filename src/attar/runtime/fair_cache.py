"""Values of several owners within one bound: beyond it, the owner that holds most loses its oldest.

So no owner can evict the values of another by storing many. Threads may share it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

V = TypeVar("V")


class _Held(OrderedDict[object, tuple[V, int]], Generic[V]):
    """An owner's values with their sizes, those used last at the end."""

    size = 0


class FairCache(Generic[V]):
    """Values by owner and key.

    Args:
        most: values of all owners.
        most_bytes: of all values; None: they are not counted.
    """

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._owners: dict[str, _Held[V]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return sum(map(len, list(self._owners.values())))

    @property
    def bytes(self) -> int:
        """Of all values."""
        return sum(held.size for held in list(self._owners.values()))

    def get(self, owner: str, key: object) -> V | None:
        """A value of an owner, which is then its last used one; None: it has none of the key."""
        with self._lock:
            held = self._owners.get(owner)
            if held is None or key not in held:
                return None
            held.move_to_end(key)
            return held[key][0]

    def put(self, owner: str, key: object, value: V, size: int = 0) -> None:
        """Keep a value, unless it alone exceeds the bound."""
        if self._most_bytes is not None and size > self._most_bytes:
            return
        with self._lock:
            self._remove(owner, key)
            held = self._owners.setdefault(owner, _Held())
            held[key] = value, size
            held.size += size
            while len(self) > self._most:
                self._evict(len)
            while self._most_bytes is not None and self.bytes > self._most_bytes:
                self._evict(lambda held: held.size)

    def delete(self, owner: str, key: object) -> bool:
        """Forget a value; whether there was one."""
        with self._lock:
            return self._remove(owner, key)

    def _remove(self, owner: str, key: object) -> bool:
        held = self._owners.get(owner)
        if held is None or key not in held:
            return False
        held.size -= held.pop(key)[1]
        if not held:
            del self._owners[owner]
        return True

    def _evict(self, measure: Callable[[_Held[V]], int]) -> None:
        """Forget the oldest value of the owner that holds most."""
        owner = max(self._owners, key=lambda name: measure(self._owners[name]))
        self._remove(owner, next(iter(self._owners[owner])))
