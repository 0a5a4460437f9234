"""Settings from mappings: conversion without guessing, errors in the words of the recipe or command."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attar.checkpoint.output import command_line
from attar.errors import RecipeError, SettingsError, UsageError
from attar.quantization.settings import quantize_settings
from attar.recipe.stages import EVALUATE_SETTINGS, STAGES, load
from attar.runtime.settings import EngineSettings, TextSettings
from attar.settings import (
    CommandOrigin,
    PythonOrigin,
    RecipeOrigin,
    SettingsOrigin,
    describe,
    document,
    parse,
    plain,
    settings_of,
    short,
    title,
)
from tests.recipe.recipe_fakes import AddSettings

PYTHON = PythonOrigin("add")
COMMAND = CommandOrigin("add")
EVERY = [
    *(stage.settings_class() for stage in STAGES.values()),
    load(EVALUATE_SETTINGS),
    TextSettings,
    EngineSettings,
]


@pytest.mark.parametrize("verb", ["quantize", "recover"])
@pytest.mark.parametrize(
    ("origin", "value", "expected"),
    [(PYTHON, True, "true"), (PYTHON, "auto", "auto"), (COMMAND, "false", "false"), (PYTHON, False, "false")],
)
def test_true_and_false_may_be_choices_next_to_others(
    verb: str, origin: SettingsOrigin, value: object, expected: str
) -> None:
    settings = parse(STAGES[verb].settings_class(), {"keep_zeros": value}, origin)
    assert plain(settings)["keep_zeros"] == expected
    with pytest.raises(SettingsError, match="auto, true or false"):
        parse(STAGES[verb].settings_class(), {"keep_zeros": "yes"}, origin)


def recipe_origin(given: Mapping[str, Any]) -> SettingsOrigin:
    """Each key on a line of its own, from line 5."""
    positions = {name: f"r.yaml:{line}" for line, name in enumerate(given, 5)}
    return RecipeOrigin("stage 'add'", "r.yaml:4", positions, ("stage", "from"))


def test_defaults() -> None:
    assert parse(AddSettings, {}, PYTHON) == AddSettings()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"amount": 2}, 2.0),
        ({"amount": np.float32(0.5)}, 0.5),
        ({"steps": 3.0}, 3),
        ({"steps": np.int64(3)}, 3),
        ({"names": ["a", "b"]}, ("a", "b")),
        ({"names": ()}, ()),
        ({"limit": None}, None),
        ({"limit": 4}, 4),
        ({"loud": True}, True),
    ],
)
def test_values_take_the_type_of_their_field(given: dict[str, Any], expected: object) -> None:
    value = getattr(parse(AddSettings, given, PYTHON), next(iter(given)))
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"amount": "2"}, "a number"),
        ({"amount": True}, "a number"),
        ({"amount": None}, "a number"),
        ({"amount": 10**400}, "a number"),
        ({"steps": 2.5}, "a whole number"),
        ({"steps": math.inf}, "a whole number"),
        ({"steps": True}, "a whole number"),
        ({"loud": 1}, "true or false"),
        ({"loud": "yes"}, "true or false"),
        ({"names": "a"}, "a list (text each)"),
        ({"names": ["a", 1]}, "a list (text each)"),
        ({"limit": "x"}, "a whole number or null"),
        ({"data": 3}, "text"),
        ({"amount": [1]}, "a number"),
        ({"amount": {"x": 1}}, "a number"),
    ],
)
def test_wrong_types_say_what_was_expected(given: dict[str, Any], allowed: str) -> None:
    name, value = next(iter(given.items()))
    with pytest.raises(SettingsError) as caught:
        parse(AddSettings, given, PYTHON)
    assert caught.value.message == f"{name} is {value!r}, but must be {allowed}"


def test_errors_of_a_recipe_name_line_key_and_nearest() -> None:
    given = {"amount": 1, "stps": 2}
    with pytest.raises(RecipeError) as caught:
        parse(AddSettings, given, recipe_origin(given))
    assert caught.value.message == "r.yaml:6: unknown key 'stps' in stage 'add'; did you mean 'steps'?"
    with pytest.raises(RecipeError, match="did you mean 'from'"):
        parse(AddSettings, {"form": 1}, recipe_origin({"form": 1}))
    with pytest.raises(RecipeError, match=r"^r.yaml:5: mode is 'nosy', but must be plain or noisy") as caught:
        parse(AddSettings, {"mode": "nosy"}, recipe_origin({"mode": 1}))
    assert caught.value.hint == "did you mean 'noisy'?"
    with pytest.raises(RecipeError, match=r"^r.yaml:5: amount is -1.0, but must be 0 or more"):
        parse(AddSettings, {"amount": -1}, recipe_origin({"amount": 1}))


def test_errors_of_the_command_line_name_the_option() -> None:
    with pytest.raises(SettingsError, match=r"^--amount is 'many', but must be a number") as caught:
        parse(AddSettings, {"amount": "many"}, COMMAND)
    assert caught.value.exit_code == 2
    with pytest.raises(SettingsError, match=r"^--amount is -1\.0, but must be 0 or more"):
        parse(AddSettings, {"amount": "-1"}, COMMAND)
    with pytest.raises(UsageError, match="did you mean '--steps'"):
        parse(AddSettings, {"stps": "1"}, COMMAND)


def test_text_of_the_command_line_is_read_by_the_type_of_the_field() -> None:
    given = {"amount": "1e-2", "steps": "1_000", "names": ("1", "re:a,b"), "limit": "none", "data": "1"}
    parsed = parse(AddSettings, given, COMMAND)
    assert parsed == AddSettings(amount=0.01, steps=1000, names=("1", "re:a,b"), limit=None, data="1")


def test_errors_of_python_name_the_keyword() -> None:
    with pytest.raises(UsageError, match="unknown setting 'stps' of add; did you mean 'steps'"):
        parse(AddSettings, {"stps": 1}, PYTHON)
    with pytest.raises(UsageError, match="known: amount, steps"):
        parse(AddSettings, {"zzzzz": 1}, PYTHON)


def test_a_required_setting() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Required:
        size: int = dataclasses.field(metadata={"help": "how many"})

    Required.__annotations__ = {"size": int}
    with pytest.raises(SettingsError, match="size is None, but must be given: a whole number"):
        parse(Required, {}, PYTHON)
    assert "required" in document(Required)


def test_describe() -> None:
    assert describe(int | None) == "a whole number or null"
    assert describe(tuple[float, ...]) == "a list (a number each)"


def test_title_tells_what_differs() -> None:
    assert title(AddSettings()) == "steps 2"
    assert (
        title(AddSettings(amount=0.5, seed=3, data="x", names=("a", "b")))
        == "amount 0.5, steps 2, names a, b"
    )


def test_title_knows_the_defaults_of_the_variant() -> None:
    cls = STAGES["train-head"].settings_class()
    assert "drafts" not in title(parse(cls, {"head": "dflash"}, PYTHON))
    assert "drafts 4" in title(parse(cls, {"head": "dflash", "drafts": 4}, PYTHON))


def test_title_tells_steps_only_where_they_are_the_work() -> None:
    """Most methods of quantization train nothing, whatever their default number of steps."""
    assert title(quantize_settings(method="gptq", scheme="W4A16")) == "W4A16, gptq"
    assert "steps 7" in title(quantize_settings(method="qat", steps=7))
    assert "steps" in title(STAGES["recover"].settings_class()())


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_every_settings_class_of_attar(cls: type) -> None:
    """Each has help on every field, defaults among its choices and a table, and survives JSON."""
    result = cls()
    for setting in settings_of(cls):
        assert setting.help, f"{cls.__name__}.{setting.name} has no help"
        assert describe(setting.kind)
        if setting.choices and not setting.many:
            assert setting.default is None or setting.default in setting.choices
    assert parse(cls, plain(result), PYTHON) == result
    table = document(cls)
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    common = [setting for setting in settings_of(cls) if not setting.variants]
    assert [f"| `{setting.name}` |" in row for setting, row in zip(common, rows, strict=False)] == [
        True
    ] * len(common)
    assert all(f"| `{setting.name}` |" in table for setting in settings_of(cls))
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for setting in common:
        assert not setting.by_variant
    for setting in settings_of(cls):
        for variant, defined in setting.by_variant.items():
            (its_table,) = (
                part for part in table.split("With `")[1:] if f"`{variant}`" in part.split(":")[0]
            )
            (row,) = (line for line in its_table.splitlines() if line.startswith(f"| `{setting.name}` |"))
            assert f"| `{short(defined.default)}` |" in row and row.endswith(f"| {defined.help} |")


CHANGES = {
    "distill": {"steps": 7, "objective": "jsd", "min_lr_ratio": 0.5},
    "train-head": {"head": "eagle", "noise": 0.1, "num_rollouts": 8},
    "prune": {"method": "wanda", "sparsity": 0.6, "data": "a name"},
    "recover": {"steps": 9, "accept_licence": ("gemma", "llama3"), "reason": "a letter"},
    "quantize": {"method": "qat", "scheme": "W3A16", "group_size": 64, "steps": 3},
    "merge": {"config": "merge.yml", "seed": 4},
    "export": {"format": "gguf", "type": "Q4_K_M", "overrides": ("a=Q6_K",)},
}


@pytest.mark.parametrize("verb", STAGES)
def test_a_command_with_what_differs_gives_the_same_settings(verb: str) -> None:
    cls = STAGES[verb].settings_class()
    known = {setting.name: setting for setting in settings_of(cls)}
    settings = parse(cls, CHANGES[verb], PythonOrigin(verb))
    words = shlex.split(command_line(verb, plain(settings, defaults=False), (), Path("out")))[4:]
    assert {word[2:].replace("-", "_") for word in words[::2]} == set(CHANGES[verb])
    given: dict[str, Any] = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        name = flag[2:].replace("-", "_")
        given[name] = [*given.get(name, []), value] if known[name].many else value
    assert parse(cls, given, CommandOrigin(verb)) == settings


def test_no_default_is_lost_by_leaving_none_out() -> None:
    """Commands leave out options that are null, so no other value may be the default of those."""
    for spec in STAGES.values():
        for setting in settings_of(spec.settings_class()):
            nullable = type(None) in getattr(setting.kind, "__args__", ())
            assert not nullable or setting.default is None, setting.name
