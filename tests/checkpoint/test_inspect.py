from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attar.checkpoint import Card, Parent
from attar.checkpoint.card import plain
from attar.checkpoint.geometry import geometry
from attar.checkpoint.inspect import inspect
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.parts import part_of
from attar.checkpoint.units import bytes_text, count_text
from attar.options import flatten
from attar.quantization.settings import quantize_settings
from tests import tiny_models
from tests.checkpoint.checkpoint_files import CONFIG, llama_tensors

# tokens, KV bytes per token (2 x layers x KV heads x head width x 4 bytes) as built in tiny_models
FAMILIES = {
    "llama3": 2 * 3 * 4 * 8 * 4,
    "gemma3": 2 * 3 * 2 * 32 * 4,
    "gpt2": 2 * 3 * 4 * 16 * 4,
    "gpt_neox": 2 * 3 * 4 * 16 * 4,
    "opt": 2 * 3 * 4 * 16 * 4,
    "phi3": 2 * 3 * 4 * 8 * 4,
    "bert": None,
    "distilbert": None,
}


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_cache_agree_with_the_model(family, tmp_path):
    model = tiny_models.build(family)
    model.save_pretrained(tmp_path)
    summary = inspect(tmp_path)
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(part.parameters for part in summary.parts) == summary.parameters
    assert "other" not in [part.name for part in summary.parts]
    assert summary.geometry.kv_bytes_per_token == FAMILIES[family]
    assert summary.geometry.context == 128
    assert summary.geometry.layers == 3


def test_by_hand(make):
    summary = inspect(make())
    sizes = {part.name: part.parameters for part in summary.parts}
    assert sizes == {
        "embedding": 32 * 8,
        "attention": 2 * (8 * 8 + 4 * 8 + 4 * 8 + 8 * 8),
        "mlp": 2 * 3 * 16 * 8,
        "norm": 5 * 8,
    }
    assert summary.bits_per_weight == 16
    assert summary.tensor_bytes == 2 * summary.parameters
    assert summary.disk_bytes == sum(path.stat().st_size for path in summary.path.iterdir())
    assert (summary.architecture, summary.model_type, summary.dtype) == (
        "LlamaForCausalLM",
        "llama",
        "bfloat16",
    )
    assert summary.tied
    assert summary.geometry.kv_bytes_per_token == 2 * 2 * 2 * 2 * 2  # K and V, layers, KV heads, width, bytes
    assert summary.quantization is None


def packed(group: int = 8) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """The tiny Llama, its decoder's Linears as int4 codes: eight in an int32, a bf16 scale a group."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in llama_tensors().items():
        if name.endswith("_proj.weight"):
            stem, (rows, columns) = name.removesuffix(".weight"), tensor.shape
            tensors[f"{stem}.weight_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
            tensors[f"{stem}.weight_scale"] = torch.ones(rows, columns // group, dtype=torch.bfloat16)
            tensors[f"{stem}.weight_shape"] = torch.tensor([rows, columns])
        else:
            tensors[name] = tensor
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"], "input_activations": None}},
        "ignore": ["lm_head"],
    }
    return tensors, {**CONFIG, "quantization_config": config}


def test_packed_codes_count_as_the_weights_they_stand_for(make):
    tensors, config = packed()
    dense, actual = inspect(make("dense")), inspect(make("packed", config=config, tensors=tensors))
    assert actual.parameters == dense.parameters
    assert [(p.name, p.parameters) for p in actual.parts] == [(p.name, p.parameters) for p in dense.parts]
    assert actual.tensor_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert actual.bits_per_weight == pytest.approx(actual.tensor_bytes * 8 / dense.parameters)
    assert actual.quantization["tensors"] == 14
    assert actual.quantization["bits_per_weight"] == 6.0  # 4-bit codes, and 16 bits of scale for each 8
    assert actual.quantization["schemes"][0]["group_size"] == 8
    assert "W4A16 group 8, pack-quantized (compressed-tensors): 14 tensors at 6.00 bits" in actual.render()


GPTQ = {
    "qweight": (torch.int32, (4, 16)),
    "scales": (torch.float16, (1, 16)),
    "qzeros": (torch.int32, (1, 2)),
    "g_idx": (torch.int32, (32,)),
}
NVFP4 = {
    "weight_packed": (torch.uint8, (16, 16)),
    "weight_scale": (torch.float8_e4m3fn, (16, 2)),
    "weight_global_scale": (torch.float32, (1,)),
}
NF4 = {
    "weight": (torch.uint8, (256, 1)),
    "weight.absmax": (torch.float32, (8,)),
    "weight.quant_map": (torch.float32, (16,)),
    "weight.quant_state.bitsandbytes__nf4": (torch.uint8, (80,)),
}
INT8 = {"weight": (torch.int8, (16, 32)), "weight_scale": (torch.bfloat16, (16, 1))}


@pytest.mark.parametrize(
    ("stored", "config", "parameters"),
    [
        (GPTQ, {"quant_method": "gptq", "bits": 4, "group_size": 32}, 32 * 16),
        (NVFP4, {"quant_method": "compressed-tensors"}, 16 * 32),
        (INT8, {"quant_method": "compressed-tensors"}, 16 * 32),
        (NF4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, 512),
        ({"weight_packed": (torch.int32, (16, 4))}, {"quant_method": "x", "bits": 8}, 16 * 16),
    ],
)
def test_other_ways_to_store_codes(make, stored, config, parameters):
    tensors = {
        f"model.layers.0.mlp.up_proj.{last}": torch.zeros(shape, dtype=dtype)
        for last, (dtype, shape) in stored.items()
    }
    tensors["model.norm.weight"] = torch.ones(8)
    summary = inspect(make(config={**CONFIG, "quantization_config": config}, tensors=tensors))
    assert summary.parameters == parameters + 8
    assert summary.quantization["tensors"] == 1
    assert summary.quantization["parameters"] == parameters


def test_a_tied_head_that_is_stored_all_the_same_counts_once(make):
    tensors = llama_tensors()
    plain = inspect(make("plain", tensors=tensors))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    doubled = inspect(make("doubled", tensors=tensors))
    assert doubled.parameters == plain.parameters
    assert doubled.tensor_bytes == plain.tensor_bytes
    assert doubled.disk_bytes >= plain.disk_bytes + 32 * 8 * 2
    untied = inspect(make("untied", tensors=tensors, config={**CONFIG, "tie_word_embeddings": False}))
    assert untied.parameters == plain.parameters + 32 * 8
    assert not untied.tied


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("transformer.h.0.ln_1.weight", "norm"),
        ("transformer.wte.weight", "embedding"),
        ("transformer.h.0.attn.c_attn.weight", "attention"),
        ("transformer.h.0.mlp.c_fc.weight", "mlp"),
        ("model.decoder.layers.0.fc1.weight", "mlp"),
        ("bert.encoder.layer.0.attention.output.dense.weight", "attention"),
        ("bert.encoder.layer.0.output.dense.weight", "mlp"),
        ("bert.encoder.layer.0.output.LayerNorm.weight", "norm"),
        ("distilbert.transformer.layer.0.ffn.lin1.weight", "mlp"),
        ("model.layers.0.block_sparse_moe.experts.0.w1.weight", "mlp"),
        ("gpt_neox.layers.0.attention.rotary_emb.inv_freq", "attention"),
        ("embed_out.weight", "head"),
        ("lm_head.weight", "head"),
        ("model.layers.0.mixer.A_log", "other"),
    ],
)
def test_part_of_a_name(name, part):
    assert part_of(name) == part


def test_caches_of_unusual_models():
    base = {**CONFIG, "layer_types": ["linear_attention", "full_attention"]}
    assert geometry(base, "bfloat16").kv_bytes_per_token == 2 * 1 * 2 * 2 * 2
    latent = {**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert geometry(latent, "bfloat16").kv_bytes_per_token == 2 * (512 + 64) * 2
    nested = {"architectures": ["XForConditionalGeneration"], "text_config": {**CONFIG, "head_dim": 16}}
    assert geometry(nested, "float32").kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    sliding = geometry(
        {**CONFIG, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}, ""
    )
    assert (sliding.sliding_layers, sliding.window) == (1, 32)
    assert geometry({"architectures": ["XForCausalLM"]}, "float32").kv_bytes_per_token is None


def test_a_configuration_of_many_lines_keeps_the_tree_whole(make):
    folder = make("merged")
    parent = Parent(role="weights", name="base", stage="original")
    yaml = "merge_method: ties\nmodels:\n  - model: a\n"
    card = Card(name="merged", stage="merge", settings={"config": yaml, "seed": 0}, parents=(parent,))
    replace(card, command="attar merge merge.yml -o merged").write(folder)
    lines = inspect(folder).render().splitlines()
    start = lines.index("Lineage")
    assert lines[start + 1] == "  merged  merge: config of 3 lines"
    assert lines[start + 2].startswith("  └─ base")
    assert lines[lines.index("To make it again") + 1] == "  attar merge merge.yml -o merged"


def test_the_lineage_shows_what_differs_from_the_defaults(make):
    folder = make("small")
    settings = plain(flatten(quantize_settings(method="rtn", group_size=64)))
    parent = Parent(role="weights", name="base", stage="original")
    unknown = Parent(role="weights", name="other", stage="anneal", settings={"heat": 3}, parents=(parent,))
    Card(name="small", stage="quantize", settings=settings, parents=(unknown,)).write(folder)
    lines = inspect(folder).render().splitlines()
    start = lines.index("Lineage")
    assert lines[start + 1] == "  small  quantize: scheme W4A16, group_size 64, method rtn"
    assert lines[start + 2] == "  └─ other  anneal: heat 3"


@pytest.mark.parametrize(
    "settings", [{"data": ["a"]}, {"scheme": {}}, {"samples": "many"}, {"samples": [[2]]}]
)
def test_settings_of_another_type_are_shown_as_they_are(make, settings):
    root = Parent(role="weights", name="org/base", stage="original")
    parent = Parent(role="weights", name="w4", stage="quantize", settings=settings, parents=(root,))
    folder = make()
    Card(name="w4", stage="prune", parents=(parent,)).write(folder)
    assert next(iter(settings)).replace("_", " ") in inspect(folder).render()


def test_json_and_text_tell_the_lineage(make):
    folder = make("small")
    root = Parent(role="weights", name="org/base", stage="original", licence={"ids": ["llama3.1"]})
    teacher = Parent(role="signal", name="org/teacher", stage="original", licence={"ids": ["gemma"]})
    middle = Parent(
        role="weights", name="middle", stage="recover", settings={"steps": 100}, parents=(root, teacher)
    )
    measurements = {"perplexity": 12.5, "bytes": 1234, "sample": "def f"}
    card = Card(name="small", stage="quantize", settings={"scheme": "W4A16"}, parents=(middle,))
    replace(card, command="attar quantize middle", measurements=measurements).write(folder)
    summary = inspect(folder)
    text = summary.render()
    assert max(len(line) for line in text.splitlines()) <= 100
    lines = [line.strip() for line in text.splitlines()]
    start = lines.index("Lineage")
    assert lines[start + 1 : start + 5] == [
        "small  quantize: scheme W4A16",
        "└─ middle  recover: steps 100",
        "├─ org/base  original: licence llama3.1",
        "└┄ org/teacher (teacher)  original: licence gemma",
    ]
    assert '- Show "Built with Llama".' in lines
    assert any("perplexity" in line and "12.5" in line for line in lines)
    content = json.loads(json.dumps(summary.to_dict()))
    assert content["lineage"]["parents"][0]["parents"][1]["role"] == "signal"
    assert content["licence"]["name_prefix"] == "Llama"
    assert content["kv_bytes_per_token"] == summary.geometry.kv_bytes_per_token
    assert content["measurements"]["perplexity"] == 12.5
    assert content["parts"][0]["name"] == "embedding"


def test_weights_are_never_read(make, monkeypatch):
    tensors, config = packed()
    folder, asked, load = make(config=config, tensors=tensors), [], Checkpoint.load
    monkeypatch.setattr(Checkpoint, "load", lambda self, name: asked.append(name) or load(self, name))
    inspect(folder).render()
    assert all(name.endswith("weight_shape") for name in asked), asked


def test_numbers_for_people():
    assert [bytes_text(n) for n in (0, 999, 1500, 15_900_000, 2_147_483_648)] == [
        "0 B", "999 B", "1.50 kB", "15.9 MB", "2.15 GB",
    ]  # fmt: skip
    assert [count_text(n) for n in (12, 7_900_000, 124_000_000)] == ["12", "7.90 M", "124 M"]
    assert bytes_text(999_600) == "1.00 MB"


def test_a_folder_that_is_no_model(tmp_path: Path):
    from attar.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"no config\.json"):
        inspect(tmp_path)
