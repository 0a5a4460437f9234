"""What a model says after a prompt, greedily: the sample in its record.

It comes out of what serves the model, :class:`attar.LLM`; where transformers runs it, of transformers' own
``generate``.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from attar.data.auto import AUTO, CODE, fitting
from attar.data.python_text import CHAT, PROSE
from attar.errors import DataError
from attar.measure.subject import Subject
from attar.models.plain_config import end_tokens
from attar.runtime.bench import measure
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.tokenizer import PromptTokenizer

SAMPLE_PROMPTS = {
    CODE: "def __init__(self",
    CHAT: "Why is the sky blue? Answer in one sentence.",
    PROSE: "Once upon a time",
}
"""Prompts of samples, by the text that fits a model."""


def encode_prompt(subject: Subject, text: str, what: str = "prompt") -> list[int]:
    """The prompt's tokens, with the special ones its tokenizer puts in front.

    Raises:
        DataError: there are none, or they leave no room in the context.
    """
    tokens: list[int] = subject.tokenizer(text, verbose=False)["input_ids"]
    if not tokens:
        raise DataError(f"{what} is empty", hint="give some text to continue")
    if subject.context is not None and len(tokens) >= subject.context:
        raise DataError(
            f"{what} has {len(tokens):,} tokens, but the context of {subject.name} is {subject.context:,}, "
            "so there is no room for an answer",
            hint=f"shorten it to at most {subject.context - 1:,} tokens",
        )
    return tokens


def sample_prompt(subject: Subject, wanted: str) -> tuple[str, list[int]]:
    """The prompt of a sample, as people read it and as tokens.

    Args:
        subject: with a tokenizer.
        wanted: a text, or ``auto``: one of SAMPLES, a question in the model's own chat template.

    Raises:
        DataError: as :func:`encode_prompt`.
    """
    if wanted != AUTO:
        return wanted, encode_prompt(subject, wanted, "the sample's prompt")
    kind = CODE if subject.checkpoint is None else fitting(subject.checkpoint)[0]
    text = SAMPLE_PROMPTS[kind]
    if kind != CHAT:
        return text, encode_prompt(subject, text, "the sample's prompt")
    ids = PromptTokenizer(subject.tokenizer).encode_chat([{"role": "user", "content": text}])
    return f"{text}\n", ids


def generate_greedily(subject: Subject, prompt: list[int], max_tokens: int) -> list[int]:
    """Up to ``max_tokens`` tokens after the prompt's, as many as the context has room for; an end token is
    the last.

    Raises:
        NumericsError: the runner's logits are NaN.
    """
    if subject.loaded is not None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return list(serving_llm(subject).generate(prompt, params)[0].token_ids)
    if subject.context is not None:
        max_tokens = min(max_tokens, subject.context - len(prompt))
    ids = torch.tensor([prompt], device=subject.model.device)
    settings = greedy_config(
        subject,
        max_tokens,
        end_tokens(subject.model.generation_config, subject.model.config, subject.tokenizer),
    )
    made = subject.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return [int(token) for token in made[0, len(prompt) :]]


def serving_llm(subject: Subject) -> LLM:
    """What serves a subject. It keeps no blocks of the pool when it is idle: they are used for scoring."""
    assert subject.loaded is not None
    return LLM.of(subject.loaded, prefix_cache=False)


def decode_tokens(subject: Subject, ids: list[int]) -> str:
    """Their text, without special tokens."""
    return str(subject.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def greedy_config(subject: Subject, max_tokens: int, ends: tuple[int, ...] = ()) -> Any:
    """Settings of transformers' ``generate`` for the likeliest token each time, and no model's own habits;
    rows that only pad the vocabulary are left out."""
    columns = int(subject.model.get_output_embeddings().weight.shape[0])
    padding = list(range(subject.vocabulary, columns))
    return GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        suppress_tokens=padding or None,
    )


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
