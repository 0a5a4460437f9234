"""What follows pruning: recover, quantize and export of sparse and of cut models, alone and in a recipe."""

import json
from pathlib import Path

import pytest
import torch

import attar
from attar.formats.readers import Decoded
from attar.measure.run_folder import read_run
from attar.measure.verdict import findings
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import weight_of
from attar.models.loading.load import load_model
from attar.recipe.run import run_recipe
from attar.recipe.schema import parse_recipe
from tests import tiny_models

DATA = str(Path(json.__file__).parent)  # a few files: the whole library takes seconds to read
PRUNE = {"samples": 4, "sequence_length": 32, "batch_size": 2, "data": DATA}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
RECIPE = """
model: {model}
data: {data}
evaluate: {{tokens: 256, sequence_length: 64, speed: false, sample: ""}}
stages:
  - {{stage: prune, method: wanda, sparsity: "2:4", samples: 8, sequence_length: 32}}
  - {{stage: recover, steps: 30, batch_size: 4, sequence_length: 32, learning_rate: 3e-3, precision: fp32}}
  - {{stage: quantize, name: w8, method: rtn, scheme: W8A16, group_size: 0, check_tokens: 0}}
  - {{stage: quantize, name: w4, from: recover, scheme: W4A16_ASYM, group_size: 32, samples: 8,
     sequence_length: 32, check_tokens: 0}}
"""


def linears(folder):
    """By module name, the weights (N, K) of the blocks' Linears."""
    model = load_model(folder, dtype=torch.float32)
    names = [name for block in discover(model).blocks for name in block.linears]
    return {name: weight_of(model.get_submodule(name)).detach() for name in names}


def two_of_four(weight):
    return bool(((weight != 0).reshape(len(weight), -1, 4).sum(-1) <= 2).all())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    built = tiny_models.build("llama3", **WIDE)
    return tiny_models.save(built, tmp_path_factory.mktemp("models") / "model", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def pruned(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("pruned") / "sparse"
    return attar.prune(model, out, method="wanda", sparsity="2:4", **PRUNE).path


@pytest.mark.slow
def test_a_recipe_keeps_the_zeros_to_its_end(model, tmp_path):
    recipe = parse_recipe(RECIPE.format(model=model, data=DATA), "r.yaml", ())
    run_recipe(recipe, tmp_path / "run")
    folders = sorted(path for path in (tmp_path / "run").iterdir() if path.name[:2].isdigit())
    stages = {path.name[3:]: path for path in folders if path.is_dir()}
    zeros = {name: weight == 0 for name, weight in linears(stages["prune"]).items()}
    for stage in ("prune", "recover", "w8", "w4"):
        for name, weight in linears(stages[stage]).items():
            assert two_of_four(weight) and not weight[zeros[name]].any(), (stage, name)
    for stage in ("recover", "w8", "w4"):
        card = json.loads((stages[stage] / "attar.json").read_text())
        assert card["settings"]["keep_zeros"] == "true", "the lineage says so"
        assert "2:4, by wanda" in attar.inspect(stages[stage]).render()
    lines = findings(read_run(tmp_path / "run"))
    assert any("recover won back" in line for line in lines), lines


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_quantize_keeps_the_zeros_of_a_pruned_model(pruned, tmp_path, method):
    options = {"samples": 4, "sequence_length": 32, "check_tokens": 0, "data": DATA}
    packed = attar.quantize(pruned, tmp_path / "out", scheme="W4A16_ASYM", method=method, **options)
    decoded = Decoded(packed)
    weights = [decoded.load(name) for name in decoded.tensors if name.endswith("proj.weight")]
    assert len(weights) == 7 and all(two_of_four(weight) and weight.any() for weight in weights)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"format": "dense", "dtype": "float16"},
        {"format": "gguf", "type": "F16"},
        {"format": "gguf", "type": "Q8_0"},
        {"format": "gguf", "type": "Q4_0"},
    ],
    ids=lambda options: f"{options['format']} {options.get('type', '')}",
)
def test_exports_that_have_a_zero_keep_the_pattern(pruned, tmp_path, options):
    out = attar.export(pruned, tmp_path / "out", **options)
    assert all(two_of_four(weight) for weight in linears(out).values())


CUTS = {
    "neurons": {"ratio": 0.3, "multiple_of": 8},  # 176 of 256: no multiple of 32, 128 or 256
    "heads": {"ratio": 0.25},  # 96 columns of o
    "hidden": {"ratio": 0.25},
    "layers": {"ratio": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", CUTS)
def test_a_cut_model_is_quantized_and_exported_as_any_other_width(tmp_path, method):
    built = tiny_models.build("llama3", **{**WIDE, "num_hidden_layers": 2})
    model = tiny_models.save(built, tmp_path / "model", dtype=torch.bfloat16)
    cut = attar.prune(model, tmp_path / "cut", method=method, **CUTS[method], **PRUNE)
    options = {"samples": 4, "sequence_length": 32, "check_tokens": 0, "data": DATA}
    wanted = linears(cut)
    assert {w.shape for w in wanted.values()} != {
        w.shape for w in linears(model).values()
    } or method == "layers"
    packed = attar.quantize(cut, tmp_path / "w8", scheme="W8A16", method="gptq", **options)
    gguf = attar.export(cut, tmp_path / "gguf", format="gguf", type="Q4_K_M", data=DATA)
    for folder, least in ((packed, 0.02), (gguf, 0.2)):
        for name, weight in linears(folder).items():
            assert (weight - wanted[name]).norm() < least * wanted[name].norm(), (folder.path, name)
