"""Conversations that are longer than the context: the oldest turns are left out, as at Ollama."""

from __future__ import annotations

from collections.abc import Sequence

from attar.serving.http.conversation import ChatMessage
from attar.serving.http.errors import ApiError
from attar.serving.http.service import Service
from attar.serving.http.tokenizer import ChatOptions

TOO_LONG = "context_length_exceeded"
_ANSWER = 8  # the part of the context that is left for an answer: 1 / 8


async def shortened(
    service: Service, messages: Sequence[ChatMessage], options: ChatOptions
) -> list[ChatMessage] | None:
    """The conversation without as few of its oldest turns as possible; None: its last turn alone is too long.
    A turn begins with a message of the user. Messages of the system stay.

    Raises:
        DataError: the chat template refuses what is left.
    """
    context = service.backend.context
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    if context is None or len(starts) < 2:
        return None

    def kept(start: int) -> list[ChatMessage]:
        return [
            message for index, message in enumerate(messages) if index >= start or message.role == "system"
        ]

    async def fits(start: int) -> bool:
        try:
            return len(await service.encode_chat(kept(start), options)) <= context - context // _ANSWER
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            return False

    low, high = 1, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(starts[middle]):
            high = middle
        else:
            low = middle + 1
    return kept(starts[low]) if await fits(starts[low]) else None
