"""Conversations to text, with the model's own chat template."""

from __future__ import annotations

from typing import Any

from attar.data.splits import Document
from attar.errors import DataError


def render(document: Document, tokenizer: Any) -> str:
    """The text a model would see: plain text as it is, messages through the tokenizer's chat template.

    Raises:
        DataError: the document is a conversation and the tokenizer has no template, or the template refuses
            it.
    """
    if isinstance(document, str):
        return document
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the data holds conversations, but the tokenizer has no chat template",
            hint="use a model with a chat template, or data with a plain text field",
        )
    try:
        return str(tokenizer.apply_chat_template(document, tokenize=False, add_generation_prompt=False))
    except Exception as error:  # a template is a program of the checkpoint's and may raise anything
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        where = getattr(document, "where", "a conversation")
        raise DataError(
            f"{where}: the model's chat template refuses the messages: {reason}",
            hint="give roles in the order it wants, mostly user and assistant in turns, contents as text",
        ) from error
