"""Errors in Ollama's form: {"error": message}."""

from __future__ import annotations

from typing import Any

from attar.serving.http.errors import ApiError


def error_answer(error: ApiError, request_id: str) -> tuple[int, dict[str, Any]]:
    """Status and body of an error; the body is also the line that ends a stream."""
    return error.status, {"error": error.message}
