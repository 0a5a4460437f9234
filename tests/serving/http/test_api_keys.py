"""Who may call, and how much each may take: keys of a file, shares, priorities, tokens of a minute, hosts."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from attar.errors import AttarError, DataError, SettingsError
from attar.serving.http.admission_control import AdmissionControl
from attar.serving.http.api_keys import ApiKey, client_address, make_api_keys
from attar.serving.http.app import create_app
from attar.serving.http.errors import ApiError
from attar.serving.http.settings import ServerSettings
from tests.serving.http.fake import FakeBackend, FakeTokenizer
from tests.serving.http.test_app import complete, error

FILE = """
keys:
  - {name: web, key: key-of-the-web, priority: -1, max_texts: 4}
  - {name: batch, key: key-of-batches, priority: 5, set_priority: true, tokens_per_minute: 100}
"""


def serve(**settings):
    backend = FakeBackend()
    app = create_app(backend, ServerSettings(**settings), tokenizer=FakeTokenizer(), model="tiny")
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False), backend


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "keys.yaml").write_text(FILE)
    return str(tmp_path / "keys.yaml")


def as_key(client, key):
    client.headers["Authorization"] = f"Bearer {key}"
    return client


def test_keys_of_a_file(keys):
    client, backend = serve(keys=keys, api_key=("another-key",))
    error(complete(client), 401)
    for key, priority in (("key-of-the-web", -1), ("key-of-batches", 5), ("another-key", 0)):
        assert complete(as_key(client, key)).status_code == 200
        assert backend.asked[-1][2]["priority"] == priority
    assert len({asked[2]["salt"] for asked in backend.asked}) == 3
    assert "key-of" not in repr(make_api_keys((), keys))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("keys: []", "has no list called keys"),
        ("- a", "has no list called keys"),
        ("keys: [{name: a}]", r"keys\[0\]: needs a name and a key"),
        ("keys: [{name: a, key: short}]", r"keys\[0\]: needs a name and a key"),
        ("keys: [{name: a, key: long-enough, prio: 1}]", r"keys\[0\]: unknown field 'prio'"),
        ("keys: [{name: a, key: long-enough, priority: high}]", r"keys\[0\]: .*priority"),
        ("keys: [{name: a, key: long-enough, max_texts: -1}]", r"keys\[0\]: .*max_texts"),
        ("keys: [{name: a, key: long-enough, set_priority: 1}]", r"keys\[0\]: .*set_priority"),
        ("keys: [{name: a, key: long-enough, adapters: yes please}]", r"keys\[0\]: .*adapters"),
        ("keys: [{name: a, key: long-enough}, {name: a, key: long-enough2}]", "two keys have the same name"),
        ("keys: [{name: a, key: 'secret-one'", "is not YAML"),
    ],
)
def test_wrong_files(tmp_path, written, message):
    (tmp_path / "k.yaml").write_text(written)
    with pytest.raises(AttarError, match=message) as caught:
        make_api_keys((), str(tmp_path / "k.yaml"))
    assert str(tmp_path) in str(caught.value) and "secret" not in str(caught.value)
    with pytest.raises(AttarError, match="cannot be read"):
        make_api_keys((), str(tmp_path / "nothing.yaml"))


def test_a_priority_is_the_operators_to_give(keys):
    client, backend = serve()
    error(complete(client, priority=-5), 400, "priority_not_allowed", "priority")
    assert complete(client, priority=0).status_code == 200
    client, backend = serve(priority=True)
    assert complete(client, priority=-5).status_code == 200 and backend.asked[-1][2]["priority"] == -5
    client, backend = serve(keys=keys)
    error(complete(as_key(client, "key-of-the-web"), priority=-5), 400, "priority_not_allowed")
    assert complete(as_key(client, "key-of-batches"), priority=-5).status_code == 200
    assert backend.asked[-1][2]["priority"] == -5


def test_a_key_has_its_completions_and_no_more(keys):
    client, _ = serve(keys=keys)
    error(complete(as_key(client, "key-of-the-web"), n=5), 400, "too_many_texts", "n")
    admission = client.app.state.service.admission
    web = make_api_keys((), keys)[0]
    with admission.serving(lambda: None, 3, web):
        error(complete(client, n=2), 429, "too_many_requests")
        assert complete(client, n=1).status_code == 200
        assert complete(as_key(client, "key-of-batches"), n=2).status_code == 200
    assert complete(as_key(client, "key-of-the-web"), n=4).status_code == 200


def test_tokens_of_a_minute(keys):
    client, _ = serve(keys=keys)
    as_key(client, "key-of-batches")
    used = [complete(client, prompt="x" * 50, max_tokens=13).status_code for _ in range(3)]
    assert used == [200, 200, 429]  # 51 and 13 tokens each
    response = complete(client)
    error(response, 429, "rate_limit_exceeded")
    assert 10 <= int(response.headers["retry-after"]) <= 20
    clock = [1000.0]
    admission = AdmissionControl(FakeBackend(), 10, clock=lambda: clock[0])
    key = ApiKey(name="a", tokens_per_minute=60)
    admission.served(1.0, 90, key)
    with pytest.raises(ApiError):
        admission.admit(1, key)
    clock[0] += 31
    admission.admit(1, key)


def test_what_is_counted_is_texts():
    client, backend = serve(max_queue=40)
    error(complete(client, n=41), 400, "too_many_texts", "n")
    error(complete(client, prompt=["a"] * 9, n=16), 400, "too_many_texts", "n")  # 144, of the request's limit
    backend.waiting = 30
    error(complete(client, prompt=["a"] * 2, n=6), 429, "queue_full")
    assert complete(client, prompt=["a"] * 2, n=5).status_code == 200


def test_shares():
    assert ServerSettings().share == ServerSettings(api_key=("a-good-key",)).share == 1
    assert (
        ServerSettings(host="0.0.0.0").share == 0.5 == ServerSettings(api_key=("key-no-1", "key-no-2")).share
    )
    assert ServerSettings(host="0.0.0.0", client_share=0.1).share == 0.1
    with pytest.raises(SettingsError):
        ServerSettings(client_share=1.5)
    admission = AdmissionControl(FakeBackend(), 10, 0.5)
    with admission.preparing(5, ApiKey(name="a")):
        with pytest.raises(ApiError, match="has 5 completions open, the limit is 5"):
            admission.admit(1, ApiKey(name="a"))
        admission.admit(5, ApiKey(name="b"))


def test_addresses():
    assert client_address(("127.0.0.1", 1)) == "127.0.0.1" and client_address(None) == ""
    assert (
        client_address(("2001:db8::1", 1))
        == client_address(("2001:db8::2", 1))
        != client_address(("2001:db9::", 1))
    )
    assert (
        client_address(("::ffff:10.0.0.1", 1)) == "10.0.0.1"
        and client_address(("testclient", 1)) == "testclient"
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "localhost.evil.example:8000"}, 421),
        ({"Host": "evil.example:80@localhost"}, 421),
        ({"Host": "["}, 421),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_hosts_of_a_server_without_a_key(headers, status):
    client, _ = serve()
    for path in ("/v1/models", "/health", "/metrics"):
        response = client.get(path, headers=headers)
        assert response.status_code == status, response.text
        if status != 200:
            error(response, status)


def test_hosts_that_are_allowed():
    evil = {"Host": "evil.example", "Origin": "http://evil.example"}
    for settings in ({"allowed_host": ("Evil.example",)}, {"host": "0.0.0.0"}):
        assert serve(**settings)[0].get("/v1/models", headers=evil).status_code == 200
    client, _ = serve(api_key=("a-good-key",))
    assert as_key(client, "a-good-key").get("/v1/models", headers=evil).status_code == 200
    client, _ = serve(host="0.0.0.0", allowed_host=("a.example",))
    assert client.get("/v1/models", headers=evil).status_code == 421


def test_no_two_callers_have_one_name(tmp_path):
    """Counters, shares and budgets go by it."""
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n  - {name: key-1, key: secret-of-web}\n")
    with pytest.raises(DataError, match=r"keys.yaml: the name 'key-1' is that of a key of --api-key"):
        make_api_keys(["secret-one"], str(file))
    assert len(make_api_keys(["secret-of-web"], str(file))) == 1
