"""Signatures and docstrings of the verbs say what their settings classes say."""

import inspect
import subprocess
import sys
from typing import Literal, get_args

import pytest

import attar
from attar.recipe.signature import verb_settings
from attar.recipe.stages import OTHER_SETTINGS, STAGES

VERBS = [verb.replace("-", "_") for verb in (*STAGES, *OTHER_SETTINGS)]


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_is_a_keyword_with_its_default(verb):
    parameters = inspect.signature(getattr(attar, verb)).parameters
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    for setting in verb_settings(verb):
        parameter = parameters[setting.name]
        if setting.name != "config":  # of merge, an argument of its own
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
            assert parameter.default == setting.default, setting.name


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_is_explained(verb):
    text = " ".join((getattr(attar, verb).__doc__ or "").split())
    for setting in verb_settings(verb):
        assert f"{setting.name}: {' '.join(setting.help.split())} [" in text


def test_choices_are_types():
    parameters = inspect.signature(attar.quantize).parameters
    assert "W4A16" in get_args(parameters["scheme"].annotation)
    assert parameters["keep_zeros"].annotation == Literal["auto", "true", "false"] | bool
    assert inspect.signature(attar.generate).parameters["verification"].annotation == (
        Literal["coupled", "exact", "typical"] | None
    )


def test_settings_with_one_name_in_two_classes_of_a_verb_agree():
    for verb in VERBS:
        names = [setting.name for setting in verb_settings(verb)]
        assert len(names) == len(set(names)), verb


@pytest.mark.slow
def test_a_type_checker_finds_a_misspelt_setting_and_a_wrong_choice(tmp_path):
    (tmp_path / "user.py").write_text(
        'import attar\nattar.quantize("m", "o", shceme="W4A16")\nattar.quantize("m", "o", scheme="W9")\n'
        'attar.quantize("m", "o", scheme="W4A16", data=["a text"], progress=False)\n'
        'attar.sweep("r.yaml", {"stages.quantize.bits": [3, 4]}, jobs=2)\n'
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "user.py")], capture_output=True, text=True
    )
    errors = [line for line in checked.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 2, checked.stdout
    assert "shceme" in errors[0] and "W9" in errors[1]
