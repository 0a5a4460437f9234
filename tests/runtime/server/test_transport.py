"""Other ways to the server: a unix socket, TLS, and web pages of other origins."""

from __future__ import annotations

import asyncio
import shutil
import socket
import stat
import subprocess
import threading
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.errors import OutputError, SettingsError
from attar.runtime.server.app import create_app
from attar.runtime.server.run import Server, listen
from attar.runtime.server.settings import ServerSettings
from attar.runtime.server.transport import ConnectionSettings
from tests.runtime.server.fake import ANSWER, FakeBackend, FakeTokenizer

PAGE = "https://app.example.com"


@contextmanager
def reached(transport, **settings):
    """A server that is reached in other ways; yields the open socket."""
    result = ServerSettings(port=0, **settings)
    app = create_app(FakeBackend(), result, tokenizer=FakeTokenizer(), model="tiny", transport=transport)
    listening, server = listen(result, transport), Server(app, result, transport)
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listening]),), daemon=True)
    thread.start()
    try:
        yield listening
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
        assert not thread.is_alive()


def ask(http, url):
    asked = {"model": "tiny", "prompt": "hi", "stream": True}
    return http.post(f"{url}/v1/completions", json=asked).text


def test_a_unix_socket(tmp_path):
    path = tmp_path / "attar.sock"
    with reached(ConnectionSettings(unix_socket=str(path))):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
            assert ANSWER[0] in ask(http, "http://localhost") and "[DONE]" in ask(http, "http://localhost")
        with pytest.raises(OutputError, match="cannot listen"):
            listen(ServerSettings(), ConnectionSettings(unix_socket=str(path)))
    with socket.socket(socket.AF_UNIX) as dead:
        path.unlink(missing_ok=True)
        dead.bind(str(path))
    listen(ServerSettings(), ConnectionSettings(unix_socket=str(path))).close()  # nobody listened there
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError):
        listen(ServerSettings(), ConnectionSettings(unix_socket=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    transport = ConnectionSettings(tls_cert=str(cert), tls_key=str(key))
    import ssl

    with reached(transport) as listening:
        port = listening.getsockname()[1]
        with httpx.Client(verify=ssl.create_default_context(cafile=str(cert))) as http:
            assert "[DONE]" in ask(http, f"https://127.0.0.1:{port}")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health")


@pytest.mark.parametrize("allowed", [PAGE, "*"])
def test_pages_of_an_origin_may_call(allowed):
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    with reached(ConnectionSettings(cors_origin=(allowed,)), api_key=("secret-one",)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/models"
        preflight = httpx.options(url, headers=asked)
        assert preflight.status_code == 200 and "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        answer = httpx.get(url, headers={"Origin": PAGE, "Authorization": "Bearer secret-one"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == allowed
        wrong = httpx.get(url, headers={"Origin": PAGE})
        assert wrong.status_code == 401 and wrong.headers["access-control-allow-origin"] == allowed
        other = httpx.options(url, headers=asked | {"Origin": "https://evil.example.com"})
        assert (other.status_code == 200) == (allowed == "*")


def test_pages_of_other_origins_may_not():
    with reached(ConnectionSettings(cors_origin=(PAGE,))) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/models"
        assert httpx.get(url, headers={"Origin": PAGE}).status_code == 200
        assert httpx.get(url, headers={"Origin": "https://evil.example.com"}).status_code == 403
        assert httpx.get(url, headers={"Host": "evil.example.com"}).status_code == 421


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tls_cert": "a"}, "tls_key"),
        ({"tls_key": "a"}, "tls_cert"),
        ({"tls_cert": "a", "tls_key": "b"}, "tls_cert"),
        ({"tls_cert": "a", "tls_key": "b", "unix_socket": "c"}, "tls_cert"),
        ({"cors_origin": ("example.com",)}, "cors_origin"),
        ({"cors_origin": ("https://example.com/",)}, "cors_origin"),
    ],
)
def test_wrong_settings_are_named(settings, field):
    with pytest.raises(SettingsError) as caught:
        ConnectionSettings(**settings)
    assert caught.value.field == field
