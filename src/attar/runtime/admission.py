"""What may run, and what is refused before it waits.

A request that could never run, even alone, is refused by name at once, and one that comes when the queue is
full is refused with the word to come back: nothing waits for what will not happen.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from attar.errors import AttarError, DataError, SettingsError
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.compose import FeatureRequests, check_together
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sequence import Request


class BusyError(AttarError):
    """The queue is full: the same request may be served later."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much runs at a time, and how much may wait.

    Args:
        step_tokens: tokens of one step at most.
        sequences: sequences that run at the same time at most.
        chunk: tokens of one prompt in one step at most; None: as many as the step has room for.
        waiting: requests that wait at most; None: any number.
        waiting_tokens: tokens of their prompts at most; None: any number.
        prefix_first: among waiting requests of equal priority the longest published prefix goes first.
        patience_s: a request that waited so long is served in the order of arrival all the same.
    """

    step_tokens: int = 512
    sequences: int = 64
    chunk: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    prefix_first: bool = False
    patience_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("step_tokens", "sequences", "chunk", "waiting", "waiting_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(name, value, "at least 1")
        if self.sequences > self.step_tokens:
            allowed = f"at most step_tokens, {self.step_tokens}: every sequence must get a token in a step"
            raise SettingsError("sequences", self.sequences, allowed)
        if self.patience_s < 0:
            raise SettingsError("patience_s", self.patience_s, "0 or more seconds")


def check_params(params: SamplingParams, features: FeatureRequests, *, words: bool, grammars: bool) -> None:
    """Raises SettingsError where they ask for what the model cannot do.

    Args:
        features: of the runner, rows of ``kv/compose.py``.
        words: tokens can be made text.
        grammars: texts can be held to one.
    """
    if not words and params.stop:
        raise SettingsError("stop", params.stop, "empty, for the model has no tokenizer")
    if params.n > 1:
        check_together({**features, "fork": ("n", params.n)})
    if params.guide is not None and not grammars:
        name, text = params.guide
        raise SettingsError(name, text[:60], "None, for the model has no tokenizer")


def check_tokens(prompt: Tokens[int], vocabulary: int) -> None:
    """Raises DataError at the first token that is not of the vocabulary."""
    for place, token in enumerate(prompt):
        if not 0 <= token < vocabulary:
            raise DataError(
                f"token {token} at place {place} of the prompt is not of the vocabulary of {vocabulary:,}"
            )


def most_tokens(request: Request, manager: BlockManager, limits: Limits, context: int | None) -> int:
    """Tokens, the prompt's included, that each text of a request may have.

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
    """Raises BusyError when ``waiting`` requests with ``waiting_tokens`` prompt tokens leave no room."""
    if limits.waiting is not None and waiting >= limits.waiting:
        raise BusyError(
            f"{waiting:,} requests are waiting, the limit is {limits.waiting:,}", hint="try again later"
        )
    total = waiting_tokens + len(request.prompt)
    if waiting and limits.waiting_tokens is not None and total > limits.waiting_tokens:
        message = f"{waiting_tokens:,} tokens are waiting, the limit is {limits.waiting_tokens:,}"
        raise BusyError(message, hint="try again later")


def _within(request: Request, manager: BlockManager, context: int | None) -> int:
    """The limit of tokens by ``max_tokens``, context and pool; the last token needs no place in the pool."""
    prompt, pool = len(request.prompt), manager.capacity * manager.block_size
    limit = min(prompt + (request.max_tokens or pool + 1), context or prompt + pool + 1)
    if manager.fits(limit - 1):
        return limit
    if request.max_tokens is None and manager.fits(prompt):
        return pool + 1
    raise SettingsError(
        "prompt + max_tokens", limit, f"at most {pool + 1:,}: the key-value pool holds {pool:,} tokens"
    )
