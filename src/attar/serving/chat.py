"""A conversation with a model: its template, a history that fits the context, answers that can be stopped.

    chat = Chat(llm, SamplingParams(temperature=0))
    for piece in chat.ask("What is the capital of France?"): ...
    chat.stats[-1].tokens_per_second

The whole history is rendered for every answer; all of it but the last message is in the prefix cache.
Special tokens that a user types are plain text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from attar.errors import DataError, ModelError
from attar.runtime.results import Usage
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.tokenizer import ServerTokenizer

RESERVE = 4  # at least 1 / RESERVE of the context is left for the answer, where the history can be shortened


@dataclass(frozen=True)
class AnswerStats:
    """Tokens and times of one answer.

    Attributes:
        cached_tokens: of these, served by the prefix cache.
        first_token_s: seconds until the first token; None without one.
        total_s: seconds until the last.
        dropped: of the oldest messages, left out because the context is full.
        stopped: by the user.
    """

    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_token_s: float | None
    total_s: float
    dropped: int = 0
    stopped: bool = False

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed, without the first token; None for fewer than two tokens."""
        decoding = self.total_s - (self.first_token_s or 0.0)
        return (self.tokens - 1) / decoding if self.tokens > 1 and decoding > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


@dataclass
class Chat:
    """One conversation.

    Args:
        llm: not used by anything else meanwhile.
        params: of every answer, with n = 1.
        system: the system message; None: the template's default.

    Attributes:
        messages: users' and assistant's, oldest first; the system message is not among them.
        stats: of every answer since the start, a cleared history included.

    Raises:
        ModelError: the model has no chat template.
    """

    llm: Any
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    stats: list[AnswerStats] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not getattr(self.llm.tokenizer, "chat_template", None):
            raise ModelError(
                f"{self.llm.name} has no chat template, so it cannot tell messages apart",
                hint='it continues text: attar generate MODEL "text"',
            )
        self._tokenizer = ServerTokenizer(self.llm.tokenizer)

    @property
    def tells_roles(self) -> bool:
        """Whether the chat template tells the messages of a user from answers."""
        return self._tokenizer.tells_roles

    @property
    def limit(self) -> int:
        """Tokens of a conversation with its answer: the context, or the size of the cache."""
        runner = self.llm.engine.runner
        pool = int(runner.capacity * runner.block_size)
        return pool if runner.context is None else min(pool, int(runner.context))

    def ask(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The answer to a message, piece by piece. Message and answer become part of the history, also where
        the answer was stopped, unless there is no answer at all.

        Args:
            stopped: called after every step; true ends the answer.

        Raises:
            DataError: the template refuses the conversation, or the message alone fills the context.
            AttarError: as :meth:`attar.runtime.llm.LLM.generate`.
        """
        started, first, pieces, count = time.perf_counter(), None, [], 0
        ids, dropped = self._fit({"role": "user", "content": text})
        usage: Usage | None = None
        try:
            for event in self.llm.stream(ids, self.params, stopped):
                count += len(event.token_ids)
                first = time.perf_counter() - started if first is None and count else first
                usage = event.usage or usage
                if event.text:
                    pieces.append(event.text)
                    yield event.text
        finally:
            if pieces or usage is not None:
                answer = {"role": "assistant", "content": "".join(pieces)}
                self.messages = [*self.messages[dropped:], {"role": "user", "content": text}, answer]
            total, cached = time.perf_counter() - started, usage.cached_tokens if usage else 0
            self.stats.append(
                AnswerStats(len(ids), cached, count, first, total, dropped, stopped=usage is None)
            )

    def clear(self) -> None:
        """Delete the messages; the system message stays."""
        self.messages = []

    def _fit(self, message: dict[str, str]) -> tuple[list[int], int]:
        """Token ids of the conversation with a new message, and how many of the oldest messages are left out
        so that the answer fits: whole turns, a question with its answer."""
        reserved = min(self.params.max_tokens or self.limit, self.limit // RESERVE)
        for dropped in range(0, len(self.messages) + 1, 2):
            ids = self._encode([*self.messages[dropped:], message])
            if len(ids) + reserved <= self.limit:
                return ids, dropped
        if len(ids) < self.limit:  # alone, with less than the reserved tokens for the answer
            return ids, dropped
        raise DataError(
            f"the message has {len(ids):,} tokens, and {self.llm.name} holds {self.limit:,} with the answer",
            hint="a shorter message",
        )

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self._tokenizer.chat([*system, *messages])
