"""Lines of a system prompt that change from request to request, such as the time: no cached prefix is reused
behind the first of them. With ``--volatile-line START`` they come behind the conversation, in a system
message of their own; a template without one there gets them as the user's words (``message_form.py``).

    system: Time: 10:31 / Be brief.     →    system: Be brief.
    user:   Hello                            user:   Hello
                                             system: Time: 10:31
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from attar.serving.http.middleware import LOGGER

MOST_PROMPTS = 256  # system prompts that are remembered
PlainMessages = Sequence[dict[str, Any]]


def move_volatile(messages: PlainMessages, starts: tuple[str, ...], continued: bool) -> list[dict[str, Any]]:
    """The messages with those lines of system messages behind the others that begin with one of ``starts``.

    Args:
        continued: the last message goes on, so they come before it.
    """
    listed, moved = list[dict[str, Any]](), list[str]()
    for message in messages:
        if message["role"] == "system" and starts:
            lines = message["content"].split("\n")
            moved += [line for line in lines if line.startswith(starts)]
            message = {**message, "content": "\n".join(line for line in lines if not line.startswith(starts))}
            if not message["content"].strip():
                continue
        listed.append(message)
    if not moved:
        return list(messages)
    volatile = {"role": "system", "content": "\n".join(moved)}
    return [*listed[:-1], volatile, listed[-1]] if continued else [*listed, volatile]


class FirstLineWatch:
    """Says in the log that the first line of a system prompt changes, and what mends it; once."""

    def __init__(self) -> None:
        self._first_lines: dict[int, int] = {}  # hash of a first line by that of the lines behind it
        self._warned = False

    def see(self, messages: PlainMessages) -> None:
        """Compare the system prompt with those before."""
        if self._warned or not messages or messages[0]["role"] != "system":
            return
        first, _, others = messages[0]["content"].partition("\n")
        if not others.strip():
            return
        before = self._first_lines.setdefault(hash(others), hash(first))
        if before != hash(first):
            self._warned = True
            logging.getLogger(LOGGER).warning(
                "the first line of a system prompt changes from request to request, so nothing behind it is "
                "reused from the cache: see --volatile-line"
            )
        if len(self._first_lines) > MOST_PROMPTS:
            del self._first_lines[next(iter(self._first_lines))]
