"""Requests, and the sequences that run for them.

    waiting → running → finished          preemption: running → waiting, with nothing computed

A sequence's tokens are [0, len(prompt)) of the prompt and what was generated; keys and values are there for
[0, computed). Drafts are proposals for the tokens behind, verified in the next step. What it wants is always

    wanted = len(tokens) + len(drafts) - computed

so that prompts in chunks, prefix hits, decoding, verification and a recompute after preemption are one
case. A request of n texts is one sequence of ``width`` n until its prompt is computed; then it forks.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Request:
    """What someone asked for.

    Args:
        id: the engine's name for it.
        prompt: token ids, at least one.
        max_tokens: tokens generated at most for each text; None: as many as there is room for.
        n: texts drawn from the prompt.
        priority: smaller goes first.
        arrival: seconds on the engine's clock; earlier goes first.
        deadline: seconds on the same clock after which the request is given up; None: never.
        salt: the tenant: prefixes are shared only inside a salt.
        prompt_logits: the logits of every token of the prompt are wanted; such a request reads no prefix
            cache.
    """

    id: str
    prompt: Tokens[int]
    max_tokens: int | None = None
    n: int = 1
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    salt: str = ""
    prompt_logits: bool = False


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One text that is being made; changed only by the scheduler, except for ``drafts`` and ``parents``.

    Args:
        id: a number no other sequence has.
        request: what it runs for.
        limit: tokens it has at most, the prompt's included.
        tokens: the prompt and what was generated.
        index: which of the request's n texts.
        width: texts it stands for: n until it forks, then 1.
        computed: tokens [0, computed) have keys and values.
        drafts: proposed tokens behind ``tokens``; the engine sets them between steps.
        parents: of the drafts, as in ``Step.parents`` with 0 the last token and drafts from 1; None: a chain.
        state: where it is.
        reason: why it finished; None before.
        preempted: it ran already, and lost its blocks.
        scored: logits of prompt tokens [0, scored) were handed out, where the request wants them.
        failure: what went wrong where the reason is "error".
    """

    id: int
    request: Request
    limit: int
    tokens: list[int] = field(default_factory=list)
    index: int = 0
    width: int = 1
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    parents: list[int] | None = None
    state: State = State.WAITING
    reason: str | None = None
    preempted: bool = False
    scored: int = 0
    failure: Exception | None = None

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        """Tokens behind the prompt."""
        return self.tokens[self.prompt :]

    @property
    def wanted(self) -> int:
        """Tokens to run before there are new ones."""
        return len(self.tokens) + len(self.drafts) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether one step's tokens are enough: the last token, and drafts."""
        return self.computed >= len(self.tokens) - 1

    @property
    def full(self) -> bool:
        """Whether no further token may come: the finish reason "length"."""
        return len(self.tokens) >= self.limit

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def order(self) -> tuple[int, float, int]:
        """Who goes first: priority, arrival, id."""
        return (self.request.priority, self.request.arrival, self.id)

    def cut_drafts(self, count: int) -> None:
        """Keeps the first ``count`` drafts, with their parents; below 0 counts as none."""
        del self.drafts[max(count, 0) :]
        if self.parents is not None:
            del self.parents[len(self.drafts) :]

    def wants(self, stop: int) -> int:
        """Logits wanted of a span [computed, stop): of its last token where that is the end, of drafts
        before it, and of every prompt token whose logits were promised and not handed out.
        """
        first = len(self.tokens) - 1
        if self.request.prompt_logits and self.scored < self.prompt:
            first = min(first, self.scored)
        return max(stop - first, 0)

    def check(self) -> None:
        """Raises AssertionError naming what does not fit together."""
        name = f"sequence {self.id}"
        assert 0 <= self.computed <= len(self.tokens) <= self.limit, (
            f"{name}: computed {self.computed}, tokens {len(self.tokens)}, limit {self.limit}"
        )
        assert self.tokens[: self.prompt] == list(self.request.prompt), f"{name} lost its prompt"
        assert self.state is State.RUNNING or self.computed == 0, (
            f"{name} is {self.state.value}, but computed"
        )
        idle = not self.drafts and self.parents is None
        assert self.state is State.RUNNING or idle, f"{name} is {self.state.value}, but has drafts"
        assert self.finished == (self.reason is not None), f"{name} is {self.state.value} for {self.reason}"
        assert self.width == 1 or not self.generated, f"{name} has tokens before it forked"
