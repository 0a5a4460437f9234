"""The server's tokenizer: safe in any thread, and special tokens that a user writes in a message stay text.

A chat template writes its own ``<|im_start|>`` around the messages. Where a message contains such a text, it
must not become the special token, or the user could begin a message of another role:

    1. in the messages each special text becomes an unguessable placeholder
    2. the template is rendered; special texts in it are now the template's own, and each becomes a mark
    3. the placeholders become the user's text again
    4. a copy of the tokenizer, which has the marks as special tokens and no special text, encodes it

Messages without special texts skip these steps, so their tokens are those of the plain tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from secrets import token_hex
from threading import Lock
from typing import Any

from attar.chat_template import PLAIN, TemplateCostError, apply_template
from attar.errors import DataError
from attar.formats.byte_alphabet import BYTE_ALPHABET
from attar.serving.http.message_form import CostlyTemplateError, MessageForm, find_form, shape_of
from attar.serving.http.tool_calls.tool_use import knows_tools

_SPACE = "\u2581"  # SentencePiece's blank
_TAG = re.compile(r"<[|｜].*[|｜]>")  # a role token in families that do not mark it as special
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation becomes a prompt.

    Args:
        tools: that the model is shown.
        answer_begins: the prompt ends with what begins an answer (``add_generation_prompt``).
        continued: the last message goes on: the prompt ends inside of it (``continue_final_message``).
        variables: others that the template may read.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    answer_begins: bool = True
    continued: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


_DEFAULT = ChatOptions()
_FORM, _WORDS = MessageForm(), MessageForm(calls="words", results="user", tools="words")  # tried first
MOST_SHAPES = 256  # of conversations whose form is cached


class ServerTokenizer:
    """Text to tokens and back.

    The Rust tokenizer is called directly and never changed, so threads do not wait for each other.

    Args:
        tokenizer: of transformers; copied.
        special: special tokens written in messages are read as such.

    Attributes:
        longest: bytes of the longest token, or more.
    """

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        self._tokenizer = deepcopy(tokenizer)
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        self._forms: dict[Any, MessageForm | str] = {}
        self._lock = Lock()  # for a tokenizer written in Python, which may change while it works
        self._bytes = {character: byte for byte, character in BYTE_ALPHABET.items()}
        self._pieces: dict[int, tuple[str, bytes]] = {}
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self._escaper = None if special else SpecialTokenEscaper(self._tokenizer)
        self.longest = max([1, *map(self._size, self._tokenizer.get_vocab())])

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can answer conversations."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def tells_roles(self) -> bool:
        """Whether the chat template tells the messages of a user from answers."""
        return self.has_chat_template and self.template != PLAIN

    def same_tokens(self, other: ServerTokenizer) -> bool:
        """Whether each token id stands for the same text in another tokenizer."""
        return bool(self._tokenizer.get_vocab() == other._tokenizer.get_vocab())

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a text, with the tokenizer's special tokens around it where ``special``."""
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=special).ids)
        with self._lock:
            # verbose warns of texts longer than the context; the server refuses them
            encoding = self._tokenizer(text, add_special_tokens=special, verbose=False)
        return [int(token) for token in encoding["input_ids"]]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Tokens of a pair of texts with the special tokens around them, and 1 for those of the second.

        Raises:
            DataError: the tokenizer is of a kind that knows no pairs.
        """
        if self._fast is None:
            raise DataError("this tokenizer knows no pairs of texts")
        encoding = self._fast.encode(first, second)
        return list(encoding.ids), list(encoding.type_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=False))
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def piece(self, id: int) -> tuple[str, bytes]:
        """Text and bytes of a single token, even half a character. Never waits: the event loop calls it."""
        piece = self._pieces.get(id)
        if piece is None:
            piece = self._pieces[id] = self._piece(id)
        return piece

    @property
    def template(self) -> str:
        """The chat template, several as one text; empty: there is none."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        return "\n".join(template.values()) if isinstance(template, Mapping) else str(template)

    def special_token(self, text: str) -> int | None:
        """The id of a special token, whose text a completion leaves out; None: the text is none."""
        return self._special_ids.get(text)

    def token(self, text: str) -> int | None:
        """The id of the token that is written so in the vocabulary, special or not; None: there is none."""
        if not text:
            return None
        if self._fast is not None:
            id: int | None = self._fast.token_to_id(text)
            return id
        known = self._tokenizer.get_vocab().get(text)
        return None if known is None else int(known)

    def chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = _DEFAULT) -> list[int]:
        """Tokens of a conversation up to where the answer begins.

        Raises:
            DataError: there is no chat template, it refuses the messages, or loses some in every form.
        """
        end = token_hex(16) if options.continued else ""
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{end}"}]
        listed, tools = self._form(messages, options).apply(messages, options.tools)
        given: list[Any] = [*listed, *tools, {"variables": dict(options.variables)}]
        escaper = self._escaper if self._escaper is not None and self._escaper.found_in(given) else None
        if escaper is not None:
            given = escaper.escape(given)
            options = replace(options, variables=given[-1]["variables"])
        text = self._rendered(given[: len(listed)], given[len(listed) : -1], options)
        if options.continued and end not in text:
            raise DataError("the model's chat template does not write the last message, so it cannot go on")
        text = text.rpartition(end)[0] if end else text
        return self.encode(text, special=False) if escaper is None else escaper.encode(text)

    def _form(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> MessageForm:
        """The form of these messages that the template reads."""
        shape = shape_of(messages)
        variables = sha256(repr(options.variables).encode("utf-8", "replace")).digest()  # which may be large
        key = shape, bool(options.tools), variables, self.template
        form = self._forms.get(key)
        if form is None:
            render = partial(self._rendered, options=replace(options, answer_begins=False))
            first = _FORM if knows_tools(self.template) else _WORDS
            form = find_form(render, shape, bool(options.tools), first)
            if len(self._forms) >= MOST_SHAPES:
                self._forms.clear()
            self._forms[key] = form
        if isinstance(form, str):
            raise DataError(f"the model's chat template leaves out {form} of this conversation")
        return form

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: ChatOptions = _DEFAULT,
    ) -> str:
        if not self.has_chat_template:
            hint = "use /v1/completions, or attar serve --chat-template plain"
            raise DataError("the model has no chat template", hint=hint)
        settings: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
        if any(message["content"] is None for message in messages):  # which a plain tokenizer leaves out
            settings["keep_none"] = True
        try:
            text = apply_template(
                self._tokenizer,
                [dict(message) for message in messages],
                add_generation_prompt=options.answer_begins and not options.continued,
                **settings,
                **options.variables,
            )
        except TemplateCostError as error:
            raise CostlyTemplateError(f"the model's chat template cannot be rendered: {error}") from error
        except Exception as error:  # a template is a program of the model's and may raise anything
            raise DataError(f"the model's chat template refuses the messages: {error}") from error
        return text

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        if self._fast is None:
            return {}
        added = self._fast.get_added_tokens_decoder()
        return {token.content: int(id) for id, token in added.items() if token.special}

    def _piece(self, id: int) -> tuple[str, bytes]:
        written = self._tokenizer.convert_ids_to_tokens(id)
        if written is None:
            return "", b""
        raw = self._raw(str(written), self.decode([id]))
        return raw.decode("utf-8", "replace"), raw

    def _raw(self, written: str, decoded: str) -> bytes:
        """Bytes of a token: byte-level alphabets and ``<0xE2>`` are undone."""
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


class SpecialTokenEscaper:
    """Keeps special tokens in messages as text.

    Args:
        tokenizer: of transformers; not changed.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._tokens = _role_tokens(tokenizer)
        self._placeholders = {text: token_hex(16) for text in self._tokens}
        # answers may repeat the model's own non-special tags, such as those of its thoughts
        special = [text for text, token in self._tokens.items() if token["special"]]
        self._in_answers, self._in_messages = _any_of(special), _any_of(list(self._tokens))

    def found_in(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a message contains the text of a special token."""
        return any(self._pattern(message).search(text) for message in messages for text in _texts(message))

    def escape(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with placeholders.

        Raises:
            DataError: the tokenizer is of a kind that cannot read special tokens as text.
        """
        if self._fast is None:
            message = "a message holds a special token's text, which this tokenizer cannot read as text"
            raise DataError(message)
        return [self._replaced(message, self._pattern(message)) for message in messages]

    def encode(self, rendered: str) -> list[int]:
        """Token ids of the template's text for escaped messages."""
        tokenizer, marks, ids = self._marked
        text = self._in_messages.sub(lambda match: marks[match[0]], rendered)
        for written, placeholder in self._placeholders.items():
            text = text.replace(placeholder, written)
        return [ids.get(token, token) for token in tokenizer.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _marked(self) -> tuple[Any, dict[str, str], dict[int, int]]:
        """The copy of the tokenizer, marks by special text, and true ids by those of the marks."""
        from tokenizers import AddedToken, Tokenizer

        assert self._fast is not None
        config = json.loads(self._fast.to_str())
        config |= {"truncation": None, "padding": None}
        for token in config["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._tokens
        tokenizer = Tokenizer.from_str(json.dumps(config))
        tokenizer.encode_special_tokens = True
        marks = {text: token_hex(16) for text in self._tokens}
        for text, token in self._tokens.items():
            tokenizer.add_tokens([AddedToken(marks[text], **{flag: token[flag] for flag in _FLAGS})])
        marked = ((tokenizer.token_to_id(mark), text) for text, mark in marks.items())
        ids = {id: int(self._tokens[text]["id"]) for id, text in marked if id is not None}
        return tokenizer, marks, ids

    def _pattern(self, message: Mapping[str, Any]) -> re.Pattern[str]:
        return self._in_answers if message.get("role") == "assistant" else self._in_messages

    def _replaced(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: self._placeholders[match[0]], value)
        if isinstance(value, Mapping):
            return {
                self._replaced(key, pattern): self._replaced(item, pattern) for key, item in value.items()
            }
        return [self._replaced(item, pattern) for item in value] if isinstance(value, list) else value


def _role_tokens(tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Added tokens that a user's text must not become, with their flags: special ones, those of the form
    ``<|name|>``, and the tokens that the chat template writes."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    template = str(getattr(tokenizer, "chat_template", ""))
    if fast is None:
        return {text: {"special": True} for text in tokenizer.all_special_tokens}
    added = json.loads(fast.to_str())["added_tokens"]
    return {token["content"]: token for token in added if token["special"] or _is_role(token, template)}


def _is_role(token: Mapping[str, Any], template: str) -> bool:
    text = str(token["content"]).strip()
    return bool(text) and not text.isalnum() and (text in template or _TAG.fullmatch(text) is not None)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Any of the texts, the longest first as in the tokenizer; matches nothing where there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []
