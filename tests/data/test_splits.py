"""Splits of sources: disjoint by construction, whatever the source; and honest where that cannot be."""

import json
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.data import python_text
from attar.data.packing import pack
from attar.data.sources import documents, read_split
from attar.data.splits import SHARES, by_position, content, take
from tests import tiny_models

SPLITS = tuple(SHARES)


def prose(paragraphs: int, seed: int = 0) -> str:
    """Paragraphs of 300 characters and more, no two alike."""
    noise = random.Random(seed)
    words = [f"{noise.choice('bcdfgklmprst')}{noise.choice('aeiou')}{number}" for number in range(500)]
    return "\n\n".join(" ".join(noise.choices(words, k=70)) + "." for _ in range(paragraphs))


def test_one_document_is_cut_by_position(tmp_path):
    text = prose(100)
    (tmp_path / "a.txt").write_text(text)
    parts = {split: "".join(documents(str(tmp_path / "a.txt"), split)) for split in SPLITS}
    assert "".join(parts.values()) == text
    for split, share in SHARES.items():
        assert abs(len(parts[split]) / len(text) - share) < 0.03
        assert parts[split].rstrip().endswith("."), "a cut is the end of a paragraph"


def test_the_rows_of_one_file_are_in_one_split_only(tmp_path):
    """What the audit saw: train, calibration and evaluation of wikitext were the same rows, bit for bit."""
    (tmp_path / "a.txt").write_text(prose(100))
    tokenizer, rows = tiny_models.tokenizer(), {}
    for split in SPLITS:
        packed = pack(tokenizer, str(tmp_path / "a.txt"), split, length=32, rows=20, seed=0)
        assert not packed.shared
        text = tokenizer.decode(packed.rows.flatten().tolist())
        rows[split] = {text[start : start + 60] for start in range(len(text) - 60)}
    assert not rows["train"] & rows["evaluation"]
    assert not rows["calibration"] & rows["evaluation"] and not rows["train"] & rows["calibration"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.text(st.sampled_from("ab \n"), min_size=1, max_size=400), min_size=1, max_size=12, unique=True
    )
)
def test_position_keeps_every_character_once_and_in_order(texts):
    parts = by_position(texts, SHARES)
    kept = "".join(text for split in SPLITS for text in parts[split])
    if all(len(" ".join(part.split())) < 200 for text in texts for part in text.split("\n\n")):
        assert kept == "".join(texts)


@pytest.mark.parametrize("copies", [2, 3])
def test_a_document_that_occurs_twice_is_on_one_side(tmp_path, copies):
    page = prose(6, seed=7)
    for number in range(copies):
        (tmp_path / f"{number}-copy.txt").write_text(page)
        (tmp_path / f"{number}-other.txt").write_text(prose(6, seed=number))
    (tmp_path / "z-quoting.txt").write_text(f"A new head.\n\n{page}\n\nA new tail.")
    parts = {split: "".join(documents(str(tmp_path), split)) for split in SPLITS}
    for paragraph in page.split("\n\n"):
        assert sum(paragraph[:150] in part for part in parts.values()) <= 1, "on one side"
        assert sum(part.count(paragraph) for part in parts.values()) <= copies


def test_conversations_are_never_cut(tmp_path):
    rows = [[{"role": "user", "content": f"{number} " * 200}] for number in range(20)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    parts = {split: list(documents(str(tmp_path / "chats.jsonl"), split)) for split in SPLITS}
    assert sorted(content(row) for part in parts.values() for row in part) == sorted(map(content, rows))
    assert all(parts.values())


def test_a_source_too_short_for_splits_says_so(tmp_path):
    split = take(["alpha beta"], "evaluation")
    assert split.documents == ["alpha beta"] and "10 characters cannot be cut" in split.shared
    (tmp_path / "a.txt").write_text(prose(12))
    tokenizer = tiny_models.tokenizer()
    packed = pack(tokenizer, str(tmp_path / "a.txt"), "evaluation", length=1024, rows=4, seed=0)
    assert "too short" in packed.shared, "the split has less than a row, the source has some"
    shorter = pack(tokenizer, str(tmp_path / "a.txt"), "evaluation", length=64, rows=4, seed=0)
    assert not shorter.shared


def test_a_source_of_one_purpose_is_read_whole(tmp_path):
    text = prose(40)
    (tmp_path / "test-set.txt").write_text(text)
    for split in SPLITS:
        assert read_split(f"whole:{tmp_path}/test-set.txt", split).documents == [text]


def test_pythons_documentation_is_prose_in_disjoint_splits():
    parts = {split: list(documents("python-docs", split)) for split in ("calibration", "evaluation")}
    assert not set(parts["calibration"]) & set(parts["evaluation"])
    assert sum(map(len, parts["calibration"])) > 150_000 and sum(map(len, parts["evaluation"])) > 60_000
    source = "\n".join(documents("python-stdlib", "calibration"))
    assert not any(part in source for part in parts["evaluation"])
    chats = list(documents("python-docs-chat", "evaluation"))
    assert all([message["role"] for message in chat][:2] == ["user", "assistant"] for chat in chats)
    reply = "".join(
        message["content"] for chat in chats for message in chat if message["role"] == "assistant"
    )
    assert len(reply) > 60_000


def test_many_documents_are_split_as_they_were(tmp_path):
    """By the hash of their content: pinned, for the figures of earlier models depend on it."""
    rows = [f"row {number}" for number in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    evaluated = sorted(documents(str(tmp_path / "rows.jsonl"), "evaluation"))
    assert evaluated == ["row 23", "row 31", "row 51", "row 73"]


def test_the_library_is_listed_without_looking_into_environments(tmp_path, monkeypatch):
    kept = ["abc.py", "json/decoder.py"]
    for name in [*kept, "site-packages/torch/a.py", "config-3.11/b.py", "lib2to3/tests/data/c.py", "d.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    looked, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(str(path)) or scandir(path))
    monkeypatch.setattr(python_text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert python_text.all_files() == [(name, tmp_path / name) for name in kept]
    assert looked and not any("torch" in path for path in looked)
