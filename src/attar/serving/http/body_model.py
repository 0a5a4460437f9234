"""What the models of all bodies share: unknown fields are refused, and errors name theirs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


def field_error(param: str, message: str) -> PydanticCustomError:
    """The error of a check of several fields, with the field that it names."""
    return PydanticCustomError("wrong_value", "{message}", {"message": message, "param": param})


class StrictModel(BaseModel):
    """Unknown fields, NaN, infinity and numbers in quotes are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
