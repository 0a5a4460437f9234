"""A collected row: ``messages``, ``prompt`` and ``completion``, or ``text``; the parts that filters read."""

from __future__ import annotations

import json
from typing import Any

CollectedRow = dict[str, Any]
"""A line of a collection's JSONL file."""


def answer_of(row: CollectedRow) -> str:
    """The teacher's text: the last message of the assistant, the completion, or the whole text."""
    if "messages" in row:
        replies = [message for message in row["messages"] if message.get("role") == "assistant"]
        return content_of(replies[-1]) if replies else ""
    return str(row.get("completion", row.get("text", "")))


def prompt_of(row: CollectedRow) -> str:
    """The user's text: messages of the user, or the prompt. A system prompt is shared by many rows and does
    not count."""
    if "messages" in row:
        return "\n".join(content_of(item) for item in row["messages"] if item.get("role") == "user")
    return str(row.get("prompt", ""))


def question_key(row: CollectedRow) -> str:
    """The same for samples of one prompt: the user's text and earlier answers, whatever the system prompt."""
    if "messages" not in row:
        return prompt_of(row)
    turns = [[item.get("role"), content_of(item)] for item in row["messages"] if item.get("role") != "system"]
    while turns and turns[-1][0] == "assistant":
        turns.pop()
    return json.dumps(turns)


def content_of(message: dict[str, Any]) -> str:
    """The text of a message; of a list of parts, the texts in it."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)
