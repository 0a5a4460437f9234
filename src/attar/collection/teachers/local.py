"""A teacher in this process: a checkpoint, whose engine answers many requests in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attar.chat_template import PLAIN
from attar.checkpoint.card import Parent
from attar.checkpoint.open import Checkpoint
from attar.collection.magpie import asks_itself, opening
from attar.collection.prompts import Message
from attar.collection.requests import TeacherRequest
from attar.collection.retry import TeacherFailure
from attar.collection.settings import CollectSettings
from attar.collection.teachers import TeacherAnswer
from attar.errors import AttarError, DataError, SettingsError

if TYPE_CHECKING:
    from attar.runtime.async_engine import AsyncEngine
    from attar.runtime.sampling.params import SamplingParams

_REASONING = ("<think>", "</think>")


class LocalTeacher:
    """A checkpoint. Its weights are read by :meth:`prepare`.

    Args:
        checkpoint: a causal language model; without a chat template it answers single messages alone.
    """

    seeded = True

    def __init__(self, checkpoint: Checkpoint, settings: CollectSettings) -> None:
        self._checkpoint, self._settings = checkpoint, settings
        self._fingerprint = checkpoint.fingerprint()
        self.name, self.identity = checkpoint.name, self._fingerprint
        self._llm: Any = None
        self._engine: AsyncEngine | None = None

    def prepare(self) -> None:
        """Read the weights. Raises as :class:`attar.runtime.llm.LLM`."""
        from attar.runtime.llm import LLM

        self._llm = LLM(self._checkpoint, device=self._settings.device)

    async def ask(self, request: TeacherRequest) -> TeacherAnswer | TeacherFailure:
        """See :class:`attar.collection.teachers.Teacher`."""
        from attar.runtime.sampling.params import SamplingParams

        if self._engine is None:
            self._engine = self._llm.streams()
        answers = self._settings.answers
        try:
            params = SamplingParams(
                max_tokens=answers.max_tokens,
                temperature=1.0 if answers.temperature is None else answers.temperature,
                top_p=1.0 if answers.top_p is None else answers.top_p,
                stop=answers.stop,
                seed=request.seed,
            )
            if not self._chats and len(request.messages) > 1:
                raise DataError(
                    "the teacher has no chat template: it answers single messages, without a system prompt"
                )
            if asks_itself(request.messages):
                return await self._ask_itself(request.messages, params)
            return await self._write(self._encode(request.messages), params)
        except (
            SettingsError,
            DataError,
        ) as error:  # a prompt that does not fit, or a template that refuses it
            return TeacherFailure(str(error.message), "refuse")
        except AttarError as error:
            return TeacherFailure(error.message, "stop", hint=error.hint)

    async def _ask_itself(
        self, messages: Sequence[Message], params: SamplingParams
    ) -> TeacherAnswer | TeacherFailure:
        """What the user says is written first, then the answer to it; without a chat template, a text."""
        begin = opening(self._llm.tokenizer, messages if self._chats else ())
        if not self._chats:
            return await self._write(begin.tokens, params)
        question = await self._write(begin.tokens, begin.ended(params))
        if isinstance(question, TeacherFailure):
            return question
        if not question.content.strip():
            return TeacherFailure("the model wrote no question", "refuse")
        with_question = (*messages[:-1], {**messages[-1], "content": question.content.strip()})
        answer = await self._write(self._encode(with_question), params)
        return answer if isinstance(answer, TeacherFailure) else replace(answer, messages=with_question)

    async def _write(self, tokens: Sequence[int], params: SamplingParams) -> TeacherAnswer | TeacherFailure:
        """What the model writes behind some tokens."""
        assert self._engine is not None
        pieces, reason, usage = [], "stop", None
        async for event in self._engine.stream(tokens, params):
            if event.finish_reason == "error":
                return TeacherFailure(event.error or "the model failed", "stop")
            pieces.append(event.text)
            reason, usage = event.finish_reason or reason, event.usage or usage
        assert usage is not None
        reasoning, content = split_reasoning("".join(pieces))
        return TeacherAnswer(
            content=content,
            finish_reason=reason,
            reasoning=reasoning,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )

    async def close(self) -> None:
        """End the engine's thread."""
        if self._engine is not None:
            await self._engine.close()

    def lineage(self) -> Parent:
        """The checkpoint's own record."""
        from attar.checkpoint.lineage import as_parent

        return as_parent(self._checkpoint, "signal", self._fingerprint)

    @property
    def _chats(self) -> bool:
        return (getattr(self._llm.tokenizer, "chat_template", None) or PLAIN) != PLAIN

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        text = str(messages[0]["content"])
        tokens: list[int] = self._llm.encode_chat(messages) if self._chats else self._llm.encode(text)
        return tokens


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and answer of a text that begins with ``<think>``; ("", text) of any other."""
    opening, closing = _REASONING
    before, end, after = text.partition(closing)
    if not end or not before.lstrip().startswith(opening):
        return "", text
    return before.lstrip().removeprefix(opening).strip(), after.lstrip()
