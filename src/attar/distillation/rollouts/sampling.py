"""Rows that a model writes after prompts, drawn by the runtime.

The tokens of a row are drawn by its own seed, whatever else is in the batch: the same weights, prompts and
seed give the same rows. What was drawn is predicted when a student learns from the row; its prompt is not,
and prompts may differ in length.

Letters: N rows, S tokens a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.errors import NumericsError
from attar.runtime.admission import Limits
from attar.runtime.engine import Engine
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.results import Event
from attar.runtime.runner.blended import BlendedRunner
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.scheduler import Scheduler
from attar.runtime.step import Runner

T = TypeVar("T", bound=Examples)
ROWS = 64  # sampled together
STEP = 2048  # most tokens of a step: prompts of several rows


@dataclass(frozen=True, kw_only=True)
class Rollouts(Examples):
    """Rows written by a model.

    Attributes:
        behaviour: float32 (N, S), the log-probability of each target under the law that drew it; 0 where
            nothing is predicted.
        policy: the same under the student that wrote it, alone: another law where a teacher was mixed in.
    """

    behaviour: Tensor
    policy: Tensor

    @classmethod
    def of(cls, tokens: Tensor, prompts: Tensor, logprobs: Tensor, policy: Tensor | None = None) -> Rollouts:
        """From rows int64 (N, S), the lengths of their prompts (N,), and the log-probability of each token
        (N, S)."""
        examples = completions(tokens, prompts)
        behaviour, policy_logprobs = (
            _shifted(x, examples) for x in (logprobs, logprobs if policy is None else policy)
        )
        return cls(tokens=tokens, targets=examples.targets, behaviour=behaviour, policy=policy_logprobs)


def completions(tokens: Tensor, prompts: Tensor) -> Examples:
    """Examples of rows int64 (N, S) whose first ``prompts`` (N,) tokens are given, and not predicted."""
    examples = Examples.of_text(tokens)
    in_prompt = torch.arange(tokens.shape[1]) < prompts[:, None] - 1
    return Examples(tokens, examples.targets.masked_fill(in_prompt, PADDING))


def _shifted(values: Tensor, examples: Examples) -> Tensor:
    """Values of tokens (N, S) at the positions that predict them."""
    return values.roll(-1, 1).masked_fill(~examples.predicted, 0.0)


def joined(parts: Sequence[T]) -> T:
    """Examples of one kind as one."""
    columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
    joint = {name: None if rows[0] is None else torch.cat(rows) for name, rows in columns.items()}
    return type(parts[0])(**joint)


def prompt_lengths(examples: Examples, tokens: int) -> Tensor:
    """How much of each row is its prompt: int64 (N,). What comes before the first prediction; of text, which
    is predicted from the start, the first ``tokens`` tokens, and at most all real ones but one."""
    first = examples.predicted.int().argmax(1)
    real = examples.mask.sum(1)
    return torch.where(first > 0, first + 1, tokens).minimum(real - 1).clamp(min=1)


def sample_rows(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    vocabulary: int,
    ends: Sequence[int],
    seed: int,
    temperature: float = 1.0,
    tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """Continue each prompt: rows int64 (N, S), :data:`PADDING` behind their ends, and float32 (N, S) the
    log-probability of each drawn token at this temperature.

    Args:
        runner: with a pool for :data:`ROWS` rows, or for all of them.
        length: S; every prompt is shorter.
        vocabulary: tokens that may be drawn; columns behind only pad the logits.
        ends: tokens that end a text; they belong to it.
        seed: row i has the seed ``seed + i``.
        tokens: most tokens that are drawn for a row; 0: until S.

    Raises:
        NumericsError: the model's logits are not finite.
    """
    if temperature != 1.0:
        runner = BlendedRunner([runner], [1.0], vocabulary=vocabulary, temperature=temperature)
    manager = BlockManager(runner.capacity, runner.block_size, reuse=False)
    limits = Limits(step_tokens=STEP, sequences=ROWS)
    scheduler = Scheduler(manager, limits, context=runner.context, memory=runner)
    engine = Engine(runner, scheduler, ends=ends, vocabulary=vocabulary)
    rows = torch.full((len(prompts), length), PADDING, dtype=torch.int64)
    logprobs = torch.zeros(len(prompts), length)
    filled = {}
    for index, prompt in enumerate(prompts):
        most = min(length - len(prompt), tokens or length)
        params = SamplingParams(max_tokens=most, seed=(seed + index) % 2**64, logprobs=0)
        name = engine.add(list(prompt), params)
        filled[name] = (index, len(prompt))
        rows[index, : len(prompt)] = torch.tensor(prompt)
    while not engine.idle:
        for event in engine.step():
            index, start = filled[event.request]
            _check(event)
            stop = start + len(event.token_ids)
            rows[index, start:stop] = torch.tensor(event.token_ids, dtype=torch.int64)
            logprobs[index, start:stop] = torch.tensor([token.logprob for token in event.logprobs])
            filled[event.request] = (index, stop)
    return rows, logprobs


def _check(event: Event) -> None:
    """A failed completion ends the run."""
    if event.finish_reason == "error":
        raise event.failure or NumericsError(event.error or "the model that writes rows failed")
