"""Tokens to text as they come.

A token's text can hang on its neighbours: half a character (UTF-8 over several tokens), a space that the
first word of a text does not get. So text is taken as the difference of two decodings of a short window,

    known = decode(ids[a:b])        ids [a, b) are shown already and give the context
    now   = decode(ids[a:])         what is new is what ``now`` has beyond ``known``

and is held back while it ends in U+FFFD, the sign of half a character (the rule of
text-generation-inference and vLLM). Differs from them: what is held for as many tokens as a character has
bytes is shown as it is, so bytes that never become a character do not make the window grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
CONTEXT = 6  # tokens of the prompt that the first word is decoded after
HALF = "\ufffd"
LONGEST = 4  # bytes of a character


class Detokenizer:
    """The text of a growing list of tokens, piece by piece.

    Args:
        decode: the tokenizer's, for any list of ids; special tokens may be left out.
        context: tokens before the text; their own text is never shown.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self.decode = decode
        self._ids = list(context[-CONTEXT:])
        self._known = len(self._ids)  # the text of ids [0, known) is shown, that of [known, end) is not
        self._waited = 0

    def add(self, token: int) -> str:
        """The text that this token makes certain; often its own, sometimes none."""
        self._ids.append(token)
        new = self._new()
        self._waited += 1
        if new.endswith(HALF) and self._waited < LONGEST:
            return ""
        return self._show(new)

    def rest(self) -> str:
        """What is held back, at the end of the text; half a character is U+FFFD."""
        return self._show(self._new())

    def _new(self) -> str:
        known, now = self.decode(self._ids[: self._known]), self.decode(self._ids)
        if now.startswith(known):
            return now[len(known) :]
        pairs = enumerate(zip(known, now, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(now))
        return now[same:]

    def _show(self, new: str) -> str:
        """The tokens whose text is shown become the window's known part; without text, they lengthen it."""
        if new:
            self._ids = self._ids[self._known :]
        self._known, self._waited = len(self._ids), 0
        return new
