"""Folders of mlx-lm: published names both ways, experts one by one, and what is refused; mlx-lm's own folders
in tests/peers/test_mlx.py."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.checkpoint.inspect import inspect
from attar.checkpoint.mlx_folder import FAMILIES, mlx_name, published
from attar.checkpoint.tensors import read_tensor
from attar.checkpoint.weight_files import read_tensors
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import AttarError, CheckpointError, ModelError, NumericsError
from attar.formats.readers import Decoded, reader
from attar.models.loading.fit import admit
from tests import tiny_models

NAME = "model.layers.0.block_sparse_moe.switch_mlp.up_proj"
PUBLISHED = {
    "llama": "model.layers.0.mlp.down_proj",
    "qwen3_moe": "model.layers.0.mlp.experts.gate_proj",
    "mixtral": "model.layers.0.block_sparse_moe.experts.w2",
    "gpt_oss": "model.layers.0.mlp.experts.up_proj",
    "gpt2": "transformer.h.0.mlp.c_fc",
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_names_go_both_ways(family, tmp_path):
    name = PUBLISHED[family]
    save_file(
        {f"{mlx_name(name, family)}.scales": torch.arange(12.0).view(3, 4)}, tmp_path / "model.safetensors"
    )
    back, _ = published(read_tensors(tmp_path)[0], family)
    if ".experts." not in name:
        assert list(back) == [f"{name}.scales"]
        return
    parts = [name.replace(".experts.", f".experts.{expert}.") for expert in range(3)]
    assert list(back) == [f"{part}.scales" for part in parts] and family in FAMILIES
    assert read_tensor(back[f"{parts[2]}.scales"]).tolist() == [8.0, 9.0, 10.0, 11.0]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture in MLX, as a folder whose files tests change."""
    root = tmp_path_factory.mktemp("mlx")
    dense = tiny_models.save(tiny_models.build("mixtral", num_hidden_layers=1), root / "dense")
    settings = ExportSettings(format="mlx", bits=8, group_size=32)
    return dense, export(dense, root / "mixture", settings).path


def copied(folder, out, change):
    """The folder with other tensors or another config."""
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json":
            (out / file.name).write_bytes(file.read_bytes())
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    change(tensors, config)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_experts_are_read_one_by_one(mixture):
    dense, folder = mixture
    view, wanted = Decoded(admit(folder)), open_checkpoint(dense)
    assert "quantization" not in view.config and view.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        weight = wanted.load(name)
        assert (view.load(name) - weight).norm() < 0.01 * weight.norm()
    shown = inspect(folder).quantization
    assert shown["method"] == "mlx" and shown["bits_per_weight"] == 10.0


def test_mlx_lm_s_config_names_no_method_and_dense_folders_none_at_all(mixture, tmp_path):
    folder = mixture[1]

    def published_config(tensors, config):
        config["quantization_config"] = config["quantization"]

    def without(tensors, config):
        del config["quantization"], config["quantization_config"]
        for name in [name for name in tensors if name.endswith(("scales", "biases"))]:
            base = name.rpartition(".")[0]
            tensors.pop(name)
            tensors[f"{base}.weight"] = torch.zeros((*tensors[f"{base}.weight"].shape[:-1], 64))
        tensors[f"{NAME}.weight"] = torch.ones(tensors[f"{NAME}.weight"].shape)

    stated = reader(open_checkpoint(copied(folder, tmp_path / "stated", published_config)))
    assert stated.grid("model.layers.0.block_sparse_moe.experts.0.w3.weight") is None  # zero points between
    plain = open_checkpoint(copied(folder, tmp_path / "plain", without))
    assert bool((plain.load("model.layers.0.block_sparse_moe.experts.7.w3.weight") == 1).all())


def change_of(key, value):
    def change(tensors, config):
        config["quantization"][key] = value

    return change


DAMAGED = {
    "group_size is 48, but must be one of 128, 64, 32": change_of("group_size", 48),
    "bits is 'four', but must be a whole number": change_of("bits", "four"),
    "mode is 'nf4', but must be one of affine": change_of("mode", "nf4"),
    "scales is missing": lambda tensors, config: tensors.pop(f"{NAME}.scales"),
    r"biases is F32 \[96, 1\]; affine of 8 bits needs F32 \[96, 2\]": lambda tensors, config: tensors.update(
        {f"{NAME}.biases": tensors[f"{NAME}.biases"][..., :1].clone()}
    ),
    r"scales is I8 \[96, 2\]": lambda tensors, config: tensors.update(
        {f"{NAME}.scales": tensors[f"{NAME}.scales"].to(torch.int8)}
    ),
    "up_proj is 3, not an object": change_of(NAME, 3),
    r"experts\.3\.w3\.weight is stored twice, alone and in a stack": lambda tensors, config: tensors.update(
        {"model.layers.0.block_sparse_moe.experts.3.w3.weight": torch.zeros(96, 64)}
    ),
    "of another quantization than mlx": lambda tensors, config: tensors.update(
        {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(4, 4, dtype=torch.int32)}
    ),
}


@pytest.mark.parametrize("problem", DAMAGED)
def test_what_does_not_fit_is_refused_in_one_line(mixture, tmp_path, problem):
    folder = copied(mixture[1], tmp_path / "odd", DAMAGED[problem])
    with pytest.raises(CheckpointError, match=problem) as raised:
        admit(folder)
    assert "\n" not in raised.value.message


def test_a_quantization_config_that_names_no_method_is_mlxs_where_the_words_are(mixture, tmp_path):
    def nameless(tensors, config):
        config["quantization_config"] = config.pop("quantization")

    opened = admit(copied(mixture[1], tmp_path / "nameless", nameless))
    assert opened.config["quantization_config"]["quant_method"] == "mlx"
    first, wanted = Decoded(opened), Decoded(admit(mixture[1]))
    assert all(torch.equal(first.load(name), wanted.load(name)) for name in wanted.tensors)

    def dense(tensors, config):
        nameless(tensors, config)
        for name in [name for name in tensors if name.endswith((".scales", ".biases"))]:
            del tensors[name]

    with pytest.raises(AttarError, match="scales is missing") as raised:
        admit(copied(mixture[1], tmp_path / "other", dense))
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("stated", [[4, 32], "4bit", 4])
def test_a_quantization_that_is_no_object_is_refused(mixture, tmp_path, stated):
    def change(tensors, config):
        del config["quantization_config"]
        config["quantization"] = stated

    with pytest.raises(CheckpointError, match="has no quantization_config"):
        admit(copied(mixture[1], tmp_path / "odd", change))


def test_numbers_that_are_none_are_found(mixture, tmp_path):
    def change(tensors, config):
        tensors[f"{NAME}.scales"][3, 5] = float("nan")

    read = reader(admit(copied(mixture[1], tmp_path / "nan", change)))
    read.check("model.layers.0.block_sparse_moe.experts.2.w3.weight")
    with pytest.raises(NumericsError, match="scales or biases"):
        read.check("model.layers.0.block_sparse_moe.experts.3.w3.weight")


def test_families_that_mlx_lm_changes_are_refused(mixture, tmp_path):
    def change(tensors, config):
        config["model_type"] = "qwen3_next"

    folder = copied(mixture[1], tmp_path / "other", change)
    with pytest.raises(ModelError, match="quantized by MLX, which attar does not read of qwen3_next"):
        open_checkpoint(folder)
    assert [odd["verdict"] for odd in inspect(folder).oddities] == ["refused"]
