"""Help: quick, complete, without heavy imports."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

import attar
from attar.cli.help_text import EXAMPLES, HEADING_OF, heading_of
from attar.cli.main import VERBS, call
from attar.recipe.stages import EVALUATE_SETTINGS, STAGES, load
from attar.runtime.settings import BenchSettings, TextSettings
from attar.serving.http.settings import LimitSettings, ServerSettings
from attar.settings import settings_of, short

SETTINGS = {verb: stage.settings_class() for verb, stage in STAGES.items()}
SETTINGS |= {"evaluate": load(EVALUATE_SETTINGS), "generate": TextSettings}
SETTINGS |= {"bench": BenchSettings, "serve": ServerSettings}
LIMITS = {setting.name for setting in settings_of(LimitSettings)}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "attar.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def test_help_lists_every_verb_at_once() -> None:
    done = run("--help")
    assert done.returncode == 0 and done.stderr == ""
    for verb, (summary, _) in VERBS.items():
        assert re.search(rf"^  {verb} +{re.escape(summary)}$", done.stdout, re.MULTILINE)


def test_no_help_imports_anything_heavy() -> None:
    program = (
        "import sys\nfrom attar.cli.main import call\n"
        f"lines = [[verb, '--help'] for verb in {list(VERBS)!r}] + [['--help'], ['--version']]\n"
        "codes = [call(line) for line in lines]\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib', 'numpy', 'rich'} & set(sys.modules)\n"
        "print(codes, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{[0] * (len(VERBS) + 2)} set()"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--version"]) == 0
    assert capsys.readouterr().out == f"attar {attar.__version__}\n"


def test_without_a_verb_there_is_help_and_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert call([]) == 2
    assert "quantize" in capsys.readouterr().out


@pytest.mark.few(12)
@pytest.mark.parametrize("verb", list(VERBS))
def test_help_of_a_verb_ends_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([verb, "--help"]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    heading = next(number for number, line in enumerate(lines) if line.strip() in ("Example:", "Examples:"))
    examples = [line.strip() for line in lines[heading + 1 :]]
    assert len(examples) == (3 if verb in EXAMPLES else 1)
    for example in examples:  # every option exists, and what is required is there
        command, words = load(VERBS[verb][1])(verb), shlex.split(example)
        assert words[:2] == ["attar", verb]
        assert command.make_context(verb, words[2:]).params


def options_of(verb: str) -> set[str]:
    """The long spellings of a verb's options, as they show in its help."""
    command = load(VERBS[verb][1])(verb)
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    return {spelling for option in options for spelling in option.opts if spelling.startswith("--")}


@pytest.mark.parametrize(
    ("verb", "most"), [("distill", 61), ("serve", 49), ("recover", 46), ("train-head", 57)]
)
def test_a_verb_has_no_more_options_than_a_person_reads(verb: str, most: int) -> None:
    assert len(options_of(verb) | {"--help"}) <= most


@pytest.mark.parametrize("verb", ["serve", "distill", "train-head", "recover", "generate", "collect"])
def test_options_of_long_helps_have_headings(verb: str) -> None:
    command = load(VERBS[verb][1])(verb)
    general = {
        parameter.name
        for parameter in command.params
        if parameter.param_type_name == "option"
        and not (getattr(parameter, "rich_help_panel", None) or heading_of(verb, parameter.name))
    }
    few = {
        "config",
        "json",
        "quiet",
        "debug",
        "force",
        "out",
        "seed",
        "teacher",
        "dry_run",
        "offline",
        "filter_only",
    }
    assert general <= few


def test_every_heading_names_options_that_exist() -> None:
    known = {parameter.name for verb, (_, build) in VERBS.items() for parameter in load(build)(verb).params}
    assert set(HEADING_OF) <= known


@pytest.mark.parametrize("verb", list(SETTINGS))
def test_help_shows_every_setting_with_its_default_and_choices(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert call([verb, "-h"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for setting in settings_of(SETTINGS[verb]):
        if setting.name == "config" or setting.name in LIMITS:  # the argument, and a file's
            continue
        option = "--" + setting.name.replace("_", "-")
        assert option in text
        first = setting.help.split(";")[0]
        assert first in text
        if setting.flag:
            assert f"{option} / --no-{option[2:]}" in text
        elif setting.default in (None, "", (), "none"):  # not used, or its help says what none means
            told = text.split(option, 1)[1].split(" --", 1)[0]
            assert "[default: none]" not in told or re.search(r"\b(none|empty)\b", told.split("[default")[0])
        else:
            assert re.search(rf"\[default: {re.escape(short(setting.default))}[\];]", text)
        if setting.choices:
            assert "|".join(str(choice) for choice in setting.choices) in text


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("attar qu", ["quantize"]),
        ("attar quantize m --method g", ["gptq", "gptaq"]),
        ("attar prune m --rat", ["--ratio"]),
    ],
)
def test_shell_completion(words: str, expected: list[str]) -> None:
    count = str(len(words.split()) - (0 if words.endswith(" ") else 1))
    done = run(_ATTAR_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count)
    assert done.stdout.split() == expected


@pytest.mark.slow
def test_completion_can_be_shown() -> None:
    done = run(_ATTAR_COMPLETE="source_bash")
    assert "_ATTAR_COMPLETE=complete_bash" in done.stdout


def test_a_default_that_differs_by_variant_is_told_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["train-head", "-h"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "drafts at most [default: 4; dflash and dspark: 7]" in text
