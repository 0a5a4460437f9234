"""The teachers of a text are its signal lineage."""

import json

import pytest

from attar.data.provenance import CARD, provenance
from attar.errors import CheckpointError


@pytest.fixture
def rows(tmp_path):
    def write(*rows, card=None, name="data.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if card is not None:
            file.with_name(name + CARD).write_text(json.dumps(card))
        return file

    return write


def test_the_card_of_a_collection_carries_the_teacher_on(rows):
    settings = {"accept_licence": ["openai-api"], "reason": "a contract"}
    file = rows(
        {"text": "x"}, card={"teacher": "gpt", "settings": settings, "licence": {"ids": ["openai-api"]}}
    )
    for source in (str(file), f"{file}:text", f"whole:{file}", str(file.parent)):
        (record,) = provenance(source, signal=False)
        assert (record.role, record.name, record.stage) == ("signal", "data.jsonl", "collect")
        assert record.licence["ids"] == ["openai-api"]
        assert record.settings == settings
    again = rows({"text": "y"})
    assert provenance(str(again), signal=False)[0].fingerprint != record.fingerprint


def test_teachers_named_in_rows(rows):
    file = rows({"text": "a", "teacher": "gpt-4o"}, {"text": "b", "teacher": "gpt-4o"}, {"text": "c"})
    (record,) = provenance(str(file), signal=False)
    assert record.licence["ids"] == ["unknown", "openai-api"]
    assert record.licence["evidence"] == ["data.jsonl: teacher gpt-4o"]


def test_an_unknown_author_counts_only_for_a_signal(rows):
    file = rows({"text": "the teacher said"}, {"text": "b", "teacher": 3})
    assert provenance(str(file), signal=False) == ()
    (record,) = provenance(str(file), signal=True)
    assert record.licence["ids"] == ["unknown"]
    assert provenance("org/data", signal=True)[0].licence["ids"] == ["unknown"]
    assert provenance("org/data", signal=False) == ()
    assert provenance("python-docs-chat", signal=True) == ()


def test_cards_that_say_nothing_and_damaged_ones(rows):
    for card in ({}, {"licence": {}}, {"licence": "x", "settings": []}, {"licence": {"ids": []}}):
        assert provenance(str(rows({}, card=card)), signal=False)[0].licence["ids"] == ["unknown"]
    file = rows({"text": "x"})
    file.with_name(file.name + CARD).write_text("{")
    with pytest.raises(CheckpointError, match=r"card\.json"):
        provenance(str(file), signal=False)
