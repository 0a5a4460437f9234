"""YAML read with the place of every value kept, so that an error can name file and line.

Scalars follow YAML 1.2's core schema, not 1.1: ``no``, ``on`` and ``1:30`` are text, ``1e-4`` is a number. A
key given twice, an anchor that contains itself and a second document are errors
(:func:`parse_documents` takes several).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from attar.errors import RecipeError

_MOST_VALUES = 100_000  # a recipe is small; aliases of aliases are not allowed to grow without end


@dataclass(frozen=True)
class Located:
    """A value and where it stands.

    Args:
        value: a scalar, a list of Located, or a dict of name to :class:`Entry`.
        where: ``file:line``, or the words of the command line that set it.
    """

    value: Any
    where: str

    def plain(self) -> Any:
        """The value without places: scalars, lists and dicts."""
        if isinstance(self.value, dict):
            return {name: entry.value.plain() for name, entry in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


@dataclass(frozen=True)
class Entry:
    """One ``key: value`` of a mapping.

    Args:
        where: place of the key.
        value: what it is set to.
    """

    where: str
    value: Located


class _Loader(yaml.SafeLoader):
    """PyYAML's scanner and parser with the scalar rules of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_INT = re.compile(r"[-+]?[0-9][0-9_]{0,40}\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_TAGS = ("!", *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")))
_WORDS |= {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}


def scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar: None, bool, int, float or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return text


def parse_yaml(text: str, name: str, *, line_numbers: bool = True) -> Located:
    """Parse one YAML document.

    Args:
        text: the document.
        name: what to call it in errors and places, usually the file's path.
        line_numbers: append ``:line`` to places (False for a value from the command line).

    Raises:
        RecipeError: one line with the place, for anything that is not one well-formed document.
    """
    with _one_line(text, name, line_numbers):
        node = _Loader(text).get_single_node()
    reader = _Reader(name, line_numbers)
    if node is None:
        return Located(None, reader.place(0))
    return reader.read(node, ())


def parse_documents(text: str, name: str) -> list[Located]:
    """Parse a file of several YAML documents, divided by ``---``; empty ones are left out.

    Args:
        text: the file.
        name: what to call it in errors and places; lines are counted through the whole file.

    Raises:
        RecipeError: one line with the place, for anything that is not well-formed.
    """
    nodes: list[yaml.Node] = []
    with _one_line(text, name, True):
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                nodes.append(node)
    reader = _Reader(name, True)
    return [each for each in (reader.read(node, ()) for node in nodes) if each.value is not None]


def read_documents(path: Path) -> list[Located]:
    """:func:`parse_documents` of a file.

    Raises:
        RecipeError: the file is missing, not readable, not UTF-8 or not well-formed.
    """
    return parse_documents(_text(path), str(path))


def read_yaml(path: Path) -> Located:
    """Parse a YAML file.

    Raises:
        RecipeError: the file is missing, not readable, not UTF-8 or not well-formed.
    """
    return parse_yaml(_text(path), str(path))


def _text(path: Path) -> str:
    """The text of a file that a person wrote."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe file") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not text in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None


@contextmanager
def _one_line(text: str, name: str, line_numbers: bool) -> Iterator[None]:
    """PyYAML's errors as ours."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        raise RecipeError(_syntax(error, name, line_numbers)) from None
    except RecursionError:
        raise RecipeError(f"{name}: nested too deeply") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(f"{name}:{line}: a character that YAML does not allow") from None


def _syntax(error: yaml.MarkedYAMLError, name: str, line_numbers: bool) -> str:
    """One line out of PyYAML's several."""
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}" if line_numbers and mark else name
    problem = ": ".join(part for part in (error.context, error.problem) if part)
    if "'\\t'" in problem:
        problem = "a tab where YAML wants spaces"
    return f"{place}: not valid YAML: {problem}"


@dataclass
class _Reader:
    """Turns PyYAML's nodes into Located values."""

    name: str
    line_numbers: bool
    values: int = 0

    def place(self, line: int) -> str:
        return f"{self.name}:{line + 1}" if self.line_numbers else self.name

    def read(self, node: yaml.Node, above: tuple[int, ...]) -> Located:
        where = self.place(node.start_mark.line)
        self.values += 1
        if id(node) in above or self.values > _MOST_VALUES:
            raise RecipeError(f"{where}: an alias that repeats itself without end")
        if node.tag not in _TAGS:
            raise RecipeError(f"{where}: the tag {node.tag!r} is not allowed", hint="recipes need no tags")
        if isinstance(node, yaml.MappingNode):
            return Located(dict(self.entries(node, (*above, id(node)))), where)
        if isinstance(node, yaml.SequenceNode):
            return Located([self.read(item, (*above, id(node))) for item in node.value], where)
        plain = getattr(node, "style", None) is None
        return Located(scalar(node.value) if plain else node.value, where)

    def entries(self, node: yaml.MappingNode, above: tuple[int, ...]) -> Iterator[tuple[str, Entry]]:
        first: dict[str, str] = {}
        for key, value in node.value:
            where = self.place(key.start_mark.line)
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"{where}: a key must be a word")
            if key.value in first:
                raise RecipeError(f"{where}: key {key.value!r} is given twice (first at {first[key.value]})")
            first[key.value] = where
            yield key.value, Entry(where, self.read(value, above))
