"""MLX folders: codes as they were, mlx-lm's names, and refusals; mlx-lm itself in tests/peers/test_mlx.py."""

import json

import pytest
import torch

from attar.checkpoint.weight_files import read_tensors
from attar.deployment.mlx import rounded
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import ModelError, NumericsError, SettingsError
from attar.formats.mlx import MLXRule, decode, float_rule
from attar.formats.readers import reader
from tests import tiny_models
from tests.quantization.packing import pack, save


def matrix(exported, name, rule):
    leaves = [leaf for leaf in ("weight", "scales", "biases") if f"{name}.{leaf}" in exported.tensors]
    return {leaf: exported.load(f"{name}.{leaf}") for leaf in leaves}, rule


def test_codes_keep_their_values_and_the_rest_is_dense_or_rounded(tmp_path):
    source = pack(save(tmp_path / "dense", "smollm"), tmp_path / "packed", scheme="W4A16")[1]
    plain = export(source, tmp_path / "plain", ExportSettings(format="mlx"))
    name = "model.layers.1.mlp.down_proj"
    carried = decode(*matrix(plain, name, MLXRule("affine", 4, 32)))
    assert torch.equal(carried.bfloat16(), reader(source).decode(f"{name}.weight_packed"))
    stated = json.loads((plain.path / "config.json").read_text())["quantization"]
    assert stated == {"bits": 4, "group_size": 32, "mode": "affine"}
    assert plain.tensors["model.embed_tokens.weight"].dtype == "BF16"
    details = plain.card.details
    assert details["checks"] == ["21 matrices with the same codes"]
    assert details["notes"] == ["1 matrix stays dense: model.embed_tokens.weight"]
    assert "mlx_lm.generate --model plain" in (tmp_path / "plain" / "README.md").read_text()
    both = export(source, tmp_path / "both", ExportSettings(format="mlx", bits=6, group_size=64))
    assert both.tensors["model.embed_tokens.weight"].dtype == "U32"
    assert both.config["quantization_config"]["model.embed_tokens"] == {
        "bits": 6,
        "group_size": 64,
        "mode": "affine",
    }


def test_experts_are_stacked_under_mlx_lm_s_names(tmp_path):
    source = tiny_models.save(tiny_models.build("mixtral"), tmp_path / "dense")
    exported = export(source, tmp_path / "out", ExportSettings(format="mlx", bits=8, group_size=32))
    name = "model.layers.0.block_sparse_moe.switch_mlp.down_proj"
    written, _ = read_tensors(exported.path)
    assert written[f"{name}.weight"].shape == (8, 64, 24)
    assert written["model.layers.0.block_sparse_moe.gate.weight"].dtype == "F32"
    assert not any(".experts." in stored for stored in written)


def test_config_has_what_mlx_lm_asks_for(tmp_path):
    source = tiny_models.save(
        tiny_models.build("gemma3", num_hidden_layers=6, layer_types=None), tmp_path / "dense"
    )
    config = export(source, tmp_path / "out", ExportSettings(format="mlx")).config
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["sliding_window_pattern"] == 6 and config["rope_scaling"] is None


@pytest.mark.parametrize(("mode", "loss"), [("mxfp4", 0.13), ("nvfp4", 0.13), ("mxfp8", 0.03)])
def test_float_modes_round_to_nearest(mode, loss):
    weight = torch.randn((16, 64), generator=torch.Generator().manual_seed(0))
    tensors = rounded(weight, float_rule(mode), torch.bfloat16)
    assert (decode(tensors, float_rule(mode)) - weight).norm() < loss * weight.norm()


def test_a_mode_whose_scales_are_too_coarse_is_refused(tmp_path):
    model = tiny_models.build("llama3")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e-4)
    source = tiny_models.save(model, tmp_path / "dense")
    with pytest.raises(NumericsError, match=r"up_proj\.weight: nvfp4 loses 100% of it"):
        export(source, tmp_path / "out", ExportSettings(format="mlx", type="nvfp4"))


@pytest.mark.parametrize(
    ("scheme", "changes", "match"),
    [
        ("W8A8", {}, "rounds activations"),
        ("FP8_BLOCK", {}, "rounds activations"),
        ("NVFP4A16", {}, "MLX has no global scale"),
        ("W4A16", {"group_size": 16}, "no multiple of 32"),
        ("NF4", {}, "layout of bitsandbytes"),
    ],
)
def test_codes_without_a_place_are_refused(tmp_path, scheme, changes, match):
    source = pack(save(tmp_path / "dense"), tmp_path / "packed", scheme=scheme, **changes)[1]
    with pytest.raises(ModelError, match=match):
        export(source, tmp_path / "out", ExportSettings(format="mlx"))
    assert not list(tmp_path.glob("*out*"))


def test_unknown_families_and_settings_are_refused(tmp_path):
    source = tiny_models.save(tiny_models.build("opt"), tmp_path / "opt")
    with pytest.raises(ModelError, match="cannot write 'opt' for MLX"):
        export(source, tmp_path / "out", ExportSettings(format="mlx"))
    for change in ({"bits": 7}, {"bits": 4.5}, {"group_size": 16}, {"type": "Q4_K_M"}, {"rounding": "gptq"}):
        with pytest.raises(SettingsError):
            ExportSettings(format="mlx", **change)
    with pytest.raises(SettingsError, match="which has its own"):
        ExportSettings(format="mlx", type="mxfp4", group_size=32)
    with pytest.raises(SettingsError, match="it is mlx's"):
        ExportSettings(format="gptq", group_size=32)
    small = tiny_models.save(tiny_models.build("llama2"), tmp_path / "small")
    with pytest.raises(ModelError, match="no matrix has inputs in whole groups of 128"):
        export(small, tmp_path / "out", ExportSettings(format="mlx", group_size=128))
