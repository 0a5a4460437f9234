"""The package's files as syntax trees, parsed once."""

import ast
from functools import cache
from pathlib import Path

import attar

ROOT = Path(attar.__file__).parent


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())
