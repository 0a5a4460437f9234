"""An endpoint's answers and failures; the key goes nowhere but into the header."""

import asyncio
import gzip
import json
import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("openai")

from attar.collection.prompts import ChatPrompt
from attar.collection.redact import Redactor
from attar.collection.requests import make_requests
from attar.collection.retry import TeacherFailure
from attar.collection.settings import CollectSettings
from attar.collection.teachers import TeacherAnswer
from attar.collection.teachers.endpoint import EndpointTeacher, base_url
from attar.errors import SettingsError, UsageError
from attar.options import nest
from tests.collection.chat_server import ChatServer, completion, content_of

KEY = "sk-very'secret/key+1234567890"


def ask(url, prompt="a b", **options):
    """The reply to one request, and what it asked."""
    settings = nest(CollectSettings, {"model": "m", **options})
    teacher = EndpointTeacher(url, settings)
    chat = ChatPrompt(({"role": "user", "content": prompt},), "here")
    request = make_requests([chat], settings, teacher.identity, seeded=teacher.seeded)[0]

    async def run():
        teacher.prepare()
        try:
            return await teacher.ask(request)
        finally:
            await teacher.close()

    return asyncio.run(run())


def served(what, **options):
    with ChatServer(lambda prompt, number: what) as server:
        return ask(server.url, **options), server


def test_an_answer(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    reply, server = served("ok", temperature=0.5, extra=("top_k=5",), max_tokens=9)
    assert reply == TeacherAnswer(
        content=content_of("a b"),
        finish_reason="stop",
        prompt_tokens=6,
        completion_tokens=len(content_of("a b").split()),
        created=1_700_000_003,
    )
    assert server.keys == [f"Bearer {KEY}"]
    assert server.bodies[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "a b"}],
        "temperature": 0.5,
        "max_tokens": 9,
        "top_k": 5,
    }


def test_a_seed_is_sent_only_where_asked_for():
    _, server = served("ok", send_seed=True)
    assert isinstance(server.bodies[0]["seed"], int)


@pytest.mark.parametrize("variable", ["none", "NO_SUCH_VARIABLE"])
def test_without_a_key_no_header_is_sent(variable, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    _, server = served("ok", key_env=variable)
    assert server.keys == [None]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("what", "effect", "charged"),
    [
        ("half", "retry", True),
        ("die", "retry", True),
        ("broken", "retry", True),
        ("empty", "retry", True),
        ("500", "retry", True),
        ("429", "retry", False),
        ("400", "refuse", False),
        ("401", "stop", False),
        ("404", "stop", False),
    ],
)
def test_failures(what, effect, charged):
    reply, _ = served(what, key_env="none")
    assert isinstance(reply, TeacherFailure), reply
    assert (reply.effect, reply.charged, reply.limited) == (effect, charged, what == "429")
    assert "\n" not in reply.message and reply.message
    assert bool(reply.hint) == (what in ("401", "404"))


@pytest.mark.parametrize("what", ["hang", "drip"])
def test_no_answer_in_time(what):
    """Nor where bytes come, one after the other, without an end."""
    reply, _ = served(what, timeout_s=0.3)
    assert (reply.message, reply.effect) == ("no answer within 0.3 s", "retry")


def test_nobody_listens():
    reply = ask("http://127.0.0.1:9/v1")
    assert reply.effect == "retry" and not reply.charged and "connection failed" in reply.message


@pytest.mark.parametrize(("what", "seconds"), [("429:3", 3.0), ("503:date5", 5.0), ("429", None)])
def test_retry_after(what, seconds):
    reply, _ = served(what)
    assert reply.retry_after == (None if seconds is None else pytest.approx(seconds, abs=1.1))


@pytest.mark.few(2)
@pytest.mark.parametrize("what", ["echo", "400", "401", "429", "500"])
def test_the_key_is_redacted_from_what_comes_back(what, monkeypatch, caplog):
    """The server echoes the Authorization header, in its errors and in an answer."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    reply, server = served(what)
    assert server.keys == [f"Bearer {KEY}"]
    assert KEY not in repr(reply) and KEY not in caplog.text
    assert "[key]" in repr(reply)


def test_redaction():
    redactor = Redactor(KEY)
    assert redactor.answer(f"x {KEY} y") == "x [key] y"
    assert redactor.answer("sk-very%27secret%2Fkey%2B1234567890") == "[key]"
    assert redactor.error("Authorization: Bearer abc.def-123\nBasic dXNlcjpwYXNz") == (
        "Authorization: Bearer [key] Basic [key]"
    )
    assert redactor.answer("The bearer token is explained") == "The bearer token is explained"
    assert Redactor("").answer("plain") == "plain"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("https://api.openai.com/v1/", "https://api.openai.com/v1"),
        ("http://h:80/v1/chat/completions", "http://h:80/v1"),
    ],
)
def test_addresses(given, url):
    assert base_url(given) == url


@pytest.mark.parametrize(
    "url",
    [f"https://me:{KEY}@h/v1", f"https://{KEY}@h/v1", f"https://h/v1?key={KEY}", "https://", "http://[x/v1"],
)
def test_an_address_with_credentials_is_refused_without_showing_them(url):
    with pytest.raises(UsageError) as info:
        base_url(url)
    assert "secret" not in str(info.value)


def test_a_key_in_place_of_its_variable_is_not_shown():
    for key in (KEY, "gsk_abcdef0123456789"):
        with pytest.raises(SettingsError) as info:
            nest(CollectSettings, {"key_env": key})
        assert key not in str(info.value)


def test_an_endpoint_needs_the_name_of_a_model():
    with pytest.raises(SettingsError, match="model"):
        EndpointTeacher("http://h/v1", CollectSettings())


def test_a_key_over_plain_http_is_noticed(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    settings = nest(CollectSettings, {"model": "m"})
    exposed = {url: EndpointTeacher(url, settings).exposed_key for url in
               ("http://h/v1", "https://h/v1", "http://127.0.0.1:1/v1", "http://localhost/v1")}  # fmt: skip
    assert list(exposed.values()) == [True, False, False, False]


@contextmanager
def hostile(respond):
    """An endpoint that writes what ``respond(handler, body)`` writes; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.close_connection = True
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            try:
                respond(self, body)
            except OSError:
                self.server.broken = True  # the client left

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def reply_with(data, status=200, **headers):
    def respond(handler, body):
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(data)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return respond


def answered(**changes):
    """An answer with other fields, as JSON."""
    whole = completion({"model": "m"}, "a b")
    choice = whole["choices"][0]
    choice["message"] |= changes.pop("message", {})
    choice |= changes.pop("choice", {})
    return json.dumps({**whole, **changes}).encode()


def endless(status, head):
    def respond(handler, body):
        handler.send_response(status)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        part = head
        while True:
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            part = b"x" * (1 << 16)

    return respond


@pytest.mark.parametrize("status", [200, 500])
def test_an_endless_answer_is_none(status):
    with hostile(endless(status, b'{"choices": [{"message": {"content": "')) as url:
        reply = ask(url, max_tokens=16, timeout_s=60)
    assert reply.message == "not an answer: more than 1,056,768 bytes, the most of --max-tokens"
    assert (reply.effect, reply.charged) == ("retry", True)


def test_a_long_answer_of_many_tokens_is_one():
    content = "x" * (2 << 20)
    with hostile(reply_with(answered(message={"content": content}))) as url:
        assert ask(url, max_tokens=4096).content == content
        assert "more than 1,049,088 bytes" in ask(url, max_tokens=1).message


def test_a_compressed_answer_which_nobody_asked_for_is_none():
    asked = []

    def respond(handler, body):
        asked.append(handler.headers["accept-encoding"])
        reply_with(gzip.compress(bytes(50 << 20)), content_encoding="gzip")(handler, body)

    with hostile(respond) as url:
        reply = ask(url)
    assert reply.message == "not an answer: compressed (gzip), which was not asked for"
    assert asked == ["identity"]


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"choices": [{"message": {"content": ['])
def test_a_deep_answer_is_a_failed_try(opening):
    with hostile(reply_with(opening.encode() * 20_000)) as url:
        reply = ask(url)
    assert reply.effect == "retry" and "not an answer: RecursionError" in reply.message


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "data", [b"[]", b"3", b'"text"', b"null", b'{"choices": 5}', b"9" * 5000, b"\xff\xfe"]
)
def test_other_json_is_a_failed_try(data):
    with hostile(reply_with(data)) as url:
        reply = ask(url)
    assert reply.effect == "retry" and reply.charged and reply.message.startswith("not a")


COUNTS = [10**400, 10**15, -1, 1.5, True, "7", None, [], {"a": 1}]


@pytest.mark.few(3)
@pytest.mark.parametrize("count", COUNTS)
def test_counts_that_cannot_be_are_not_believed(count):
    usage = {"prompt_tokens": count, "completion_tokens": count}
    with hostile(reply_with(answered(usage=usage, created=count if count != 10**400 else 10**300))) as url:
        reply = ask(url, max_tokens=50)
    assert (reply.content, reply.prompt_tokens, reply.completion_tokens) == (content_of("a b"), None, None)
    assert reply.created is None


@pytest.mark.parametrize(("prompt_tokens", "completion_tokens"), [(21, 50), (0, 0)])
def test_counts_up_to_what_was_sent_and_asked_for_are_believed(prompt_tokens, completion_tokens):
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    with hostile(reply_with(answered(usage=usage))) as url:
        reply = ask(url, max_tokens=50)
        assert (reply.prompt_tokens, reply.completion_tokens) == (prompt_tokens, completion_tokens)
    more = {"prompt_tokens": 22, "completion_tokens": 51}
    with hostile(reply_with(answered(usage=more))) as url:
        reply = ask(url, max_tokens=50)
    assert (reply.prompt_tokens, reply.completion_tokens) == (None, None)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"usage": []},
        {"usage": "many"},
        {"choice": {"finish_reason": 5}},
        {"message": {"reasoning_content": ["x"]}},
        {"created": "today"},
    ],
)
def test_an_answer_with_other_odd_fields_is_kept(changes):
    with hostile(reply_with(answered(**changes))) as url:
        reply = ask(url)
    assert (reply.content, reply.finish_reason, reply.reasoning) == (content_of("a b"), "stop", "")


@pytest.mark.few(4)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("other", ["port", "host"])
def test_prompts_do_not_follow_a_redirect_to_another_place(status, other, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    got = []
    with hostile(lambda handler, body: got.append(body)) as elsewhere:
        there = elsewhere if other == "port" else elsewhere.replace("127.0.0.1", "localhost")
        with hostile(reply_with(b"", status, location=f"{there}/{KEY}\x1b[2J")) as url:
            reply = ask(url)
    assert got == [] and reply.effect == "stop" and not reply.charged
    assert reply.message.startswith(f"{status}: sends requests on to {there}/[key]\\u001b")
    assert "--teacher" in reply.hint and "\x1b" not in reply.message


def test_a_redirect_in_the_same_place_is_followed():
    def respond(handler, body):
        if handler.path.endswith("/"):
            reply_with(answered())(handler, body)
        else:
            reply_with(b"", 307, location=f"{handler.path}/", connection="close")(handler, body)

    with hostile(respond) as url:
        assert ask(url).content == content_of("a b")


def test_an_endpoints_words_are_printable():
    said = "\x1b]52;c;cm0=\x07\u202e\u2028 no \r\n error: forged"
    with hostile(reply_with(json.dumps({"error": {"message": said}}).encode(), 400)) as url:
        reply = ask(url)
    assert reply.message == "400: \\u001b]52;c;cm0=\\u0007\\u202e no error: forged"


@pytest.mark.parametrize(
    "date", ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "Mon, 99 Jan 2026", "0" * 99]
)
def test_a_date_that_is_none(date):
    with hostile(reply_with(b"{}", 429, retry_after=date)) as url:
        reply = ask(url)
    assert reply.effect == "retry" and (reply.retry_after or 0.0) == 0.0
