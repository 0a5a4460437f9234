"""Speculation on attar:tiny at the command line: texts, the profiler's table, JSON and picture, bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attar.checkpoint import paths
from attar.cli.main import call
from attar.measure.speculation.profile import FixedPolicy
from attar.runtime.settings import EngineSettings, SchedulingSettings
from attar.runtime.speculate import build
from attar.runtime.speculate.settings import ProfileSettings
from attar.settings import settings_of, short


@pytest.fixture(autouse=True)
def models_that_are_only_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """``m``, ``t`` and ``small`` stand for models of verbs that are replaced here."""
    find = paths.find
    names = ("m", "t", "small")
    monkeypatch.setattr(paths, "find", lambda model: Path(model) if model in names else find(model))


SMALL = ["--tokens", "10", "--rounds", "1", "--kv-tokens", "4096", "-q"]
BENCH = ["bench", "attar:tiny", *SMALL]
PROMPT = "def area(width, height):\n    return width * height\n\ndef area(width"
WAYS = (
    "--speculate=ngram",
    "--speculate=suffix",
    "--speculate=lookahead",
    "--speculate=self",
    "--draft=attar:tiny",
)
FLAGS = ("speculate", "draft", "drafts", "verification")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Three lines of Spec-Bench's ``question.jsonl``."""
    rows: list[dict[str, Any]] = [
        {
            "question_id": 81,
            "category": "writing",
            "turns": ["Write about Hawaii.", "Again."],
            "reference": [],
        },
        {"question_id": 82, "category": "coding", "turns": ["def fib(n):\n"]},
        {"question_id": 83, "category": "coding", "turns": ["class Stack:\n"]},
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def generated(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The one completion."""
    line = ["generate", "attar:tiny", PROMPT, "--max-tokens", "24", "--kv-tokens", "512", "-q", "--json"]
    assert call([*line, *options]) == 0
    (result,) = json.loads(capsys.readouterr().out)["completions"]
    usage = result["usage"]
    assert 0 <= usage["accepted_tokens"] <= usage["drafted_tokens"]
    assert usage["drafted_tokens"] == 0 or set(options) & {*WAYS, "--draft"}
    return dict(result)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--seed", "3"]], ids=["greedy", "seeded"])
def test_generate_says_the_same_with_every_method(
    sampling: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    want = generated(capsys, *sampling)
    for way in WAYS:
        assert generated(capsys, way, "--drafts", "3", *sampling)["samples"] == want["samples"], way


def test_verification_is_handed_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact sampled texts have other noise, so they are not those of plain decoding."""
    monkeypatch.setattr(
        build, "DraftPolicy", lambda latency, most: FixedPolicy(most)
    )  # drafts, whether they pay or not
    hot = ["--temperature", "1.5", "--seed", "3"]
    actual = generated(capsys, "--draft", "attar:tiny", "--verification", "exact", *hot)
    assert actual["usage"]["drafted_tokens"] and actual["text"] != generated(capsys, *hot)["text"]


@pytest.mark.parametrize("verb", ["generate", "serve"])
def test_help_has_the_flags(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_help(verb, EngineSettings, capsys, monkeypatch)


def test_help_of_bench_has_the_profiler_s_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_help("bench", ProfileSettings, capsys, monkeypatch)


def _check_help(
    verb: str, cls: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert call([verb, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    in_file = {setting.name for setting in settings_of(SchedulingSettings)} if verb == "serve" else set()
    known = {setting.name: setting for setting in settings_of(cls) if setting.name not in in_file}
    assert set(FLAGS) <= set(known)
    for name, setting in known.items():
        assert f"--{name.replace('_', '-')} " in shown and setting.help.split(";")[0] in shown, name
        if not setting.flag:
            assert f"[default: {short(setting.default)}]" in shown
    assert "ngram|suffix|lookahead|self" in shown and "coupled|exact" in shown


def test_serve_hands_speculation_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("attar.serving.http.serve", lambda *given, **named: seen.append(named))
    assert call(["serve", "m", "--speculate", "lookahead", "--drafts", "7", "--verification", "exact"]) == 0
    assert call(["serve", "m", "--draft", "small"]) == 0
    assert [seen[0][name] for name in FLAGS] == ["lookahead", None, 7, "exact"]
    assert [seen[1][name] for name in FLAGS] == [None, "small", None, None]


@pytest.mark.slow
def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--sets", "repetition", "--sets", "random", "--prompts", "2"]
    assert call([*BENCH, *sets, "--speculate", "ngram", "--draft", "attar:tiny"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    message = r"attar:tiny, runner (compiled|modules), 10 tokens each, greedy, 1 round"
    assert re.fullmatch(message, lines[0])
    header = "set  method  batch  tok/s  speedup  95 %  accepted  a  tok/pass  theory  drafting  same"
    assert re.split(" {2,}", lines[2]) == header.split("  ")
    rows = [line.split() for line in lines[4:12]]
    methods = ["plain", "ngram", "attar:tiny", "attar:tiny+suffix"]
    assert [row[:3] for row in rows] == [[s, m, "1"] for s in ("repetition", "random") for m in methods]
    assert all(row[-1] == "2/2" for row in rows)
    assert all(float(row[4]) > 0 and row[6] == "to" for row in rows if row[1] != "plain")
    assert "speedup: geometric mean" in shown and "drafting: share of the time" in shown


def test_bench_reads_spec_bench_and_gives_json(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt-file", str(questions), "--speculate", "ngram", "--batch", "1", "--batch", "2"]
    assert call([*BENCH, *options, "--drafts", "1", "--drafts", "3", "--fixed", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [record[name] for name in ("model", "tokens", "rounds", "temperature")] == [
        "attar:tiny",
        10,
        1,
        0.0,
    ]
    cases = [(row["set"], row["method"], row["batch"], row["texts"]) for row in record["rows"]]
    methods = ("plain", "ngram, 1", "ngram, 3")
    sets = {"writing": 1, "coding": 2}
    assert cases == [(s, m, batch, sets[s]) for batch in (1, 2) for s in sets for m in methods]
    for row in record["rows"]:
        assert row["same"] == row["texts"] and row["tokens_per_s"] > 0 and 0 <= row["draft_share"] < 1
        if row["method"] == "plain":
            assert row["speedup"] is row["low"] is row["high"] is None and row["histogram"] == []
        else:
            assert row["low"] <= row["speedup"] <= row["high"]
            assert row["tokens_per_pass"] >= 1 and row["theory"] >= 1
            assert len(row["histogram"]) <= 1 + int(row["method"][-1]), "no more drafts than were fixed"


@pytest.mark.slow
def test_one_prompt_has_no_interval(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([*BENCH, "--prompt-file", str(questions), "--speculate", "ngram"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[4:8]]
    assert [row[:2] for row in rows] == [[s, m] for s in ("writing", "coding") for m in ("plain", "ngram")]
    assert rows[1][5] == "-" and rows[3][6] == "to"


@pytest.mark.slow
def test_bench_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speedup.svg"
    options = ["--sets", "code", "--prompts", "1", "--speculate", "ngram", "--speculate", "lookahead"]
    assert call([*BENCH, *options, "--temperature", "0.7", "--picture", str(file), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    words = {item.text for item in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")}
    assert {"code", "ngram", "lookahead"} <= words
    assert "attar:tiny: times as fast as plain decoding, temperature 0.7" in words
    assert record["temperature"] == 0.7 and all(row["same"] == row["texts"] for row in record["rows"])
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("options", "code", "error"),
    [
        (["--picture", "p.svg"], 2, "--picture goes with --speculate or --draft"),
        (["--prompts", "3"], 2, "--prompts goes with --speculate or --draft"),
        (["--drafts", "3"], 2, "--drafts goes with --speculate or --draft"),
        (["--speculate", "ngrm"], 2, "--speculate is 'ngrm', but must be ngram, suffix, lookahead, self or"),
        (["--speculate", "ngram", "--drafts", "0"], 2, "--drafts is 0, but must be at least 1"),
        (["--speculate", "ngram", "--fixed"], 2, "--fixed is True, but must be given with drafts"),
        (["--speculate", "ngram", "--prompts", "0"], 2, "--prompts is 0, but must be at least 1"),
        (["--speculate", "ngram", "--sets", "verse"], 2, "--sets is 'verse', but must be code, prose, json"),
        (["--speculate", "ngram", "--temperature", "-1"], 2, "--temperature is -1.0, but must be between 0"),
        (["--speculate", "ngram", "--verification", "no"], 2, "--verification is 'no', but must be coupled"),
        (["--speculate", "ngram", "--eviction", "h2o"], 2, "with eviction='h2o': H2O's scores"),
        (
            ["--speculate", "ngram", "--picture", "no/p.svg"],
            1,
            "no/p.svg cannot be written: there is no folder no",
        ),
        (["--speculate", "ngram", "--picture", "."], 1, ". is a folder"),
        (["--speculate", "ngram", "--prompt-file", "lost"], 1, "lost: cannot be read: No such file"),
        (["--speculate", "ngram", "--prompt-file", "bad"], 1, "bad:2: turns must be a list of texts"),
        (["--speculate", "ngram", "--prompt-file", "empty"], 1, "empty has no questions"),
        (["--draft", "./nowhere"], 1, "nowhere: no such model folder"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], code: int, error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    line = {"question_id": 1, "category": "a", "turns": ["x"]}
    (tmp_path / "bad").write_text(f"{json.dumps(line)}\n{json.dumps(line | {'turns': []})}\n")
    (tmp_path / "empty").write_text("\n")
    assert call([*BENCH, *options]) == code
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert shown.out == "" and 1 <= len(lines) <= 2 and all("Traceback" not in item for item in lines)
    assert lines[0].startswith("error: ") and error in lines[0]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["bad", "empty"]
