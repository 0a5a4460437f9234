"""YAML with places: values, line numbers, and one line for everything that is not well-formed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from attar.errors import RecipeError
from attar.yaml import parse_documents, parse_yaml, read_yaml, safe_values, scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-3", -3), ("1_000", 1000), ("1e-4", 1e-4), ("0.5", 0.5), (".5", 0.5), ("5.", 5.0),
        ("1E3", 1000.0), ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("no", "no"), ("on", "on"), ("1:30", "1:30"), ("0x10", "0x10"), ("2021-01-01", "2021-01-01"),
        ("W4A16", "W4A16"), ("org/name@main", "org/name@main"), (".inf", float("inf")),
    ],
)  # fmt: skip
def test_scalars(text: str, value: object) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_quotes_make_text() -> None:
    assert parse_yaml("a: '1'\nb: \"true\"\nc: |\n  2\n", "r").plain() == {"a": "1", "b": "true", "c": "2\n"}


def test_places_of_keys_and_values() -> None:
    root = parse_yaml("a: 1\nb:\n  c:\n    - x\n    - y\n", "r.yaml")
    b = root.value["b"]
    assert (b.where, b.value.where) == ("r.yaml:2", "r.yaml:3")
    items = b.value.value["c"].value.value
    assert [item.where for item in items] == ["r.yaml:4", "r.yaml:5"]


def test_aliases_are_values() -> None:
    assert parse_yaml("a: &x {k: 1}\nb: *x\n", "r").plain() == {"a": {"k": 1}, "b": {"k": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "r.yaml:2: key 'a' is given twice (first at r.yaml:1)"),
        ("a: 1\n\tb: 2", "r.yaml:2: not valid YAML: a tab where YAML wants spaces"),
        ("a: [1,\n2", "r.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2", "r.yaml:2: not valid YAML: expected a single document"),
        ("- &a [*a]", "r.yaml:1: an alias that repeats itself without end"),
        ("a: *x", "r.yaml:1: not valid YAML: found undefined alias"),
        ("a: 1\nb: !!python/name:os.system", "r.yaml:2: the tag"),
        ("a: !!int abc", "r.yaml:1: 'abc' is no int"),
        ("a: !!set {x}", "r.yaml:1: the tag"),
        ("a: {<<: [1]}", "r.yaml:1: << takes mappings alone"),
        ("a: 1\n? [x, y]\n: 2", "r.yaml:2: a key must be a word"),
        ("a: 1\nb: \x00", "r.yaml:2: a character that YAML does not allow"),
        ("[" * 1200, "r.yaml: nested too deeply"),
    ],
)
def test_what_is_not_well_formed(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_yaml(text, "r.yaml")
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message


def test_several_documents() -> None:
    actual = parse_documents("a: 1\n---\nb: 2\n---\n# nothing\n---\n- x\n", "r.yaml")
    assert [(item.plain(), item.where) for item in actual] == [
        ({"a": 1}, "r.yaml:1"), ({"b": 2}, "r.yaml:3"), (["x"], "r.yaml:7"),
    ]  # fmt: skip
    assert parse_documents("", "r.yaml") == []
    with pytest.raises(RecipeError, match=r"r\.yaml:4: key 'b' is given twice"):
        parse_documents("a: 1\n---\nb: 2\nb: 3\n", "r.yaml")
    with pytest.raises(RecipeError, match=r"r\.yaml:4: not valid YAML"):
        parse_documents("a: 1\n---\n{\n", "r.yaml")


def test_documents_of_a_text() -> None:
    assert [parse_document.plain() for parse_document in parse_documents("a: 1\n---\na: 2\n", "two.yml")] == [
        {"a": 1},
        {"a": 2},
    ]


def test_aliases_do_not_explode() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    for parse in (parse_yaml, parse_documents):
        with pytest.raises(RecipeError, match=r"r\.yaml:5: aliases that repeat others: more than 100,000"):
            parse("\n".join(lines), "r.yaml")
    with pytest.raises(yaml.YAMLError, match="aliases that repeat others"):
        safe_values("\n".join(lines))


STAGES = ["- {prune: {ratio: 0.1, name: s%d}}\n", "- prune:\n    ratio: 0.1\n    name: s%d\n"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_of_too_many_values_is_named_as_that(stage, monkeypatch) -> None:
    monkeypatch.setattr("attar.yaml.MOST_NODES", 5_000)
    text = "stages:\n" + "".join(stage % number for number in range(4_000))
    for parse in (parse_yaml, parse_documents):
        with pytest.raises(RecipeError, match=r"more than 5,000 (lines|values)"):
            parse(text, "r.yaml")


def test_a_very_long_file_is_refused_at_once() -> None:
    start = time.process_time()
    with pytest.raises(RecipeError, match=r"r\.yaml: more than 50,000 lines"):
        parse_yaml("stages:\n" + "- {stage: prune}\n" * 1_000_000, "r.yaml")
    assert time.process_time() - start < 2


def test_as_many_ordinary_values_as_any_recipe_has() -> None:
    text = "".join(f"- {{a: {number}, b: [1, 2]}}\n" for number in range(2_000))
    assert len(parse_yaml(text, "r.yaml").value) == 2_000


@pytest.mark.parametrize(
    "text",
    ["a: 2024-99-99", "a: " + "9" * 5000, "[" * 1200, "a: !!python/object:os.system x", "a: [", "- &a [*a"],
)
def test_values_of_others_are_one_kind_of_error(text) -> None:
    with pytest.raises(yaml.YAMLError):
        safe_values(text)
    assert safe_values("a: 1\na: yes") == {"a": True}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        read_yaml(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff")
    with pytest.raises(RecipeError, match=r"not text in UTF-8 \(byte 3\)"):
        read_yaml(tmp_path / "bytes.yaml")


def test_tags_and_merge_keys() -> None:
    text = "a: !!str 0.5\nb: !!float 1\nc: !!bool true\nd: !!null null\ne: &e {x: 1, y: 2}\n"
    text += "f: &f {x: 3, z: 4}\ng: {<<: *e, y: 5}\nh: {<<: [*e, *f]}\ni: {'<<': 6}\n"
    actual = parse_yaml(text, "r.yaml").plain()
    assert {name: actual[name] for name in "abcd"} == {"a": "0.5", "b": 1.0, "c": True, "d": None}
    assert type(actual["b"]) is float
    assert (actual["g"], actual["h"], actual["i"]) == ({"x": 1, "y": 5}, {"x": 1, "z": 4, "y": 2}, {"<<": 6})
