"""What the models of all bodies share: unknown fields are refused, errors name theirs, and JSON is not nested
deeper than what walks over it recursively, as templates do, can bear."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

MAX_LEVELS = 64  # of a field of a request


def field_error(param: str, message: str) -> PydanticCustomError:
    """The error of a check of several fields, with the field that it names."""
    return PydanticCustomError("wrong_value", "{message}", {"message": message, "param": param})


class StrictModel(BaseModel):
    """Unknown fields, NaN, infinity and numbers in quotes are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


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
