from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attar.checkpoint.card import Card, Parent, plain, versions
from attar.checkpoint.inspect import inspect
from attar.checkpoint.licences import duties
from attar.checkpoint.lineage import as_parent, compact, duties_of
from attar.checkpoint.open import open_checkpoint
from attar.errors import AttarError, CheckpointError

ROOT = Parent(
    role="weights", name="org/base@main", stage="original", fingerprint="f0", licence={"ids": ["mit"]}
)
TEACHER = Parent(role="signal", name="teacher", stage="original", licence={"ids": ["gemma"]})
CARD = Card(
    name="small",
    stage="prune",
    settings={"ratio": 0.25, "methods": ["heads"]},
    seed=3,
    key="k",
    parents=(Parent(role="weights", name="mid", stage="distill", parents=(ROOT, TEACHER)),),
    versions=versions(),
    files={"model.safetensors": "00"},
    details={"curve": [{"step": 1, "loss": 2.0}]},
    licence={"status": "allow"},
    command="attar prune mid -o small",
)


def test_a_card_comes_back_whole(tmp_path):
    CARD.write(tmp_path)
    assert Card.read(tmp_path) == CARD
    assert json.loads((tmp_path / "attar.json").read_text())["attar"] == 1


def test_no_card(tmp_path):
    assert Card.read(tmp_path) is None


def test_the_same_card_has_the_same_bytes(tmp_path):
    CARD.write(tmp_path)
    first = (tmp_path / "attar.json").read_bytes()
    CARD.write(tmp_path)
    assert (tmp_path / "attar.json").read_bytes() == first


def test_unknown_fields_of_a_later_attar_are_written_again(tmp_path):
    content = CARD.to_dict() | {"colour": "red"}
    content["parents"][0]["parents"][1]["hours"] = [3, {"x": None}]
    (tmp_path / "attar.json").write_text(json.dumps(content))
    card = Card.read(tmp_path)
    assert (card.unknown, card.parents[0].parents[1].unknown) == (
        {"colour": "red"}, {"hours": [3, {"x": None}]},
    )  # fmt: skip
    assert card.to_dict() == content
    assert card.with_measurements(bytes=1).to_dict() == {**content, "measurements": {"bytes": 1}}
    assert as_parent(open_card(tmp_path, card), "weights").parents[0].parents[1].unknown["hours"][0] == 3


def open_card(folder, card):
    """A checkpoint with a card, and nothing else of it."""
    return SimpleNamespace(name=card.name, card=card, path=folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attar": 2}, "card version 2"),
        ({"attar": None}, "card version None"),
        ({"name": None}, "name is None, but must be a text"),
        ({"stage": 7}, "stage is 7, but must be a text"),
        ({"settings": []}, r"settings is \[\], but must be an object"),
        ({"parents": {}}, r"parents is \{\}, but must be a list"),
        ({"parents": [{"role": "uncle", "name": "x", "stage": "y"}]}, "a parent without a role"),
        ({"parents": ["x"]}, "a parent without a role"),
    ],
)
def test_damaged_cards(tmp_path, change, message):
    (tmp_path / "attar.json").write_text(json.dumps({**CARD.to_dict(), **change}))
    with pytest.raises(CheckpointError, match=message) as caught:
        Card.read(tmp_path)
    assert "attar.json" in str(caught.value)


def test_measurements_are_added():
    once = CARD.with_measurements(perplexity=9.0, bytes=10)
    twice = once.with_measurements(perplexity=8.0)
    assert twice.measurements == {"perplexity": 8.0, "bytes": 10}
    assert CARD.measurements == {}


def test_a_parent_keeps_its_own_parents_and_a_root_its_licence():
    assert CARD.as_parent("signal", "f").parents == CARD.parents
    assert CARD.as_parent("signal", "f").licence == {}
    root = Card(name="tiny", stage="train", licence={"ids": ["apache-2.0"]})
    assert root.as_parent("weights").licence == {"ids": ["apache-2.0"]}


def test_plain_values():
    value = {
        "p": Path("/x"),
        1: (1, 2),
        "t": torch.tensor([1.5]),
        "n": float("nan"),
        "d": torch.float16,
        "b": True,
    }
    assert plain(value) == {"p": "/x", "1": [1, 2], "t": [1.5], "n": None, "d": "torch.float16", "b": True}
    assert plain(ROOT)["name"] == "org/base@main"


def test_versions_name_what_decides_numbers():
    assert list(versions()) == ["attar", "python", "torch", "transformers"]
    assert versions()["torch"] == torch.__version__


def locations(value, path=()):
    """The path of every value inside a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from locations(item, (*path, key))


def replaced(value, path, other):
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], other)
    return copy


WHOLE = json.loads(
    json.dumps(
        CARD.with_measurements(perplexity=8.0, bytes=10, prompt="x", kl=None).to_dict()
        | {
            "licence": {
                "ids": ["mit"],
                "evidence": ["by hand"],
                "status": "allow",
                "sources": [{"id": "mit"}],
            }
        }
    )
)
VALUES = (None, True, 5, -1, 10**250, 0.5, "text", "", [], [1], {}, {"a": 1})


@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_no_field_of_a_card_can_break_what_reads_it(make, tmp_path, step):
    """One value anywhere in the card of another kind: one line, or no notice taken. In each place one of
    the kinds always."""
    folder = make()
    for number, path in enumerate(locations(WHOLE)):
        for value in VALUES[number % step :: step]:
            (folder / "attar.json").write_text(json.dumps(replaced(WHOLE, path, value)))
            try:
                summary = inspect(folder)
                summary.render()
                summary.to_dict()
                duties_of(open_checkpoint(folder))
                lineage = compact(
                    [as_parent(open_checkpoint(folder), role) for role in ("weights", "signal")]
                )
                Card(name="x", stage="y", parents=lineage, licence=duties(lineage).to_dict()).to_dict()
            except AttarError as error:
                assert "attar.json" in error.message and "\n" not in error.message, path
