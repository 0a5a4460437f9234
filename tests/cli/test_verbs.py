"""The verbs on the command line and in Python: what they hand on, what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import attar
from attar import verbs
from attar.checkpoint import paths
from attar.checkpoint.card import Card
from attar.cli.main import call
from attar.errors import SettingsError, UsageError
from attar.options import flatten
from attar.progress import SILENT, Terminal
from attar.recipe import stages
from attar.recipe.stages import STAGES


@pytest.fixture(autouse=True)
def models_that_are_only_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """``m``, ``t`` and ``small`` stand for models of verbs that are replaced here."""
    find = paths.find
    names = ("m", "t", "small", "MODEL", "BASE")
    monkeypatch.setattr(paths, "find", lambda model: Path(model) if model in names else find(model))


@dataclass
class Built:
    """Stands for a checkpoint."""

    path: Path = Path("out")
    nbytes: int = 1500
    card: Any = None


@dataclass
class Answered:
    """Stands for measurements and completions."""

    content: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The content."""
        return self.content


MEASURED = {
    "perplexity": 7.25,
    "kl_mean": None,
    "kl_p99": None,
    "top1_agreement": None,
    "bytes": 2_000_000,
    "bits_per_weight": 4.5,
    "prefill_tokens_per_s": 100.0,
    "decode_tokens_per_s": 50.0,
    "peak_rss_bytes": 10**9,
    "prompt": "def ",
    "sample": "f():",
}
COMPLETION = {"text": " b", "token_ids": [1], "finish_reason": "stop"}
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the functions behind the verbs are called with; they print something, as libraries do."""
    seen: list[tuple[Any, ...]] = []

    def behind(path: str) -> Any:
        def function(*arguments: Any, **named: Any) -> Any:
            print("noise from a library")
            seen.append((path, arguments, named))
            if path.endswith(":evaluate"):
                return Answered(MEASURED)
            if path.endswith(":generate"):
                return Answered({"completions": [COMPLETION] * len(arguments[1]), "usage": USAGE})
            return Built()

        return function

    real = stages.load

    def load(path: str) -> Any:
        if path.endswith((":open_checkpoint", ":refuse_packed", ":check_memory")):
            return lambda model, *more: model
        return (
            behind(path)
            if ".stage:" in path or path.endswith((":evaluate", ":generate", ":export", ":train_head"))
            else real(path)
        )

    monkeypatch.setattr("attar.recipe.stages.load", load)
    monkeypatch.setattr("attar.verbs.load", load)
    monkeypatch.setattr("attar.verbs.is_dense", lambda model: False)  # there is no model
    return seen


def test_the_flags_that_scripts_rely_on(calls: list[Any]) -> None:
    line = "quantize MODEL -o OUT --scheme W4A16 --group-size 128 --method gptq --data python-stdlib --seed 0"
    assert call(line.split()) == 0
    assert call(["prune", "MODEL", "-o", "OUT", "--method", "heads", "--ratio", "0.25"]) == 0
    assert call(["evaluate", "MODEL", "--reference", "BASE", "--data", "FILE"]) == 0
    quantize, prune, evaluate = calls
    assert quantize[0] == "attar.quantization.stage:quantize"
    model, out, settings = quantize[1]
    assert (model, out) == ("MODEL", Path("OUT"))
    options = flatten(settings)
    assert [options[name] for name in ("scheme", "group_size", "method", "seed")] == ["W4A16", 128, "gptq", 0]
    assert (prune[1][2].method, prune[1][2].options.ratio) == ("heads", 0.25)
    assert evaluate[2]["reference"] == "BASE" and evaluate[1][1].data == "FILE"


def test_only_what_is_given_is_set(calls: list[Any]) -> None:
    assert call(["quantize", "m", "-o", "x"]) == 0
    assert calls[0][1][2] == STAGES["quantize"].settings_class()()
    assert calls[0][2]["force"] is False and isinstance(calls[0][2]["progress"], Terminal)


def test_flags_lists_and_the_teacher(calls: list[Any]) -> None:
    line = "quantize m -o x --keep-zeros true --ignore a --ignore re:b,c --force --quiet"
    assert call(line.split()) == 0
    assert call(["recover", "m", "-o", "x", "--teacher", "t", "--steps", "3"]) == 0
    settings, named = calls[0][1][2], calls[0][2]
    assert settings.storage.keep_zeros == "true" and settings.storage.ignore == ("a", "re:b,c")
    assert named["force"] is True and named["progress"] is SILENT and "teacher" not in named
    assert calls[1][2]["teacher"] == "t" and calls[1][1][2].steps == 3


@pytest.mark.parametrize("verb", list(STAGES))
def test_json_of_a_stage_is_all_there_is_on_stdout(
    verb: str, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = ["--teacher", "t"] if STAGES[verb].teacher else []
    model = "merge_method: linear" if verb == "merge" else "m"  # a configuration may be written out
    assert call([verb, model, "-o", "x", *teacher, "--json"]) == 0
    captured = capsys.readouterr()
    content = json.loads(captured.out)
    assert content["path"] == "out" and content["bytes"] == 1500 and content["seconds"] >= 0
    assert "noise" in captured.err


def test_a_stage_names_its_output(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["prune", "m", "-o", "some/where", "-q"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "some/where  1.50 kB"


def test_a_draft_head_is_described_by_its_own_report(
    calls: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its card has the acceptance at each position, where a draft model's has other numbers."""
    details = {"head": {"kind": "dspark"}, "drafting": {"acceptance": [0.7, 0.6], "tokens_a_pass": 2.1}}
    card = Card(name="out", stage="train-head", details=details)
    monkeypatch.setattr(sys.modules[__name__], "Built", partial(Built, card=card))
    assert call(["train-head", "MODEL", "-o", "OUT", "--head", "dspark"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "OUT  1.50 kB"


def test_evaluate_prints_a_table_or_json(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["evaluate", "m", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(MEASURED) <= set(content)
    assert call(["evaluate", "m", "--no-speed"]) == 0
    text = capsys.readouterr().out
    assert "7.2500" in text and "2.00 MB" in text and "def f():" in text
    assert "quality kept" not in text, "without a reference"
    assert calls[1][1][1].speed is False


def test_evaluate_shows_questions_and_what_computed(
    calls: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    task = {"name": "arc", "acc": 0.541, "acc_stderr": 0.0102, "acc_norm": 0.5, "acc_norm_stderr": None}
    task |= {"acc_difference": -0.005, "acc_difference_stderr": 0.003, "acc_lost": 0.012, "acc_won": 0.007}
    for key, value in (
        ("tasks", [task]), ("quality_kept", 0.9956), ("quality_kept_stderr", 0.00412),
        ("runner", "transformers"),
        ("runner_note", "no attention"), ("activations", "int8"), ("kv_dtype", "fp8"),
    ):  # fmt: skip
        monkeypatch.setitem(MEASURED, key, value)
    assert call(["evaluate", "m", "--tasks", "a.jsonl", "--tasks", "b.jsonl", "--runner", "modules"]) == 0
    text = capsys.readouterr().out
    for words in (
        "54.1% ± 1.0% (-0.5% ± 0.3%: 1.2% lost, 0.7% won)",
        "99.56% ± 0.81%",
        "transformers (no attention)",
        "int8",
        "fp8",
    ):
        assert words in text
    assert "50.0%" in text and "50.0% ±" not in text
    assert (calls[0][1][1].tasks, calls[0][1][1].runner) == (("a.jsonl", "b.jsonl"), "modules")


def test_json_holds_no_nan(calls: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setitem(MEASURED, "perplexity", float("inf"))
    assert call(["evaluate", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] is None


def test_dry_run_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        call(
            ["demo", "--dry-run", "--json", "-o", str(tmp_path / "run"), "--set", "stages.rtn.group_size=64"]
        )
        == 0
    )
    content = json.loads(capsys.readouterr().out)
    rtn = next(stage for stage in content["stages"] if stage["name"] == "rtn")
    assert rtn["settings"]["group_size"] == 64 and rtn["state"] == "new"
    assert not (tmp_path / "run").exists()


def test_python_verbs_check_their_keywords(calls: list[Any]) -> None:
    verbs.quantize("m", "out", scheme="W8A16", group_size=64, force=True)
    verbs.recover("m", "out", teacher="t", steps=3)
    assert (
        calls[0][1][2].storage.scheme == "W8A16"
        and calls[0][2]["force"] is True
        and calls[0][2]["progress"] is SILENT
    )
    assert calls[1][2]["teacher"] == "t"
    with pytest.raises(
        UsageError, match="unknown setting 'groupsize' of quantize; did you mean 'group_size'"
    ):
        verbs.quantize("m", "out", groupsize=3)
    with pytest.raises(SettingsError, match=r"ratio is 1\.5, but must be"):
        verbs.prune("m", "out", ratio=1.5)
    with pytest.raises(SettingsError, match="group_size is '32', but must be a whole number"):
        verbs.quantize("m", "out", group_size="32")
    with pytest.raises(UsageError, match="unknown setting 'token' of evaluate; did you mean 'tokens'"):
        verbs.evaluate("m", token=3)
    assert len(calls) == 2


def test_a_fault_found_by_the_stage_names_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise SettingsError("group_size", 128, "a divisor of 96, the inputs of model.layers.0.mlp.down_proj")

    monkeypatch.setattr(
        "attar.recipe.stages.load", lambda path: refuse if ":quantize" in path else stages_load(path)
    )
    monkeypatch.setattr("attar.verbs.load", lambda path: lambda model, *more: model)
    monkeypatch.setattr("attar.verbs.is_dense", lambda model: False)
    assert call(["quantize", "m", "-o", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: --group-size is 128, but must be a divisor of 96")


stages_load = stages.load


def test_public_names() -> None:
    assert set(attar.__all__) >= {
        *(verb.replace("-", "_") for verb in STAGES),
        "demo",
        "run",
        "evaluate",
        "generate",
        "inspect",
        "report",
        "Checkpoint",
    }
    for name in attar.__all__:
        assert getattr(attar, name) is not None, name
    assert attar.quantize is verbs.quantize
    assert set(attar.__all__) <= set(dir(attar))
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        attar.quantise  # noqa: B018


def test_importing_attar_imports_nothing_heavy() -> None:
    program = (
        "import sys, attar, attar.verbs\nattar.quantize, attar.SettingsError, attar.load_recipe\n"
        "print({'torch', 'transformers', 'numpy', 'rich', 'typer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
