"""What docs/coming-from.md has on the right is read up to the missing model, and run on small models."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import attar
from attar.cli.main import call
from attar.errors import CheckpointError
from tests import tiny_models

PAGE = (Path(__file__).parents[1] / "docs/coming-from.md").read_text()
CELLS = [row.split(" | ", 1)[1] for row in re.findall(r"^\| (?!-)(.*) \|$", PAGE, flags=re.M)]
CODE = [code for cell in CELLS for code in re.findall(r"`((?:attar[ .]|python ).*?)`", cell)]
COMMANDS = [shlex.split(code)[1:] for code in CODE if code.startswith("attar ")]
PYTHON = [code for code in CODE if code.startswith("attar.")]
ROWS = ["--sequence-length", "64"]
QUICK = {
    "quantize": ["--samples", "4", *ROWS, "--check-tokens", "64"],
    "prune": ["--samples", "4", *ROWS],
    "evaluate": ["--tokens", "256", *ROWS, "--no-speed", "--answers", "0", "--sample", ""],
    "distill": ["--steps", "2", "--batch-size", "2", *ROWS],
    "recover": ["--steps", "2", "--batch-size", "2", *ROWS],
    "export": ["--samples", "4", *ROWS],
    "merge": ["--samples", "2"],
    "bench": ["--rounds", "1"],
    "generate": ["--max-tokens", "8"],
}
CHAT = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)


def make_models(folder):
    """The models that the page's commands name."""
    for seed, name in enumerate(("M", "tuned", "D")):
        model = tiny_models.build("smollm", seed=seed, max_position_embeddings=512).to(torch.bfloat16)
        tiny_models.save(model, folder / name)
        (folder / name / "chat_template.jinja").write_text(CHAT)


def make_files(folder):
    """The texts and configurations that they name."""
    text = "\n\n".join(
        Path(module.__file__).read_text() for module in (textwrap, shlex, json.decoder, subprocess)
    )
    (folder / "my.txt").write_text(text)
    lines = [json.dumps({"text": part}) for part in text.split("\n\n") if part.strip()]
    (folder / "my.jsonl").write_text("\n".join(lines))
    chats = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"A number, {n}."}]
        for n in range(200)
    ]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    (folder / "prompts.txt").write_text("def f(\nimport \n")
    question = {"q": "One and one is", "choices": ["two", "three"], "label": 0}
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(question) for _ in range(3)))
    (folder / "serve.yaml").write_text("name: tiny\n")
    linear = "merge_method: linear\nmodels:\n  - {model: M, parameters: {weight: 0.5}}\n"
    (folder / "merge.yml").write_text(linear + "  - {model: tuned, parameters: {weight: 0.5}}\n")
    (folder / "moe.yml").write_text(
        "base_model: M\ngate_mode: random\nexperts:\n  - {source_model: M}\n  - {source_model: tuned}\n"
    )
    second = "merge_method: linear\nmodels:\n  - {model: between, parameters: {weight: 0.5}}\n"
    (folder / "multi.yml").write_text(
        f"name: between\n{linear}  - {{model: tuned, parameters: {{weight: 0.5}}}}\n---\n"
        f"{second}  - {{model: D, parameters: {{weight: 0.5}}}}\n"
    )


def test_every_row_has_something_to_type_here():
    assert len(CELLS) > 55 and len(COMMANDS) > 50 and len(PYTHON) >= 2
    for cell in CELLS:
        assert "`attar" in cell or "`python -m attar" in cell or cell == "attar", cell


def test_every_command_is_understood_as_far_as_the_missing_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    for words in COMMANDS:
        code, error = call(words), capsys.readouterr().err
        if words != ["list"]:
            assert code == 1, f"attar {' '.join(words)}: {code} {error}"
            assert re.match(r"error: .*(no such|is not installed)", error), (
                f"attar {' '.join(words)}: {error}"
            )


def test_the_verbs_of_python_are_understood_as_far_as_the_missing_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in (line for line in PYTHON if not line.startswith("attar.LLM")):
        with pytest.raises(CheckpointError, match="no such model"):
            eval(line, {"attar": attar})


def test_the_modules_that_are_run_exist():
    modules = [shlex.split(code)[2] for code in CODE if code.startswith("python ")]
    assert modules and all(find_spec(module) for module in modules)


def quick(words):
    """A command with fewer samples and steps, where it does not say how many itself."""
    more = QUICK.get(words[0], [])
    if words[0] == "quantize" and "autoround" in words:
        more = [*more, "--iterations", "2"]
    pairs = [
        more[i : i + 2] if not more[i].startswith("--no-") else more[i : i + 1]
        for i in range(len(more))
        if more[i].startswith("--")
    ]
    return [*words, *(word for pair in pairs if pair[0] not in words for word in pair)]


def serve(words):
    """Start the server, wait until it is ready, and end it."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    line = [sys.executable, "-m", "attar.cli.main", *words, "--port", str(port), "--host", "127.0.0.1"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 240
        while time.monotonic() < until and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                    assert answer.status == 200
                    break
            except OSError:
                time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=60)[1]
        assert process.returncode == 0, f"{words}: {error[-1500:]}"
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_works(tmp_path, monkeypatch, capsys):
    make_models(tmp_path)
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    for code in CODE:
        words = shlex.split(code)[1:]
        if code.startswith("attar."):
            result = eval(code, {"attar": attar})
            assert result
        elif code.startswith("python "):
            continue  # asks the network for its questions: tests/peers/test_lm_eval.py runs it with its own
        elif "--track" in words and find_spec(words[words.index("--track") + 1]) is None:
            continue
        elif words[0] == "serve":
            serve(words)
        elif words[0] == "chat":
            line = [sys.executable, "-m", "attar.cli.main", *words, "--max-tokens", "4"]
            done = subprocess.run(line, input="Hello\n", capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{code}: {done.stderr[-1500:]}"
        else:
            returned = call(quick(words))
            assert returned == 0, f"{code}: {capsys.readouterr().err[-1500:]}"
            if "-o" in words:
                made = words[words.index("-o") + 1]
                assert list(tmp_path.glob(f"{made.removesuffix('.gguf')}*")), code
    assert (tmp_path / "my.Modelfile").is_file() and (tmp_path / "q3/imatrix.gguf").is_file()
