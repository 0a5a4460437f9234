"""Settings by method: the two tables agree, and an option belongs to the methods that take it."""

import dataclasses
import json

import pytest

from attar.cli.main import call
from attar.errors import RecipeError, SettingsError
from attar.options import flatten, nest, option_fields
from attar.quantization.rounding import METHODS
from attar.quantization.settings import METHOD_SETTINGS, QuantizeSettings, quantize_settings
from attar.settings import RecipeOrigin, parse


def test_the_table_of_methods_has_the_settings_of_each():
    assert {name: method.settings for name, method in METHODS.items()} == METHOD_SETTINGS


@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_no_class_has_more_than_twelve_settings(method):
    classes = [METHOD_SETTINGS[method], QuantizeSettings]
    classes += [type(value) for value in vars(QuantizeSettings()).values() if dataclasses.is_dataclass(value)]
    assert all(len(dataclasses.fields(cls)) <= 12 for cls in classes)


@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_flat_options_and_nested_settings_are_one(method):
    settings = quantize_settings(method=method, samples=7, group_size=32, alpha=0.5)
    assert isinstance(settings.rounding, METHOD_SETTINGS[method])
    assert nest(QuantizeSettings, flatten(settings)) == settings


@pytest.mark.few(2)
@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_an_option_of_other_methods_is_refused_by_name(method, capsys):
    foreign = [one for one in option_fields(QuantizeSettings) if one.by and method not in one.variants]
    for option in foreign:
        name, value = option.field.name, option.field.default
        with pytest.raises(
            SettingsError, match=f"left out with method {method}: it belongs to .*{option.variants[-1]}"
        ):
            quantize_settings(method=method, **{name: value})
        line = ["quantize", "m", "-o", "x", "--method", method, "--" + name.replace("_", "-"), str(value)]
        assert call(line) == 2
        assert len(capsys.readouterr().err.split("\nhint")[0].strip().splitlines()) == 1
    assert foreign or method == "qat"


ORIGIN = RecipeOrigin("stage 'quantize'", "recipe.yaml:3", {})


@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_every_choice_of_a_method_is_taken_where_others_have_fewer(method):
    for option in dataclasses.fields(METHOD_SETTINGS[method]):
        for choice in option.metadata["choices"]:
            if (method, choice) == ("qat", "group"):  # refused with its reason
                continue
            settings = parse(QuantizeSettings, {"method": method, option.name: choice}, ORIGIN)
            assert getattr(settings.rounding, option.name) == choice


def test_a_choice_that_only_another_method_has_is_refused(capsys):
    parse(QuantizeSettings, {"method": "qat", "start": "qronos"}, ORIGIN)
    with pytest.raises(RecipeError, match="start is 'qronos', but must be auto, rtn or gptq"):
        parse(QuantizeSettings, {"method": "autoround", "start": "qronos"}, ORIGIN)
    assert call(["quantize", "m", "-o", "x", "--method", "autoround", "--start", "qronos"]) == 2
    assert "--start is 'qronos', but must be auto, rtn or gptq" in capsys.readouterr().err


def test_a_resolved_recipe_may_write_out_defaults_of_other_methods():
    settings = parse(QuantizeSettings, {"method": "rtn", "damp": 0.01, "iterations": 200}, ORIGIN)
    assert settings == quantize_settings(method="rtn")
    with pytest.raises(RecipeError, match=r"damp is 0\.02, but must be left out with method rtn"):
        parse(QuantizeSettings, {"method": "rtn", "damp": 0.02}, ORIGIN)


@pytest.mark.parametrize("method", METHOD_SETTINGS)
@pytest.mark.parametrize("spelling", [["--method", "{}"], ["--method={}"]])
def test_help_with_a_method_shows_what_it_takes(method, spelling, capsys):
    assert call(["quantize", *(word.format(method) for word in spelling), "--help"]) == 0
    text = capsys.readouterr().out
    for option in option_fields(QuantizeSettings):
        shown = f"  --{option.field.name.replace('_', '-')} " in text
        assert shown == (not option.by or method in option.variants), option.field.name


def test_a_card_has_the_options_that_the_method_takes():
    options = json.loads(json.dumps(flatten(quantize_settings(method="rtn"))))
    assert "damp" not in options and options["scheme"] == "W4A16" and options["samples"] == 128


@pytest.mark.parametrize("sparsity", [0, 0.0, "0", "0.0"])
def test_no_sparsity(sparsity):
    assert quantize_settings(sparsity=sparsity).amount is None
    assert quantize_settings(sparsity=sparsity, keep_zeros="true").amount is None


def test_sparsity_is_a_fraction_or_a_pattern_of_gptq():
    assert quantize_settings(sparsity="2:4").amount.of == 4
    assert quantize_settings(sparsity=0.5).amount.zeros == 0.5
    for wrong in ("4:4", 1.0, -0.5, "many"):
        with pytest.raises(SettingsError, match="sparsity"):
            quantize_settings(sparsity=wrong)
    with pytest.raises(
        SettingsError, match=r"sparsity.*left out with method rtn: it belongs to auto and gptq"
    ):
        quantize_settings(method="rtn", sparsity="2:4")
