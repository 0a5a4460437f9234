"""Draft and target with different tokens: what both have, by what it stands for.

    the same tokenizer     ids are equal; the logits may have more or fewer columns (padding, added tokens)
    different ones         ids of equal bytes, or of one special role, are paired; draft logits reach the
                           target's ids through the pairs, every other target id has -inf

So q is a distribution over target ids, and verification is exact whatever the draft was shown. It is shown
the text: token by token where every new one has a pair, else all of it is encoded again by the draft's
tokenizer. Where that is not possible (the text ends inside of a character) the round goes without a draft.

Source: vLLM's ``v1/spec_decode/vocab_mapping.py`` (token-level intersection, arXiv 2502.05202). Differs:
bytes are compared and not strings (``pieces.py``); new text goes through the pairs as long as it can.

Letters: R rows, V columns of the target, D of the draft.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from attar.errors import ModelError

BLANK = "\u2581"
ROLES = ("eos_token_id", "bos_token_id")
_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")

TokenBytes = bytes | str
"""What a token stands for: bytes, or a special token as it is written."""


def ids_by_bytes(tokenizer: Any, columns: int, name: str) -> dict[TokenBytes, int]:
    """Ids by what they stand for; of equal ones a word before a fallback byte, then the smallest id.

    Raises:
        ModelError: the tokenizer has no fast form, or is neither byte-level nor of SentencePiece's kind.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    told = "" if backend is None else json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False)
    byte_level = '"ByteLevel"' in told
    if not byte_level and BLANK not in told:
        raise ModelError(
            f"the tokenizer of {name} is neither byte-level nor of SentencePiece's kind",
            hint="take a draft model with the target's tokenizer",
        )
    added = tokenizer.added_tokens_decoder
    found: dict[TokenBytes, int] = {}
    late: dict[TokenBytes, int] = {}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda each: each[1]):
        if number >= columns:
            continue
        if number in added:
            found.setdefault(token if added[number].special else token.encode(), number)
        elif byte_level:
            found.setdefault(unbyted(token), number)
        elif _FALLBACK.fullmatch(token):
            late.setdefault(bytes([int(token[3:5], 16)]), number)
        else:
            found.setdefault(token.replace(BLANK, " ").encode(), number)
    return late | found


def paired(
    draft: Any, target: Any, mine: dict[TokenBytes, int], theirs: dict[TokenBytes, int]
) -> list[tuple[int, int]]:
    """(draft id, target id): roles first, then equal pieces; no id stands twice."""
    asked = [(getattr(draft, role, None), getattr(target, role, None)) for role in ROLES]
    asked += [(mine[piece], theirs[piece]) for piece in mine if piece in theirs]
    ones, twos = frozenset(mine.values()), frozenset(theirs.values())
    pairs: dict[int, int] = {}
    taken: dict[int, int] = {}
    for one, two in asked:
        if one in ones and two in twos and one not in pairs and two not in taken:
            pairs[one], taken[two] = two, one
    return sorted(pairs.items())


def unbyted(token: str) -> bytes:
    """The bytes of a token of a byte-level tokenizer; characters that are none of its bytes, as UTF-8."""
    return b"".join(_BYTES.get(character) or character.encode() for character in token)


def beginning(tokenizer: Any) -> list[int]:
    """Special tokens that a tokenizer puts before a text."""
    special = frozenset(tokenizer.all_special_ids)
    ids = [int(token) for token in tokenizer("a")["input_ids"]]
    plain = next((place for place, token in enumerate(ids) if token not in special), 0)
    return ids[:plain]


def _bytes() -> dict[str, bytes]:
    """GPT-2's characters of the 256 bytes: printable ones are themselves, the others come from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): bytes([byte]) for byte in plain}
    return table | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


_BYTES = _bytes()


LEAST = 0.1  # of the smaller vocabulary, must be in both
BROKEN = "\ufffd"


class TokenTranslator(Protocol):
    """Follows one text for the draft model."""

    def read(self, tokens: Sequence[int]) -> list[int] | None:
        """All of the text in the draft's tokens, newly made; None: not now.

        Args:
            tokens: the target's, all so far; a text only grows.
        """
        ...

    def copy(self) -> TokenTranslator:
        """For a text that begins like this one."""
        ...


class VocabularyMapping(Protocol):
    """Between the draft's tokens and the target's."""

    def reader(self) -> TokenTranslator:
        """For a new text."""
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """Logits of the draft (R, D) at the target's ids (R, V); -inf where the draft has none."""
        ...

    def own(self, token: int) -> int:
        """The draft's id of a target token that it has."""
        ...


class SameVocabulary:
    """One tokenizer; it is its own reader.

    Args:
        draft: D. target: V.
    """

    def __init__(self, draft: int, target: int) -> None:
        self.draft, self.target = draft, target

    def reader(self) -> TokenTranslator:
        return self

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The text; where the draft lacks a token, the last one it has stands for it."""
        if self.draft >= self.target:
            return list(tokens)
        return [min(token, self.draft - 1) for token in tokens]

    def copy(self) -> TokenTranslator:
        return self

    def logits(self, rows: Tensor) -> Tensor:
        if self.draft >= self.target:
            return rows[:, : self.target]
        return pad(rows, (0, self.target - self.draft), value=-torch.inf)

    def own(self, token: int) -> int:
        return token


class SharedVocabulary:
    """Two tokenizers.

    Args:
        draft: the draft's, of transformers' fast ones. target: the target's.
        columns: D and V; tokens beyond are left out.
        names: for messages, of draft and target.

    Attributes:
        pairs: (draft id, target id) of the tokens of both; each id stands in one.

    Raises:
        ModelError: a tokenizer is of a kind that is not read here, or next to nothing is in both.
    """

    def __init__(
        self, draft: Any, target: Any, columns: tuple[int, int], names: tuple[str, str] = ("draft", "target")
    ) -> None:
        mine, theirs = ids_by_bytes(draft, columns[0], names[0]), ids_by_bytes(target, columns[1], names[1])
        self.pairs = paired(draft, target, mine, theirs)
        smaller = min(len(mine), len(theirs))
        if len(self.pairs) < LEAST * smaller:
            raise ModelError(
                f"the tokenizers of {names[0]} and {names[1]} have {len(self.pairs):,} tokens in common, of "
                f"{len(mine):,} and {len(theirs):,}: it cannot draft",
                hint="take a draft model of the same family",
            )
        self._from = torch.tensor([one for one, _ in self.pairs])
        self._to = torch.tensor([two for _, two in self.pairs])
        self.columns = columns
        self._own = {two: one for one, two in self.pairs}
        self._draft, self._target = draft.backend_tokenizer, target.backend_tokenizer
        self._special = frozenset(target.all_special_ids)
        self._begin = beginning(draft)

    def reader(self) -> TokenTranslator:
        return SharedTranslator(self)

    def logits(self, rows: Tensor) -> Tensor:
        found = rows.new_full((len(rows), self.columns[1]), -torch.inf)
        found[:, self._to.to(rows.device)] = rows[:, self._from.to(rows.device)]
        return found

    def own(self, token: int) -> int:
        return self._own[token]

    def mapped(self, tokens: Sequence[int]) -> list[int] | None:
        """Each token's pair; None where one has none."""
        found = [self._own.get(token, -1) for token in tokens]
        return None if -1 in found else found

    def encoded(self, tokens: Sequence[int]) -> list[int] | None:
        """A text in the draft's tokens; None where it ends inside of a character.

        Special tokens that have no pair are left out.
        """
        found: list[int] = []
        text = ""
        for special, some in groupby(tokens, key=self._special.__contains__):
            if special:
                found += [self._own[token] for token in some if token in self._own]
                text = ""
            else:
                text = str(self._target.decode(list(some), skip_special_tokens=False))
                found += self._draft.encode(text, add_special_tokens=False).ids
        if text.endswith(BROKEN):
            return None
        begin = self._begin if found[: len(self._begin)] != self._begin else []
        return begin + found


class SharedTranslator:
    """One text behind two tokenizers.

    Args:
        shared: between which.
    """

    def __init__(self, shared: SharedVocabulary) -> None:
        self._shared, self._seen = shared, 0
        self._known: list[int] = []

    def read(self, tokens: Sequence[int]) -> list[int] | None:
        """New tokens by their pairs where there is something to continue and all have one; else anew."""
        new = self._shared.mapped(tokens[self._seen :]) if self._known else None
        known = self._shared.encoded(tokens) if new is None else self._known + new
        if known is None:
            return None
        self._known, self._seen = known, len(tokens)
        return known.copy()

    def copy(self) -> TokenTranslator:
        made = SharedTranslator(self._shared)
        made._known, made._seen = self._known, self._seen
        return made


def map_vocabularies(
    draft: Any, target: Any, columns: tuple[int, int], names: tuple[str, str] = ("draft", "target")
) -> VocabularyMapping:
    """What stands between two models.

    Args:
        draft: its tokenizer. target: the target's. None where a model has none: then ids are equal.
        columns: of their logits, D and V.
        names: for messages.

    Raises:
        ModelError: as :class:`SharedVocabulary`.
    """
    if draft is None or target is None:
        return SameVocabulary(*columns)
    mine, theirs = draft.get_vocab(), target.get_vocab()
    common = [token for token in mine if token in theirs]
    equal = sum(mine[token] == theirs[token] for token in common)
    if equal == len(common) and 2 * equal >= min(len(mine), len(theirs)):
        return SameVocabulary(*columns)
    return SharedVocabulary(draft, target, columns, names)
