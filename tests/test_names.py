"""One name for one thing: class names unique in the package, no twin files, values named by what they are."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.syntax import ROOT, tree_of

# Names that say nothing of a value, and words of our own where the field has one (CONTRIBUTING.md, "Names").
VAGUE = {"found", "made", "said", "told", "each", "place", "places", "whoever", "nobody"}
VAGUE |= {"one", "own", "whole", "rest", "asked"}
COINED = {"beside", "purse", "stock", "roster", "hope", "hopes", "mourned", "taken", "to_come", "look_at"}
SUFFIXES = re.compile(r"(ing|ion|ed|es|s|e|_solver)$")


@cache
def trees() -> dict[str, ast.Module]:
    """Module path in the package, to its syntax tree."""
    return {str(path.relative_to(ROOT)): tree_of(path) for path in sorted(ROOT.rglob("*.py"))}


def type_names(tree: ast.Module) -> Iterator[str]:
    """Classes and type aliases (CamelCase) of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and re.match(r"_?[A-Z]\w*[a-z]", target.id):
                yield target.id


def bound_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Variables, parameters, fields and functions that a module defines, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def test_a_class_name_stands_for_one_class():
    homes = defaultdict(list)
    for path, tree in trees().items():
        for name in type_names(tree):
            homes[name].append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_folder_has_no_twin_files():
    stems = defaultdict(list)
    for path in trees():
        parent, stem = Path(path).parent, Path(path).stem
        stems[str(parent), SUFFIXES.sub("", SUFFIXES.sub("", stem))].append(path)
    assert [paths for paths in stems.values() if len(paths) > 1] == []


def test_values_are_named_by_what_they_are():
    wrong = [
        f"{path}:{line} {name}"
        for path, tree in trees().items()
        for name, line in bound_names(tree)
        if name.strip("_").lower() in VAGUE | COINED
    ]
    assert wrong == []
