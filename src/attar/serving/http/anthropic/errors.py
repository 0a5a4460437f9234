"""Errors in Anthropic's form.

{"type": "error", "error": {"type", "message"}, "request_id"}

The statuses are attar's, except for a full queue: 529, which Anthropic's clients know as an overload. 429 is
a limit of the caller. A prompt beyond the context is "too long", by which agents know to shorten it.
"""

from __future__ import annotations

from typing import Any

from attar.serving.http.errors import ApiError

VERSION_HEADER = "anthropic-version"
OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def error_answer(error: ApiError, request_id: str) -> tuple[int, dict[str, Any]]:
    """Status and body of an error; the body is also the event that ends a stream."""
    status = OVERLOADED if error.code == "queue_full" else error.status
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    too_long = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    detail = {"type": kind, "message": too_long + error.message}
    return status, {"type": "error", "error": detail, "request_id": request_id}
