"""The page without a browser: one small file, its policy, and when it is there."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from tests.serving.http.test_app import error, serve


def test_it_is_one_small_file_that_loads_nothing():
    client, _ = serve()
    response = client.get("/")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    html = response.text
    assert len(response.content) < 80_000 and "/*S" not in html
    assert not re.findall(r"<(?:script|img|iframe|object|embed)[^>]+src|@import|url\(", html)
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}, addresses  # a name of SVG's, nothing that is loaded
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", html
    )
    assert not re.search(r"<[^>]+\s(?:on\w+|style)=", html.split("<script>")[0])


def test_its_policy_allows_its_own_script_and_style_and_calls_to_this_server():
    client, _ = serve()
    response = client.get("/")
    policy = dict(
        part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, flags=re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    assert response.headers["x-content-type-options"] == "nosniff"


def test_it_needs_no_key_and_says_whether_its_calls_do():
    client, _ = serve(api_key=("long-enough",))
    assert "<body data-key>" in client.get("/").text
    error(client.get("/attar/state"), 401)
    assert client.post("/").status_code == 405
    client, _ = serve()
    assert "<body>" in client.get("/").text


def test_no_page():
    client, _ = serve(page=False)
    assert client.get("/").text == "Ollama is running", "for clients that look for a server"


def test_a_page_of_another_host_cannot_embed_or_call():
    client, _ = serve()
    error(client.get("/", headers={"Host": "evil.example"}), 421)
    assert client.get("/").headers["cross-origin-resource-policy"] == "same-origin"
