"""Other ways to the server: a unix socket, TLS, and web pages of other origins."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import stat
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from attar.errors import OutputError, SettingsError
from attar.serving.http.app import create_app
from attar.serving.http.run import Server, listen
from attar.serving.http.settings import ServerSettings
from attar.serving.http.transport import ConnectionSettings
from tests.serving.http.fake import ANSWER, FakeBackend, FakeTokenizer

PAGE = "https://app.example.com"


@contextmanager
def reached(transport=None, **settings):
    """A server that is reached in other ways; yields the open socket."""
    result = ServerSettings(port=0, **settings)
    app = create_app(FakeBackend(), result, tokenizer=FakeTokenizer(), model="tiny", transport=transport)
    listening, server = listen(result), Server(app, result, transport)
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
    with reached(host=f"unix:{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
            assert ANSWER[0] in ask(http, "http://localhost") and "[DONE]" in ask(http, "http://localhost")
        with pytest.raises(OutputError, match="cannot listen"):
            listen(ServerSettings(host=f"unix:{path}"))
    with socket.socket(socket.AF_UNIX) as dead:
        path.unlink(missing_ok=True)
        dead.bind(str(path))
    listen(ServerSettings(host=f"unix:{path}")).close()  # nobody listened there
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError):
        listen(ServerSettings(host=f"unix:{tmp_path / 'file'}"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a certificate and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    cert, key = (tmp_path_factory.mktemp("tls") / name for name in ("cert.pem", "key.pem"))
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return {"tls_cert": str(cert), "tls_key": str(key)}


def trusting(certificate):
    return ssl.create_default_context(cafile=certificate["tls_cert"])


def test_tls(certificate):
    with reached(ConnectionSettings(**certificate)) as listening:
        port = listening.getsockname()[1]
        with httpx.Client(verify=trusting(certificate)) as http:
            assert "[DONE]" in ask(http, f"https://127.0.0.1:{port}")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health")


def client_hello():
    """The first bytes of a client's handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


BEFORE_THE_HANDSHAKE = {
    "nothing": lambda: b"",
    "a byte": lambda: b"\x16",
    "half of it": lambda: client_hello()[:60],
    "all but the answer": client_hello,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("sent", BEFORE_THE_HANDSHAKE)
def test_tls_connections_without_a_handshake_make_room(certificate, sent):
    """They are counted from the moment they are accepted, as those of a plain port are."""
    piece = BEFORE_THE_HANDSHAKE[sent]()
    with reached(ConnectionSettings(**certificate), max_connections=10) as listening:
        address = listening.getsockname()
        with ExitStack() as opened:
            silent = [opened.enter_context(socket.create_connection(address, 20)) for _ in range(40)]
            for client in silent:
                with suppress(OSError):  # the server has closed it
                    client.sendall(piece)
            with httpx.Client(verify=trusting(certificate), timeout=15) as http:
                for _ in range(3):
                    assert http.get(f"https://127.0.0.1:{address[1]}/health").status_code == 200
            assert gone(silent[0]), "the oldest had to go"


@pytest.mark.few(2)
@pytest.mark.parametrize("sent", BEFORE_THE_HANDSHAKE)
def test_a_handshake_has_the_time_of_headers(certificate, sent):
    with (
        reached(ConnectionSettings(**certificate), header_s=0.3) as listening,
        socket.create_connection(listening.getsockname(), 15) as client,
    ):
        client.sendall(BEFORE_THE_HANDSHAKE[sent]())
        assert gone(client)


def test_a_handshake_in_single_bytes_is_closed_in_time(certificate):
    with (
        reached(ConnectionSettings(**certificate), header_s=0.4) as listening,
        socket.create_connection(listening.getsockname(), 30) as client,
        pytest.raises(OSError),
    ):
        for byte in client_hello()[:-1]:  # 5 s at least
            client.sendall(bytes([byte]))
            time.sleep(0.02)


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(certificate):
    """In one write with the client's last message of it."""
    context = trusting(certificate)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    answer = b""
    with (
        reached(ConnectionSettings(**certificate)) as listening,
        socket.create_connection(listening.getsockname(), 60) as raw,
    ):

        def repeat(step):
            """A step of the client, once the server has sent what it needs."""
            while True:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    raw.sendall(outgoing.read())
                    incoming.write(raw.recv(65536))

        repeat(client.do_handshake)
        client.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while not answer.endswith(b"}"):
            answer += repeat(lambda: client.read(65536))
    assert answer.startswith(b"HTTP/1.1 200 ")


def gone(client):
    """Wait until the server has closed a connection, whatever it sent before."""
    with suppress(ConnectionResetError):
        while client.recv(65536):
            pass
    return True


@pytest.mark.parametrize("allowed", [PAGE, "*"])
def test_pages_of_an_origin_may_call(allowed):
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    with reached(ConnectionSettings(cors_origin=(allowed,)), api_key=("secret-one",)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/models"
        preflight = httpx.options(url, headers=asked)
        methods = preflight.headers["access-control-allow-methods"]
        assert preflight.status_code == 200 and {"GET", "POST", "DELETE"} <= set(methods.split(", "))
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


def test_a_certificate_is_checked_before_anything_is_loaded(certificate, tmp_path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for files in ({"tls_cert": str(wrong)}, {"tls_key": str(wrong)}):
        with pytest.raises(SettingsError, match="a certificate of the key") as caught:
            ConnectionSettings(**certificate | files)
        assert caught.value.field == "tls_cert"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tls_cert": "a"}, "tls_key"),
        ({"tls_key": "a"}, "tls_cert"),
        ({"tls_cert": "a", "tls_key": "b"}, "tls_cert"),
        ({"cors_origin": ("example.com",)}, "cors_origin"),
        ({"cors_origin": ("https://example.com/",)}, "cors_origin"),
    ],
)
def test_wrong_settings_are_named(settings, field):
    with pytest.raises(SettingsError) as caught:
        ConnectionSettings(**settings)
    assert caught.value.field == field
