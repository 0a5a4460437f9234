"""Prefill and decode speed, in tokens per second.

A round reads a prompt of random tokens in one pass (prefill) and then makes tokens one by one with a KV cache
(decode). The first round warms up and is thrown away; the median of the others is reported with its spread,
(max - min) / median. The batch is one sequence, as for a person who waits.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

BUDGET = 2.0  # seconds after which no further round is begun
ROUNDS = 7


@dataclass(frozen=True)
class Speed:
    """Medians over ``rounds`` rounds, with (max - min) / median beside them.

    Attributes:
        prompt_tokens, decode_tokens: what a round did; shorter than asked where the context is.
        threads: torch's, inside an operator.
    """

    prefill_tokens_per_s: float
    prefill_spread: float
    decode_tokens_per_s: float
    decode_spread: float
    prompt_tokens: int
    decode_tokens: int
    rounds: int
    threads: int


def measure_speed(
    model: Any,
    *,
    vocabulary: int,
    prompt_tokens: int = 128,
    decode_tokens: int = 32,
    context: int | None = None,
    seed: int = 0,
    rounds: int = ROUNDS,
    budget: float = BUDGET,
) -> Speed:
    """Time a loaded causal language model.

    Args:
        model: a transformers model in evaluation mode.
        vocabulary: the prompt's tokens are drawn below this.
        context: the most tokens the model holds; the prompt and then the decoding are cut to fit.
        budget: seconds after which no further round is begun (one is always timed).
    """
    if context is not None:
        decode_tokens = max(1, min(decode_tokens, context // 2))
        prompt_tokens = max(1, min(prompt_tokens, context - decode_tokens))
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(vocabulary, (1, prompt_tokens), generator=generator).to(model.device)
    _round(model, prompt, decode_tokens)
    prefill: list[float] = []
    decode: list[float] = []
    start = time.perf_counter()
    while len(prefill) < rounds and (not prefill or time.perf_counter() - start < budget):
        first, rest = _round(model, prompt, decode_tokens)
        prefill.append(prompt_tokens / first)
        decode.append(decode_tokens / rest)
    return Speed(
        *_summary(prefill),
        *_summary(decode),
        prompt_tokens,
        decode_tokens,
        len(prefill),
        torch.get_num_threads(),
    )


def _summary(values: list[float]) -> tuple[float, float]:
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / middle


def _round(model: Any, prompt: torch.Tensor, decode_tokens: int) -> tuple[float, float]:
    """Seconds of the prefill of int64 (1, S) and of ``decode_tokens`` decoding steps after it."""
    cache = DynamicCache(config=model.config)
    start = _now(prompt)
    token = _step(model, prompt, cache)
    middle = _now(prompt)
    for _ in range(decode_tokens):
        token = _step(model, token, cache)
    return middle - start, _now(prompt) - middle


def _step(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1:].argmax(-1)


def _now(tensor: torch.Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
