"""A transformers tokenizer as the server's :class:`~attar.runtime.server.backend.Words`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from attar.errors import DataError

_SPACE = "\u2581"  # how SentencePiece writes a blank


class TokenizerWords:
    """Text to tokens and back; a lock, because fast tokenizers refuse two threads that change their state.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self._bytes = _byte_alphabet()

    def encode(self, text: str, special: bool = True) -> list[int]:
        with self._lock:
            # verbose warns of texts longer than the context; the server refuses them
            found = self._tokenizer(text, add_special_tokens=special, verbose=False)
        return [int(token) for token in found["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        with self._lock:
            return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def piece(self, id: int) -> tuple[str, bytes]:
        """Its own bytes, even half a character: byte-level alphabets and ``<0xE2>`` are undone."""
        with self._lock:
            written = self._tokenizer.convert_ids_to_tokens(id)
        if written is None:
            return "", b""
        raw = self._raw(str(written), self.decode([id]))
        return raw.decode("utf-8", "replace"), raw

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError("the model has no chat template", hint="use /v1/completions")
        try:
            with self._lock:
                text = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
                )
        except Exception as error:  # a template is a program of the model's and may raise anything
            raise DataError(f"the model's chat template refuses the messages: {error}") from error
        return self.encode(str(text), special=False)

    def _raw(self, written: str, decoded: str) -> bytes:
        if written.startswith("<0x") and written.endswith(">") and len(written) == 6:
            return bytes([int(written[3:5], 16)])
        if written.startswith(_SPACE):
            return written.replace(_SPACE, " ").encode()
        if "\ufffd" in decoded and all(letter in self._bytes for letter in written):
            return bytes(self._bytes[letter] for letter in written)
        return decoded.encode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for 256 and on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
