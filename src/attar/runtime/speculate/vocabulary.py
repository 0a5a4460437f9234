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

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from attar.errors import ModelError
from attar.runtime.speculate.pieces import beginning, ids_by_bytes, paired

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
