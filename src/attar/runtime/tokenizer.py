"""Prompts to token ids and back, with a model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attar.chat_template import apply_template
from attar.errors import DataError

Prompt = str | Sequence[int]


class PromptTokenizer:
    """A tokenizer.

    Args:
        tokenizer: of transformers; None: prompts are token ids, and there is no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)  # ten times as fast

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds; ids stay as they are.

        Raises:
            DataError: text, but the model has no tokenizer; or there are no tokens.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise DataError("the model has no tokenizer", hint="give token ids")
        ids = [int(token) for token in self.tokenizer(prompt, verbose=False)["input_ids"]]
        if not ids:
            raise DataError("the prompt is empty", hint="give some text to continue")
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to the start of the answer.

        Raises:
            DataError: the tokenizer has no chat template, or it refuses the messages.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError("the tokenizer has no chat template", hint="use generate with plain text")
        try:
            text = apply_template(self.tokenizer, list(messages), add_generation_prompt=True)
        except Exception as error:  # a template is code of the model and may raise anything
            raise DataError(f"the chat template refuses the messages: {error}") from error
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; spaces are not cleaned up."""
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))
        skip = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **skip))


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one (a text, or its token ids) or several."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed
