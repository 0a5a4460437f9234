"""Quantize on mixtures of experts, from the command's settings to a checkpoint that is read back."""

import pytest
import torch
import transformers

from attar.checkpoint import open_checkpoint
from attar.errors import CheckpointError, ModelError
from attar.models.fit import check_fit
from attar.models.load import load_model
from attar.quantization.plan import plan
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
from attar.quantization.write import loads_in
from tests import tiny_models

FAMILIES = [f for f in tiny_models.MIXTURES if not f.startswith(("gpt_oss", "granite", "llama4"))]
SMALL = {"group_size": 32, "samples": 4, "sequence_length": 32, "batch_size": 4, "check_tokens": 0}


def quantized(tmp_path, family, **options):
    model, generator = tiny_models.build(family), torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):  # of a router's choice
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    source = tiny_models.save(model, tmp_path / "model")
    return model, quantize(source, tmp_path / "out", quantize_settings(**SMALL | options))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_stored_in_codes_and_the_router_is_not(tmp_path, family):
    model, out = quantized(tmp_path, family, method="gptq", scheme="W8A16")
    source = open_checkpoint(tmp_path / "model")
    experts = {n for n in source.tensors if ".experts." in n}
    assert experts and all(f"{name}_packed" in out.tensors for name in experts)
    routers = {n for n in source.tensors if n.endswith((".gate.weight", ".router.weight"))}
    routers |= {n for n in source.tensors if n.endswith("shared_expert_gate.weight")}
    assert routers and routers <= set(out.tensors)
    tokens = tiny_models.tokens(model, batch=4, length=32)
    p, q = (tiny_models.logits(one, tokens).log_softmax(-1) for one in (model, load_model(tmp_path / "out")))
    assert (p.exp() * (p - q)).sum(-1).mean() < 0.1
    assert sum("routed" in report for report in out.card.details["layers"]) >= 8 * 3


def test_all_tokens_count_for_every_expert(tmp_path):
    _, out = quantized(tmp_path, "mixtral", method="gptq", moe_calibrate="all")
    reports = out.card.details["layers"]
    assert {r["tokens"] for r in reports if "routed" in r} == {128}
    assert len({r["routed"] for r in reports if "routed" in r}) > 1


def test_nearest_is_the_nearest_of_each_expert(tmp_path):
    model, _ = quantized(tmp_path, "qwen3_moe", method="rtn", scheme="W8A16", scales="absmax")
    dense = load_model(tmp_path / "out").model.layers[1].mlp.experts.down_proj
    weight = model.model.layers[1].mlp.experts.down_proj.reshape(8, 64, 1, 32)
    scale = weight.abs().amax(-1, keepdim=True) / 127.5
    assert torch.equal(dense.reshape_as(weight), (weight / scale).round().clamp(-128, 127) * scale)


def test_experts_of_a_block_have_one_scheme(tmp_path):
    with pytest.raises(Exception, match="one scheme for Linears that engines fuse") as caught:
        quantized(tmp_path, "mixtral", method="rtn", overrides=("model.layers.1.mlp.experts.3.w2=W8A16",))
    assert "\n" not in str(caught.value).split("hint")[0]


METHODS: list[dict[str, object]] = [
    {"method": "awq", "scheme": "W8A16"},
    {"method": "gptq", "scheme": "W8A8_STATIC", "kv_cache": "fp8"},
    {"method": "rtn", "scheme": "NVFP4A16"},
    {"method": "smoothquant", "scheme": "W8A8"},
    {"method": "gptaq", "scheme": "W8A16"},
    {"method": "qronos", "scheme": "W8A16", "act_order": "group"},
    {"method": "yaqa", "scheme": "W8A16"},
    {"method": "autoround", "scheme": "W8A16", "iterations": 4},
    {"method": "qat", "scheme": "W8A16", "steps": 2},
    {"method": "rtn", "scheme": "FP8"},
    {"method": "gptq", "bits": 6.0},
]


@pytest.mark.few(2)
@pytest.mark.parametrize("options", METHODS, ids=str)
def test_every_method_takes_experts(tmp_path, options):
    model, out = quantized(tmp_path, "mixtral", **options)
    experts = [n for n in open_checkpoint(tmp_path / "model").tensors if ".experts." in n]
    kinds = {out.tensors[name].dtype for name in experts if name in out.tensors}
    assert len(experts) == 3 * 8 * 3 and kinds <= {"I8", "F8_E4M3"}
    tokens = tiny_models.tokens(model, batch=4, length=32)
    p, q = (tiny_models.logits(one, tokens).log_softmax(-1) for one in (model, load_model(tmp_path / "out")))
    assert (p.exp() * (p - q)).sum(-1).mean() < 0.3
    if "kv_cache" in options:
        scale = "model.layers.1.block_sparse_moe.experts.3.w2.input_scale"
        assert out.load(scale) > 0


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe", "llama4"])
def test_experts_that_a_checkpoint_stores_stacked_are_refused_by_name(tmp_path, family):
    with pytest.raises(ModelError, match=f"{family}.* stores experts stacked, as model.layers") as caught:
        quantized(tmp_path, family, method="rtn")
    assert not (tmp_path / "out").exists() and "one by one" in caught.value.hint


def test_the_router_is_ignored_under_both_of_its_names(tmp_path):
    """transformers calls it mlp.gate, the checkpoint and vLLM block_sparse_moe.gate."""
    _, out = quantized(tmp_path, "mixtral", method="rtn")
    ignored = out.config["quantization_config"]["ignore"]
    assert {"model.layers.1.mlp.gate", "model.layers.1.block_sparse_moe.gate"} <= set(ignored)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_transformers_loads_experts_of_packed_integers(tmp_path, family):
    model, out = quantized(tmp_path, family, method="rtn", scheme="W4A16")
    assert out.card.details["loads_in"]["transformers"] == "yes"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = tiny_models.tokens(model)
    assert torch.equal(
        tiny_models.logits(theirs, tokens), tiny_models.logits(load_model(tmp_path / "out"), tokens)
    )


@pytest.mark.parametrize("scheme", ["W8A8", "NVFP4A16"])
def test_other_codes_of_experts_are_said_not_to_load_in_transformers(tmp_path, scheme):
    source = open_checkpoint(tiny_models.save(tiny_models.build("mixtral"), tmp_path / "model"))
    chosen = plan(source, quantize_settings(method="rtn", scheme=scheme).storage)
    assert loads_in(chosen)["transformers"].startswith("no: it stacks experts")


def test_the_card_names_the_rarest_expert(tmp_path):
    _, out = quantized(tmp_path, "qwen3_moe", method="gptq")
    rarest = out.card.details["rarest_expert"]
    tokens = {r["name"]: r["routed"] for r in out.card.details["layers"] if "routed" in r}
    assert tokens[rarest["name"]] == rarest["tokens"] == min(tokens.values())


@pytest.mark.parametrize("family", ["llama4", "granitemoe", "mixtral"])
def test_a_checkpoint_fits_however_it_stores_its_experts(tmp_path, family):
    source = open_checkpoint(tiny_models.save(tiny_models.build(family), tmp_path / "model"))
    check_fit(source)
    name = next(name for name in source.tensors if "expert" in name or "linear" in name)
    del source.tensors[name]
    with pytest.raises((CheckpointError, ModelError), match="no tensor for"):
        check_fit(source)
