"""The teachers of a text are its signal lineage."""

import hashlib
import json

import pytest

from attar.checkpoint.card import Card, Parent
from attar.checkpoint.licences import duties
from attar.data.provenance import card_path, provenance
from attar.errors import CheckpointError

TEACHER = Parent(role="signal", name="gpt", stage="original", licence={"ids": ["openai-api"]})


@pytest.fixture
def rows(tmp_path):
    def write(*rows, card=False, name="data.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if card:
            settings = {"accept_licence": ["openai-api"], "reason": "a contract"}
            files = {name: hashlib.sha256(file.read_bytes()).hexdigest()}
            content = Card(name=name, stage="collect", settings=settings, parents=(TEACHER,), files=files)
            card_path(file).write_text(json.dumps(content.to_dict()))
        return file

    return write


def test_the_card_of_a_collection_carries_the_teacher_on(rows):
    file = rows({"text": "x"}, card=True)
    for source in (str(file), f"{file}:text", f"whole:{file}", str(file.parent)):
        (record,) = provenance(source, signal=False)
        assert (record.role, record.name, record.stage) == ("signal", "data.jsonl", "collect")
        assert record.parents == (TEACHER,)
        assert record.settings["reason"] == "a contract"
    assert duties([record]).sources[0].id == "openai-api"


def test_rows_that_were_added_have_an_unknown_author(rows):
    rows({"text": "x"}, card=True)
    before = provenance(str(rows({"text": "x"})), signal=False)
    after = provenance(str(rows({"text": "x"}, {"text": "y"})), signal=False)
    assert len(before) == 1
    assert [record.licence.get("ids") for record in after] == [None, ["unknown"]]
    assert after[0].fingerprint != before[0].fingerprint


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


def test_a_damaged_card_is_refused(rows):
    file = rows({"text": "x"})
    for content in ("{", "{}", json.dumps({"attar": 1, "name": "x"})):
        card_path(file).write_text(content)
        with pytest.raises(CheckpointError, match=r"card\.json"):
            provenance(str(file), signal=False)
