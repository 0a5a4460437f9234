"""A transformers tokenizer as the server's :class:`~attar.runtime.server.backend.Words`.

Any thread may call it, and none waits for another: the tokenizer's Rust part is asked directly and is never
changed, so a long text in one thread holds up neither the event loop nor a short text in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from threading import Lock
from typing import Any

from attar.errors import DataError
from attar.runtime.server.special import SpecialTokenEscaper

_SPACE = "\u2581"  # how SentencePiece writes a blank


class ServerTokenizer:
    """Text to tokens and back.

    Args:
        tokenizer: of transformers; copied.
        special: special tokens written in the messages of a conversation are read as such; else they are
            text like any other, so that a user's message cannot begin a message of another role.
    """

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        self._tokenizer = deepcopy(tokenizer)
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        self._lock = Lock()  # of a tokenizer written in Python, which may change while it works
        self._bytes = _byte_alphabet()
        self._pieces: dict[int, tuple[str, bytes]] = {}
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self._specials = None if special else SpecialTokenEscaper(self._tokenizer)
        self.longest = max([1, *map(self._size, self._tokenizer.get_vocab())])

    def encode(self, text: str, special: bool = True) -> list[int]:
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=special).ids)
        with self._lock:
            # verbose warns of texts longer than the context; the server refuses them
            encoding = self._tokenizer(text, add_special_tokens=special, verbose=False)
        return [int(token) for token in encoding["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=False))
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def piece(self, id: int) -> tuple[str, bytes]:
        """Its own bytes, even half a character: byte-level alphabets and ``<0xE2>`` are undone."""
        name = self._pieces.get(id)
        if name is None:
            name = self._pieces[id] = self._piece(id)
        return name

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self._specials is not None and self._specials.written_in(messages):
            hidden = self._specials.hide(messages)
            return self._specials.encode(self._rendered(hidden))
        return self.encode(self._rendered(messages), special=False)

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError("the model has no chat template", hint="use /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's and may raise anything
            raise DataError(f"the model's chat template refuses the messages: {error}") from error
        return str(text)

    def _piece(self, id: int) -> tuple[str, bytes]:
        written = self._tokenizer.convert_ids_to_tokens(id)
        if written is None:
            return "", b""
        raw = self._raw(str(written), self.decode([id]))
        return raw.decode("utf-8", "replace"), raw

    def _raw(self, written: str, decoded: str) -> bytes:
        if written.startswith("<0x") and written.endswith(">") and len(written) == 6:
            return bytes([int(written[3:5], 16)])
        if written.startswith(_SPACE):
            return written.replace(_SPACE, " ").encode()
        if "\ufffd" in decoded and all(letter in self._bytes for letter in written):
            return bytes(self._bytes[letter] for letter in written)
        return decoded.encode("utf-8", "replace")

    def _size(self, written: str) -> int:
        """Bytes of a token, or more."""
        alphabet = all(letter in self._bytes for letter in written)
        return len(written) if alphabet else len(written.encode("utf-8", "replace"))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for 256 and on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
