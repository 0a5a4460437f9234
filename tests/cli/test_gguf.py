"""A GGUF file at the command line: looked at, measured, asked, turned back into a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.checkpoint import paths
from attar.checkpoint.open import open_checkpoint
from attar.cli.main import call
from attar.data.auto import fitting
from tests import tiny_models
from tests.formats.gguf.gguf_files import write_gguf
from tests.formats.gguf.making import tokenizer_metadata


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.save(tiny_models.build("smollm"), tmp_path / "dense", dtype=torch.bfloat16)


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    source = open_checkpoint(folder)
    return write_gguf(source, tmp_path / "m.gguf", "BF16", extra=tokenizer_metadata(folder, source.config))


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    """The JSON that a command prints."""
    assert call([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["inspect", str(file)]) == 0
    text = capsys.readouterr().out
    assert f"file        {file}" in text and "GGUF version 3, BF16" in text
    assert "tokenizer.ggml.tokens" in text and "320 of str" in text
    content = answer(capsys, "inspect", file)
    assert content["container"]["metadata"]["tokenizer.ggml.model"] == "gpt2"
    assert content["bits_per_weight"] == pytest.approx(16, abs=0.2)


def test_a_damaged_file_is_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(file.read_bytes()[:-5000])
    for verb in ("inspect", "evaluate"):
        assert call([verb, str(file)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {file}: tensor ") and "but the file ends at" in error
        assert "Traceback" not in error


def test_evaluate_and_generate(file: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tokens", "256", "--sequence-length", "64", "--no-speed", "--sample-tokens", "4"]
    actual, known = (answer(capsys, "evaluate", model, *options) for model in (file, folder))
    assert actual["perplexity"] == known["perplexity"] and actual["sample"] == known["sample"]
    against = answer(capsys, "evaluate", file, "--reference", folder, "--runner", "transformers", *options)
    assert against["kl_mean"] == 0 and against["top1_agreement"] == 1
    actual, known = (
        answer(capsys, "generate", model, "-p", "def f(", "--max-tokens", "8") for model in (file, folder)
    )
    assert [item["samples"] for item in actual["completions"]] == [
        item["samples"] for item in known["completions"]
    ]


def test_export_to_a_folder(
    file: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, "export", file, "-o", tmp_path / "back", "--format", "dense")
    source, back = open_checkpoint(folder), open_checkpoint(tmp_path / "back")
    assert sorted(back.tensors) == sorted(source.tensors)
    assert all(torch.equal(back.load(name), source.load(name)) for name in source.tensors)
    assert "quantization_config" not in back.config and (back.path / "tokenizer.json").is_file()
    assert back.card is not None and back.card.parents[0].name == "m"


def test_a_model_of_a_package_is_named_as_the_user_named_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "llm_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    file.rename(package / file.name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(paths.PACKAGED, "smollm2", (package.name, file.name))
    out = str(tmp_path / "out")
    arguments = ["--method", "rtn", "--check-tokens", "0", "--group-size", "0"]
    assert call(["quantize", "attar:smollm2", "-o", out, *arguments]) == 0
    log = capsys.readouterr().err
    assert "note: attar:smollm2 is quantized already (gguf)" in log
    checkpoint = open_checkpoint("attar:smollm2")
    assert checkpoint.name == checkpoint.spelling == "attar:smollm2"
    assert "trained on it" not in fitting(checkpoint)[1]  # only the embedded models are of Python source
