"""An endpoint's answers and failures; the key goes nowhere but into the header."""

import asyncio
import logging

import pytest

pytest.importorskip("openai")

from attar.distillation.collection.prompts import ChatPrompt
from attar.distillation.collection.redact import Redactor
from attar.distillation.collection.requests import make_requests
from attar.distillation.collection.retry import TeacherFailure
from attar.distillation.collection.settings import CollectSettings
from attar.distillation.collection.teachers import TeacherAnswer
from attar.distillation.collection.teachers.endpoint import EndpointTeacher, base_url
from attar.errors import SettingsError, UsageError
from attar.options import nest
from tests.distillation.collection.chat_server import ChatServer, content_of

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
