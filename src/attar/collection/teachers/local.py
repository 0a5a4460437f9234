"""A teacher in this process: a checkpoint, whose engine answers many requests in one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attar.chat_template import PLAIN
from attar.checkpoint.card import Parent
from attar.checkpoint.open import Checkpoint
from attar.collection.requests import TeacherRequest
from attar.collection.retry import TeacherFailure
from attar.collection.settings import CollectSettings
from attar.collection.teachers import TeacherAnswer
from attar.errors import AttarError, DataError, SettingsError

if TYPE_CHECKING:
    from attar.runtime.async_engine import AsyncEngine

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
        pieces, reason, usage = [], "stop", None
        try:
            params = SamplingParams(
                max_tokens=answers.max_tokens,
                temperature=1.0 if answers.temperature is None else answers.temperature,
                top_p=1.0 if answers.top_p is None else answers.top_p,
                stop=answers.stop,
                seed=request.seed,
            )
            async for event in self._engine.stream(self._encode(request), params):
                if event.finish_reason == "error":
                    return TeacherFailure(event.error or "the model failed", "stop")
                pieces.append(event.text)
                reason, usage = event.finish_reason or reason, event.usage or usage
        except (
            SettingsError,
            DataError,
        ) as error:  # a prompt that does not fit, or a template that refuses it
            return TeacherFailure(str(error.message), "refuse")
        except AttarError as error:
            return TeacherFailure(error.message, "stop", hint=error.hint)
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

    def _encode(self, request: TeacherRequest) -> list[int]:
        chats = (getattr(self._llm.tokenizer, "chat_template", None) or PLAIN) != PLAIN
        if not chats and len(request.messages) > 1:
            raise DataError(
                "the teacher has no chat template: it answers single messages, without a system prompt"
            )
        messages, text = request.messages, str(request.messages[0]["content"])
        tokens: list[int] = self._llm.encode_chat(messages) if chats else self._llm.encode(text)
        return tokens


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and answer of a text that begins with ``<think>``; ("", text) of any other."""
    opening, closing = _REASONING
    before, end, after = text.partition(closing)
    if not end or not before.lstrip().startswith(opening):
        return "", text
    return before.lstrip().removeprefix(opening).strip(), after.lstrip()
