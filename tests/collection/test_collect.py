"""The whole run against a real HTTP server: every prompt answered exactly once, whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("openai")

import attar
from attar.checkpoint.lineage import root_licences
from attar.cli.main import call
from attar.collection import crew
from attar.collection.teachers.endpoint import EndpointTeacher
from attar.data.provenance import card_path, provenance, read_card
from attar.errors import DataError, EndpointError, LicenceError, OutputError, SettingsError, UsageError
from tests.collection.chat_server import ChatServer, content_of

KEY = "sk-secret-key-1234567890"
FIRST = ("zero", "one", "two", "three")
SECOND = ("four", "five", "six", "seven", "eight")
PROMPTS = [f"{first} {second}" for first in FIRST for second in SECOND]
OPTIONS = {"model": "m", "key_env": "none", "filters": "none"}


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(crew, "backoff", lambda attempt, draw: draw.uniform(0.0, 0.02))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_each_prompt_is_answered_once_in_order(tmp_path, prompts):
    out = tmp_path / "deep" / "data.jsonl"
    with ChatServer() as server:
        result = attar.collect(prompts, out, teacher=server.url, **OPTIONS)
    rows = rows_of(out)
    assert [row["messages"][-2]["content"] for row in rows] == PROMPTS
    assert [row["messages"][-1] for row in rows] == [
        {"role": "assistant", "content": content_of(prompt)} for prompt in PROMPTS
    ]
    assert set(server.answered.values()) == {1} and len(server.bodies) == len(PROMPTS)
    assert (result.sent, result.answers, result.refused, result.filters.kept) == (20, 20, 0, 20)
    assert set(rows[0]) == {"messages", "id", "teacher", "usage", "finish_reason", "created"}
    assert (rows[0]["teacher"], rows[0]["finish_reason"]) == ("m", "stop")
    card = read_card(out)
    assert card.details["answers"] == 20 and card.parents[0].name == "m at 127.0.0.1"
    assert json.loads(card_path(out).read_text())["licence"]["ids"] == ["unknown"]
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "data.jsonl",
        "data.jsonl.card.json",
        "data.jsonl.journal",
    ]


def test_an_answer_is_in_the_journal_before_anything_is_counted(tmp_path, prompts, monkeypatch):
    def broken(row):
        raise OverflowError("a count")

    monkeypatch.setattr(crew, "row_tokens", broken)
    with ChatServer() as server, pytest.raises(OverflowError):
        attar.collect(prompts, tmp_path / "data.jsonl", teacher=server.url, concurrency=1, **OPTIONS)
    assert len(rows_of(tmp_path / "data.jsonl.journal")) == 1


TROUBLE = ["ok", "slow", "429:0.2", "500", "half", "die", "broken", "empty", "503:date0", "429", "502"]


def trouble(prompt, number):
    """Every prompt meets two kinds of trouble, each another pair, before it is answered."""
    first = PROMPTS.index(prompt)
    return TROUBLE[(first + 3 * number) % len(TROUBLE)] if number < 2 else "ok"


def test_a_server_that_is_slow_refuses_and_dies(tmp_path, prompts):
    out, plain = tmp_path / "data.jsonl", tmp_path / "plain.jsonl"
    with ChatServer(trouble) as server:
        result = attar.collect(prompts, out, teacher=server.url, concurrency=4, **OPTIONS)
        assert server.most_running <= 4
        assert set(server.answered.values()) == {1} and len(server.answered) == len(PROMPTS)
        assert result.sent == len(server.bodies) > 1.5 * len(PROMPTS)
        server.script = lambda prompt, number: "ok"
        attar.collect(prompts, plain, teacher=server.url, **OPTIONS)
    assert out.read_bytes() == plain.read_bytes()


def test_retry_after_is_kept_by_all_workers(tmp_path, prompts):
    def limited(prompt, number):
        return "429:1" if (prompt, number) == (PROMPTS[0], 0) else "ok"

    with ChatServer(limited) as server:
        attar.collect(prompts, tmp_path / "data.jsonl", teacher=server.url, concurrency=2, **OPTIONS)
    asked = sorted(server.times)
    # two requests of the other worker may be on their way already
    assert asked[3] - asked[0] > 0.9 and set(server.answered.values()) == {1}


COMMAND = [sys.executable, "-m", "attar.cli.main", "collect"]


def start(prompts, out, url, *options, **environment):
    command = [*COMMAND, str(prompts), "--teacher", url, "-o", str(out), "--model", "m", "--filters", "none"]
    variables = os.environ | {"OPENAI_API_KEY": KEY} | environment
    return subprocess.Popen(
        [*command, *options], env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for_lines(path, count, seconds=60):
    until = time.monotonic() + seconds
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < until, f"{path} has too few lines"
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_and_run_again_nothing_is_asked_twice(tmp_path, prompts):
    """kill -9 when 3, then when 9 answers are there; requests that are held die with the process."""
    out, plain = tmp_path / "data.jsonl", tmp_path / "plain.jsonl"
    holds = [3, 9]

    def script(prompt, number):
        return "hold" if holds and sum(server.answered.values()) >= holds[0] else "ok"

    with ChatServer(script) as server:
        for count in list(holds):
            process = start(prompts, out, server.url, "--concurrency", "1")
            wait_for_lines(tmp_path / "data.jsonl.journal", count)
            process.kill()
            process.communicate()
            assert not out.exists()
            holds.pop(0)
        process = start(prompts, out, server.url)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "20 requests, 11 to ask" in errors
        assert set(server.answered.values()) == {1} and len(server.answered) == len(PROMPTS)
        card = card_path(out).read_text()
        assert set(server.keys) == {f"Bearer {KEY}"} and KEY not in card + errors
        attar.collect(prompts, plain, teacher=server.url, **OPTIONS)
    assert out.read_bytes() == plain.read_bytes()


@pytest.mark.slow
def test_ctrl_c_waits_for_what_is_on_its_way(tmp_path, prompts):
    out = tmp_path / "data.jsonl"
    with ChatServer(lambda *_: "slow", slow=0.5) as server:
        process = start(prompts, out, server.url, "--concurrency", "4")
        wait_for_lines(tmp_path / "data.jsonl.journal", 4)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130, errors
        assert errors.splitlines()[-1].startswith("stopped; to go on: attar collect")
        assert "on their way" in errors and "Traceback" not in errors and "bug" not in errors
        assert not out.exists()
        journal = rows_of(tmp_path / "data.jsonl.journal")
        assert len(journal) == sum(server.answered.values()) == len(server.bodies) == 8
        attar.collect(prompts, out, teacher=server.url, **OPTIONS, concurrency=16)
        assert set(server.answered.values()) == {1}


def test_more_prompts_and_samples_ask_only_what_is_new(tmp_path, prompts):
    out = tmp_path / "data.jsonl"
    with ChatServer() as server:
        attar.collect(prompts, out, teacher=server.url, limit=5, **OPTIONS)
        with pytest.raises(OutputError, match="already exists"):
            attar.collect(prompts, out, teacher=server.url, **OPTIONS)
        result = attar.collect(prompts, out, teacher=server.url, force=True, **OPTIONS)
        assert (result.sent, len(rows_of(out))) == (15, 20)
        result = attar.collect(prompts, out, teacher=server.url, force=True, limit=5, samples=3, **OPTIONS)
        assert (result.sent, len(rows_of(out))) == (10, 15)
        assert [row["messages"][0]["content"] for row in rows_of(out)[:4]] == [*[PROMPTS[0]] * 3, PROMPTS[1]]
        result = attar.collect(prompts, out, teacher=server.url, force=True, offline=True, **OPTIONS)
        assert (result.sent, len(rows_of(out))) == (0, 20)


def test_system_prompts_and_seeds_are_asked_for(tmp_path, prompts):
    out = tmp_path / "data.jsonl"
    options = OPTIONS | {"systems": ("none", "steps"), "send_seed": True}
    with ChatServer() as server:
        attar.collect(prompts, out, teacher=server.url, **options)
    lengths = {len(body["messages"]) for body in server.bodies}
    assert lengths == {1, 2} and len({body["seed"] for body in server.bodies}) == len(PROMPTS)
    assert sorted({len(row["messages"]) for row in rows_of(out)}) == [2, 3]


def test_a_request_that_is_refused_is_left_out_and_counted(tmp_path, prompts, capsys):
    out = tmp_path / "data.jsonl"

    def script(prompt, number):
        return "400" if prompt == PROMPTS[3] else "ok"

    with ChatServer(script) as server:
        result = attar.collect(
            prompts, out, teacher=server.url, progress=attar.Terminal(), most_failures=2, **OPTIONS
        )
    assert (result.refused, result.answers, len(rows_of(out))) == (1, 19, 19)
    assert f"1 requests were refused: {prompts}:4: 400: status 400" in capsys.readouterr().err


def test_an_endpoint_that_fails_again_and_again_ends_the_run(tmp_path, prompts):
    out = tmp_path / "data.jsonl"
    with ChatServer(lambda *_: "500") as server:
        with pytest.raises(EndpointError, match="5 failures in a row, the last of them: 500") as info:
            attar.collect(prompts, out, teacher=server.url, most_failures=5, concurrency=2, **OPTIONS)
        assert 5 <= len(server.bodies) <= 6 and "run the same command again" in info.value.hint
    assert list(tmp_path.iterdir()) == [prompts], "no journal without an answer"


def test_a_key_that_is_refused_ends_the_run_at_once(tmp_path, prompts):
    with ChatServer(lambda *_: "401") as server:
        with pytest.raises(EndpointError, match="401") as info:
            attar.collect(prompts, tmp_path / "data.jsonl", teacher=server.url, concurrency=1, **OPTIONS)
        assert len(server.bodies) == 1 and "--key-env" in info.value.hint


def test_a_request_without_an_answer_is_named_and_asked_again(tmp_path, prompts):
    out = tmp_path / "data.jsonl"

    def script(prompt, number):
        return "500" if prompt == PROMPTS[1] and number < 4 else "ok"

    with ChatServer(script) as server:
        with pytest.raises(EndpointError, match=r"1 of 20 requests have no answer: .*prompts\.txt:2: 500"):
            attar.collect(prompts, out, teacher=server.url, attempts=4, **OPTIONS)
        assert not out.exists()
        result = attar.collect(prompts, out, teacher=server.url, attempts=4, **OPTIONS)
    assert result.sent == 1 and set(server.answered.values()) == {1}


def test_a_wait_that_is_too_long_ends_the_run(tmp_path, prompts):
    with (
        ChatServer(lambda *_: "429:3600") as server,
        pytest.raises(EndpointError, match="asks to wait 3600 s"),
    ):
        attar.collect(prompts, tmp_path / "data.jsonl", teacher=server.url, **OPTIONS)


@pytest.mark.slow
def test_an_endpoint_that_is_asked_too_often_is_asked_until_it_answers(tmp_path, prompts):
    """More 429 than a request has attempts: they are no failures."""
    with ChatServer(lambda prompt, number: "429" if number < 6 else "ok") as server:
        result = attar.collect(prompts, tmp_path / "d.jsonl", teacher=server.url, attempts=2, **OPTIONS)
        assert result.answers == 20 and len(server.bodies) == 140
        server.script = lambda prompt, number: "429"
        with pytest.raises(EndpointError, match="answers nothing for 1 s: 429"):
            attar.collect(prompts, tmp_path / "e.jsonl", teacher=server.url, longest_wait_s=0.6, **OPTIONS)


def test_the_budget_holds_and_the_rest_is_asked_with_a_larger_one(tmp_path, prompts):
    out = tmp_path / "data.jsonl"
    prices = {"price_in": 1000.0, "price_out": 2000.0, "max_tokens": 20}
    with ChatServer() as server:
        with pytest.raises(EndpointError, match=r"budget of 0\.3 has no room") as info:
            attar.collect(prompts, out, teacher=server.url, budget=0.3, **prices, **OPTIONS)
        assert "--offline" in info.value.hint
        journal = rows_of(tmp_path / "data.jsonl.journal")
        spent = sum(
            row["usage"]["prompt_tokens"] * 1e-3 + row["usage"]["completion_tokens"] * 2e-3 for row in journal
        )
        assert 0.2 < spent <= 0.3 and 5 < len(journal) == sum(server.answered.values()) < 20
        result = attar.collect(prompts, out, teacher=server.url, budget=9.0, **prices, **OPTIONS)
    assert result.sent == 20 - len(journal) and set(server.answered.values()) == {1}
    assert result.cost == pytest.approx(result.spent)


def test_answers_that_broke_off_count_against_the_budget(tmp_path, prompts):
    """They may be charged: without an answer, the budget ends after as many as it could have paid."""
    prices = {"price_in": 0.001, "price_out": 1000.0, "max_tokens": 100}
    options = OPTIONS | {"most_failures": 1000, "attempts": 1000}
    with ChatServer(lambda *_: "half") as server:
        with pytest.raises(EndpointError, match="budget"):
            attar.collect(prompts, tmp_path / "d.jsonl", teacher=server.url, budget=1.0, **prices, **options)
        assert len(server.bodies) == 9  # a tenth would leave no room for its prompt


def test_rate_limits_hold(tmp_path, prompts):
    with ChatServer() as server:
        start_s = time.monotonic()
        attar.collect(
            prompts, tmp_path / "d.jsonl", teacher=server.url, requests_per_minute=1200.0, limit=12, **OPTIONS
        )
    assert time.monotonic() - start_s < 5
    asked = sorted(server.times)
    assert asked[-1] - asked[0] < 5 and len(asked) == 12


def test_dry_run_asks_nothing_and_writes_nothing(tmp_path, prompts, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    command = ["collect", str(prompts), "--teacher", "https://api.example.org/v1", "--model", "m", "-o",
               str(tmp_path / "data.jsonl"), "--price-in", "1", "--price-out", "2", "--dry-run"]  # fmt: skip
    assert call([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["requests"] == 20 and plan["answer_tokens"] == 20 * 1024 and plan["answered"] == 0
    assert plan["cost"] == pytest.approx(plan["prompt_tokens"] * 1e-6 + 20 * 1024 * 2e-6)
    assert call(command) == 0
    assert "20 requests, 20 to ask" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [prompts]


SLOW = [pytest.param(what, marks=pytest.mark.slow) for what in ("400", "500", "429:0", "half")]


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["401", "echo", *SLOW])
def test_the_key_is_nowhere(tmp_path, prompts, what):
    """The server echoes the Authorization header in the bodies of its errors, and in an answer."""
    out = tmp_path / "out" / "data.jsonl"

    def script(prompt, number):
        return what if prompt == PROMPTS[2] else "ok"

    with ChatServer(script) as server:
        options = [
            "--longest-wait-s",
            "0.5",
            "--limit",
            "4",
            "--attempts",
            "2",
            "--debug",
            "--concurrency",
            "1",
        ]
        process = start(prompts, out, server.url, *options, OPENAI_LOG="debug")
        texts = process.communicate(timeout=60)
    assert f"Bearer {KEY}" in server.keys
    assert process.returncode == (0 if what in ("400", "echo") else 1), texts[1]
    files = [path.read_text() for path in out.parent.iterdir()]
    assert files and KEY not in "".join([*texts, *files])
    if what in ("401", "400", "500", "429:0"):
        assert "[key]" in texts[1]


def test_a_key_that_goes_over_plain_http_is_warned_of(tmp_path, prompts, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(EndpointTeacher, "exposed_key", True)
    with ChatServer() as server:
        attar.collect(
            prompts, tmp_path / "d.jsonl", teacher=server.url, model="m", progress=attar.Terminal(), limit=1
        )
    assert "warning: the key goes to 127.0.0.1 over http" in capsys.readouterr().err


def test_exceptions_hold_no_key(tmp_path, prompts, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ChatServer(lambda *_: "401") as server, pytest.raises(EndpointError) as info:
        attar.collect(prompts, tmp_path / "d.jsonl", teacher=server.url, model="m")
    error = info.value
    while error is not None:
        assert KEY not in repr(error) + repr(vars(error))
        assert type(error).__module__ == "attar.errors"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({"teacher": "https://api.openai.com/v1"}, LicenceError, "--accept-licence openai-api"),
        ({"out": "data.txt"}, SettingsError, "ends with .jsonl"),
        ({"model": ""}, SettingsError, "model is ''"),
        ({"teacher": "attar:tiny"}, SettingsError, "left out: --teacher names a model"),
        ({"teacher": "https://u:p@h/v1"}, UsageError, "more than host and path"),
        ({"prompts": "nosuch.txt"}, DataError, "cannot be read"),
        ({"systems": ("nosuch",)}, SettingsError, "NAME=WEIGHT"),
        ({"top_p": 0.0}, SettingsError, "above 0, and at most 1"),
        (
            {"filters": "auto", "evaluation": ("nosuch.txt",)},
            DataError,
            "evaluation: nosuch.txt: cannot be read",
        ),
        ({"filters": "auto", "refusals": "nosuch.txt"}, DataError, "nosuch.txt"),
    ],
)
def test_bad_input_is_refused_before_any_work(tmp_path, prompts, change, error, problem):
    options = OPTIONS | {"out": tmp_path / "d.jsonl", "teacher": "http://127.0.0.1:9/v1", "prompts": prompts}
    options |= change
    arguments = [options.pop("prompts"), options.pop("out")]
    with pytest.raises(error, match=problem):
        attar.collect(*arguments, **options)
    assert list(tmp_path.iterdir()) == [prompts]


def test_filters_run_and_can_run_alone(tmp_path, prompts):
    out, again = tmp_path / "data.jsonl", tmp_path / "again.jsonl"
    options = OPTIONS | {"filters": "length", "least_words": 6}
    with ChatServer() as server:
        result = attar.collect(prompts, out, teacher=server.url, **options)
    kept = [prompt for prompt in PROMPTS if len(content_of(prompt).split()) >= 6]
    assert [row["messages"][0]["content"] for row in rows_of(out)] == kept
    assert result.filters.kept == len(kept)
    journal = tmp_path / "data.jsonl.journal"
    assert call(["collect", str(journal), "--filter-only", "-o", str(again), "--filters", "none", "-q"]) == 0
    assert len(rows_of(again)) == 20
    parent = read_card(again).parents[0]
    assert parent.stage == "collect" and parent.parents[0].name == "m at 127.0.0.1"
    with pytest.raises(DataError, match="the filters keep no row"):
        attar.collect(
            prompts, out, teacher=server.url, offline=True, force=True, **options | {"least_words": 999}
        )


def test_terms_that_are_accepted_with_a_reason_are_in_the_card(tmp_path, prompts):
    """The name of the model says whose terms hold, whichever host passes it on."""
    out, options = tmp_path / "data.jsonl", OPTIONS | {"model": "openai/gpt-4o-mini"}
    with ChatServer() as server:
        with pytest.raises(LicenceError, match="OpenAI"):
            attar.collect(prompts, out, teacher=server.url, **options)
        assert not server.bodies
        accepted = {"accept_licence": ("openai-api",), "reason": "a contract of our own"}
        attar.collect(prompts, out, teacher=server.url, **accepted, **options)
    card = json.loads(card_path(out).read_text())
    assert "openai-api" in card["licence"]["ids"] and card["settings"]["reason"] == "a contract of our own"
    parent = provenance(str(out), signal=True)[0]
    assert parent.name == "data.jsonl" and "openai-api" in root_licences(parent)
    assert parent.parents[0].name == "openai/gpt-4o-mini at 127.0.0.1"


def test_a_notebook_whose_loop_runs_already(tmp_path, prompts):
    import asyncio

    async def cell(url):
        return attar.collect(prompts, tmp_path / "d.jsonl", teacher=url, **OPTIONS)

    with ChatServer() as server:
        assert asyncio.run(cell(server.url)).answers == 20


def test_a_local_teacher_killed_and_run_again_ends_in_the_same_bytes(tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("\n".join(f"def {word}(x):" for word in PROMPTS))
    out, plain = tmp_path / "data.jsonl", tmp_path / "plain.jsonl"
    options = {"teacher": "attar:tiny", "max_tokens": 16, "filters": "none", "concurrency": 4}
    attar.collect(prompts, plain, **options)
    journal = tmp_path / "plain.jsonl.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    (tmp_path / "data.jsonl.journal").write_bytes(b"".join(lines[:7]) + lines[7][:30])
    result = attar.collect(prompts, out, **options)
    assert result.sent == 13 and out.read_bytes() == plain.read_bytes()


@pytest.mark.slow
def test_attars_own_server(tmp_path, prompts, monkeypatch):
    """It needs a key, and answers 429 where more requests come than it lets wait."""
    pytest.importorskip("fastapi")
    from attar.runtime.admission import Limits
    from tests.serving.http.real import serving

    monkeypatch.setenv("ATTAR_TEST_KEY", KEY)
    options = {"model": "tiny", "max_tokens": 8, "send_seed": True, "filters": "none"}
    out, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    with serving(limits=Limits(sequences=2, waiting=1), api_key=(KEY,)) as (url, _, _):
        first = attar.collect(
            prompts, out, teacher=f"{url}/v1", key_env="ATTAR_TEST_KEY", concurrency=8, **options
        )
        attar.collect(prompts, again, teacher=f"{url}/v1", key_env="ATTAR_TEST_KEY", concurrency=1, **options)
    assert first.answers == 20 < first.sent
    rows = [[row | {"created": None} for row in rows_of(path)] for path in (out, again)]
    assert rows[0] == rows[1] and len({row["messages"][-1]["content"] for row in rows[0]}) > 10
