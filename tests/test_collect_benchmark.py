"""``benchmarks/collect.py``: its endpoint, the rows it makes up, its tables."""

import asyncio
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import collect as benchmark  # noqa: E402


class Pipe:
    def send(self, seen):
        self.seen = seen


def cells(table):
    """The rows below the head of a Markdown table."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.slow
def test_answers_come_after_the_delay_and_the_journal_asks_nothing():
    arguments = Namespace(prompts=6, delay=0.05, concurrency=3, words=5)
    first, again = cells(benchmark.answers(arguments))
    assert first[:2] == ["first", "6"] and again[:2] == ["again", "0"] and again[4] == "–"
    assert 0 < float(first[4].rstrip("%")) <= 100 and float(first[2]) >= 0.1  # two turns of three


def test_the_endpoint_waits_before_every_answer_of_a_connection(monkeypatch):
    waited, pipe, body = [], Pipe(), b'{"model": "m", "messages": [{"role": "user", "content": "Why?"}]}'

    async def sleep(seconds):
        waited.append(seconds)

    async def ask(times):
        serving = asyncio.create_task(benchmark._serve(pipe, 7.5, 5))
        while not hasattr(pipe, "seen"):
            await yielded(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", pipe.seen)
        for _ in range(times):
            writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            answer = json.loads(await reader.readexactly(int(head.split()[-1])))
        writer.close()
        serving.cancel()
        return answer

    yielded = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", sleep)
    answer = asyncio.run(ask(2))
    assert waited == [7.5, 7.5]
    assert (
        len(answer["choices"][0]["message"]["content"].split()) == answer["usage"]["completion_tokens"] == 5
    )


def test_the_part_that_is_made_up_is_of_each_kind():
    rows, originals = benchmark.made_up(600)
    kinds = [
        benchmark.kind_of(row, None if of is None else rows[of])
        for row, of in zip(rows, originals, strict=True)
    ]
    assert len(rows) == 600 and originals == sorted(originals, key=lambda of: of is not None)
    assert kinds.count("strangers") == 540
    assert 15 <= kinds.count("repeats") <= 35  # of 60: J is anywhere between 0.5 and 1, the limit is 0.8
    assert benchmark.made_up(600)[0] == rows


@pytest.mark.parametrize(
    ("text", "kind"), [("a b c d e f g h i j", "repeats"), ("a b c d e f g h i x", "relatives")]
)
def test_the_kind_of_a_row_is_by_its_runs_of_words(text, kind):
    prompt, _, answer = "a b c d e f g h i j".partition(" ")
    other, _, changed = text.partition(" ")
    original = {"prompt": prompt, "completion": answer}
    assert benchmark.kind_of({"prompt": other, "completion": changed}, original) == kind  # J = 5/7
    assert benchmark.kind_of(original, None) == "strangers"


def test_what_the_filter_misses_and_wrongly_drops_is_counted(monkeypatch):
    pipe = Pipe()
    benchmark.filtered(pipe, 300)
    repeats, relatives, strangers = (pipe.seen[kind] for kind in ("repeats", "relatives", "strangers"))
    assert repeats[0] == repeats[1] > 0 and relatives[1] == strangers[1] == 0
    assert repeats[0] + relatives[0] == 30 and strangers[0] == 270
    monkeypatch.setattr(
        benchmark, "near_duplicates", lambda rows, settings: ["", *["copy"] * (len(rows) - 1)]
    )
    benchmark.filtered(pipe, 300)
    assert pipe.seen["strangers"] == (270, 269) and pipe.seen["relatives"] == (relatives[0], relatives[0])


def test_the_table_of_near_duplicates():
    ((rows, *_, repeats, relatives, strangers),) = cells(benchmark.duplicates(Namespace(rows=200)))
    assert rows == "200" and strangers == "0 of 180"
    assert repeats.split(" of ")[0] == repeats.split(" of ")[1] and relatives.startswith("0 of ")
