"""From the bytes of a body to a checked model: bounded before it is checked, large ones in a thread.

    bytes → number of lists and objects → JSON → number of values → pydantic

Text of a bounded length is read in milliseconds, but making and checking every value of it takes a hundred
times as long and holds the interpreter, so what no request needs is refused by number first.
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

from attar.runtime.server.errors import ApiError, validation_error
from attar.runtime.server.service import SMALL

MOST_VALUES = 8192  # in lists and objects together; ids of prompts and schemas are not counted
MOST_LEVELS = 64  # of a JSON schema
MOST_IDS = 1 << 18  # of one list of token ids, where the model has no limit of its own
_UNCOUNTED = ("prompt", "tokens", "schema")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

BodyModel = TypeVar("Model", bound=BaseModel)


class BodyRoute(APIRoute):
    """A route whose argument ``body`` is read here and not by FastAPI, which reads it on the event loop."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """See FastAPI; a route without a body is as ever."""
        model = get_type_hints(self.endpoint).get("body")
        if model is None:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            body = await read(request, model)
            answer: Response = await self.endpoint(body=body, request=request)
            return answer

        return handle


async def read(request: Request, model: type[BodyModel]) -> BodyModel:
    """The body of a request.

    Raises:
        RefusedError: 400, it is not what the model allows; 499, the client has gone.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ApiError(499, "the client has hung up") from None
    if not raw:
        raise ApiError(400, "the body is missing")
    if not _is_json(request.headers):
        raise ApiError(400, "the body is not a JSON object; send one with Content-Type: application/json")
    service = request.app.state.service
    most_ids = service.backend.context or MOST_IDS
    if len(raw) <= SMALL:
        return parse(raw, model, most_ids)
    parsed: BodyModel = await service.lanes.small(parse, raw, model, most_ids)
    return parsed


def parse(raw: bytes, model: type[BodyModel], most_ids: int = MOST_IDS) -> BodyModel:
    """A model from JSON.

    Args:
        most_ids: token ids in one list at most.

    Raises:
        RefusedError: 400, and which field is wrong.
    """
    bare = b"".join(raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])  # without its texts
    _count(max(bare.count(b"[") + bare.count(b"{"), bare.count(b":")))
    data = _json(raw)
    _check_values(data)
    _check_ids(data, most_ids)
    _check_schema(data)
    try:
        return model.model_validate(data)
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
    """Raises RefusedError where there are more values than a request has need of."""
    left = MOST_VALUES
    waiting: list[Any] = [data]
    while waiting:
        value = waiting.pop()
        left -= len(value)
        _count(MOST_VALUES - left)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        waiting += [item for key, item in items if isinstance(item, dict | list) and key not in _UNCOUNTED]


def _count(values: int) -> None:
    if values > MOST_VALUES:
        message = f"the body has more than {MOST_VALUES:,} values in its lists and objects"
        raise ApiError(400, message, code="too_many_values")


def _check_ids(data: dict[str, Any], most: int) -> None:
    """Raises RefusedError for a list of token ids that no context holds."""
    for name in ("prompt", "tokens"):
        given = data.get(name)
        if not isinstance(given, list):
            continue
        count = max([len(given), *(len(part) for part in given[:MOST_VALUES] if isinstance(part, list))])
        if count > most:
            message = f"This model's context is {most:,} tokens, but {name!r} has {count:,}."
            raise ApiError(400, message, param=name, code="context_length_exceeded")


def _check_schema(data: dict[str, Any]) -> None:
    """Raises RefusedError for a JSON schema that is nested too deeply to be compiled."""
    level: list[Any] = [data.get("response_format")]
    for _ in range(MOST_LEVELS):
        level = [part for value in level for part in _parts(value)]
        if not level:
            return
    message = f"a JSON schema may be nested {MOST_LEVELS} levels deep at most"
    raise ApiError(400, message, param="response_format", code="invalid_value")


def _parts(value: Any) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for part in parts if isinstance(part, dict | list)]
