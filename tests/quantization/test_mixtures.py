"""Quantize on mixtures of experts, from the command's settings to a checkpoint that is read back."""

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.models.load import load_model
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
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
