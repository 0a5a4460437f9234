"""Teachers that write text: an endpoint, or a checkpoint. Each is one file behind :class:`Teacher`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from attar.checkpoint.card import Parent
from attar.collection.prompts import Message
from attar.collection.requests import TeacherRequest
from attar.collection.retry import TeacherFailure


@dataclass(frozen=True)
class TeacherAnswer:
    """One answer.

    Attributes:
        messages: those in front of it, where the teacher wrote the last of them; (): the request's.
        reasoning: what a reasoning model wrote before it, where the teacher tells; "": nothing.
        prompt_tokens: as the teacher counts; None: it does not.
        created: seconds since 1970, as an endpoint says; None: a checkpoint has no clock.
    """

    content: str
    finish_reason: str
    messages: tuple[Message, ...] = ()
    reasoning: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    created: int | None = None


class Teacher(Protocol):
    """Whoever answers.

    Attributes:
        name: of the model.
        identity: part of each request's hash.
        seeded: whether a request's seed decides its answer.
    """

    name: str
    identity: str
    seeded: bool

    def prepare(self) -> None:
        """Load what answers; called before the first request. Raises AttarError."""

    async def ask(self, request: TeacherRequest) -> TeacherAnswer | TeacherFailure:
        """Send a request once. Failures are returned, not raised: exceptions of a client hold the key."""

    async def close(self) -> None:
        """Let go of connections and threads."""

    def lineage(self) -> Parent:
        """The record of the teacher in the lineage of those who learn from it, with its licences."""
