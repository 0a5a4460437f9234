"""Tokens to text as they come, and the stop strings in that text.

The text of a token can depend on its neighbours: half a character (UTF-8 over several tokens), a space that
the first word of a text does not get. So new text is the difference of two decodings of a short window,

    known = decode(ids[a:b])        ids [a, b) are returned already and give the context
    now   = decode(ids[a:])         the new text is what ``now`` has beyond ``known``

without the U+FFFD at its end, which stands for half a character (the rule of text-generation-inference and
vLLM). Differs from them: a token may end one character and begin the next, so what is certain is returned
though the last character is not. Halves that are held for as many tokens as a character has bytes are
returned, all but the last, so bytes that never become a character do not make the window grow.

A stop string may begin in one token and end in another, so text that could become one is held back as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
CONTEXT = 6  # tokens of the prompt before the first decoded token
HALF = "\ufffd"
LONGEST = 4  # most bytes of a character


class Detokenizer:
    """The text of a growing list of tokens, piece by piece.

    Args:
        decode: the tokenizer's, for any list of ids; special tokens may be left out.
        context: tokens before the text; their own text is never returned.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self.decode = decode
        self._ids = list(context[-CONTEXT:])
        self._known = len(self._ids)  # the text of ids [0, known) is returned, that of [known, end) is not,
        self._halves = 0  # except for this number of halves at the end of the former
        self._held_tokens = 0

    def add(self, token: int) -> str:
        """The text that is certain with this token; often its own, sometimes none."""
        self._ids.append(token)
        new = self._new_text()
        certain = new.rstrip(HALF)
        if certain == new:
            return self._advance(new)
        self._held_tokens += 1
        if not certain and self._held_tokens >= LONGEST:
            certain = new[:-1]
        return self._advance(certain, len(new) - len(certain)) if certain else ""

    def flush(self) -> str:
        """The text that is held back, at the end; half a character is U+FFFD."""
        return self._advance(self._new_text())

    def _new_text(self) -> str:
        known, now = self.decode(self._ids[: self._known]), self.decode(self._ids)
        known = known[: len(known) - self._halves]
        if now.startswith(known):
            return now[len(known) :]
        pairs = enumerate(zip(known, now, strict=False))
        first_difference = next((i for i, (a, b) in pairs if a != b), len(now))
        return now[first_difference:]

    def _advance(self, new: str, halves: int = 0) -> str:
        """Tokens whose text is returned become the known part of the window; without text, they extend it."""
        if new:
            self._ids = self._ids[self._known :]
        self._known, self._halves, self._held_tokens = len(self._ids), halves, 0
        return new


class StopFinder:
    """Finds stop strings in text that comes in pieces, and cuts it where the earliest begins.

    Args:
        stops: strings, none of them empty.
        included: the stop string is the end of the text.
    """

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        self.stops, self._included = tuple(stops), included
        self.match: str | None = None
        self._held = ""
        self._longest = max(map(len, self.stops), default=0)

    def add(self, piece: str) -> str:
        """The text that can be returned now. Where a stop string is complete, it is ``match``, and the text
        ends before the earliest, or with it; of two that begin together the longer one is the match."""
        assert self.match is None, "a stop string ended the text"
        text = self._held + piece
        matches = [(text.find(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if matches:
            start, _, self.match = min(matches)
            self._held = ""
            return text[: start + (len(self.match) if self._included else 0)]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that is held back, when the completion ends for another reason."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Characters at the end of the text that may begin a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0
