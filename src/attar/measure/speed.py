"""Prefill and decode speed, in tokens per second, of what serves the model; of transformers where it runs it.

A round reads a prompt of random tokens (prefill) and then makes tokens one by one (decode), for one sequence,
as for a person who waits. The first round warms up and is thrown away; the median of the others is reported
with its spread, (max - min) / median, which one round alone does not have.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from attar.measure.generation import greedy_config, serving_llm
from attar.measure.subject import Subject
from attar.runtime.bench import measure

BUDGET = 2.0  # seconds after which no further round is begun
ROUNDS = 7

SpeedRound = Callable[[], tuple[float, float]]
"""Prompt tokens and generated tokens a second, once."""


@dataclass(frozen=True)
class Speed:
    """Medians over ``rounds`` rounds, with (max - min) / median beside them, None of one round.

    Attributes:
        prompt_tokens, decode_tokens: what a round did; shorter than asked where the context is.
    """

    prefill_tokens_per_s: float
    prefill_spread: float | None
    decode_tokens_per_s: float
    decode_spread: float | None
    prompt_tokens: int
    decode_tokens: int
    rounds: int


def measure_speed(
    subject: Subject,
    *,
    prompt_tokens: int = 128,
    decode_tokens: int = 32,
    seed: int = 0,
    rounds: int = ROUNDS,
    budget: float = BUDGET,
) -> Speed:
    """Time a loaded model.

    Args:
        prompt_tokens, decode_tokens: of a round; cut to fit the model's context.
        seed: of the prompts.
        budget: seconds after which no further round is begun (one is always timed).
    """
    if subject.context is not None:
        decode_tokens = max(1, min(decode_tokens, subject.context // 2))
        prompt_tokens = max(1, min(prompt_tokens, subject.context - decode_tokens - 1))
    make = _runtime_round if subject.loaded is not None else _transformers_round
    once = make(subject, prompt_tokens, decode_tokens, random.Random(seed))
    once()
    speeds: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(speeds) < rounds and (not speeds or time.perf_counter() - start < budget):
        speeds.append(once())
    prefill, decode = zip(*speeds, strict=True)
    return Speed(*_summary(prefill), *_summary(decode), prompt_tokens, decode_tokens, len(speeds))


def _summary(values: tuple[float, ...]) -> tuple[float, float | None]:
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / middle if len(values) > 1 else None


def _runtime_round(subject: Subject, prompt: int, decode: int, draws: random.Random) -> SpeedRound:
    llm = serving_llm(subject)

    def once() -> tuple[float, float]:
        case = measure(llm, 1, prompt, decode + 1, draws)  # the first token is the prefill's
        return case.prompt_tokens_per_s, case.decode_tokens_per_s

    return once


def _transformers_round(subject: Subject, prompt: int, decode: int, draws: random.Random) -> SpeedRound:
    settings = greedy_config(subject, decode + 1)

    def once() -> tuple[float, float]:
        ids = [[draws.randrange(subject.vocabulary) for _ in range(prompt)]]
        tokens, stamps = torch.tensor(ids, device=subject.model.device), TokenTimes()
        mask = torch.ones_like(tokens)
        subject.model.generate(tokens, attention_mask=mask, generation_config=settings, streamer=stamps)
        begin, first, *_, last = stamps.times
        return prompt / (first - begin), decode / (last - first)

    return once


class TokenTimes(BaseStreamer):  # type: ignore[misc]
    """When transformers hands over the prompt, and then each token: seconds of ``time.perf_counter``."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Tokens on the CPU: whatever made them is done."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""
