"""Errors in OpenAI's shape, with their status codes.

{"error": {"message", "type", "param", "code"}}

400  a wrong value, a prompt that is too long      404  an unknown model or path
401  a missing or wrong key                        413  a body that is too large
429  the queue is full (Retry-After)               503  the server shuts down, or the engine has stopped
500  a bug, or the model failed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from attar.errors import AttarError, DataError, SettingsError
from attar.runtime.admission import BusyError
from attar.serving.services.messages import UnavailableError


class ErrorDetail(BaseModel):
    """An error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


class ApiError(Exception):
    """An error response.

    Args:
        code: OpenAI's name of the reason.
        retry_s: seconds for ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_s = status, message, param, code, retry_s

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorBody(error=detail).model_dump()

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


_FIELDS = {"json_schema": "response_format", "stop_ids": "stop_token_ids"}  # attar's field to the body's
_MEMBERS = ("str", "int", "float", "bool", "dict", "list")
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def api_error(error: AttarError, retry_s: int) -> ApiError:
    """The response to an error of the engine or the tokenizer."""
    if isinstance(error, BusyError):
        return ApiError(429, error.message, code="queue_full", retry_s=retry_s)
    if isinstance(error, SettingsError):
        param = _FIELDS.get(error.field, error.field) if error.field.isidentifier() else None
        code = None if param else "context_length_exceeded"
        return ApiError(400, error.message, param=param, code=error.kind or code)
    if isinstance(error, DataError):
        return ApiError(400, error.message, code=error.kind)
    if isinstance(error, UnavailableError):
        return ApiError(503, error.message, code="target_unavailable", retry_s=1)
    return ApiError(500, error.message)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The response to pydantic's errors: the deepest of the first field. The value is not repeated."""
    errors = errors[:100]
    start = _path(errors[0])[:1]
    first = max((error for error in errors if _path(error)[:1] == start), key=lambda error: len(_path(error)))
    nested = first.get("ctx", {}).get("param")
    kind, param = str(first.get("type", "")), ".".join([*_path(first), *([nested] if nested else [])]) or None
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: {param!r}.", param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: {param!r}."
        return ApiError(400, message, param=param, code="missing_required_parameter")
    reason = str(first.get("msg", "not allowed")).removeprefix("Value error, ")
    return ApiError(
        400, f"Invalid value for {param!r}: {reason}" if param else reason, param=param, code="invalid_value"
    )


def _path(error: Mapping[str, Any]) -> list[str]:
    """Fields and list indices of an error, without pydantic's names for members of a union."""
    parts = [str(part) for part in error.get("loc", ()) if part != "[key]"]
    return [part for part in parts if part not in _MEMBERS and "[" not in part and "-" not in part]
