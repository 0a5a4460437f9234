"""Which requests are refused at once, and the order in which the others start.

A request that could never run, even alone, is refused by the name of the setting; one that arrives when the
queue is full is refused as busy.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from attar.errors import AttarError, DataError, SettingsError
from attar.options import check_at_least
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.compose import FeatureRequests, check_together
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sequence import Request, Sequence


class BusyError(AttarError):
    """The queue is full: the same request may be served later."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much runs at a time, and how much may wait.

    Args:
        sequences: most sequences that run at the same time.
        chunk: most tokens of one prompt in a step; None: as many as the step has room for.
        waiting: most requests that wait; None: any number.
        waiting_tokens: most tokens of their prompts; None: any number.
        prefix_first: among waiting requests of equal priority the longest published prefix goes first.
        patience_s: a request that waited this long is served in the order of arrival all the same.
    """

    step_tokens: int = 512
    sequences: int = 64
    chunk: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    prefix_first: bool = False
    patience_s: float = 1.0

    def __post_init__(self) -> None:
        check_at_least(self, step_tokens=1, sequences=1, chunk=1, waiting=1, waiting_tokens=1)
        if self.sequences > self.step_tokens:
            allowed = f"at most step_tokens, {self.step_tokens}: every sequence must get a token in a step"
            raise SettingsError("sequences", self.sequences, allowed)
        if self.patience_s < 0:
            raise SettingsError("patience_s", self.patience_s, "0 or more seconds")


def check_params(params: SamplingParams, features: FeatureRequests, *, decodes: bool, grammars: bool) -> None:
    """Raises SettingsError where the model cannot do what the parameters ask for.

    Args:
        features: of the runner, rows of ``kv/compose.py``.
        grammars: output can be constrained by a grammar.
    """
    if not decodes and params.stop:
        raise SettingsError("stop", params.stop, "empty, for the model has no tokenizer")
    if params.n > 1:
        check_together({**features, "fork": ("n", params.n)})
    if params.guide is not None and not grammars:
        name, text = params.guide
        raise SettingsError(name, text[:60], "None, for the model has no tokenizer")


def check_tokens(prompt: Tokens[int], vocabulary: int) -> None:
    """Raises DataError at the first token outside the vocabulary."""
    for index, token in enumerate(prompt):
        if not 0 <= token < vocabulary:
            raise DataError(f"token {token} at position {index} of the prompt is outside [0, {vocabulary:,})")


def most_tokens(request: Request, manager: BlockManager, limits: Limits, context: int | None) -> int:
    """Most tokens, the prompt's included, of each completion of a request.

    Args:
        context: positions of the model; None: no limit.

    Raises:
        DataError: the prompt is empty.
        SettingsError: n, max_tokens or the length of the prompt can never be served.
    """
    prompt = len(request.prompt)
    if not prompt:
        raise DataError(f"the prompt of request {request.id} is empty", hint="give at least one token")
    if not 1 <= request.n <= limits.sequences:
        raise SettingsError("n", request.n, f"1 to {limits.sequences}, the sequences that may run together")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise SettingsError("max_tokens", request.max_tokens, "at least 1")
    if context is not None and prompt >= context:
        allowed = f"below the model's context of {context:,} tokens"
        raise SettingsError("the length of the prompt", prompt, allowed)
    return _within(request, manager, context)


def refuse_if_busy(request: Request, limits: Limits, waiting: int, waiting_tokens: int) -> None:
    """Raises BusyError where ``waiting`` requests with ``waiting_tokens`` prompt tokens fill the queue."""
    if limits.waiting is not None and waiting >= limits.waiting:
        raise BusyError(
            f"{waiting:,} requests are waiting, the limit is {limits.waiting:,}", hint="try again later"
        )
    total = waiting_tokens + len(request.prompt)
    if waiting and limits.waiting_tokens is not None and total > limits.waiting_tokens:
        message = f"{waiting_tokens:,} tokens are waiting, the limit is {limits.waiting_tokens:,}"
        raise BusyError(message, hint="try again later")


def _within(request: Request, manager: BlockManager, context: int | None) -> int:
    """The limit by ``max_tokens``, context and pool; the last token needs no slot in the pool."""
    prompt, pool = len(request.prompt), manager.capacity * manager.block_size
    limit = min(prompt + (request.max_tokens or pool + 1), context or prompt + pool + 1)
    if manager.fits(limit - 1):
        return limit
    if request.max_tokens is None and manager.fits(prompt):
        return pool + 1
    raise SettingsError(
        "prompt + max_tokens", limit, f"at most {pool + 1:,}: the key-value pool holds {pool:,} tokens"
    )


class WaitingQueue:
    """Waiting sequences, which hold no blocks, in the order in which they start.

    By priority; inside one, preempted sequences first, then by arrival. With ``prefix_first`` the longest
    published prefix goes before the earlier arrival, so that cached blocks are used before they are evicted;
    a sequence that waited longer than the patience goes first all the same, so that none starves.

    Args:
        limits: ``prefix_first`` and ``patience_s``.
    """

    def __init__(self, manager: BlockManager, limits: Limits) -> None:
        self._manager, self._limits = manager, limits
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """By priority, preempted ones first, then by arrival."""
        return iter(self._sequences)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(sequence.prompt for sequence in self._sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_waiting_order)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def ordered(self, now: float) -> list[Sequence]:
        """All sequences in the order in which they start.

        Args:
            now: seconds on the clock of the arrivals.
        """
        if not self._limits.prefix_first:
            return list(self._sequences)
        return sorted(self._sequences, key=lambda sequence: self._prefix_order(sequence, now))

    def check(self) -> None:
        """Raises AssertionError naming what is wrong."""
        ordered = sorted(self._sequences, key=_waiting_order)
        assert self._sequences == ordered, "waiting sequences are out of order"

    def _prefix_order(
        self, sequence: Sequence, now: float
    ) -> tuple[int, bool, bool, int, tuple[int, float, int]]:
        request, matched = sequence.request, 0
        patient = now - request.arrival < self._limits.patience_s
        if patient and request.logits_from is None:
            matched = self._manager.matched(sequence.tokens, request.salt)
        return (request.priority, not sequence.preempted, patient, -matched, sequence.order)


def _waiting_order(sequence: Sequence) -> tuple[int, bool, tuple[int, float, int]]:
    return (sequence.request.priority, not sequence.preempted, sequence.order)
