"""YAML with the line number of every key and value, so that an error can name file and line.

Scalars follow YAML 1.2's core schema, not 1.1: ``no``, ``on`` and ``1:30`` are text, ``1e-4`` is a number.
Merge keys (``<<``) are those of 1.1. Duplicate keys, an anchor that contains itself and a second document are
errors (:func:`parse_documents` takes several documents, and keys twice that only carry anchors). A file has
:data:`MOST_NODES` values at most, and with its aliases written out :data:`MOST_VALUES`: aliases of aliases
grow exponentially.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from attar.errors import RecipeError

MOST_NODES = 50_000
MOST_VALUES = 100_000


@dataclass(frozen=True)
class Located:
    """A value and its location.

    Args:
        value: a scalar, a list of Located, or a dict of name to :class:`YamlEntry`.
        where: ``file:line``, or the command-line option that set it.
    """

    value: Any
    where: str

    def plain(self) -> Any:
        """The value without locations: scalars, lists and dicts."""
        if isinstance(self.value, dict):
            return {name: entry.value.plain() for name, entry in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


@dataclass(frozen=True)
class YamlEntry:
    """The location of a mapping's key, and its value.

    Attributes:
        anchored: an anchor stands in the value, and is used.
        again: the location of the same key before it; empty: there is none.
    """

    where: str
    value: Located
    anchored: bool = False
    again: str = ""


class _TooMany(yaml.MarkedYAMLError):
    """More values than a file may have."""


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's loader, which stops at the bounds, and whose nodes know whether an alias stands for them."""

    def __init__(self, text: str) -> None:
        if text.count("\n") > MOST_NODES:
            raise _TooMany(problem=f"more than {MOST_NODES:,} lines")
        super().__init__(text)
        self._nodes = self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, or the node that an alias stands for; the values of either are counted."""
        mark, before = self.peek_event().start_mark, self._values  # type: ignore[no-untyped-call]
        alias = self.check_event(yaml.AliasEvent)
        self._nodes += not alias
        self._values += not alias
        if self._nodes > MOST_NODES:
            raise _TooMany(problem=f"more than {MOST_NODES:,} values", problem_mark=mark)
        node: Any = super().compose_node(parent, index)
        if alias:
            node.aliased = True
            self._values += self._sizes.get(id(node), 1)
        else:
            self._sizes[id(node)] = self._values - before
        if self._values > MOST_VALUES:
            problem = f"aliases that repeat others: more than {MOST_VALUES:,} values"
            raise _TooMany(problem=problem, problem_mark=mark)
        return node


class _Loader(_BoundedLoader):
    """PyYAML's scanner and parser with the scalar rules of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """The tag of a node without one; a plain scalar has none."""
        plain = kind is yaml.ScalarNode and implicit[0]
        return "" if plain else str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]


def _aliased(node: Any) -> bool:
    """Whether an alias stands for a node or a part of it."""
    parts = node.value if isinstance(node, yaml.CollectionNode) else ()
    flat = (part for item in parts for part in (item if isinstance(item, tuple) else (item,)))
    return getattr(node, "aliased", False) or any(_aliased(part) for part in flat)


_INT = re.compile(r"[-+]?[0-9][0-9_]{0,40}\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_CONSTANTS: dict[str, Any] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_CONSTANTS |= dict.fromkeys(("true", "True", "TRUE"), True)
_CONSTANTS |= dict.fromkeys(("false", "False", "FALSE"), False)
_CONSTANTS |= {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
_TAG = "tag:yaml.org,2002:"
_TAGS = ("", "!", *(f"{_TAG}{kind}" for kind in ("str", "seq", "map")))
_TYPES: dict[str, tuple[type, ...]] = {
    f"{_TAG}int": (int,), f"{_TAG}float": (int, float), f"{_TAG}bool": (bool,), f"{_TAG}null": (type(None),),
}  # fmt: skip


def scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar: None, bool, int, float or the text itself."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return text


def parse_yaml(text: str, name: str, *, line_numbers: bool = True) -> Located:
    """Parse one YAML document.

    Args:
        name: its name in errors and locations, usually the file's path.
        line_numbers: append ``:line`` to locations (False for a value from the command line).

    Raises:
        RecipeError: one line with the location, for anything that is not one well-formed document.
    """
    with _yaml_errors(text, name, line_numbers):
        node = _Loader(text).get_single_node()
    reader = _NodeReader(name, line_numbers)
    if node is None:
        return Located(None, reader.location(0))
    return reader.read(node, ())


def parse_documents(text: str, name: str) -> list[Located]:
    """Parse a file of several YAML documents, separated by ``---``; empty ones are left out.

    Args:
        name: its name in errors and locations; lines are counted from the start of the file.

    Raises:
        RecipeError: one line with the location, for anything that is not well-formed.
    """
    nodes: list[yaml.Node] = []
    with _yaml_errors(text, name, True):
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                nodes.append(node)
    reader = _NodeReader(name, True, anchors=True)
    return [root for root in (reader.read(node, ()) for node in nodes) if root.value is not None]


def read_yaml(path: Path) -> Located:
    """Parse a YAML file.

    Raises:
        RecipeError: the file is missing, not readable, not UTF-8 or not well-formed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not text in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_yaml(text, str(path))


def safe_values(text: str) -> Any:
    """The values of a document of others as PyYAML reads it (YAML 1.1, the last of equal keys), bounded.

    Raises:
        yaml.YAMLError: it is not well-formed, or has too many values.
    """
    try:
        return _BoundedLoader(text).get_single_data()
    except (ValueError, RecursionError, OverflowError) as error:  # a date or a number that is none; its depth
        raise yaml.YAMLError(str(error)) from error


@contextmanager
def _yaml_errors(text: str, name: str, line_numbers: bool) -> Iterator[None]:
    """Raise PyYAML's errors as :class:`RecipeError`."""
    try:
        yield
    except _TooMany as error:
        where = f"{name}:{error.problem_mark.line + 1}" if line_numbers and error.problem_mark else name
        raise RecipeError(f"{where}: {error.problem}", hint="write a smaller file, or several") from None
    except yaml.MarkedYAMLError as error:
        raise RecipeError(_syntax_message(error, name, line_numbers)) from None
    except RecursionError:
        raise RecipeError(f"{name}: nested too deeply") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(f"{name}:{line}: a character that YAML does not allow") from None


def _syntax_message(error: yaml.MarkedYAMLError, name: str, line_numbers: bool) -> str:
    """PyYAML's message in one line."""
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}" if line_numbers and mark else name
    problem = ": ".join(part for part in (error.context, error.problem) if part)
    if "'\\t'" in problem:
        problem = "a tab where YAML wants spaces"
    return f"{where}: not valid YAML: {problem}"


@dataclass
class _NodeReader:
    """Turns PyYAML's nodes into Located values.

    Attributes:
        anchors: note which entries carry anchors; these may be there again.
    """

    name: str
    line_numbers: bool
    anchors: bool = False

    def location(self, line: int) -> str:
        return f"{self.name}:{line + 1}" if self.line_numbers else self.name

    def read(self, node: yaml.Node, parents: tuple[int, ...]) -> Located:
        where = self.location(node.start_mark.line)
        if id(node) in parents:
            raise RecipeError(f"{where}: an alias that repeats itself without end")
        if node.tag not in (*_TAGS, *_TYPES):
            raise RecipeError(f"{where}: the tag {node.tag!r} is not allowed", hint="leave it out")
        if isinstance(node, yaml.MappingNode):
            return Located(dict(self.entries(node, (*parents, id(node)))), where)
        if isinstance(node, yaml.SequenceNode):
            return Located([self.read(item, (*parents, id(node))) for item in node.value], where)
        return Located(_tagged(node, where), where)

    def entries(self, node: yaml.MappingNode, parents: tuple[int, ...]) -> Iterator[tuple[str, YamlEntry]]:
        """The entries of a mapping; those of merge keys first, so that its own replace them."""
        for key, value in node.value:
            if key.value == "<<" and key.tag == "":
                yield from self.merged(value, parents)
        first: dict[str, YamlEntry] = {}
        for key, value in node.value:
            where = self.location(key.start_mark.line)
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"{where}: a key must be a word")
            if key.value == "<<" and key.tag == "":
                continue
            entry = YamlEntry(where, self.read(value, parents), self.anchors and _aliased(value))
            if key.value in first:
                before = first[key.value]
                if not (entry.anchored and before.anchored):
                    raise RecipeError(f"{where}: key {key.value!r} is given twice (first at {before.where})")
                entry = replace(entry, again=before.where)
            first[key.value] = entry
            yield key.value, entry

    def merged(self, node: yaml.Node, parents: tuple[int, ...]) -> Iterator[tuple[str, YamlEntry]]:
        """The entries that a merge key brings, of several mappings the first one's last."""
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for part in reversed(parts):
            if not isinstance(part, yaml.MappingNode):
                raise RecipeError(f"{self.location(node.start_mark.line)}: << takes mappings alone")
            located = self.read(part, parents)
            yield from located.value.items()


def _tagged(node: yaml.Node, where: str) -> Any:
    """The value of a scalar: by its tag, else by its text where it is not quoted."""
    if node.tag not in _TYPES:
        return scalar(node.value) if node.tag == "" else node.value
    value = scalar(node.value)
    if type(value) not in _TYPES[node.tag]:
        raise RecipeError(f"{where}: {node.value!r} is no {node.tag.removeprefix(_TAG)}")
    return float(value) if node.tag == f"{_TAG}float" else value
