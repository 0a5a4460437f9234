"""JSON of long answers, piece by piece: Python's own writer lets no other thread run until it is done."""

from __future__ import annotations

import json
from typing import Any

_DEEP = 5  # levels above the entries of log-probabilities


def dump_json(data: Any, levels: int = _DEEP) -> str:
    """JSON without blanks.

    Args:
        levels: of objects and lists whose items are written one by one.

    Raises:
        ValueError: NaN or an infinity, which JSON does not have.
    """
    if levels and isinstance(data, dict):
        return "{" + ",".join(f"{_plain(str(key))}:{dump_json(data[key], levels - 1)}" for key in data) + "}"
    if levels and isinstance(data, list):
        return "[" + ",".join(dump_json(item, levels - 1) for item in data) + "]"
    return _plain(data)


def _plain(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
