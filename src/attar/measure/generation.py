"""Text from a model: greedy, or sampled at a temperature, one token at a time.

The loop is written out: one pass over the prompt, then one pass per token with a KV cache, through the
model's own forward. Prompts go one after the other, so a completion does not depend on its neighbours; the
runtime is what batches them.

Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from attar.checkpoint import Checkpoint
from attar.errors import DataError, NumericsError, SettingsError
from attar.measure.subject import Subject, load_subject
from attar.progress import SILENT, Progress

Choose = Callable[[Tensor], int]
"""From the logits (V,) of the last position to the next token."""


@dataclass(frozen=True)
class Completion:
    """What a model said after one prompt.

    Attributes:
        text: without special tokens, and cut before a stop string.
        token_ids: all that was generated, the end-of-text token and a stop string's tokens included.
        finish_reason: ``stop`` (end of text, or a stop string) or ``length`` (max_tokens, or the context is
            full).
    """

    text: str
    token_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Usage:
    """Tokens read and written, over all prompts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class Completions:
    """One completion for each prompt, in the prompts' order."""

    completions: list[Completion]
    usage: Usage

    def to_dict(self) -> dict[str, Any]:
        """As ``attar generate --json`` prints it."""
        return asdict(self)


def generate(
    model: str | Path | Checkpoint | Subject,
    prompts: str | Sequence[str],
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress = SILENT,
) -> Completions:
    """Continue each prompt.

    Args:
        temperature: 0 takes the likeliest token; above 0 samples from softmax(logits / temperature).
        seed: prompt i is sampled with ``seed + i``, so the same call gives the same tokens.
        stop: strings that end a completion; they are not part of its text.

    Raises:
        DataError: a prompt is empty, or leaves no room in the model's context.
        SettingsError: a setting out of range.
        NumericsError: the model's logits are NaN.
    """
    if max_tokens < 1:
        raise SettingsError("max_tokens", max_tokens, "at least 1")
    if not temperature >= 0.0:
        raise SettingsError("temperature", temperature, "0 (greedy) or more")
    if "" in stop:
        raise SettingsError("stop", "", "a string that is not empty")
    subject = load_subject(model, dtype=dtype, device=device)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    encoded = [encode(subject, text, f"prompt {number}") for number, text in enumerate(texts, 1)]
    completions = []
    with progress.task("generate", total=len(encoded)) as task:
        for number, tokens in enumerate(encoded):
            choose = sampler(temperature, seed + number) if temperature else greedy
            completions.append(complete(subject, tokens, max_tokens, choose, stop))
            task.advance()
    read, written = sum(map(len, encoded)), sum(len(completion.token_ids) for completion in completions)
    return Completions(completions, Usage(read, written, read + written))


def encode(subject: Subject, text: str, what: str = "prompt") -> list[int]:
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


def complete(
    subject: Subject, prompt: list[int], max_tokens: int, choose: Choose, stop: Sequence[str] = ()
) -> Completion:
    """Continue the tokens of one prompt; see :func:`generate`."""
    if subject.context is not None:
        max_tokens = min(max_tokens, subject.context - len(prompt))
    ends = end_tokens(subject)
    ids: list[int] = []
    for token in steps(subject.model, prompt, max_tokens, choose, subject.vocabulary):
        ids.append(token)
        if token in ends:
            return Completion(_text(subject, ids), ids, "stop")
        text = _text(subject, ids) if stop else ""
        found = [text.index(string) for string in stop if string in text]
        if found:
            return Completion(text[: min(found)], ids, "stop")
    return Completion(_text(subject, ids), ids, "length")


def steps(model: Any, prompt: list[int], max_tokens: int, choose: Choose, vocabulary: int) -> Iterator[int]:
    """Yield up to ``max_tokens`` tokens after the prompt; the cache belongs to this call alone."""
    cache = DynamicCache(config=model.config)
    unread = prompt
    for _ in range(max_tokens):
        tokens = torch.tensor([unread], device=model.device)
        with torch.inference_mode():  # not around the yield: it would leak into the caller
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        row = logits[0, -1, :vocabulary].float()
        if bool(row.isnan().any()):
            raise NumericsError(
                "the model's logits are NaN",
                hint="check the checkpoint with attar inspect, or try --dtype float32",
            )
        unread = [choose(row)]
        yield unread[0]


def greedy(logits: Tensor) -> int:
    """The likeliest token."""
    return int(logits.argmax())


def sampler(temperature: float, seed: int) -> Choose:
    """Draw from softmax(logits / temperature), in float32 on the CPU so that a seed means the same on every
    device.
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        shifted = (
            logits.cpu() - logits.max().cpu()
        )  # before the division: a tiny temperature must not overflow
        return int(torch.multinomial((shifted / temperature).softmax(-1), 1, generator=generator))

    return choose


def end_tokens(subject: Subject) -> tuple[int, ...]:
    """Tokens after which a completion is finished: the generation config's, else the model's, else the
    tokenizer's.
    """
    for owner in (subject.model.generation_config, subject.model.config, subject.tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()


def _text(subject: Subject, ids: list[int]) -> str:
    return str(subject.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
