"""JSON from outside, read with errors that name file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attar.errors import CheckpointError

DEEPEST = 256
"""Levels of lists and objects; recursion over deeper JSON would overflow the stack."""

_DIGITS = 300
_LONG = re.compile(rb"\d{%d}" % (_DIGITS + 1))
_HINT = "copy or download the file again"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object, of at most :data:`DEEPEST` levels.

    Raises:
        CheckpointError: names the file, and the line where the JSON is wrong.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    content = parse_json(raw, str(path))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object", hint=_HINT)
    _check_depth(content, str(path))
    return content


def parse_json(raw: bytes, where: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """JSON in UTF-8 without numbers of hundreds of digits and without halves of surrogate pairs.

    Args:
        where: the name of the JSON in errors, such as the path of the file.
        pairs: ``object_pairs_hook`` of :func:`json.loads`.

    Raises:
        CheckpointError: names ``where``, and the line where there is one.
    """
    try:
        parse_int = _int if _LONG.search(raw) else None  # slower, so only where a number may be too long
        content = json.loads(raw.decode(), object_pairs_hook=pairs, parse_int=parse_int)
        if b"\\u" in raw:
            json.dumps(content, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}:{error.lineno}: not JSON: {error.msg}", hint=_HINT) from error
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{where}: has half of a surrogate pair in a text", hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 text", hint=_HINT) from error
    except RecursionError as error:
        raise _too_deep(where) from error
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}", hint=_HINT) from error
    return content


def _int(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"has a number of {len(digits)} digits")
    return int(digits)


def _check_depth(content: Any, where: str) -> None:
    level = [content]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]
        if not level:
            return
    raise _too_deep(where)


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(where: str) -> CheckpointError:
    return CheckpointError(f"{where}: JSON of more than {DEEPEST} levels", hint=_HINT)
