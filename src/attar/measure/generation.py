"""What a model says after a prompt, greedily: the sample in its record.

The loop is written out over the model's own forward, so that it shows what transformers computes, whatever
the model is; :class:`attar.LLM` is for texts.

Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from attar.errors import DataError, NumericsError
from attar.measure.subject import Subject


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


def complete(subject: Subject, prompt: list[int], max_tokens: int) -> list[int]:
    """Up to ``max_tokens`` tokens after the prompt's, as many as the context has room for; an end token is
    the last.

    Raises:
        NumericsError: the model's logits are NaN.
    """
    if subject.context is not None:
        max_tokens = min(max_tokens, subject.context - len(prompt))
    ends = end_tokens(subject)
    ids: list[int] = []
    for token in steps(subject.model, prompt, max_tokens, subject.vocabulary):
        ids.append(token)
        if token in ends:
            break
    return ids


def words(subject: Subject, ids: list[int]) -> str:
    """Their text, without special tokens."""
    return str(subject.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def steps(model: Any, prompt: list[int], max_tokens: int, vocabulary: int) -> Iterator[int]:
    """Yield up to ``max_tokens`` likeliest tokens after the prompt; the cache belongs to this call alone.

    Args:
        vocabulary: tokens are chosen from the first so many of V.
    """
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
        unread = [int(row.argmax())]
        yield unread[0]


def end_tokens(subject: Subject) -> tuple[int, ...]:
    """Tokens after which a text is finished: the generation config's, else the model's, else the
    tokenizer's.
    """
    for owner in (subject.model.generation_config, subject.model.config, subject.tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
