"""Logits of whole prompts, as the runtime computes them in serving: same weights, activations and KV format.

    for logits in prompt_logits(runner, rows): ...        float32 (tokens, vocabulary) of each prompt

There is no scheduler: the prompts of a step are placed one after the other in the runner's pool, which must
be unused and keeps nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from attar.errors import SettingsError
from attar.runtime.step import Runner, StepInput, TokenSpan

LOGIT_BYTES = 256 * 2**20  # of one step
STEP_TOKENS = 4096  # of one step, unless a prompt is longer


def prompt_logits(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    wants: Sequence[int] | None = None,
    *,
    limit: int = LOGIT_BYTES,
) -> Iterator[Tensor]:
    """Logits of the last tokens of each prompt.

    Args:
        runner: with an unused pool.
        prompts: token ids, one at least.
        wants: number of last tokens of each, at least 1; None: all.
        limit: most bytes of the logits of a step; a prompt is never divided.

    Yields:
        float32 (wants, vocabulary) for each prompt, in their order. Row i predicts the token after it.

    Raises:
        SettingsError: a prompt is longer than the pool.
    """
    counts = list(map(len, prompts)) if wants is None else list(wants)
    for first, last in _steps(runner, prompts, counts, limit):
        step = _step(runner, prompts[first:last], counts[first:last])
        logits = runner.run(step)
        for span in step.spans:
            runner.forget(span.sequence)
        yield from logits.split(counts[first:last])


def _steps(
    runner: Runner, prompts: Sequence[Sequence[int]], wants: Sequence[int], limit: int
) -> Iterator[tuple[int, int]]:
    """Prompts [first, last) of each step, limited by the pool and the bytes of logits."""
    first, blocks, rows, tokens = 0, 0, 0, 0
    for index, prompt in enumerate(prompts):
        needed = -(-len(prompt) // runner.block_size)
        if needed > runner.capacity:
            most = runner.capacity * runner.block_size
            raise SettingsError("kv_tokens", most, f"at least the {len(prompt):,} tokens of a prompt")
        full = blocks + needed > runner.capacity or tokens + len(prompt) > STEP_TOKENS
        if index > first and (full or 4 * (rows + wants[index]) * runner.vocabulary > limit):
            yield first, index
            first, blocks, rows, tokens = index, 0, 0, 0
        blocks, rows, tokens = blocks + needed, rows + wants[index], tokens + len(prompt)
    if first < len(prompts):
        yield first, len(prompts)


def _step(runner: Runner, prompts: Sequence[Sequence[int]], wants: Sequence[int]) -> StepInput:
    """All prompts from their first token, each in separate blocks."""
    spans: list[TokenSpan] = []
    block = 0
    for number, (prompt, rows) in enumerate(zip(prompts, wants, strict=True)):
        end = block + -(-len(prompt) // runner.block_size)
        spans.append(TokenSpan(number, 0, len(prompt), tuple(range(block, end)), rows))
        block = end
    return StepInput([token for prompt in prompts for token in prompt], tuple(spans))
