"""``benchmarks/collect.py``: its endpoint, the rows it makes up, its tables."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import collect as benchmark  # noqa: E402


def cells(table):
    """The rows below the head of a Markdown table."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_answers_come_after_the_delay_and_the_journal_asks_nothing():
    arguments = Namespace(prompts=6, delay=0.05, concurrency=3, words=5)
    first, again = cells(benchmark.answers(arguments))
    assert first[:2] == ["first", "6"] and again[:2] == ["again", "0"] and again[4] == "–"
    assert 0 < float(first[4].rstrip("%")) <= 100  # two turns of three: the delay is waited for
    assert float(first[2]) >= 0.1


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


class Pipe:
    def send(self, seen):
        self.seen = seen


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
