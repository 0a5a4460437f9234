"""What followed n tokens in any text of a tenant: a bounded table that all its requests read and feed.

Keys are the tokens themselves with the tenant's salt, so no tenant learns from another's texts, and nothing
collides. A key holds the last NEXT different tokens that followed, the latest first. The least recently fed
or used keys go when there are more than ``most``.

Source: llama.cpp's ngram-mod (a rolling-hash table, 24 tokens a key, shared by all requests, 16 MB). Differs:
salts; exact keys; several continuations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

NEXT = 3  # continuations that a key holds


class SharedNgrams:
    """The table.

    Args:
        context: tokens of a key.
        most: keys at most; about 250 bytes each.
    """

    def __init__(self, context: int = 3, most: int = 1 << 16) -> None:
        self.context, self.most = context, most
        self._next: OrderedDict[tuple[str, tuple[int, ...]], tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._next)

    def add(self, salt: str, tokens: Sequence[int], start: int = 0) -> None:
        """Learns tokens [start, end) of a text, each behind those before it."""
        for place in range(max(start, self.context), len(tokens)):
            key = (salt, tuple(tokens[place - self.context : place]))
            token, known = tokens[place], self._next.pop(key, ())
            self._next[key] = (token, *(each for each in known if each != token))[:NEXT]
            if len(self._next) > self.most:
                self._next.popitem(last=False)

    def after(self, salt: str, tokens: Sequence[int]) -> tuple[int, ...]:
        """What followed the last tokens, the latest first; may be empty."""
        key = (salt, tuple(tokens[-self.context :]))
        if key not in self._next:
            return ()
        self._next.move_to_end(key)
        return self._next[key]

    def continuations(self, salt: str, tokens: Sequence[int], reach: int) -> list[list[int]]:
        """How texts went on, one for each token that followed, the latest first; ``reach`` tokens at most."""
        return [self._followed(salt, tokens, first, reach) for first in self.after(salt, tokens)]

    def _followed(self, salt: str, tokens: Sequence[int], first: int, reach: int) -> list[int]:
        text, found = [*tokens[-self.context :], first], [first]
        while len(found) < reach:
            known = self.after(salt, text)
            if not known:
                break
            found.append(known[0])
            text.append(known[0])
        return found
