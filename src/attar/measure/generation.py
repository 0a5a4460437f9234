"""Greedy samples and answers, and prefill and decode speed, of the engine that serves a model.

The engine is :class:`attar.LLM`. A model that transformers runs (``--runner transformers``, or one that the
runtime does not support) uses transformers' own ``generate``.

A round of the speed measurement prefills a prompt of random tokens and then decodes token by token, one
sequence. The first round is a warm-up; the median of the others is reported with its spread,
(max - min) / median, which a single round does not have.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from attar.data.auto import AUTO, CODE, fitting
from attar.data.python_text import CHAT, PROSE
from attar.errors import DataError
from attar.measure.subject import Subject
from attar.models.loading.plain_config import end_tokens
from attar.runtime.bench import measure
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.tokenizer import PromptTokenizer

PROMPTS = {
    CODE: (
        "def __init__(self",
        "def read_json(path):\n",
        "import os\n\ndef walk(",
        "class Stack:\n",
        "for i, line in enumerate(",
        "def test_empty_",
        "try:\n    import",
        "def fibonacci(n):\n",
    ),
    CHAT: (
        "Why is the sky blue? Answer in one sentence.",
        "Name three yellow fruits.",
        "What is 17 plus 25?",
        "Write two lines about rain.",
        "How long does an egg boil?",
        "What is 'good morning' in French?",
        "Is 91 a prime number?",
        "Give me a title for a story about a lighthouse.",
    ),
    PROSE: (
        "Once upon a time",
        "The capital of France is",
        "In the year 1969",
        "Water boils when",
        "The most important thing about learning is",
        "She opened the door and",
        "A computer is a machine that",
        "When the rain stopped,",
    ),
}
"""Prompts by the text that fits a model: the first of the sample, all of the answers that are compared."""

BUDGET_S = 2.0  # seconds after which no further round begins
ROUNDS = 7

SpeedRound = Callable[[], tuple[float, float]]
"""Runs one round; returns prefill and decode tokens per second."""


@dataclass(frozen=True)
class Speed:
    """Medians over ``rounds`` rounds; the spreads are (max - min) / median, None for a single round.

    Attributes:
        prompt_tokens, decode_tokens: of a round; fewer than requested where the context is shorter.
    """

    prefill_tokens_per_s: float
    prefill_spread: float | None
    decode_tokens_per_s: float
    decode_spread: float | None
    prompt_tokens: int
    decode_tokens: int
    rounds: int


def encode_prompt(subject: Subject, text: str, what: str = "prompt") -> list[int]:
    """Token ids of a prompt, with the special tokens that the tokenizer adds in front.

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


def sample_prompt(subject: Subject, setting: str) -> tuple[str, list[int]]:
    """The prompt of the sample, as text and as tokens.

    Args:
        setting: the prompt, or ``auto``: the first of PROMPTS that fit the model, a question in its
            own chat template where it has one.

    Raises:
        DataError: as :func:`encode_prompt`.
    """
    if setting != AUTO:
        return setting, encode_prompt(subject, setting, "the sample's prompt")
    kind = _kind(subject)
    text = PROMPTS[kind][0]
    if kind != CHAT:
        return text, encode_prompt(subject, text, "the sample's prompt")
    return f"{text}\n", _question(subject, text)


def answer_prompts(subject: Subject, count: int) -> list[list[int]]:
    """Tokens of the first ``count`` of PROMPTS that fit the model: none without a tokenizer, and none that
    leave no room in the context."""
    if subject.tokenizer is None:
        return []
    kind = _kind(subject)
    prompts = [
        _question(subject, text) if kind == CHAT else subject.tokenizer(text, verbose=False)["input_ids"]
        for text in PROMPTS[kind][:count]
    ]
    return [tokens for tokens in prompts if 0 < len(tokens) < (subject.context or math.inf)]


def _kind(subject: Subject) -> str:
    """The text that fits a model."""
    return CODE if subject.checkpoint is None else fitting(subject.checkpoint)[0]


def _question(subject: Subject, text: str) -> list[int]:
    """Tokens of a question in the model's chat template."""
    return PromptTokenizer(subject.tokenizer).encode_chat([{"role": "user", "content": text}])


def serving_llm(subject: Subject) -> LLM:
    """The engine of a subject; without a prefix cache, so that the whole pool is free for scoring."""
    assert subject.loaded is not None
    return LLM.of(subject.loaded, prefix_cache=False)


def generate_greedily(subject: Subject, prompt: list[int], max_tokens: int) -> list[int]:
    """The completion of one prompt, as :func:`generate_answers` gives it."""
    return generate_answers(subject, [prompt], max_tokens)[0]


def generate_answers(subject: Subject, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Up to ``max_tokens`` greedy tokens after each prompt, as many as the context has room for; an end token
    is included.

    Raises:
        NumericsError: the logits are NaN (attar's engine only).
    """
    if subject.loaded is not None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return [list(result.token_ids) for result in serving_llm(subject).generate(prompts, params)]
    if subject.context is not None:
        max_tokens = min(max_tokens, subject.context - max(map(len, prompts)))
    ends = end_tokens(subject.model.generation_config, subject.model.config, subject.tokenizer)
    rows = _transformers_generate(subject, prompts, max_tokens, ends).tolist()
    return [_up_to_end(row, ends) for row in rows]


def _up_to_end(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """Tokens up to the first end token, which is included: what follows is padding."""
    end = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]


def decode_tokens(subject: Subject, ids: list[int]) -> str:
    """The text of tokens, without special tokens."""
    return str(subject.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def measure_speed(
    subject: Subject,
    *,
    prompt_tokens: int = 128,
    decode_tokens: int = 32,
    seed: int = 0,
    rounds: int = ROUNDS,
    budget: float = BUDGET_S,
) -> Speed:
    """Time a loaded model.

    Args:
        prompt_tokens, decode_tokens: of a round; reduced to fit the context.
        budget: seconds after which no further round begins (one is always timed).
    """
    if subject.context is not None:
        decode_tokens = max(1, min(decode_tokens, subject.context // 2))
        prompt_tokens = max(1, min(prompt_tokens, subject.context - decode_tokens - 1))
    make_round = _attar_round if subject.loaded is not None else _transformers_round
    run_round = make_round(subject, prompt_tokens, decode_tokens, random.Random(seed))
    run_round()
    speeds: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(speeds) < rounds and (not speeds or time.perf_counter() - start < budget):
        speeds.append(run_round())
    prefill, decode = zip(*speeds, strict=True)
    return Speed(*_summary(prefill), *_summary(decode), prompt_tokens, decode_tokens, len(speeds))


def _summary(values: tuple[float, ...]) -> tuple[float, float | None]:
    """Median and spread."""
    median = statistics.median(values)
    return median, (max(values) - min(values)) / median if len(values) > 1 else None


def _attar_round(subject: Subject, prompt: int, decode: int, rng: random.Random) -> SpeedRound:
    llm = serving_llm(subject)

    def run_round() -> tuple[float, float]:
        case = measure(llm, 1, prompt, decode + 1, rng)  # the first token belongs to the prefill
        return case.prompt_tokens_per_s, case.decode_tokens_per_s

    return run_round


def _transformers_round(subject: Subject, prompt: int, decode: int, rng: random.Random) -> SpeedRound:
    def run_round() -> tuple[float, float]:
        ids = [rng.randrange(subject.vocabulary) for _ in range(prompt)]
        token_times = TokenTimes()
        _transformers_generate(subject, [ids], decode + 1, streamer=token_times)
        start, first, *_, last = token_times.times
        return prompt / (first - start), decode / (last - first)

    return run_round


def _transformers_generate(
    subject: Subject, prompts: list[list[int]], max_tokens: int, ends: tuple[int, ...] = (), **options: Any
) -> Tensor:
    """Completions, int64 (B, S), of transformers' greedy ``generate``, without the model's own generation
    settings; rows that only pad the vocabulary are excluded. Shorter prompts are padded on the left."""
    columns = int(subject.model.get_output_embeddings().weight.shape[0])
    config = GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        suppress_tokens=list(range(subject.vocabulary, columns)) or None,
    )
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    tokens: Tensor = subject.model.generate(
        ids.to(subject.model.device),
        attention_mask=mask.to(subject.model.device),
        generation_config=config,
        **options,
    )
    return tokens[:, width:]


class TokenTimes(BaseStreamer):  # type: ignore[misc]
    """Times at which transformers passes on the prompt and then each token: ``time.perf_counter`` seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Called with tokens on the CPU, so the device has finished computing them."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""
