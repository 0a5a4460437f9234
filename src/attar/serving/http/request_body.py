"""From the bytes of a body to a validated request: bounded before validation, large bodies in a thread.

    bytes → number of lists and objects → JSON → number of values → pydantic

Parsing JSON of a bounded length takes milliseconds. Validating all its values takes a hundred times as long
and holds the interpreter, so bodies with more values than any request needs are refused before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from attar.serving.http.body_model import MAX_LEVELS, levels_exceed
from attar.serving.http.errors import ApiError, validation_error
from attar.serving.http.protocol import IGNORED
from attar.serving.http.service import SMALL

IGNORED_HEADER = "X-Ignored-Fields"
MAX_VALUES = 8192  # in lists and objects; token ids of prompts and schemas are not counted
MAX_ALL_VALUES = 1 << 16  # with them
MAX_IDS = 1 << 18  # in a list of token ids, where the model's context has no limit
_UNCOUNTED = ("prompt", "tokens", "context", "schema", "parameters", "input_schema")
_SCHEMAS = ("response_format", "tools", "text", "output_config")  # fields that hold them
_IDS = ("prompt", "tokens", "context")  # whose type has two levels at most
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

BodyModel = TypeVar("BodyModel", bound=BaseModel)


class BodyRoute(APIRoute):
    """A route whose argument ``body`` is parsed here; FastAPI would parse it on the event loop."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """See FastAPI; a route without a body is unchanged."""
        model = get_type_hints(self.endpoint).get("body")
        if model is None:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            body, ignored = await read_body(request, model)
            response: Response = await self.endpoint(body=body, request=request)
            if ignored:
                noted = response.headers.get(IGNORED_HEADER)
                response.headers[IGNORED_HEADER] = ", ".join([*([noted] if noted else []), *ignored])
            return response

        return handle


async def read_body(request: Request, model: type[BodyModel]) -> tuple[BodyModel, list[str]]:
    """The body of a request, and its fields that change nothing.

    Raises:
        ApiError: 400, it is invalid; 499, the client has disconnected.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ApiError(499, "the client has disconnected") from None
    if not raw:
        raise ApiError(400, "the body is missing")
    if not (_is_json(request.headers) or getattr(model, "ANY_MEDIA_TYPE", False)):
        raise ApiError(400, "the body is not a JSON object; send one with Content-Type: application/json")
    service, max_ids = request.app.state.service, request.app.state.models.context or MAX_IDS
    if len(raw) <= SMALL:
        return parse(raw, model, max_ids)
    parsed: tuple[BodyModel, list[str]] = await service.threads.run_small(parse, raw, model, max_ids)
    return parsed


def parse(raw: bytes, model: type[BodyModel], max_ids: int = MAX_IDS) -> tuple[BodyModel, list[str]]:
    """A request from JSON, and its fields that change nothing (``IGNORED``).

    Args:
        max_ids: token ids in one list.

    Raises:
        ApiError: 400, naming the wrong field.
    """
    bare = b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])  # without its strings
    _check_count(max(bare.count(b"[") + bare.count(b"{"), bare.count(b":")), MAX_ALL_VALUES)
    data = _json(raw)
    _check_values(data)
    _check_ids(data, max_ids)
    _check_levels(data)
    used, names = getattr(model, "USED", ()), getattr(model, "IGNORED", IGNORED)
    ignored = [name for name in names if data.get(name) is not None and name not in used]
    for name in names:
        if name not in model.model_fields:
            data.pop(name, None)
    try:
        body = model.model_validate(data)
        return body, [*ignored, *getattr(body, "ignored_fields", ())]
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise validation_error(errors) from None


def _is_json(headers: Headers) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _json(raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw.decode("utf-8"))
        if _SURROGATE.search(raw) is not None:
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "a text holds half of a surrogate pair, which is not Unicode"
        raise ApiError(400, message, code="invalid_value") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_value") from None
    except ValueError:
        raise ApiError(400, "the body is not valid JSON") from None
    if not isinstance(data, dict):
        message = "the body is not a JSON object; send one with Content-Type: application/json"
        raise ApiError(400, message)
    return data


def _check_values(data: dict[str, Any]) -> None:
    """Raise ApiError for more values than a request needs."""
    count = 0
    stack: list[Any] = [data]
    while stack:
        value = stack.pop()
        count += len(value)
        _check_count(count)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        stack += [item for key, item in items if isinstance(item, dict | list) and key not in _UNCOUNTED]


def _check_count(values: int, limit: int = MAX_VALUES) -> None:
    if values > limit:
        message = f"the body has more than {limit:,} values in its lists and objects"
        raise ApiError(400, message, code="too_many_values")


def _check_ids(data: dict[str, Any], limit: int) -> None:
    """Raise ApiError for a list of token ids longer than the context."""
    for name in (*_IDS, "input"):
        ids = data.get(name)
        if not isinstance(ids, list) or (name == "input" and not _is_ids(ids[:1])):
            continue
        count = max([len(ids), *(len(part) for part in ids[:MAX_VALUES] if isinstance(part, list))])
        if count > limit:
            message = f"This model's context is {limit:,} tokens, but {name!r} has {count:,}."
            raise ApiError(400, message, param=name, code="context_length_exceeded")


def _is_ids(items: list[Any]) -> bool:
    """Whether a list is of token ids, or of lists of them."""
    return all(isinstance(item, int | list) for item in items)


def _check_levels(data: dict[str, Any]) -> None:
    """Raise ApiError for a field that is nested too deeply: templates, grammars and answers walk over it."""
    for name in data:
        if name not in _IDS and levels_exceed([data[name]], MAX_LEVELS + 1):
            subject = "a JSON schema" if name in _SCHEMAS else "a field"
            message = f"{subject} may be nested {MAX_LEVELS} levels deep at most"
            raise ApiError(400, message, param=name[:100], code="invalid_value")
