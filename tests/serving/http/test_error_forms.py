"""An error is in the form of its path's API, whichever part of the server refuses the request."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.serving.http.error_forms import error_response
from attar.serving.http.errors import ApiError
from tests.serving.http.real import refused
from tests.serving.http.test_live import running

VERSION = {"anthropic-version": "2023-06-01"}


def scope_of(path, **headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "headers": raw, "state": {"request_id": "r1"}}


@pytest.mark.parametrize(
    ("path", "headers", "anthropic"),
    [
        ("/v1/messages", {}, True),
        ("/v1/messages/count_tokens", {}, True),
        ("/v1/messagesx", {}, False),
        ("/v1/models", {}, False),
        ("/v1/models", {"anthropic_version": "2023-06-01"}, True),
        ("/v1/models/x", {"anthropic_version": "2023-06-01"}, True),
        ("/v1/chat/completions", {"anthropic_version": "2023-06-01"}, False),
    ],
)
def test_the_path_decides_the_form(path, headers, anthropic):
    body = error_response(ApiError(404, "not here"), scope_of(path, **headers)).body
    form = b'{"type":"error","error":{"type":"not_found_error","message":"not here"},"request_id":"r1"}'
    assert (body == form) is anthropic, body


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError(400, "m"), 400, "invalid_request_error"),
        (ApiError(401, "m"), 401, "authentication_error"),
        (ApiError(413, "m"), 413, "request_too_large"),
        (ApiError(429, "m", code="queue_full", retry_s=2), 529, "overloaded_error"),
        (ApiError(429, "m", code="rate_limit_exceeded", retry_s=2), 429, "rate_limit_error"),
        (ApiError(500, "m"), 500, "api_error"),
        (ApiError(503, "m"), 503, "overloaded_error"),
    ],
)
def test_statuses_have_anthropics_types(error, status, kind):
    response = error_response(error, scope_of("/v1/messages"))
    assert response.status_code == status and f'"type":"{kind}"'.encode() in response.body
    assert response.headers.get("retry-after") == ("2" if error.retry_s else None)
    assert response.headers.get("connection") == ("close" if status == 413 else None)


def test_keys_are_bearers_or_x_api_key():
    with running(api_key=("a-long-key", "another-key"), max_body=2000) as (url, _, _):
        get, path = httpx.get, f"{url}/v1/models"
        assert get(path, headers={"x-api-key": "another-key"}).status_code == 200
        assert get(path, headers={"Authorization": "Bearer a-long-key"}).status_code == 200
        refused(get(path, headers={"x-api-key": "a-wrong-key"}), 401, "invalid_api_key")
        wrong = get(path, headers={"x-api-key": "a-wrong-key", **VERSION})
        assert wrong.status_code == 401 and wrong.json()["error"]["type"] == "authentication_error"
        assert wrong.json()["request_id"] == wrong.headers["x-request-id"]
        key = {"x-api-key": "a-long-key"}
        large = httpx.post(f"{url}/v1/messages", headers=key, json={"a": "x" * 3000})
        assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"
        unknown = get(f"{url}/v1/messages/x", headers=key)
        assert unknown.status_code == 404 and unknown.json()["type"] == "error"
