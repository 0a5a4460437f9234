"""Special tokens that a user writes in a message stay text: they begin no message of another role.

A chat template writes its own ``<|im_start|>`` around what the messages say. Where a message holds such a
text itself, the two must be told apart, and the text around must be cut into tokens as ever:

    1. in the messages each special text becomes a placeholder that nobody can guess
    2. the template is rendered; special texts in it are now the template's own, and each becomes a mark
    3. the placeholders become what the user wrote
    4. a copy of the tokenizer, which knows the marks for the special tokens and no special text, encodes it

Messages without special texts never come here, so their tokens are those of the plain tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from secrets import token_hex
from typing import Any

from attar.errors import DataError

_TAG = re.compile(r"<[|｜].*[|｜]>")  # a role's token in families that do not call it special
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class SpecialTokenEscaper:
    """The special tokens of a tokenizer, as text.

    Args:
        tokenizer: of transformers; not changed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._tokens = _role_tokens(tokenizer)
        self._hidden = {text: token_hex(16) for text in self._tokens}
        # a thought that a model closed before is sent back as it was
        spoken = [text for text, token in self._tokens.items() if token["special"]]
        self._in_answers, self._in_messages = _any_of(spoken), _any_of(list(self._tokens))

    def written_in(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a text of the messages holds a special token's."""
        return any(self._pattern(message).search(text) for message in messages for text in _texts(message))

    def hide(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with placeholders.

        Raises:
            DataError: the tokenizer is of a kind that cannot read special tokens as text.
        """
        if self._fast is None:
            message = "a message holds a special token's text, which this tokenizer cannot read as text"
            raise DataError(message)
        return [self._replaced(message, self._pattern(message)) for message in messages]

    def encode(self, rendered: str) -> list[int]:
        """Token ids of what a template made of hidden messages."""
        tokenizer, marks, ids = self._marked
        text = self._in_messages.sub(lambda found: marks[found[0]], rendered)
        for written, placeholder in self._hidden.items():
            text = text.replace(placeholder, written)
        return [ids.get(token, token) for token in tokenizer.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _marked(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """The copy of the tokenizer, the marks by special text, and the true ids by those of the marks."""
        from tokenizers import AddedToken, Tokenizer

        assert self._fast is not None
        described = json.loads(self._fast.to_str())
        described |= {"truncation": None, "padding": None}
        for token in described["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._tokens
        tokenizer = Tokenizer.from_str(json.dumps(described))
        tokenizer.encode_special_tokens = True
        marks = {text: token_hex(16) for text in self._tokens}
        for text, token in self._tokens.items():
            tokenizer.add_tokens([AddedToken(marks[text], **{flag: token[flag] for flag in _FLAGS})])
        found = ((tokenizer.token_to_id(mark), text) for text, mark in marks.items())
        ids = {id: int(self._tokens[text]["id"]) for id, text in found if id is not None}
        return tokenizer, marks, ids

    def _pattern(self, message: Mapping[str, Any]) -> re.Pattern[str]:
        return self._in_answers if message.get("role") == "assistant" else self._in_messages

    def _replaced(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: self._hidden[found[0]], value)
        if isinstance(value, Mapping):
            return {
                self._replaced(key, pattern): self._replaced(item, pattern) for key, item in value.items()
            }
        return [self._replaced(item, pattern) for item in value] if isinstance(value, list) else value


def _role_tokens(tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Added tokens that a text of a user must not become, with their flags.

    Special ones, those of the form ``<|name|>``, and those that the chat template writes.
    """
    fast, template = (
        getattr(tokenizer, "backend_tokenizer", None),
        str(getattr(tokenizer, "chat_template", "")),
    )
    if fast is None:
        return {text: {"special": True} for text in tokenizer.all_special_tokens}
    added = json.loads(fast.to_str())["added_tokens"]
    return {token["content"]: token for token in added if token["special"] or _is_role(token, template)}


def _is_role(token: Mapping[str, Any], template: str) -> bool:
    text = str(token["content"]).strip()
    return bool(text) and not text.isalnum() and (text in template or _TAG.fullmatch(text) is not None)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Any of some texts, the longest first, as the tokenizer finds them; none matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []
