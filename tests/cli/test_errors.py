"""Bad input: one or two lines on stderr, the right exit code, nothing on stdout, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attar.cli import guard
from attar.cli.main import call
from attar.errors import CheckpointError


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> list[str]:
    """The lines on stderr of a command that fails with this exit code."""
    assert call(list(arguments)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    lines = captured.err.splitlines()
    assert 1 <= len(lines) <= 2 and lines[0].startswith("error: ")
    return lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantise"], "no verb 'quantise'; did you mean 'quantize'?"),
        (["quantize"], "Missing argument 'MODEL'."),
        (["quantize", "m"], "Missing option"),
        (
            ["prune", "m", "-o", "x", "--ration", "1"],
            "no option '--ration' in attar prune; did you mean '--ratio'?",
        ),
        (["prune", "m", "-o", "x", "--ratio", "1.5"], "--ratio is 1.5, but must be the fraction removed"),
        (["prune", "m", "-o", "x", "--ratio", "much"], "--ratio is 'much', but must be a number"),
        (["prune", "m", "-o", "x", "--method", "head"], "--method is 'head', but must be "),
        (
            ["quantize", "m", "-o", "x", "--group-size", "1.5"],
            "--group-size is '1.5', but must be a whole number",
        ),
        (
            ["quantize", "m", "-o", "x", "--scheme", "w4a16"],
            "--scheme is 'w4a16', but must be W8A16, W6A16, W5A16, W4A16",
        ),
        (["recover", "attar:tiny", "-o", "x"], "recover needs a teacher, the model to agree with"),
        (["evaluate", "m", "--tokens", "0"], "--tokens is 0, but must be at least 2"),
        (
            ["generate", "attar:tiny", "a", "--max-tokens", "0"],
            "--max-tokens is 0, but must be a whole number at least 1",
        ),
        (
            ["generate", "attar:tiny", "a", "--logit-bias", "x"],
            "--logit-bias is 'x', but must be TOKEN=BIAS in numbers",
        ),
        (["generate", "attar:tiny", "a", "--eviction", "h3o"], "(did you mean h2o?)"),
        (
            ["generate", "attar:tiny", "a", "--eviction", "streaming:4,x"],
            "must be streaming:SINKS,WINDOW in whole numbers",
        ),
        (["bench", "attar:tiny", "--batch", "0"], "--batch is 0, but must be at least 1"),
        (
            ["serve", "attar:tiny", "--prefix-cache", "maybe"],
            "--prefix-cache is 'maybe', but must be auto, on or off",
        ),
        (
            ["generate", "attar:tiny", "-p", "a", "--temperature", "-1"],
            "--temperature is -1.0, but must be a number from 0 to 1e+06",
        ),
        (["run", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["inspect", "a", "b"], "Got unexpected extra argument"),
        (["prune", "m", "-o"], "Option '-o' requires an argument."),
    ],
)
def test_wrong_use(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, *arguments, code=2)[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["inspect", "quantize", "prune", "distill", "export", "evaluate"])
def test_a_missing_model(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = [] if verb in ("inspect", "evaluate") else ["-o", "a/b"]
    lines = error_of(capsys, verb, "./nowhere", *out, code=1)
    assert "nowhere" in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_with_a_misspelt_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: attar:tiny\nstages:\n  - stage: prune\n    ration: 0.5\n")
    lines = error_of(capsys, "run", str(recipe), "-o", str(tmp_path / "run"), code=2)
    assert lines == [f"error: {recipe}:4: unknown key 'ration' in stage 'prune'; did you mean 'ratio'?"]
    assert not (tmp_path / "run").exists()


def test_an_override_that_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{model: m, stages: [{stage: prune}]}")
    lines = error_of(capsys, "run", str(recipe), "--set", "stages.0.ratio=2", code=2)
    assert lines[0].startswith("error: --set stages.0.ratio=2: ratio is 2.0, but must be")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make ``attar inspect`` raise."""

    def install(error: BaseException) -> None:
        def fail(model: str) -> None:
            raise error

        monkeypatch.setattr("attar.verbs.inspect", fail)

    return install


def test_a_bug_says_so_in_one_line(broken: Any, capsys: pytest.CaptureFixture[str]) -> None:
    broken(KeyError("x"))
    lines = error_of(capsys, "inspect", "m", code=1)
    assert lines[0].startswith("error: this is a bug of attar: KeyError: 'x' (test_errors.py:")
    assert "--debug" in lines[1]


def test_debug_shows_the_traceback(broken: Any, capsys: pytest.CaptureFixture[str]) -> None:
    broken(CheckpointError("a: damaged", hint="copy it again"))
    assert call(["inspect", "m", "--debug"]) == 1
    text = capsys.readouterr().err
    assert "Traceback" in text and text.endswith("error: a: damaged\nhint: copy it again\n")


def test_a_message_of_several_lines_becomes_one(broken: Any, capsys: pytest.CaptureFixture[str]) -> None:
    broken(RuntimeError("first\n  second"))
    assert "RuntimeError: first second" in error_of(capsys, "inspect", "m", code=1)[0]


def test_faults_of_the_system(broken: Any, capsys: pytest.CaptureFixture[str]) -> None:
    broken(PermissionError(13, "Permission denied", "/x"))
    assert error_of(capsys, "inspect", "m", code=1) == ["error: /x: Permission denied"]
    broken(MemoryError())
    assert error_of(capsys, "inspect", "m", code=1)[0].startswith("error: out of memory")


def test_an_interruption(broken: Any, capsys: pytest.CaptureFixture[str]) -> None:
    broken(KeyboardInterrupt())
    assert call(["inspect", "m"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_an_interrupted_run_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = tmp_path / "my recipe.yaml"
    recipe.write_text("{model: m, stages: [{stage: prune}]}")

    def interrupted(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attar.recipe.run.run_recipe", interrupted)
    monkeypatch.setattr(sys, "argv", ["attar", "run", str(recipe), "--fresh"])
    assert call(["run", str(recipe), "--fresh"]) == 130
    assert capsys.readouterr().err == f"stopped; to go on: attar run '{recipe}'\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = (
        "import sys\nimport attar.verbs\nfrom attar.cli.main import call\n"
        "class Found:\n    def render(self): return 'x' * 10**7\n    def to_dict(self): return {}\n"
        "attar.verbs.inspect = lambda model: Found()\nsys.exit(call(['inspect', 'm']))"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


def test_error_lines_keep_hints() -> None:
    assert guard.error_lines(CheckpointError("a\nb", hint="c\nd")) == ["error: a b", "hint: c d"]


WITHOUT_A_MODEL = {
    **{verb: [verb, "nosuch", "-o", "x"] for verb in ("distill", "prune", "quantize", "export")},
    "recover": ["recover", "attar:tiny", "-o", "x", "--teacher", "nosuch"],
    "merge": ["merge", "nosuch.yml", "-o", "x"],
    "extract": ["extract", "attar:tiny", "--base", "nosuch", "-o", "x"],
    "evaluate": ["evaluate", "nosuch"],
    "reference": ["evaluate", "attar:tiny", "--reference", "nosuch"],
    "generate": ["generate", "nosuch", "a"],
    "bench": ["bench", "nosuch"],
    "serve": ["serve", "nosuch"],
    "inspect": ["inspect", "nosuch"],
    "plan-kv": ["plan-kv", "nosuch"],
    "report": ["report", "nosuch"],
    "run": ["run", "nosuch.yaml"],
}


def test_a_wrong_path_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    """Imports of torch and transformers take seconds; every verb looks at its paths first."""
    code = (
        "import json, sys\nfrom attar.cli.main import call\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    code = call(argv)\n"
        "    heavy = [name for name in ('torch', 'transformers') if name in sys.modules]\n"
        "    print(json.dumps([argv, code, heavy]), flush=True)\n"
    )
    argv = json.dumps(list(WITHOUT_A_MODEL.values()))
    run = subprocess.run([sys.executable, "-c", code, argv], capture_output=True, text=True, cwd=tmp_path)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(lines) == len(WITHOUT_A_MODEL), run.stderr
    assert [line for line in lines if line[1] not in (1, 2) or line[2]] == []
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(lines) and all("nosuch" in line for line in errors)


def test_an_unfinished_folder_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".rtn.work").mkdir()
    (tmp_path / ".other.work").mkdir()
    lines = error_of(capsys, "inspect", str(tmp_path / "rtn"), code=1)
    assert lines == [
        f"error: {tmp_path}/rtn: is unfinished",
        "hint: run the command that makes it again to go on",
    ]
    assert ".other" not in error_of(capsys, "inspect", str(tmp_path / "othe"), code=1)[1]
