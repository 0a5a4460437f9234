"""Errors in the form of the API whose path was called: a row per API; all other paths have OpenAI's.

A form takes the error and the request's id, and returns the status and the body.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from attar.serving.http.anthropic import errors as anthropic
from attar.serving.http.errors import ApiError
from attar.serving.http.ollama import errors as ollama


@dataclass(frozen=True)
class ErrorForm:
    """The errors of the paths of one API.

    Args:
        path: the API's path, or the start of its paths.
        write: status and body of an error, from the error and the request's id.
        header: only of requests that send it; empty: of all.
    """

    path: str
    write: Callable[[ApiError, str], tuple[int, dict[str, Any]]]
    header: str = ""


FORMS = (
    ErrorForm("/v1/messages", anthropic.error_answer),
    ErrorForm("/api", ollama.error_answer),
    ErrorForm("/v1/models", anthropic.error_answer, header=anthropic.VERSION_HEADER),
)


def error_response(error: ApiError, scope: MutableMapping[str, Any]) -> JSONResponse:
    """The response to a refused request; a connection whose body was not read is closed."""
    status, body = _form_of(scope)(error, scope["state"]["request_id"])
    headers = error.headers | ({"Connection": "close"} if error.status == 413 else {})
    headers |= {"request-id": body["request_id"]} if "request_id" in body else {}
    return JSONResponse(body, status_code=status, headers=headers)


def _form_of(scope: MutableMapping[str, Any]) -> Callable[[ApiError, str], tuple[int, dict[str, Any]]]:
    path, headers = scope["path"], Headers(scope=scope)
    for form in FORMS:
        inside = path == form.path or path.startswith(form.path.rstrip("/") + "/")
        if inside and (not form.header or form.header in headers):
            return form.write
    return lambda error, _: (error.status, error.body)
