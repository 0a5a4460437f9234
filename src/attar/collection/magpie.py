"""Text of a model's own: it writes what the user says, then the answer.

A chat template, cut where the words of a user begin, is a text that a chat model goes on with a question
such as it was trained on (Magpie: Xu 2024, arXiv 2406.08464, section 2). A model without a template goes on
from the token that begins a text. Such text is like all that the model was trained on, which no one file is,
and calibrates quantization and pruning where there is none of the model's use (self-calibration: Williams
2024, arXiv 2410.17170).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.chat_template import apply_template
from attar.collection.prompts import ChatPrompt, Message
from attar.errors import DataError

if TYPE_CHECKING:
    from attar.runtime.sampling.params import SamplingParams

MAGPIE = "magpie"
"""What stands for a file of prompts."""

MOST_TOKENS = 512  # of a question
_MARK = "?5d1c?"


@dataclass(frozen=True)
class Opening:
    """What a question follows, and what ends it: a token, or else a string.

    Attributes:
        stop_id: the token behind the user's words, where it is a special one.
        stop: what stands behind them, where it is text; "": nothing but the model's end token.
    """

    tokens: list[int]
    stop_id: int | None = None
    stop: str = ""

    def ended(self, params: SamplingParams) -> SamplingParams:
        """The parameters of the question, from those of the answer."""
        return replace(
            params,
            max_tokens=min(MOST_TOKENS, params.max_tokens or MOST_TOKENS),
            stop=tuple(filter(None, [self.stop])),
            stop_ids=() if self.stop_id is None else (self.stop_id,),
        )


def is_magpie(prompts: Path) -> bool:
    """Whether a collection's prompts are the model's own: the word, and no file of that name."""
    return str(prompts) == MAGPIE and not prompts.exists()


def magpie_prompt() -> ChatPrompt:
    """The prompt that the model itself writes."""
    return ChatPrompt(({"role": "user", "content": ""},), MAGPIE)


def asks_itself(messages: Sequence[Message]) -> bool:
    """Whether the last message is the user's, and empty."""
    return messages[-1].get("role") == "user" and messages[-1].get("content") == ""


def opening(tokenizer: Any, messages: Sequence[Message]) -> Opening:
    """What a question follows, by the chat template.

    Args:
        tokenizer: of transformers.
        messages: the last of them is the user's, and empty; (): the model has no template.

    Raises:
        DataError: the template refuses the messages, or no token begins a text.
    """
    if not messages:
        return Opening(_beginning(tokenizer))
    marked = [*messages[:-1], {**messages[-1], "content": _MARK}]
    try:
        text = apply_template(tokenizer, marked, add_generation_prompt=True)
    except Exception as error:  # a template is code of the model and may raise anything
        raise DataError(f"the chat template refuses the messages: {error}") from error
    before, mark, behind = text.rpartition(_MARK)
    if not mark:
        raise DataError("the chat template does not write the user's message")
    tokens, after = (
        [int(token) for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
        for part in (before, behind.strip())
    )
    tokens = tokens or _beginning(tokenizer)
    if after and after[0] in tokenizer.all_special_ids:
        return Opening(tokens, stop_id=after[0])
    return Opening(tokens, stop=behind.strip().split("\n")[0])


def _beginning(tokenizer: Any) -> list[int]:
    """The token in front of a text."""
    for name in ("bos_token_id", "eos_token_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            return [int(token)]
    raise DataError("the tokenizer has neither BOS nor EOS, so that no token begins a text")
