"""What tokens stand for, so that those of different tokenizers can be compared.

A token stands for bytes. Byte-level tokenizers write each byte as a character ("Ġthe"), those of
SentencePiece a blank as "▁" and single bytes as "<0x0A>". Special tokens stand for what they are written as,
and are paired by their role where they begin or end a text. Nothing is matched by likeness: what is not the
same is not paired.
"""

from __future__ import annotations

import json
import re
from typing import Any

from attar.errors import ModelError
from attar.formats.byte_alphabet import BYTE_ALPHABET

BLANK = "\u2581"
ROLES = ("eos_token_id", "bos_token_id")
_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")
_BYTES = {character: bytes([byte]) for byte, character in BYTE_ALPHABET.items()}

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
