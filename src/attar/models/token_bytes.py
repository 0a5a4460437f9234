"""The bytes of each token: what two tokenizers have in common.

Byte-level tokenizers write each byte of a token as a character ("Ġthe"), those of SentencePiece a blank as
"▁" and single bytes as "<0x0A>". Special tokens are compared by spelling, and paired by role where they begin
or end a sequence. Nothing is matched by similarity.
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
"""The bytes of a token, or the spelling of a special token."""


def bytes_by_id(tokenizer: Any, name: str) -> dict[int, TokenBytes]:
    """The bytes of every token, by id, smallest id first.

    Raises:
        ModelError: the tokenizer has no fast form, or is neither byte-level nor of SentencePiece's kind.
    """
    byte_level, added = _is_byte_level(tokenizer, name), tokenizer.added_tokens_decoder
    table: dict[int, TokenBytes] = {}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if number in added:
            table[number] = token if added[number].special else token.encode()
        elif byte_level:
            table[number] = token_bytes(token)
        elif _FALLBACK.fullmatch(token):
            table[number] = bytes([int(token[3:5], 16)])
        else:
            table[number] = token.replace(BLANK, " ").encode()
    return table


def ids_by_bytes(tokenizer: Any, columns: int, name: str) -> dict[TokenBytes, int]:
    """Ids below ``columns`` by token bytes; of equal ones a piece before a byte fallback, then the smallest
    id.

    Raises:
        ModelError: as :func:`bytes_by_id`.
    """
    ids: dict[TokenBytes, int] = {}
    fallback: dict[TokenBytes, int] = {}
    spellings = {number: token for token, number in tokenizer.get_vocab().items()}
    byte_level = _is_byte_level(tokenizer, name)
    for number, content in bytes_by_id(tokenizer, name).items():
        if number < columns:
            single = not byte_level and _FALLBACK.fullmatch(spellings[number])
            (fallback if single else ids).setdefault(content, number)
    return fallback | ids


def paired(
    draft: Any, target: Any, draft_ids: dict[TokenBytes, int], target_ids: dict[TokenBytes, int]
) -> list[tuple[int, int]]:
    """(draft id, target id): roles first, then equal bytes; every id at most once."""
    candidates = [(getattr(draft, role, None), getattr(target, role, None)) for role in ROLES]
    candidates += [(draft_ids[key], target_ids[key]) for key in draft_ids if key in target_ids]
    known_drafts, known_targets = frozenset(draft_ids.values()), frozenset(target_ids.values())
    pairs: dict[int, int] = {}
    used: set[int] = set()
    for draft_id, target_id in candidates:
        if (
            draft_id in known_drafts
            and target_id in known_targets
            and draft_id not in pairs
            and target_id not in used
        ):
            pairs[draft_id] = target_id
            used.add(target_id)
    return sorted(pairs.items())


def token_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level tokenizer; characters outside of its alphabet as UTF-8."""
    return b"".join(_BYTES.get(character) or character.encode() for character in token)


def _is_byte_level(tokenizer: Any, name: str) -> bool:
    """Whether a token's characters are bytes; else it is of SentencePiece's kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = (
        "" if backend is None else json.dumps(json.loads(backend.to_str())["decoder"], ensure_ascii=False)
    )
    byte_level = '"ByteLevel"' in decoder
    if not byte_level and BLANK not in decoder:
        raise ModelError(
            f"the tokenizer of {name} is neither byte-level nor of SentencePiece's kind",
            hint="take a model with the other one's tokenizer",
        )
    return byte_level
