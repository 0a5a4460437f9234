"""Texts in memory (strings, conversations, rows of a data set) as a source of text: a file in the cache.

The file is named by its content, so the same texts are the same source: a stage that was killed goes on.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import explain_os_errors
from attar.checkpoint.hashing import cache_folder, sha256_file
from attar.errors import DataError

HINT = "strings, conversations (lists of messages), or rows with text, messages or prompt and completion"


def text_source(data: str | Path | Iterable[Any]) -> str:
    """A source as the setting ``data`` names it; texts that are no path are written to a file of the cache.

    Args:
        data: a source's name or path, or an iterable of texts, conversations or rows, such as a
            ``datasets.Dataset``. It is read once.

    Raises:
        DataError: there is no text, or a row that JSON cannot hold.
        OutputError: the cache cannot be written.
    """
    if isinstance(data, str | Path):
        return str(data)
    folder = cache_folder() / "texts"
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".partial")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(_lines(data))
            target = folder / f"{sha256_file(Path(name))[:32]}.jsonl"
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)
    return str(target)


def _lines(rows: Iterable[Any]) -> Iterator[str]:
    number = -1
    for number, row in enumerate(rows):
        try:
            yield json.dumps(_row(row), ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise DataError(f"data, row {number}: {error}", hint=HINT) from None
    if number < 0:
        raise DataError("data: no text in it", hint=HINT)


def _row(row: Any) -> dict[str, Any]:
    if isinstance(row, str):
        return {"text": row}
    if isinstance(row, list | tuple):
        return {"messages": list(row)}
    if isinstance(row, Mapping):
        return dict(row)
    raise TypeError(f"is {type(row).__name__}")
