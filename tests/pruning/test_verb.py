"""What holds for every method of ``attar prune``, from folder to folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import attar
from attar.errors import RecipeError
from attar.measure.evaluate import measure_quality
from attar.measure.reference import make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject
from attar.pruning.settings import METHOD_SETTINGS, ZerosSettings
from attar.recipe.schema import parse_recipe
from tests import tiny_models

SMALL = {
    "samples": 4,
    "sequence_length": 32,
    "batch_size": 2,
    "data": str(Path(json.__file__).parent),  # a few files: the whole library takes seconds to read
}
AMOUNTS = {"query-heads": 0.5, "neurons": 0.5, "hidden": 0.5, "layers": 0.34}
ZEROS = [method for method, options in METHOD_SETTINGS.items() if issubclass(options, ZerosSettings)]
UNITS = [method for method in METHOD_SETTINGS if method not in ZEROS]


def amount(method):
    return {"sparsity": "2:4"} if method in ZEROS else {"ratio": AMOUNTS.get(method, 0.25)}


@pytest.fixture
def model(tmp_path):
    return tiny_models.save(tiny_models.build("smollm"), tmp_path / "model", dtype=torch.bfloat16)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [method for method in METHOD_SETTINGS if method != "experts"])
def test_what_comes_out_is_an_ordinary_dense_checkpoint(method, model, tmp_path):
    """vLLM refuses any ``sparsity_config``, so there is none; transformers loads it and computes the same."""
    out = attar.prune(model, tmp_path / "out", method=method, **amount(method), **SMALL)
    for file in out.path.rglob("*"):
        assert b"sparsity_config" not in file.read_bytes(), file
    assert "quantization_config" not in out.config
    theirs = AutoModelForCausalLM.from_pretrained(out.path, dtype=torch.float32).eval()
    tokens = tiny_models.tokens(theirs)
    ours = attar.models.loading.load.load_model(out, dtype=torch.float32)
    assert torch.equal(tiny_models.logits(theirs, tokens), tiny_models.logits(ours, tokens))


@pytest.mark.few(4)
@pytest.mark.parametrize("method", METHOD_SETTINGS)
def test_recipes_have_every_method_and_its_own_options_alone(method):
    options = json.dumps(amount(method))[1:-1]
    text = "model: attar:tiny\nstages:\n  - {{stage: prune, method: {}, {}}}\n"
    recipe = parse_recipe(text.format(method, options))
    assert recipe.stages[0].settings.method == method
    other = "ratio: 0.3" if method in ZEROS else "sparsity: '0.5'"
    with pytest.raises(RecipeError, match=other.split(":")[0]):
        parse_recipe(text.format(method, other))


@pytest.mark.parametrize("text", ["2:4", "'2:4'", "0.5", "50%"])
def test_recipes_take_an_amount_of_zeros_as_the_command_does(text):
    stage = f"{{stage: prune, method: {ZEROS[0]}, sparsity: {text}}}"
    recipe = parse_recipe(f"model: attar:tiny\nstages:\n  - {stage}\n")
    assert str(recipe.stages[0].settings.options.sparsity) == text.strip("'")


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", ["0.5", "2:4"])
def test_methods_rank_as_in_their_papers(sparsity, tmp_path):
    """KL on held-out text: what compensates for its zeros keeps more, the whole layer's problem the most."""
    settings = EvaluateSettings(
        data="python-stdlib", tokens=4096, speed=False, sample="", runner="transformers"
    )
    reference = make_reference("attar:tiny", settings)

    def kl(method):
        options = {"samples": 32, "sequence_length": 256, "data": "python-stdlib", "reconstruct": "none"}
        out = attar.prune("attar:tiny", tmp_path / method, method=method, sparsity=sparsity, **options)
        return measure_quality(load_subject(out), settings, reference).kl_mean

    measured = {method: kl(method) for method in ("magnitude", "wanda", "sparsegpt", "alps")}
    assert measured["alps"] < 0.97 * measured["sparsegpt"]
    assert measured["sparsegpt"] < 0.7 * min(measured["magnitude"], measured["wanda"])


INTERRUPTED = [
    ["--method", "wanda", "--sparsity", "2:4", "--reconstruct", "none"],
    ["--method", "sparsegpt", "--sparsity", "0.5", "--reconstruct", "none"],
    ["--method", "alps", "--sparsity", "4:8", "--reconstruct", "none"],
    ["--method", "wanda", "--sparsity", "2:4", "--reconstruct", "block"],
    ["--method", "mixed", "--ratio", "0.25"],
    ["--method", "neurons", "--rounds", "8"],
    ["--method", "layers", "--criterion", "kl", "--ratio", "0.67", "--rounds", "4"],
]


def command(model, out, method):
    rows = {"samples": 64, "sequence_length": 128, "batch_size": 4, "data": SMALL["data"]}
    options = [text for name, value in rows.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", "attar.cli.main", "prune", str(model), "-o", str(out), *method, *options]


def kept_files(out):
    """Files that survive a kill."""
    work = out.with_name(f".{out.name}.work")
    return [file for file in work.rglob("*") if file.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("method", INTERRUPTED, ids=lambda method: "-".join(method[1::2]))
def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(method, tmp_path):
    built = tiny_models.build("smollm", hidden_size=256, intermediate_size=768, num_hidden_layers=6)
    model = tiny_models.save(built, tmp_path / "model", dtype=torch.bfloat16)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    out, whole = tmp_path / "out", tmp_path / "whole"
    for files in (2, 4):  # killed twice, each time with more done
        process = subprocess.Popen(command(model, out, method), env=environment, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(kept_files(out)) < files:
            time.sleep(0.005)
        assert process.poll() is None, "the kill must meet a living process"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists()
    for folder in (out, whole):
        ended = subprocess.run(
            command(model, folder, method), env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not kept_files(out)
