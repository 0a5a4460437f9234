"""Tokens that a tokenizer has and a model has no row for.

Many fine-tunes add a ``<pad>`` behind the last row, which no text holds and nothing feeds to the model. Such
a tokenizer works as long as no text has one of these tokens; a text that has is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attar.chat_template import apply_template
from attar.checkpoint.oddities import Oddity, oddity
from attar.errors import DataError


def within_rows(tokenizer: Any, rows: int, where: Path) -> Any:
    """The tokenizer itself, or where added tokens have no row, one that refuses text with them.

    Args:
        rows: of the embedding.
        where: the folder, for the error.

    Raises:
        CheckpointError: tokens of the vocabulary have no row: the tokenizer is of another model.
    """
    beyond = {index: token for token, index in tokenizer.get_vocab().items() if index >= rows}
    if not beyond:
        return tokenizer
    added = tokenizer.added_tokens_decoder
    base = vocabulary_without_added(tokenizer)
    other = max((index for index in beyond if index not in added or beyond[index] in base), default=None)
    if other is not None:
        raise oddity("other vocabulary", id=other, token=beyond[other], rows=rows).error(where)
    return TokenizerWithinRows(tokenizer, beyond, rows)


def vocabulary_without_added(tokenizer: Any) -> Mapping[str, int]:
    """The tokens of the vocabulary proper; empty where the tokenizer does not tell."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {} if backend is None else backend.get_vocab(with_added_tokens=False)


class TokenizerWithinRows:
    """A tokenizer that refuses text with a token that the model has no row for; else the tokenizer itself.

    Args:
        beyond: tokens by id.
        rows: of the embedding.
    """

    def __init__(self, tokenizer: Any, beyond: Mapping[int, str], rows: int) -> None:
        self._tokenizer, self._beyond, self._rows = tokenizer, dict(beyond), rows
        self.oddities: list[Oddity] = [
            oddity("token beyond the rows", token=token, id=index, rows=rows)
            for index, token in sorted(beyond.items())[:1]
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return min(len(self._tokenizer), self._rows)

    def __call__(self, *texts: Any, **settings: Any) -> Any:
        """As the tokenizer.

        Raises:
            DataError: the text has such a token.
        """
        encoding = self._tokenizer(*texts, **settings)
        self._check(encoding["input_ids"])
        return encoding

    def encode(self, *texts: Any, **settings: Any) -> Any:
        """As the tokenizer; raises as a call."""
        return self._checked(self._tokenizer.encode(*texts, **settings))

    def apply_chat_template(self, *messages: Any, **settings: Any) -> Any:
        """As the tokenizer; raises as a call. Text is rendered within the bounds of attar.chat_template."""
        if settings.get("tokenize") is False:
            del settings["tokenize"]
            return apply_template(self._tokenizer, *messages, **settings)
        result = self._tokenizer.apply_chat_template(*messages, **settings)
        return result if isinstance(result, str) else self._checked(result)

    def _checked(self, ids: Any) -> Any:
        self._check(ids["input_ids"] if isinstance(ids, Mapping) else ids)
        return ids

    def _check(self, ids: Any) -> None:
        values = ids.flatten().tolist() if hasattr(ids, "flatten") else ids
        largest = max(_flat(values), default=-1)
        if largest >= self._rows:
            token = self._beyond.get(largest, "")
            raise DataError(
                f"the text has {token!r}, token {largest}, but the model has {self._rows} rows",
                hint=f"take {token!r} out of the text, or give the model a row for it",
            )


def _flat(ids: Any) -> Iterable[int]:
    for entry in ids:
        if isinstance(entry, int):
            yield entry
        else:
            yield from _flat(entry)
