"""``--set stages.2.ratio=0.3``: change one value of a recipe from the command line.

The value is parsed as YAML; later errors about it name the option instead of a line of the file.
"""

from __future__ import annotations

from collections.abc import Callable

from attar.errors import RecipeError, did_you_mean
from attar.yaml import Located, YamlEntry, parse_yaml

Names = Callable[[Located], list[str]]


def override(root: Located, text: str, names: Names) -> Located:
    """A copy of the recipe ``root`` with one value replaced.

    Args:
        text: ``path=value``; a path is keys joined by dots; a stage is its index (from 0) or its name.
        names: returns the stages' names, for paths such as ``stages.recover.steps``.

    Raises:
        RecipeError: no ``=``, an empty part, a stage that does not exist, a path into a scalar.
    """
    path, equals, value = text.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(f"--set {text}: not of the form key=value", hint="--set stages.2.ratio=0.3")
    where = f"--set {text}"
    return _replace(root, parts, parse_yaml(value.strip(), where, line_numbers=False), where, names)


def _replace(node: Located, parts: list[str], new: Located, where: str, names: Names) -> Located:
    if not parts:
        return new
    head, deeper = parts[0], parts[1:]
    if isinstance(node.value, list):
        index = _index(node, head, where, names)
        items = [
            _replace(item, deeper, new, where, names) if i == index else item
            for i, item in enumerate(node.value)
        ]
        return Located(items, node.where)
    if node.value is None or isinstance(node.value, bool):  # evaluate.tokens=100 replaces `evaluate: false`
        node = Located({}, where)
    if not isinstance(node.value, dict):
        raise RecipeError(f"{where}: {node.value!r} has no keys, so {head!r} cannot be set in it")
    old = node.value.get(head, YamlEntry(where, Located(None, where)))
    return Located(
        node.value | {head: YamlEntry(where, _replace(old.value, deeper, new, where, names))}, node.where
    )


def _index(node: Located, head: str, where: str, names: Names) -> int:
    """The index in the list: a number counted from 0, or a stage's name."""
    if head.isdigit():
        if int(head) < len(node.value):
            return int(head)
        last = len(node.value) - 1
        raise RecipeError(
            f"{where}: no stage {head}", hint=f"the list counts from 0 to {last}; names work too"
        )
    known = names(node)
    if head not in known:
        raise RecipeError(f"{where}: no stage {head!r}{did_you_mean(head, known)}")
    return known.index(head)
