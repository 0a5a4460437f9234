"""Requests, and the sequences that run for them.

    waiting → running → finished          preemption: running → waiting, with nothing computed

A sequence's tokens are those of the prompt, followed by the generated ones; [0, computed) have keys and
values. Drafts are proposals for the next tokens, verified in the next step. The tokens still to run are
always

    wanted = len(tokens) + len(drafts) - computed

so that chunked prefill, prefix hits, decoding, verification and recomputation after preemption are one case.
A request of n completions is one sequence of ``width`` n until its prompt is computed; then it forks.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request as the scheduler sees it.

    Args:
        prompt: token ids, at least one.
        max_tokens: most tokens generated for each completion; None: what the context and the pool allow.
        n: completions of the prompt.
        priority: smaller goes first.
        arrival: seconds on the engine's clock; earlier goes first.
        deadline: seconds on the same clock after which the request is ended; None: never.
        salt: the tenant, and the adapter: prefixes are shared only inside a salt.
        adapter: key of its LoRA adapter in the runner; empty: none.
        logits_from: the logits of the prompt's tokens from this one on are needed, so the prefix cache serves
            those before it at most; None: no logits of the prompt.
    """

    id: str
    prompt: Tokens[int]
    max_tokens: int | None = None
    n: int = 1
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    salt: str = ""
    adapter: str = ""
    logits_from: int | None = None

    @property
    def payer(self) -> str:
        """Whose share of a step the masks of its grammar take: the tenant's, or its own."""
        return self.salt.partition("\0")[0] or self.id  # without the adapter


class State(Enum):
    """The state of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """The tokens of one completion; changed only by the scheduler, except for ``drafts`` and ``parents``.

    Args:
        limit: most tokens, the prompt's included.
        tokens: the prompt and the generated tokens.
        index: of the completion in [0, n).
        width: completions it stands for: n until it forks, then 1.
        computed: tokens [0, computed) have keys and values.
        drafts: proposed tokens after ``tokens``, set between steps.
        parents: of the drafts, as in ``StepInput.parents`` with 0 the last token and drafts from 1; None: a
            chain.
        reason: why it finished; None before.
        preempted: it ran already, and lost its blocks.
        scored: logits of prompt tokens [0, scored) were returned, where the request needs them.
        failure: the exception where the reason is "error".
        held: it does not run, because what its next token may be is not known yet.
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
    held: bool = False

    @property
    def prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.prompt :]

    @property
    def wanted(self) -> int:
        """Tokens to run before there are new ones."""
        return len(self.tokens) + len(self.drafts) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether it decodes: only the last token and drafts are left to run."""
        return self.computed >= len(self.tokens) - 1

    @property
    def full(self) -> bool:
        """Whether the limit is reached: the finish reason "length"."""
        return len(self.tokens) >= self.limit

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def order(self) -> tuple[int, float, int]:
        """Scheduling order: priority, arrival, id."""
        return (self.request.priority, self.request.arrival, self.id)

    def cut_drafts(self, count: int) -> None:
        """Keep the first ``count`` drafts, with their parents; below 0 counts as none."""
        del self.drafts[max(count, 0) :]
        if self.parents is not None:
            del self.parents[len(self.drafts) :]

    def wants(self, stop: int) -> int:
        """Logits needed of a span [computed, stop): of the last token and of drafts, and of every prompt
        token whose logits the request needs and did not get yet."""
        first = len(self.tokens) - 1
        if self.request.logits_from is not None and self.scored < self.prompt:
            first = min(first, self.scored)
        return max(stop - first, 0)

    def check(self) -> None:
        """Raises AssertionError naming what is inconsistent."""
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
