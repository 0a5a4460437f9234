"""``attar generate``, ``attar bench`` and ``attar serve`` on attar:tiny, as people call them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import attar
from attar.checkpoint import paths
from attar.cli.main import call
from attar.errors import SettingsError, UsageError
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.settings import EngineSettings


@pytest.fixture(autouse=True)
def models_that_are_only_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """``m``, ``t`` and ``small`` stand for models of verbs that are replaced here."""
    find = paths.find
    names = ("m", "t", "small")
    monkeypatch.setattr(paths, "find", lambda model: Path(model) if model in names else find(model))


GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    llm = LLM("attar:tiny", kv_tokens=256)
    return {prompt: llm.generate(prompt, GREEDY)[0].text for prompt in ("def f(", "import", "x = ")}


def test_texts_of_every_source(
    known: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("import\n\nx = \n")
    line = ["generate", "attar:tiny", "--max-tokens", "6", "-q", "--kv-tokens", "256"]
    assert call([*line, "def f("]) == 0
    assert capsys.readouterr().out == "def f(" + known["def f("] + "\n"
    assert call([*line, "-p", "def f(", "--file", str(file)]) == 0
    assert capsys.readouterr().out == "\n\n".join(key + value for key, value in known.items()) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("import"))
    assert call(line) == 0
    assert capsys.readouterr().out == "import" + known["import"] + "\n"


@pytest.mark.slow
def test_json_has_every_sample(known: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "attar:tiny", "def f(", "x = ", "--max-tokens", "6", "--json", "--n", "2"]
    assert call([*line, "--logprobs", "1", "--eviction", "streaming:4,60", "--step-tokens", "64"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [item["text"] for item in record["completions"]] == [known["def f("], known["x = "]]
    assert [len(item["samples"]) for item in record["completions"]] == [2, 2]
    assert len(record["completions"][0]["samples"][0]["logprobs"]) == 6
    assert record["usage"]["completion_tokens"] == 24


def test_pieces_are_shown_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(io.StringIO):
        flushed: list[str] = []  # noqa: RUF012

        def flush(self) -> None:
            self.flushed.append(self.getvalue())

    watched = Watched()
    monkeypatch.setattr(sys, "stdout", watched)
    assert call(["generate", "attar:tiny", "def f(", "--max-tokens", "6", "-q"]) == 0
    assert len(set(watched.flushed)) > 4 and watched.flushed[0].startswith("def f(")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["a", "--regex", "("], "--regex is '(', but must be one that can be enforced (unclosed group)"),
        (["a", "--json-schema", "@nowhere.json"], "nowhere.json: cannot be read: No such file"),
        (["--file", "nowhere.txt"], "nowhere.txt: cannot be read: No such file"),
        (["a", "--eviction", "h2o:8,0"], "--recent is 0, but must be at least 1"),
        (
            ["a", "--eviction", "h2o:8,8", "--prefix-cache", "on"],
            "--prefix-cache is 'on', but must be something else with eviction='h2o:8,8': H2O's scores",
        ),
        (
            ["a", "--eviction", "h2o", "--speculate", "ngram"],
            "--speculate is 'ngram', but must be something else with eviction='h2o': H2O's scores",
        ),
        (
            ["a", "--eviction", "h2o", "--draft", "attar:tiny"],
            "--draft is 'attar:tiny', but must be something else with eviction='h2o': H2O's scores",
        ),
        (
            ["a", "--eviction", "snapkv", "--kv-dtype", "kivi2"],
            "--eviction is 'snapkv', but must be something else with kv_dtype='kivi2': KIVI's",
        ),
        (["a", "--sequences", "600"], "--sequences is 600, but must be at most step_tokens"),
    ],
)
def test_what_is_refused_is_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    assert call(["generate", "attar:tiny", "-q", *options]) != 0
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") <= 2 and shown.out == ""


@pytest.mark.slow
def test_bench_measures_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "attar:tiny", "-q", "--batch", "1", "--batch", "3", "--context", "9", "--tokens", "4"]
    assert call([*line, "--rounds", "1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(case["batch"], case["context"]) for case in record["cases"]] == [(1, 9), (3, 9)]
    for case in record["cases"]:
        assert all(value > 0 for value in case.values())
        assert case["between_p50_s"] <= case["between_p99_s"] and case["first_p50_s"] <= case["first_p99_s"]
    assert record["peak_rss_bytes"] > 10**7 and record["runner"] in ("modules", "compiled")
    assert record["weights"].removeprefix("torch.") in ("bf16", "bfloat16", "float32")
    assert call(["bench", "attar:tiny", "-q", "--context", "100000"]) == 1
    assert "pass the model's context" in capsys.readouterr().err


def test_serve_hands_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("attar.serving.http.serve", lambda *given, **named: seen.append((given, named)))
    options = "--port 0 --kv-tokens 99 --eviction snapkv:64,8 --prefix-cache off --limits limits.yaml"
    assert call(["serve", "m", *options.split()]) == 0
    (model, settings, *_), named = seen[0]
    assert (model, settings.port, named["kv_tokens"], named["prefix_cache"]) == ("m", 0, 99, False)
    assert (named["limits_file"], named["limits"].sequences) == ("limits.yaml", 64)
    assert (named["eviction"].capacity, named["eviction"].window) == (64, 8)


def test_the_python_verb_takes_both_kinds_of_settings(known: dict[str, str]) -> None:
    results = attar.generate("attar:tiny", list(known), max_tokens=6, kv_tokens=256)
    assert [result.text for result in results] == list(known.values())
    with pytest.raises(
        UsageError, match="unknown setting 'max_token' of generate; did you mean 'max_tokens'"
    ):
        attar.generate("attar:tiny", "x", max_token=3)
    with pytest.raises(SettingsError, match="top_p is 2"):
        attar.generate("attar:tiny", "x", top_p=2.0)


def test_a_number_alone_is_the_capacity_of_reread() -> None:
    result = EngineSettings(eviction="200").options()["eviction"]
    assert (type(result).__name__, result.capacity, result.recent) == ("Reread", 200, 128)
