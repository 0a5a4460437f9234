"""Where text comes from: the standard library, files, folders, JSONL, hub data sets.

A source is named by one string:

    python-stdlib            the running Python's standard library (see stdlib.py)
    notes.txt                one document
    corpus/                  every .txt, .md, .py and .jsonl file below it, one document each (a JSONL line
    each)
    chats.jsonl              one document a line, field ``text`` (or ``messages``: see chat.py)
    chats.jsonl:answer       the same with the field ``answer``
    org/name[:field]         a hub data set, through ``datasets`` (split train; validation or test for
    evaluation)

Apart from ``python-stdlib`` and hub data sets with splits of their own, documents are split by a hash of
their content.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attar.data import stdlib
from attar.errors import DataError

Document = str | list[dict[str, Any]]
"""A text, or the messages of a conversation."""

SUFFIXES = (".txt", ".md", ".py", ".rst", ".jsonl")


def documents(data: str, split: str, seed: int = 0) -> Iterator[Document]:
    """The documents of one split, in an order shuffled by the seed.

    Args:
        data: the source, as in the module's docstring.
        split: ``train``, ``calibration`` or ``evaluation``.
        seed: of the order.

    Raises:
        DataError: the source does not exist, is empty, or lacks the field.
    """
    if split not in stdlib.SPLITS:
        raise DataError(f"unknown split {split!r}", hint="train, calibration or evaluation")
    if data == "python-stdlib":
        found: list[Document] = [text for _, text in stdlib.texts(split)]
    else:
        every = list(_read(data))
        if not every:
            raise DataError(
                f"{data}: no text in it", hint="the source must hold at least one non-empty document"
            )
        found = _split(every, split)
    random.Random(seed).shuffle(found)
    yield from found


def _split(every: list[Document], split: str) -> list[Document]:
    """The documents whose content hash falls in the split; a source too small to be split serves every
    split."""
    if len(every) < 100:
        return every
    return [document for document in every if stdlib.split_of(_content(document)) == split]


def _content(document: Document) -> str:
    return document if isinstance(document, str) else json.dumps(document, sort_keys=True)


def fingerprint(data: str) -> str:
    """A hash of what a source holds now; hub data sets by their name.

    It enters a stage's identity, so that an edited text file makes the stage run again.
    """
    digest = hashlib.sha256(data.encode())
    name, _ = _field(data)
    path = Path(name)
    if data == "python-stdlib":
        for split in stdlib.SPLITS:
            for relative, file in stdlib.files(split):
                digest.update(f"{relative}:{file.stat().st_size}\n".encode())
    elif path.exists():
        for file in [path] if path.is_file() else _files(path):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _field(data: str) -> tuple[str, str | None]:
    """Split ``name:field``; a Windows drive or an existing path keeps its colon."""
    name, colon, field = data.rpartition(":")
    if not colon or Path(data).exists():
        return data, None
    return name, field


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())


def _read(data: str) -> Iterator[Document]:
    name, field = _field(data)
    path = Path(name)
    if path.is_dir():
        for file in _files(path):
            yield from _read_file(file, field)
    elif path.is_file():
        yield from _read_file(path, field)
    elif name.count("/") == 1 and not name.startswith((".", "/", "~")) and not path.suffix:
        yield from _read_hub(name, field)
    else:
        raise DataError(
            f"{name}: no such file or folder", hint="--data takes python-stdlib, a file, a folder or org/name"
        )


def _read_file(file: Path, field: str | None) -> Iterator[Document]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text (byte {error.start})", hint="convert it to UTF-8") from error
    if file.suffix != ".jsonl":
        if text.strip():
            yield text
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield from _read_row(f"{file}:{number}", line, field)


def _read_row(where: str, line: str, field: str | None) -> Iterator[Document]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg}") from error
    yield from _document(where, row, field)


def _document(where: str, row: dict[str, Any], field: str | None) -> Iterator[Document]:
    wanted = field or ("messages" if "messages" in row and "text" not in row else "text")
    value = row.get(wanted)
    if not isinstance(value, str | list):
        known = ", ".join(row) or "nothing"
        raise DataError(
            f"{where}: no text in field {wanted!r}; fields: {known}", hint="name the field: FILE.jsonl:FIELD"
        )
    if value:
        yield value


def _read_hub(name: str, field: str | None) -> Iterator[Document]:
    import datasets

    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
    except Exception as error:  # the hub's library raises many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{name}: no such file, and not readable as a hub data set: {reason}") from error
    for number, row in enumerate(rows):
        yield from _document(f"{name} row {number}", row, field)
