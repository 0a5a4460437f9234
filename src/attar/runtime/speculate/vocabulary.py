"""Draft and target model with different tokenizers: the intersection of their vocabularies, by token bytes.

    one tokenizer       ids are equal; the logits may have more or fewer columns (padding, added tokens)
    two tokenizers      ids with equal bytes, or the same special role, are paired; the draft's logits move
                        to the target ids of the pairs, all other target ids have -inf

So q is a distribution over target ids, and verification is exact for any input of the draft model. Its input
is the sequence: new tokens are mapped by their pairs if all have one, else the whole sequence is decoded and
encoded again by the draft's tokenizer. If the text ends inside a character, nothing is drafted.

Byte-level tokenizers write each byte of a token as a character ("Ġthe"), those of SentencePiece a blank as
"▁" and single bytes as "<0x0A>". Special tokens are compared by spelling, and paired by role where they begin
or end a sequence. Nothing is matched by similarity.

Source: vLLM's ``v1/spec_decode/vocab_mapping.py`` (token-level intersection, arXiv 2502.05202). Differs:
bytes are compared, not strings; new tokens are mapped by pairs as long as all have one.

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
from attar.models.token_bytes import ids_by_bytes, paired

LEAST_SHARED = 0.1  # of the smaller vocabulary
REPLACEMENT = "\ufffd"  # decoded in place of an incomplete character


class TokenTranslator(Protocol):
    """Translates one sequence to the draft model's tokens."""

    def translate(self, tokens: Sequence[int]) -> list[int] | None:
        """The sequence in the draft's tokens, a new list; None: not possible now.

        Args:
            tokens: all of the target's so far; between calls they only grow.
        """
        ...


class VocabularyMapping(Protocol):
    """Mapping between the draft's tokens and the target's."""

    def translator(self) -> TokenTranslator:
        """For a new sequence."""
        ...

    def target_logits(self, rows: Tensor) -> Tensor:
        """Logits of the draft (R, D) at the target's ids (R, V); -inf where the draft has none."""
        ...

    def draft_id(self, token: int) -> int:
        """The draft's id of a target token that is paired."""
        ...


class SameVocabulary:
    """One tokenizer, with D columns of the draft and V of the target; it is its own translator."""

    def __init__(self, draft: int, target: int) -> None:
        self.draft, self.target = draft, target

    def translator(self) -> TokenTranslator:
        return self

    def translate(self, tokens: Sequence[int]) -> list[int]:
        """The sequence; tokens that the draft lacks are replaced by its last one."""
        if self.draft >= self.target:
            return list(tokens)
        return [min(token, self.draft - 1) for token in tokens]

    def target_logits(self, rows: Tensor) -> Tensor:
        if self.draft >= self.target:
            return rows[:, : self.target]
        return pad(rows, (0, self.target - self.draft), value=-torch.inf)

    def draft_id(self, token: int) -> int:
        return token


class SharedVocabulary:
    """The mapping between two tokenizers.

    Args:
        draft: the draft's, a fast one of transformers. target: the target's.
        columns: D and V; ids beyond are left out.

    Attributes:
        pairs: (draft id, target id) of the shared tokens; each id is in one pair.

    Raises:
        ModelError: a tokenizer's kind is not supported, or the vocabularies share too few tokens.
    """

    def __init__(
        self, draft: Any, target: Any, columns: tuple[int, int], names: tuple[str, str] = ("draft", "target")
    ) -> None:
        draft_ids = ids_by_bytes(draft, columns[0], names[0])
        target_ids = ids_by_bytes(target, columns[1], names[1])
        self.pairs = paired(draft, target, draft_ids, target_ids)
        if len(self.pairs) < LEAST_SHARED * min(len(draft_ids), len(target_ids)):
            raise ModelError(
                f"the tokenizers of {names[0]} and {names[1]} have {len(self.pairs):,} tokens in common, of "
                f"{len(draft_ids):,} and {len(target_ids):,}: it cannot draft",
                hint="take a draft model of the same family",
            )
        self._from = torch.tensor([draft_id for draft_id, _ in self.pairs])
        self._to = torch.tensor([target_id for _, target_id in self.pairs])
        self.columns = columns
        self._draft_ids = {target_id: draft_id for draft_id, target_id in self.pairs}
        self._draft, self._target = draft.backend_tokenizer, target.backend_tokenizer
        self._special = frozenset(target.all_special_ids)
        self._prefix = special_prefix(draft)

    def translator(self) -> TokenTranslator:
        return SharedTranslator(self)

    def target_logits(self, rows: Tensor) -> Tensor:
        logits = rows.new_full((len(rows), self.columns[1]), -torch.inf)
        logits[:, self._to.to(rows.device)] = rows[:, self._from.to(rows.device)]
        return logits

    def draft_id(self, token: int) -> int:
        return self._draft_ids[token]

    def mapped(self, tokens: Sequence[int]) -> list[int] | None:
        """The pair of each token; None where one has none."""
        ids = [self._draft_ids.get(token, -1) for token in tokens]
        return None if -1 in ids else ids

    def encoded(self, tokens: Sequence[int]) -> list[int] | None:
        """A sequence encoded in the draft's tokens; None where it ends inside a character.

        Special tokens without a pair are left out.
        """
        ids: list[int] = []
        text = ""
        for special, run in groupby(tokens, key=self._special.__contains__):
            if special:
                ids += [self._draft_ids[token] for token in run if token in self._draft_ids]
                text = ""
            else:
                text = str(self._target.decode(list(run), skip_special_tokens=False))
                ids += self._draft.encode(text, add_special_tokens=False).ids
        if text.endswith(REPLACEMENT):
            return None
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids


class SharedTranslator:
    """One sequence between two tokenizers."""

    def __init__(self, vocabulary: SharedVocabulary) -> None:
        self._vocabulary, self._length = vocabulary, 0
        self._translated: list[int] = []

    def translate(self, tokens: Sequence[int]) -> list[int] | None:
        """New tokens are mapped by their pairs if all have one; else the whole sequence is encoded again."""
        new = self._vocabulary.mapped(tokens[self._length :]) if self._translated else None
        translated = self._vocabulary.encoded(tokens) if new is None else self._translated + new
        if translated is None:
            return None
        self._translated, self._length = translated, len(tokens)
        return translated.copy()


def map_vocabularies(
    draft: Any, target: Any, columns: tuple[int, int], names: tuple[str, str] = ("draft", "target")
) -> VocabularyMapping:
    """The mapping between the vocabularies of two models.

    Args:
        draft, target: tokenizers; None where a model has none: then ids are equal.
        columns: of their logits, D and V.

    Raises:
        ModelError: as :class:`SharedVocabulary`.
    """
    if draft is None or target is None:
        return SameVocabulary(*columns)
    draft_ids, target_ids = draft.get_vocab(), target.get_vocab()
    common = [token for token in draft_ids if token in target_ids]
    equal = sum(draft_ids[token] == target_ids[token] for token in common)
    if equal == len(common) and 2 * equal >= min(len(draft_ids), len(target_ids)):
        return SameVocabulary(*columns)
    return SharedVocabulary(draft, target, columns, names)


def special_prefix(tokenizer: Any) -> list[int]:
    """Special tokens that a tokenizer puts in front."""
    special = frozenset(tokenizer.all_special_ids)
    ids = [int(token) for token in tokenizer("a")["input_ids"]]
    plain = next((index for index, token in enumerate(ids) if token not in special), 0)
    return ids[:plain]
