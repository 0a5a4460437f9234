"""How deep JSON is nested: what walks over it recursively, as templates do, needs a bound."""

from __future__ import annotations

from typing import Any

MAX_LEVELS = 64  # of a field of a request


def levels_exceed(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than ``most`` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        if not level:
            return False
        level = [child for parent in level for child in _children(parent)]
    return bool(level)


def _children(value: dict[str, Any] | list[Any]) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value
    return [part for part in parts if isinstance(part, dict | list)]
