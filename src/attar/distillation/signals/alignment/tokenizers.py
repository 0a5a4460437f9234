"""Whether two models share a tokenizer, by what the tokenizers are and do, never by the vocabularies' sizes.

Token numbers mean the same where all plain tokens, and the special tokens that both have, have one number,
and where a text with letters, digits, blanks and code of many kinds becomes the same tokens. Embeddings may
be padded to different sizes, and one side may have special tokens of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attar.errors import DataError

PROBE = (
    "The quick brown fox's 12 jumps, over 3.14159 lazy dogs; WE'LL see!  Two  blanks\tand\n\n\nlines.\r\n"
    "def f(x: int) -> list[str]:\n        return [str(x_1) for _ in range(0x1F)]  # näive café Ǆ ﬁ e\u0301\n"
    "Привет мир, 東京は今日も晴れ, 안녕하세요, مرحبا, नमस्ते, 👩‍🚀🎉 ½ ™ …\u00a0“quoted” —2026-11-23"
)
"""Texts that tokenizers of one vocabulary cut differently: digits, contractions, blanks, accents, scripts."""


def same_tokenizer(ours: Any, theirs: Any) -> bool:
    """Whether a token's number means the same text to both models, and a text is the same tokens."""
    our_tokens, their_tokens = plain_tokens(ours), plain_tokens(theirs)
    if our_tokens != their_tokens or differing_specials(ours, theirs):
        return False
    return bool(_encoded(ours) == _encoded(theirs))


def plain_tokens(tokenizer: Any) -> dict[str, int]:
    """The vocabulary without special tokens."""
    special = special_tokens(tokenizer)
    return {token: number for token, number in tokenizer.get_vocab().items() if token not in special}


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Special tokens by spelling."""
    added = tokenizer.added_tokens_decoder
    return {str(token): number for number, token in added.items() if token.special}


def differing_specials(ours: Any, theirs: Any) -> list[str]:
    """Special tokens of both that have two numbers."""
    our_tokens, their_tokens = special_tokens(ours), special_tokens(theirs)
    return [token for token, number in our_tokens.items() if their_tokens.get(token, number) != number]


def missing_specials(ours: Any, theirs: Any) -> dict[int, str]:
    """Special tokens of ours, by number, that theirs lacks: no text may have them."""
    known = special_tokens(theirs)
    return {number: token for token, number in special_tokens(ours).items() if token not in known}


def check_known(rows: Tensor, missing: Mapping[int, str]) -> None:
    """Refuse text that a teacher cannot read.

    Args:
        rows: tokens of any shape.
        missing: special tokens that the teacher lacks, by number.

    Raises:
        DataError: a row has one.
    """
    unknown = rows[torch.isin(rows, torch.tensor(sorted(missing), dtype=rows.dtype))] if missing else rows[:0]
    if unknown.numel():
        token = missing[int(unknown.flatten()[0])]
        raise DataError(
            f"the text has the token {token}, which the teacher's tokenizer lacks",
            hint="take a teacher that knows it, or text without it",
        )


def vocabulary_size(tokenizer: Any) -> int:
    """The largest token number and one: rows of an embedding beyond it are padding."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _encoded(tokenizer: Any) -> list[int]:
    return [int(token) for token in tokenizer(PROBE, add_special_tokens=False, verbose=False)["input_ids"]]
