"""A student's row in its teacher's tokens: the same bytes, encoded by the teacher's tokenizer.

Runs of plain tokens are decoded by their bytes and encoded again; a special token becomes the teacher's of
the same role or spelling, and begins a new run. What the teacher puts in front of a text (BOS) is put in
front. A tokenizer of SentencePiece's kind writes a blank before a text that has none: that blank covers no
byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from attar.data.packing import PADDING, front_tokens
from attar.distillation.signals.alignment.spans import NOWHERE, ByteSpan, texts_of
from attar.models.token_bytes import TokenBytes, bytes_by_id, ids_by_bytes, paired

BLANK = b" "


@dataclass(frozen=True)
class TwoTokenizations:
    """One text in the tokens of both models.

    Attributes:
        tokens: the teacher's.
        ours: spans of the student's tokens.
        theirs: of the teacher's.
    """

    tokens: list[int]
    ours: list[ByteSpan]
    theirs: list[ByteSpan]

    def cut(self, count: int) -> TwoTokenizations:
        """The same with at most so many of the teacher's tokens."""
        return replace(self, tokens=self.tokens[:count], theirs=self.theirs[:count])


@dataclass(frozen=True)
class Retokenizer:
    """From a student's tokens to its teacher's.

    Attributes:
        student, teacher: fast tokenizers.
        names: of both models, for errors.
    """

    student: Any
    teacher: Any
    names: tuple[str, str] = ("the student", "the teacher")

    def __call__(self, row: Sequence[int]) -> TwoTokenizations:
        """A row int (S,), with :data:`PADDING` on the right."""
        both = TwoTokenizations(list(self._front(row)), [], [])
        both.theirs.extend(NOWHERE for _ in both.tokens)
        offset = 0
        for special, run in groupby((token for token in row if token != PADDING), self._is_special):
            add = self._add_specials if special else self._add_text
            offset = add(both, list(run), offset)
        return both

    @cached_property
    def our_bytes(self) -> dict[int, TokenBytes]:
        """The bytes of each of the student's tokens."""
        return bytes_by_id(self.student, self.names[0])

    @cached_property
    def their_bytes(self) -> dict[int, TokenBytes]:
        """The bytes of each of the teacher's tokens."""
        return bytes_by_id(self.teacher, self.names[1])

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """(student's id, teacher's id) of the tokens that both have: roles first, then equal bytes."""
        ours = ids_by_bytes(self.student, 1 << 62, self.names[0])
        theirs = ids_by_bytes(self.teacher, 1 << 62, self.names[1])
        return paired(self.student, self.teacher, ours, theirs)

    @cached_property
    def _paired(self) -> dict[int, int]:
        return dict(self.pairs)

    @cached_property
    def _blank_in_front(self) -> bool:
        """Whether the teacher's tokenizer writes a blank before a text."""
        return self._content(self._encode("x")[0]).startswith(BLANK)

    @cached_property
    def _teacher_front(self) -> list[int]:
        return front_tokens(self.teacher)

    def _front(self, row: Sequence[int]) -> list[int]:
        """Tokens that the teacher reads first, unless the row begins with their pairs."""
        front = self._teacher_front
        begins = [self._paired.get(token) for token in row[: len(front)]]
        return [] if begins == front else front

    def _is_special(self, token: int) -> bool:
        return not isinstance(self.our_bytes.get(token), bytes)

    def _add_specials(self, both: TwoTokenizations, tokens: list[int], offset: int) -> int:
        for start, token in enumerate(tokens, offset):
            span = (start, start + 1)
            both.ours.append(span)
            if token in self._paired:
                both.tokens.append(self._paired[token])
                both.theirs.append(span)
        return offset + len(tokens)

    def _add_text(self, both: TwoTokenizations, tokens: list[int], offset: int) -> int:
        pieces = [self.our_bytes[token] for token in tokens]
        end = offset
        for piece in pieces:
            both.ours.append((end, end + len(piece)))
            end += len(piece)
        for start, text in texts_of(b"".join(piece for piece in pieces if isinstance(piece, bytes))):
            for token, span in self._spans(text, offset + start):
                both.tokens.append(token)
                both.theirs.append(span)
        return end

    def _spans(self, text: str, offset: int) -> Iterator[tuple[int, ByteSpan]]:
        """The teacher's tokens of a text that begins at a byte, with the bytes that they cover."""
        blank = self._blank_in_front and text.startswith(" ")
        tokens, characters = self._encode(text[1:] if blank else text)
        content, encoded = self._content(tokens), text.encode()
        added = len(BLANK) if self._blank_in_front and not blank else 0
        if content[added:] != encoded:  # a normalizer changed the text: by characters then
            yield from self._character_spans(text, tokens, characters, int(blank), offset)
            return
        position = offset - added
        for token in tokens:
            end = position + len(self._piece(token))
            yield token, (position, end) if position >= offset else NOWHERE
            position = end

    def _character_spans(
        self, text: str, tokens: list[int], characters: list[ByteSpan], shift: int, offset: int
    ) -> Iterator[tuple[int, ByteSpan]]:
        """Tokens that share a character have its span: no edge lies between them."""
        starts = [0]
        for character in text:
            starts.append(starts[-1] + len(character.encode()))
        for token, (first, last) in zip(tokens, characters, strict=True):
            yield token, (offset + starts[first + shift], offset + starts[last + shift])

    def _encode(self, text: str) -> tuple[list[int], list[ByteSpan]]:
        encoding = self.teacher.backend_tokenizer.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def _piece(self, token: int) -> bytes:
        piece = self.their_bytes.get(token, b"")
        return piece if isinstance(piece, bytes) else piece.encode()

    def _content(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._piece, tokens))
