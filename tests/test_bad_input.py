"""Bad input at the command line: one clear line, exit code 1 or 2, never a traceback, nothing left behind."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.cli.main import call
from tests import tiny_models

SMALL = ["--samples", "4", "--sequence-length", "32", "--batch-size", "2"]
TEXT = ["--data", str(Path(json.__file__).parent)]  # a few files: the whole library takes seconds to read


@pytest.fixture
def model(tmp_path):
    return tiny_models.save(tiny_models.build("smollm"), tmp_path / "model", dtype=torch.bfloat16)


@pytest.fixture
def refused(tmp_path, capsys):
    """Run attar; check that it refuses in a line or two and that the folder holds what it held before."""

    def run(*arguments, code, out=None):
        before = sorted(path.name for path in tmp_path.rglob("*"))
        got = call([str(argument) for argument in arguments])
        written = capsys.readouterr()
        assert got == code, written.err
        lines = [line for line in written.err.splitlines() if line.startswith(("error", "hint", "Error"))]
        assert "Traceback" not in written.err and "Traceback" not in written.out
        assert 1 <= len(lines) <= 2, written.err
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
        return " ".join(lines)

    return run


def damaged(model, change):
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def rewrite(model, **changes):
    config = json.loads((model / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key)
        else:
            config[key] = value
    (model / "config.json").write_text(json.dumps(config))


VERBS = {
    "quantize": ["--group-size", "32", *SMALL, *TEXT],
    "prune": ["--method", "neurons", *SMALL, *TEXT],
    "distill": ["--steps", "2", "--sequence-length", "32", *TEXT],
}


@pytest.mark.parametrize("verb", VERBS)
def test_missing_folder(verb, refused, tmp_path):
    message = refused(verb, tmp_path / "nowhere", "-o", tmp_path / "out", *VERBS[verb], code=1)
    assert "nowhere" in message


@pytest.mark.parametrize("verb", VERBS)
def test_truncated_weights(verb, refused, model, tmp_path):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    message = refused(verb, model, "-o", tmp_path / "out", *VERBS[verb], code=1)
    assert "model.safetensors" in message


@pytest.mark.parametrize("content", [b"", b"\x05", b"garbage that is no header at all", b"\xff" * 64])
def test_corrupt_weights(refused, model, tmp_path, content):
    (model / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refused("quantize", model, "-o", tmp_path / "out", *SMALL, code=1)


def test_config_without_architecture(refused, model, tmp_path):
    rewrite(model, architectures=None)
    assert "config.json" in refused("quantize", model, "-o", tmp_path / "out", *SMALL, code=1)


def test_config_of_another_shape(refused, model, tmp_path):
    rewrite(model, intermediate_size=128)
    refused("prune", model, "-o", tmp_path / "out", *SMALL, code=1)


def test_tokenizer_of_another_vocabulary(refused, model, tmp_path):
    content = json.loads((model / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 5000, "content": "<other>"})
    content["model"]["vocab"]["<other>"] = 5000
    (model / "tokenizer.json").write_text(json.dumps(content))
    assert "tokenizer" in refused("prune", model, "-o", tmp_path / "out", *SMALL, code=1)


def test_misspelt_recipe_key(refused, model, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: {model}\nstages:\n  - stage: prune\n    ration: 0.5\n")
    message = refused("run", recipe, "-o", tmp_path / "run", code=2)
    assert "r.yaml:4" in message and "'ration'" in message and "'ratio'" in message


def test_ratio_beyond_one(refused, model, tmp_path):
    assert "ratio" in refused("prune", model, "-o", tmp_path / "out", "--ratio", "1.5", code=2)


PRUNINGS = [
    (["--method", "wunda"], ["'wunda'", "wanda"]),
    (["--method", "magnitude", "--sparsity", "0"], ["--sparsity", "0.5", "2:4"]),
    (["--method", "magnitude", "--sparsity", "1"], ["--sparsity", "0.5", "2:4"]),
    (["--method", "magnitude", "--sparsity", "half"], ["--sparsity", "0.5", "2:4"]),
    (["--method", "magnitude", "--sparsity", "4:2"], ["--sparsity", "0.5", "2:4"]),
    (["--method", "magnitude", "--sparsity", "2:5"], ["sparsity", "2:5", "q_proj"]),
    (["--method", "wanda", "--sparsity", "2:5"], ["sparsity", "2:5", "q_proj"]),
    (["--method", "sparsegpt", "--sparsity", "2:5"], ["sparsity", "2:5", "q_proj"]),
    (["--method", "alps", "--sparsity", "2:5"], ["sparsity", "2:5", "q_proj"]),
    (["--method", "wanda", "--sparsity", "2:4", "--allocation", "owl"], ["allocation", "2:4"]),
    (["--method", "magnitude", "--sparsity", "2:4", "--scope", "global"], ["scope", "2:4"]),
    (["--method", "magnitude", "--ignore", "re:("], ["ignore", "regular expression"]),
    (["--method", "wanda", "--ratio", "0.5"], ["--ratio", "neurons"]),
    (["--method", "neurons", "--sparsity", "0.5"], ["--sparsity", "wanda"]),
    (["--method", "wanda", "--reconstruct", "blocks"], ["--reconstruct", "block"]),
    *(
        (["--method", method, "--ratio", "1.0"], ["ratio"])
        for method in ("heads", "hidden", "layers", "mixed")
    ),
    (["--method", "neurons", "--criterion", "wunda"], ["--criterion", "wanda"]),
    (["--method", "neurons", "--rounds", "0"], ["rounds"]),
    (["--method", "neurons", "--candidates", "4"], ["--candidates", "mixed"]),
    (["--method", "mixed", "--size", "large"], ["--size", "GB"]),
    (["--method", "mixed", "--speed", "fast"], ["speed", "1.5x"]),
    (["--method", "mixed", "--size", "1MB", "--speed", "2x"], ["speed", "size"]),
]


@pytest.mark.few(10)
@pytest.mark.parametrize(("options", "words"), PRUNINGS, ids=lambda value: " ".join(value))
def test_prunings_that_cannot_be(options, words, refused, model, tmp_path):
    """Settings are refused (2), and what a model cannot have (1 or 2), by name and with the mend."""
    message = refused("prune", model, "-o", tmp_path / "out", *options, *SMALL, *TEXT, code=2)
    for word in words:
        assert word in message, message


def test_group_size_that_does_not_divide(refused, model, tmp_path):
    message = refused("quantize", model, "-o", tmp_path / "out", "--group-size", "64", *SMALL, code=2)
    assert "down_proj" in message and "32" in message


@pytest.mark.few(1)
@pytest.mark.parametrize("verb", VERBS)
def test_nan_weights(verb, refused, model, tmp_path):
    damaged(model, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][0, 0].fill_(float("nan")))
    message = refused(verb, model, "-o", tmp_path / "out", *VERBS[verb], code=1)
    assert "layers.1.mlp.up_proj.weight" in message and "NaN" in message


@pytest.mark.parametrize("content", ["", "  \n\n", "a few words"])
def test_empty_calibration_text(refused, model, tmp_path, content):
    text = tmp_path / "text.txt"
    text.write_text(content)
    message = refused(
        "quantize", model, "-o", tmp_path / "out", "--group-size", "32", *SMALL, "--data", text, code=1
    )
    assert "text.txt" in message


def test_prompt_longer_than_the_context(refused, model):
    assert "128" in refused("generate", model, "-p", "word " * 500, code=2)


def test_existing_output_is_kept(refused, model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    message = refused("quantize", model, "-o", out, "--group-size", "32", "--method", "rtn", code=1)
    assert "exists" in message and (out / "mine.txt").read_text() == "precious"


def test_several_kinds_of_wrong_options(refused, model, tmp_path):
    assert "'gptk'" in refused("quantize", model, "-o", tmp_path / "out", "--method", "gptk", code=2)
    refused("quantize", model, "-o", tmp_path / "out", "--group-sise", "32", code=2)
    refused("quantise", model, code=2)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB, where mounting is allowed."""
    folder = tmp_path.parent / f"{tmp_path.name}-disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("verb", VERBS)
def test_full_disk(verb, refused, model, small_disk):
    message = refused(verb, model, "-o", small_disk / "out", *VERBS[verb], code=1)
    assert "space" in message
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_read_only_output(verb, refused, model, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    message = refused(verb, model, "-o", small_disk / "out", *VERBS[verb], code=1)
    assert "read-only" in message.lower() or "permission" in message.lower()


def test_a_bug_of_ours_is_called_one(refused, model, tmp_path, monkeypatch):
    monkeypatch.setattr("attar.quantization.stage.write", None)
    small = ["--method", "rtn", "--group-size", "32", *TEXT]
    message = refused("quantize", model, "-o", tmp_path / "out", *small, code=1)
    assert "a bug of attar" in message and "--debug" in message


def small_tokenizer(model, content):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (model / name).unlink(missing_ok=True)
    if content is None:
        (model / "tokenizer.json").unlink()
    else:
        (model / "tokenizer.json").write_text(content)


def transposed(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def cut(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:, :32].contiguous()


def stray(tensors):
    tensors["model.layers.1.mlp.extra.weight"] = torch.ones(4, 4)


def codes(tensors):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)


MISFITS = {  # what is wrong with a folder, and what the line says
    "transposed": (lambda model: damaged(model, transposed), "up_proj.weight is [64, 96], but"),
    "cut": (lambda model: damaged(model, cut), "up_proj.weight is [96, 32], but"),
    "stray": (lambda model: damaged(model, stray), "extra.weight has no place in the model"),
    "codes": (
        lambda model: damaged(model, codes),
        "(I8) is of a quantized weight, but config.json has no",
    ),
    "fewer layers": (lambda model: rewrite(model, num_hidden_layers=1), "has no place in the model"),
    "more layers": (
        lambda model: rewrite(model, num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000, but must be",
    ),
    "vocabulary": (
        lambda model: rewrite(model, vocab_size=10**12),
        "vocab_size is 1000000000000, but must be",
    ),
    "{} tokenizer": (lambda model: small_tokenizer(model, "{}"), "the tokenizer cannot be loaded"),
    "cut tokenizer": (
        lambda model: small_tokenizer(model, '{"version": "1.0", "model'),
        "the tokenizer cannot",
    ),
}
STREAMS = {
    "rtn": ["quantize", "--group-size", "32", "--method", "rtn", "--check-tokens", "0"],
    "dense": ["export", "--format", "dense"],
    "gguf": ["export", "--format", "gguf", "--type", "Q8_0"],
}


@pytest.mark.few(12)
@pytest.mark.parametrize("verb", STREAMS)
@pytest.mark.parametrize("fault", MISFITS)
def test_what_does_not_fit_together_is_refused_before_any_work(fault, verb, refused, model, tmp_path):
    spoil, words = MISFITS[fault]
    spoil(model)
    name, *options = STREAMS[verb]
    message = refused(name, model, "-o", tmp_path / "out", *options, code=1)
    assert words in message and str(model) in message and "bug of attar" not in message


@pytest.mark.parametrize("verb", [*VERBS, "quantize --method rtn"])
def test_a_missing_tokenizer_is_reported_before_any_work(verb, refused, model, tmp_path, monkeypatch):
    """The default quantize reads text to judge the result, whatever the method."""
    from attar.checkpoint import open as opened

    small_tokenizer(model, None)
    monkeypatch.setattr(opened, "read_tensor", lambda info: pytest.fail("a weight was read"))
    name, *more = verb.split()
    message = refused(name, model, "-o", tmp_path / "out", *more, *VERBS.get(name, []), code=1)
    assert f"{model}: no tokenizer" in message


def test_errors_never_name_the_hidden_folder(tmp_path):
    from attar.checkpoint.open import open_checkpoint
    from attar.checkpoint.output import produce
    from attar.errors import CheckpointError

    with (
        pytest.raises(CheckpointError) as caught,
        produce(tmp_path / "out", "prune", {}, 1, [open_checkpoint("attar:tiny")]) as output,
    ):
        raise CheckpointError(f"{output.folder}: broken", hint=f"look at {output.folder}/x")
    assert str(caught.value) == f"{tmp_path}/out: broken\nhint: look at {tmp_path}/out/x"
