"""Texts in memory are a source like a file."""

import json
from pathlib import Path

import datasets
import pytest

from attar.data.in_memory import text_source
from attar.data.sources import documents
from attar.errors import DataError

TEXTS = [f"document {number} of some text" for number in range(30)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "attar" / "texts"


def test_names_and_paths_stay():
    assert text_source("python-docs") == "python-docs"
    assert text_source(Path("a/b.txt")) == "a/b.txt"


@pytest.mark.parametrize(
    "data",
    [
        TEXTS,
        (text for text in TEXTS),
        [{"text": text, "other": 1} for text in TEXTS],
        datasets.Dataset.from_dict({"text": TEXTS}),
    ],
    ids=["list", "generator", "rows", "dataset"],
)
def test_texts_are_read_back(data):
    assert sorted(documents(f"whole:{text_source(data)}", "train")) == sorted(TEXTS)


def test_conversations_are_read_back():
    talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    (document,) = documents(f"whole:{text_source([talk])}", "train")
    assert list(document) == talk


def test_the_same_texts_are_the_same_source_and_nothing_else_is_left(cache):
    first = text_source(TEXTS)
    assert text_source(iter(TEXTS)) == first != text_source(TEXTS[1:])
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "no text"),
        (["a", 3], "row 1"),
        ([{"text": {1, 2}}], "row 0"),
        ([{"score": float("nan")}], "row 0"),
    ],
)
def test_what_is_no_text_is_refused(data, words, cache):
    with pytest.raises(DataError, match=words):
        text_source(data)
    assert list(cache.iterdir()) == []


def test_a_line_of_text_stays_one(cache):
    name = text_source(["two\nlines", "\u2028"])
    assert [json.loads(line)["text"] for line in Path(name).read_text().split("\n")[:2]] == [
        "two\nlines",
        "\u2028",
    ]
