"""Prompts from a file: a text file with a prompt a line, JSON lines, or topics to write about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.collection.settings import PromptSettings
from attar.collection.textbook import textbook_prompts
from attar.data.sources import check_messages, check_unicode, parse_row, read_text
from attar.errors import DataError

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatPrompt:
    """The messages in front of an answer, the last of them the user's.

    Args:
        where: file and line, for errors.
    """

    messages: tuple[Message, ...]
    where: str


def read_prompts(file: Path, settings: PromptSettings, seed: int) -> list[ChatPrompt]:
    """The prompts of a file; equal ones are kept once.

    Raises:
        DataError: the file is missing, empty, or a line of it is wrong.
    """
    lines = [
        (number, line) for number, line in enumerate(read_text(file).split("\n"), start=1) if line.strip()
    ]
    reading = settings.read_as
    if reading == "auto":
        reading = "jsonl" if file.suffix == ".jsonl" else "lines"
    if reading == "topics":
        topics = [line.strip() for _, line in lines]
        texts = textbook_prompts(topics, settings, seed)
        prompts = [_user(text, f"{file}: made prompt {number}") for number, text in enumerate(texts, start=1)]
    elif reading == "jsonl":
        prompts = [_of_row(f"{file}:{number}", line) for number, line in lines]
    else:
        prompts = [_user(line.strip(), f"{file}:{number}") for number, line in lines]
    if not prompts:
        raise DataError(f"{file}: no prompt in it", hint="a prompt a line, or rows of prompt or messages")
    unique: dict[str, ChatPrompt] = {}
    for prompt in prompts:
        unique.setdefault(repr(prompt.messages), prompt)
    return list(unique.values())[: settings.limit or None]


def _user(text: str, where: str) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": text},), where)


def _of_row(where: str, line: str) -> ChatPrompt:
    row = parse_row(where, line)
    if not isinstance(row, dict) or not ("prompt" in row or "messages" in row):
        raise DataError(f"{where}: neither prompt nor messages in it", hint='a row is {"prompt": "..."}')
    name = "messages" if "messages" in row else "prompt"
    value: Any = row[name]
    check_unicode(f"{where}: {name}", value)
    if isinstance(value, str) and name == "prompt" and value.strip():
        return _user(value, where)
    if not isinstance(value, list) or name == "prompt" or not value:
        raise DataError(f"{where}: {name} is empty, or not {'a list' if name == 'messages' else 'text'}")
    check_messages(f"{where}: messages", value)
    if value[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message is the assistant's already", hint="end with what the user says"
        )
    return ChatPrompt(tuple(value), where)
