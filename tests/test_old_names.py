"""Options under names of earlier versions: one line with the new name, wherever they are written."""

import re

import pytest

import attar
from attar import old_names
from attar.cli.main import call
from attar.errors import RecipeError, UsageError
from attar.old_names import old_name
from attar.recipe.schema import parse_recipe
from attar.settings import option
from tests.cli.test_help import options_of

TABLES = (*old_names._RENAMED.items(), *old_names._REMOVED.items())
ROWS = sorted({(verb, name) for verbs, names in TABLES for verb in verbs for name in names})


@pytest.mark.few(35)
@pytest.mark.parametrize(("verb", "name"), ROWS)
def test_a_name_of_the_table_is_no_option_and_its_successor_is_one(verb, name):
    options = options_of(verb)
    assert option(name) not in options
    answer = old_name(verb, name, option)
    if match := re.search(r"is now (--[a-z-]+)", answer):
        assert match[1] in options
    assert "\n" not in answer and answer.startswith(option(name))


def test_a_command_line_names_the_new_option(capsys):
    assert call(["distill", "attar:tiny", "-o", "out", "--final", "0.1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --final is now --min-lr-ratio",
        "hint: attar distill --help",
    ]
    assert call(["serve", "attar:tiny", "--max-queue", "3"]) == 2
    assert "--max-queue is gone: a line of the file of --limits has it" in capsys.readouterr().err
    assert call(["distill", "attar:tiny", "-o", "out", "--head", "medusa"]) == 2
    assert "draft heads have a verb of their own, train-head" in capsys.readouterr().err
    assert call(["recover", "attar:tiny", "-o", "out", "--no-whiten"]) == 2
    assert "--whiten is gone: objective minillm is the paper's loss" in capsys.readouterr().err


def test_a_recipe_names_the_line_and_the_new_key():
    text = "model: attar:tiny\nstages:\n  - stage: distill\n    {}\n"
    with pytest.raises(RecipeError, match=r"recipe:4: in stage 'distill' final is now min_lr_ratio$"):
        parse_recipe(text.format("final: 0.1"))
    with pytest.raises(RecipeError, match=r"recipe:4: in stage 'distill' signal is gone: objective sft"):
        parse_recipe(text.format("signal: text"))
    with pytest.raises(RecipeError, match=r"recipe:4: in stage 'distill' head is gone: .* train-head$"):
        parse_recipe(text.format("head: eagle3"))


def test_a_keyword_names_the_new_one():
    with pytest.raises(UsageError, match=r"^share is now teacher_generated$"):
        attar.train_head("attar:tiny", "out", share=0.5)
    with pytest.raises(UsageError, match=r"^norm_before_fc is now norms states$"):
        attar.train_head("attar:tiny", "out", norm_before_fc=True)
    with pytest.raises(UsageError, match=r"unknown setting 'share' of prune"):
        attar.prune("attar:tiny", "out", share=0.5)
