"""Prompts that a model answers, from any source of text.

    a conversation           its messages up to the first answer, through the tokenizer's chat template, with
                             the words that ask for an answer
    prompt and completion    the prompt
    other text               the first P tokens of packed rows

A source with conversations among its first documents gives these alone. A prompt that leaves less than
1 / ROOM of a row for its answer is left out.

Letters: S tokens a row, P prompt tokens of text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.chat_template import apply_template
from attar.data.answers import has_conversations
from attar.data.examples import Examples
from attar.data.packing import PADDING, front_tokens, is_plain, pack
from attar.data.seen import hashes, sketch, words_of
from attar.data.sources import read_split
from attar.distillation.rollouts.sampling import prompt_lengths
from attar.errors import DataError

ROOM = 4


@dataclass(frozen=True)
class PromptRows:
    """Prompts of a split.

    Attributes:
        prompts: tokens, each shorter than a row.
        rows: int64 (N, S) the text that was read for them.
        dropped: prompts that are too long.
        shared: the reason why other splits hold the same text; empty if they do not.
    """

    prompts: list[list[int]]
    rows: Tensor
    dropped: int = 0
    shared: str = ""

    def record(self, stage: str, tokenizer: Any, data: str, split: str) -> dict[str, Any]:
        """See :func:`attar.data.seen.record`."""
        return {
            "stage": stage,
            "data": data,
            "split": split,
            "prompts": len(self.prompts),
            "too_long": self.dropped,
            "tokens": int((self.rows >= 0).sum()),
            "held_out": not self.shared,
            "reason": self.shared,
            "sketch": sketch(hashes(words_of(tokenizer, [self.rows]))),
        }


def read_prompts(
    tokenizer: Any,
    data: str,
    split: str,
    *,
    length: int,
    count: int,
    seed: int,
    bos: str = "auto",
    packing: str = "stream",
    tokens: int = 32,
) -> PromptRows:
    """At most ``count`` prompts of a source's split.

    Args:
        length: S.
        tokens: P.

    Raises:
        DataError: there is no prompt that leaves room for an answer.
    """
    if has_conversations(data, split):
        return _of_conversations(tokenizer, data, split, length, count, seed, bos)
    packed = pack(tokenizer, data, split, length=length, rows=count, seed=seed, packing=packing, bos=bos)
    lengths = prompt_lengths(Examples.of_text(packed.rows), min(tokens, length - 1)).tolist()
    prompts = [row[:n].tolist() for row, n in zip(packed.rows, lengths, strict=True)]
    return PromptRows(prompts, packed.rows, shared=packed.shared)


def _of_conversations(
    tokenizer: Any, data: str, split: str, length: int, count: int, seed: int, bos: str
) -> PromptRows:
    front, longest = front_tokens(tokenizer, bos), length - max(length // ROOM, 1)
    for unsplit in (False, True):
        text = read_split(data, split, seed, unsplit=unsplit)
        prompts, dropped = list[list[int]](), 0
        for prompt in _prompts(text.documents, tokenizer):
            if len(prompts) == count:
                break
            ids = list(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])
            ids = ids if ids[: len(front)] == front else [*front, *ids]
            dropped += len(ids) > longest
            if 0 < len(ids) <= longest:
                prompts.append(ids)
        if prompts:
            rows = torch.full((len(prompts), length), PADDING, dtype=torch.int64)
            for row, ids in zip(rows, prompts, strict=True):
                row[: len(ids)] = torch.tensor(ids)
            return PromptRows(prompts, rows, dropped, text.shared)
    raise DataError(
        f"{data}: no prompt of the {split} split leaves room for an answer in {length} tokens ({dropped} are "
        "too long)",
        hint="give more text, or a larger --sequence-length",
    )


def _prompts(documents: Any, tokenizer: Any) -> Iterator[str]:
    """The text in front of the first answer of each conversation that has one."""
    for document in documents:
        if isinstance(document, str):
            continue
        first = getattr(document, "first", 0)
        roles = [message.get("role") for message in document]
        stop = next((n for n in range(first, len(roles)) if roles[n] == "assistant"), len(roles))
        if stop:
            yield _rendered(document, stop, tokenizer)


def _rendered(document: Any, stop: int, tokenizer: Any) -> str:
    """The first messages, and what asks for the next.

    Raises:
        DataError: the tokenizer has no chat template for them, or the template fails.
    """
    messages, where = list(document[:stop]), getattr(document, "where", "a conversation")
    alone = stop == 1 and messages[0].get("role") == "user" and isinstance(messages[0].get("content"), str)
    if is_plain(document, tokenizer) or (alone and not getattr(tokenizer, "chat_template", None)):
        return str(messages[0]["content"])
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{where}: a conversation, but the tokenizer has no chat template",
            hint="use a model with a chat template, or data with a plain text field",
        )
    try:
        return apply_template(tokenizer, messages, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the checkpoint and may raise anything
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise DataError(f"{where}: the model's chat template refuses the messages: {reason}") from error
