"""What a model says after a prompt, greedily: the sample in its record.

It comes out of what serves the model, :class:`attar.LLM`; where transformers runs it, of transformers' own
``generate``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from attar.data.auto import AUTO, CODE, fitting
from attar.data.prose import CHAT, PROSE
from attar.errors import DataError
from attar.measure.subject import Subject
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.tokenizer import PromptTokenizer

SAMPLES = {
    CODE: "def __init__(self",
    CHAT: "Why is the sky blue? Answer in one sentence.",
    PROSE: "Once upon a time",
}
"""Prompts of samples, by the text that fits a model."""


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


def sample_prompt(subject: Subject, wanted: str) -> tuple[str, list[int]]:
    """The prompt of a sample, as people read it and as tokens.

    Args:
        subject: with a tokenizer.
        wanted: a text, or ``auto``: one of SAMPLES, a question in the model's own chat template.

    Raises:
        DataError: as :func:`encode`.
    """
    if wanted != AUTO:
        return wanted, encode(subject, wanted, "the sample's prompt")
    kind = CODE if subject.checkpoint is None else fitting(subject.checkpoint)[0]
    text = SAMPLES[kind]
    if kind != CHAT:
        return text, encode(subject, text, "the sample's prompt")
    ids = PromptTokenizer(subject.tokenizer).encode_chat([{"role": "user", "content": text}])
    return f"{text}\n", ids


def complete(subject: Subject, prompt: list[int], max_tokens: int) -> list[int]:
    """Up to ``max_tokens`` tokens after the prompt's, as many as the context has room for; an end token is
    the last.

    Raises:
        NumericsError: the runner's logits are NaN.
    """
    if subject.loaded is not None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        return list(engine(subject).generate(prompt, params)[0].token_ids)
    if subject.context is not None:
        max_tokens = min(max_tokens, subject.context - len(prompt))
    ids = torch.tensor([prompt], device=subject.model.device)
    settings = greedy(subject, max_tokens, end_tokens(subject))
    made = subject.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return [int(token) for token in made[0, len(prompt) :]]


def engine(subject: Subject) -> LLM:
    """What serves a subject. It keeps no blocks of the pool when it is idle: they are used for scoring."""
    assert subject.loaded is not None
    return LLM.of(subject.loaded, prefix_cache=False)


def words(subject: Subject, ids: list[int]) -> str:
    """Their text, without special tokens."""
    return str(subject.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def greedy(subject: Subject, max_tokens: int, ends: tuple[int, ...] = ()) -> Any:
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


def end_tokens(subject: Subject) -> tuple[int, ...]:
    """Tokens after which a text is finished: the generation config's, else the model's, else the
    tokenizer's.
    """
    for owner in (subject.model.generation_config, subject.model.config, subject.tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
