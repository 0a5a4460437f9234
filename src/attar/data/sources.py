"""Text sources: Python's documentation and source, files, folders, JSONL, hub data sets.

A source is one string:

    python-docs              English prose: the running Python's documentation (see python_text.py)
    python-docs-chat         the same as conversations
    python-stdlib            the running Python's standard-library source
    notes.txt                one document
    corpus/                  every .txt, .md, .py, .rst and .jsonl file below it: one document per file, or
                             per JSONL line
    chats.jsonl              one document per line, field ``text`` or ``messages``, or ``prompt`` and
                             ``completion``, both texts or both messages
    chats.jsonl:answer       the same with the field ``answer``
    train.tsv                labelled texts: one document per line, without the label in its last column
    org/name[:field]         a hub data set, through ``datasets`` (its split train)
    whole:SOURCE             all of a file, folder or data set for every split, such as a test set
    SOURCE + SOURCE          a mixture: as many rows of each, in turns

``auto``, the default of every verb, becomes one of the first three (see auto.py). All but ``whole:`` are
split into text for training, calibration and evaluation (see splits.py).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from attar.checkpoint.hashing import sha256_file
from attar.data import python_text
from attar.data.settings import SOURCES
from attar.data.splits import BY_HASH, SPLITS, Document, Split, take
from attar.errors import DataError

T = TypeVar("T")

SUFFIXES = (".txt", ".md", ".py", ".rst", ".jsonl")
UNSPLIT = "whole:"
_PLUS = re.compile(r" +\+ +")
COMPRESSION = "compression"
"""What a method without a training of its own reads: all text but the evaluation's."""

PAIR = {"prompt", "completion"}


class MessageList(list[dict[str, Any]]):
    """The messages of a conversation.

    Args:
        where: file and line, for errors.
        first: number of the first message that is a completion; those before it are its prompt.
        plain: a prompt and its completion, as text that no chat template changes.
    """

    def __init__(
        self, messages: list[dict[str, Any]], where: str, *, first: int = 0, plain: bool = False
    ) -> None:
        super().__init__(messages)
        self.where, self.first, self.plain = where, first, plain


def documents(data: str, split: str, seed: int = 0) -> Iterator[Document]:
    """The documents of a split (``train``, ``calibration``, ``evaluation``), shuffled by the seed.

    Raises:
        DataError: the source does not exist, is empty, or lacks the field.
    """
    yield from read_split(data, split, seed).documents


def sources(data: str) -> list[str]:
    """The sources of a mixture; of any other source, itself."""
    return [data] if _exists(data.removeprefix(UNSPLIT)) else _PLUS.split(data)


def in_turns(parts: Iterable[Iterable[T]]) -> Iterator[T]:
    """The first of each part, the second of each, and so on until all are at their end."""
    missing = object()
    for turn in zip_longest(*parts, fillvalue=missing):
        yield from (value for value in turn if value is not missing)  # type: ignore[misc]


def read_split(data: str, split: str, seed: int = 0, *, unsplit: bool = False) -> Split:
    """The same as a :class:`Split`; with ``unsplit``, all of a source that would be split by position.
    :data:`COMPRESSION` is the text of training and of calibration. Documents of a mixture come in turns."""
    if len(names := sources(data)) > 1:
        splits = [read_split(name, split, seed, unsplit=unsplit) for name in names]
        shared = next((part.shared for part in splits if part.shared), "")
        return Split(list(in_turns(part.documents for part in splits)), shared)
    if split == COMPRESSION:
        return _all_but_evaluation(data, seed, unsplit)
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}", hint="train, calibration or evaluation")
    if data == "python-stdlib":
        chosen = Split([text for _, text in python_text.texts(split)])
    elif data in (python_text.PROSE, python_text.CHAT):
        chosen = Split(python_text.documents(data, split))
    else:
        chosen = _of_files(data, split, unsplit)
    shuffled = list(chosen.documents)
    random.Random(seed).shuffle(shuffled)
    return Split(shuffled, chosen.shared)


def _all_but_evaluation(data: str, seed: int, unsplit: bool) -> Split:
    calibration, train = (read_split(data, part, seed, unsplit=unsplit) for part in ("calibration", "train"))
    if calibration.shared or data.startswith(UNSPLIT):  # both are all of it
        return calibration
    joined = [*calibration.documents, *train.documents]
    random.Random(seed).shuffle(joined)
    return Split(joined)


def _of_files(data: str, split: str, unsplit: bool) -> Split:
    every = list(_read(data))
    if not every:
        raise DataError(f"{data}: no text in it", hint="the source must hold at least one non-empty document")
    if data.startswith(UNSPLIT):
        return Split(every)  # the user vouches for it; the stages that read it are recorded (seen.py)
    if unsplit and len(every) < BY_HASH:
        return Split(every, "it is too short to be cut into splits of one row each")
    return take(every, split)


def fingerprint(data: str) -> str:
    """A hash of a source's current content (of a hub data set, its name): part of a stage's identity."""
    if len(names := sources(data)) > 1:
        return hashlib.sha256(" ".join(map(fingerprint, names)).encode()).hexdigest()
    digest = hashlib.sha256(data.encode(errors="surrogateescape"))
    if data in ("python-stdlib", python_text.PROSE, python_text.CHAT):
        for relative, file in python_text.all_files():
            digest.update(f"{relative}:{file.stat().st_size}\n".encode())
        return digest.hexdigest()
    name, _ = _field(data)
    path = Path(name)
    for file in [path] if path.is_file() else _files(path) if path.is_dir() else []:
        digest.update(f"{file.name}:{_explained(file, partial(sha256_file, file))}\n".encode())
    return digest.hexdigest()


def path_of(data: str) -> Path:
    """The file or folder that a source names, without its field; it need not exist."""
    return Path(_field(data)[0])


def _field(data: str) -> tuple[str, str | None]:
    """Split ``name:field``; an existing path keeps its colon.

    Raises:
        DataError: there is no name.
    """
    data = data.removeprefix(UNSPLIT)
    name, colon, field = data.rpartition(":")
    if _exists(data) or not colon:
        name, field = data, ""
    if not name.strip():
        raise DataError("the data has no name", hint=f"--data takes {SOURCES}")
    return name, field or None


def _exists(name: str) -> bool:
    return _explained(name, Path(name).exists)


def _explained(where: object, read: Callable[[], T]) -> T:
    """The result of ``read``; an error of the system becomes a DataError."""
    try:
        return read()
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in a path
        raise DataError(f"{where!r}: cannot be read: {error}") from error


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
        raise DataError(f"{name}: no such file or folder", hint=f"--data takes {SOURCES}")


def _read_file(file: Path, field: str | None) -> Iterator[Document]:
    text = read_text(file)
    if file.suffix == ".tsv":
        cells = (line.split("\t") for line in text.split("\n"))
        yield from (part for row in cells if (part := "\t".join(row[:-1] or row)).strip())
        return
    if file.suffix != ".jsonl":
        if text.strip():
            yield text
        return
    for where, row in parse_rows(file, text):
        yield from _document(where, row, field)


def json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file of JSON lines, each with its place, ``FILE:NUMBER``. Raises DataError."""
    return parse_rows(file, read_text(file))


def parse_rows(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    """See :func:`json_rows`."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield (where := f"{file}:{number}"), parse_row(where, line)


def read_text(file: Path) -> str:
    """The UTF-8 text of a file, its lines ended by ``\\n``. Raises DataError."""
    raw = _explained(file, file.read_bytes)
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text (byte {error.start})", hint="convert it to UTF-8") from error


def parse_row(where: str, line: str) -> Any:
    """The JSON of a line. Raises DataError, which names ``where``."""
    try:
        return json.loads(line)
    except RecursionError as error:
        raise DataError(f"{where}: not JSON that can be read: nested too deeply") from error
    except ValueError as error:  # not JSON, or an integer of thousands of digits
        raise DataError(f"{where}: not JSON: {getattr(error, 'msg', error)}") from error


def _document(where: str, row: Any, field: str | None) -> Iterator[Document]:
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a row must be a JSON object, not {type(row).__name__}",
            hint='write rows as {"text": "..."} or {"messages": [...]}',
        )
    if field is None and row.keys() >= PAIR and not row.keys() & {"text", "messages"}:
        yield from _pair(where, row["prompt"], row["completion"])
        return
    field = field or ("messages" if "messages" in row and "text" not in row else "text")
    value = row.get(field)
    if not isinstance(value, str | list):
        fields = ", ".join(row) or "nothing"
        raise DataError(
            f"{where}: no text in field {field!r}; fields: {fields}", hint="name the field: FILE.jsonl:FIELD"
        )
    check_unicode(f"{where}: {field}", value)
    if isinstance(value, str):
        if value.strip():
            yield value
    elif value:
        check_messages(f"{where}: {field}", value)
        yield MessageList(value, where)


def _pair(where: str, prompt: Any, completion: Any) -> Iterator[MessageList]:
    """A prompt and its completion, where there is one."""
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list) or type(value) is not type(prompt):
            raise DataError(
                f"{where}: {name} is no {'list of messages' if isinstance(prompt, list) else 'text'}",
                hint="write prompt and completion both as text, or both as messages",
            )
        check_unicode(f"{where}: {name}", value)
        if isinstance(value, list):
            check_messages(f"{where}: {name}", value)
    if isinstance(prompt, list) and completion:
        yield MessageList([*prompt, *completion], where, first=len(prompt))
    elif isinstance(prompt, str) and completion.strip():
        pair = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        yield MessageList(pair, where, plain=True)


def check_unicode(where: str, value: Any) -> None:
    """Refuse half of a surrogate pair, which no tokenizer takes. Raises DataError."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise DataError(
            f"{where} holds half of a surrogate pair ({half})",
            hint="write the whole character, or leave it out",
        ) from error


def check_messages(where: str, messages: list[Any]) -> None:
    """Refuse what is not a list of messages with role and content. Raises DataError."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(
                f"{where}[{number}] must be a message, not {type(message).__name__}",
                hint='a message is {"role": "user", "content": "..."}',
            )
        if not isinstance(message.get("role"), str):
            raise DataError(f"{where}[{number}] has no role", hint="user, assistant or system")
        calls = message.get("tool_calls") is not None
        if not isinstance(message.get("content"), str | list) and not calls:
            raise DataError(f"{where}[{number}] has no content", hint="content is a text, or a list of parts")


def _read_hub(name: str, field: str | None) -> Iterator[Document]:
    import datasets

    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
    except Exception as error:  # the hub's library raises many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{name}: no such file, and not readable as a hub data set: {reason}") from error
    for number, row in enumerate(rows):
        yield from _document(f"{name} row {number}", row, field)
