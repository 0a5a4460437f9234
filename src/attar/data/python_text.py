"""Text that every machine with attar has: the running Python's own source and documentation.

python-stdlib    source files of the standard library. A whole file is in one split, by a hash of its path in
                 the library: the same on every machine and in every version of Python.
python-docs      English prose of the Python Software Foundation: the help topics of the language reference
                 (``pydoc_data/topics.py``, about 380,000 characters without repetitions) and the docstrings
                 of 300 characters or more of the standard library without its tests. A docstring is in the
                 split of its source file, so that no text evaluated here was trained on there. The topics are
                 divided 20 : 60 : 20, because calibration needs most and has little otherwise.
python-docs-chat the same as conversations, for the model's own chat template.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from attar.data.splits import LONG, Document, by_position, split_of

PROSE, CHAT = "python-docs", "python-docs-chat"
SHARES = {"train": 0.2, "calibration": 0.6, "evaluation": 0.2}
LEAST = 300  # characters of a docstring
ANSWER = 1_500  # characters of an answer, about
TURNS = 4  # questions of a conversation, at most
SKIP = ("site-packages", "dist-packages", "__pycache__", "lib2to3/tests/data", "config-")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BODIES = ("body", "handlers", "orelse", "finalbody", "cases")  # of a statement, in the order of its fields
LARGEST = 400_000  # bytes: longer files are generated tables


def files(split: str) -> list[tuple[str, Path]]:
    """(relative path, file) of one split, sorted."""
    return [(name, file) for name, file in all_files() if split_of(name) == split]


def all_files() -> list[tuple[str, Path]]:
    """(relative path, file) of all splits, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, folders, names in os.walk(root):
        here = Path(folder).relative_to(root)
        # pruned here: an environment's site-packages have many times the files of the library
        folders[:] = [name for name in folders if not _skipped(here / name)]
        paths += [here / name for name in names if name.endswith(".py") and not _skipped(here / name)]
    return sorted((path.as_posix(), root / path) for path in paths)


def _skipped(path: Path) -> bool:
    return any(part in path.as_posix() for part in SKIP)


def texts(split: str) -> Iterator[tuple[str, str]]:
    """(relative path, source text) of the UTF-8 files of one split, sorted."""
    for name, file in files(split):
        raw = file.read_bytes()
        if not 0 < len(raw) <= LARGEST:
            continue
        try:
            yield name, raw.decode("utf-8")
        except UnicodeDecodeError:  # test data in other encodings
            continue


def documents(data: str, split: str) -> list[Document]:
    """The documents of one split of ``python-docs`` or ``python-docs-chat``."""
    if data == PROSE:
        return [text for _, text in _texts(split)]
    return [
        conversation for question, text in _texts(split) for conversation in conversations(question, text)
    ]


def conversations(question: str, text: str) -> Iterator[list[dict[str, str]]]:
    """A text as answers to a question, at most :data:`TURNS` per conversation: messages with ``role`` and
    ``content``."""
    answers = _portions(text)
    for start in range(0, len(answers), TURNS):
        prompt = question if start == 0 else f"{question} Go on after what you said before."
        messages = []
        for answer in answers[start : start + TURNS]:
            messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            prompt = "Go on."
        yield messages


def _portions(text: str) -> list[str]:
    """The text in parts of whole paragraphs, about :data:`ANSWER` characters each."""
    portions = [""]
    for paragraph in text.split("\n\n"):
        if len(portions[-1]) > ANSWER:
            portions.append("")
        portions[-1] += paragraph + "\n\n"
    return [portion.strip() for portion in portions if portion.strip()]


@lru_cache(maxsize=3)
def _texts(split: str) -> tuple[tuple[str, str], ...]:
    """(question, text) of one split: topics, then docstrings by file. Cached, because a stage reads the text
    a second time for its record."""
    titles = {text: title for title, text in _topics()}
    parts = _split_topics([text for _, text in _topics()])
    topics = [(f"What does the Python reference say about {titles[text]}?", text) for text in parts[split]]
    return (*topics, *_docstrings(split))


def _split_topics(texts: list[str]) -> dict[str, list[str]]:
    """Topics by position, in the order of their hashes."""
    hashed = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    wrapped: list[Document] = [[{"text": text}] for text in hashed]  # messages are never cut
    parts = by_position(wrapped, SHARES)
    return {
        name: [messages[0]["text"] for messages in part if isinstance(messages, list)]
        for name, part in parts.items()
    }


def _topics() -> list[tuple[str, str]]:
    """(title, text) of the help topics, shortest first, each without the long paragraphs of earlier ones.
    Empty for a Python without help topics."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    seen: set[str] = set()
    sections = []
    for title, text in sorted(topics.items(), key=lambda item: (len(item[1]), item[0])):
        kept = []
        for paragraph in text.split("\n\n"):
            even = " ".join(paragraph.split())
            if even not in seen:
                kept.append(paragraph)
            if len(even) >= LONG // 2:
                seen.add(even)
        sections.append((title, "\n\n".join(kept)))
    return [(title, text) for title, text in sections if len(text) >= LEAST]


def _docstrings(split: str) -> Iterator[tuple[str, str]]:
    """(question, docstring) of the library's modules, classes and functions."""
    for name, text in texts(split):
        if "test" in name or name.startswith(("pydoc_data/", "lib2to3/")):
            continue
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for owner, docstring in _of_source(module, text):
            if len(docstring) >= LEAST and docstring.isascii():
                yield f"What is {owner} in Python, and how is it used?", docstring


def _of_source(module: str, text: str) -> Iterator[tuple[str, str]]:
    """(name, docstring) of a file's module, classes and functions."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    nodes: deque[ast.AST] = deque([tree])
    while nodes:  # breadth first, as ast.walk, but for expressions: no docstring is inside of one
        node = nodes.popleft()
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield module if isinstance(node, ast.Module) else f"{module}.{node.name}", docstring
        for field in BODIES:
            nodes.extend(getattr(node, field, ()))
