"""Quantize on mixtures of experts, from the command's settings to a checkpoint that is read back."""

import copy

import pytest
import torch
import transformers

from attar.checkpoint import open_checkpoint
from attar.checkpoint.tensors import read_tensor
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import CheckpointError, ModelError, SettingsError
from attar.models.anatomy.discover import discover
from attar.models.loading import single_experts as reading
from attar.models.loading.experts import unstack
from attar.models.loading.fit import admit
from attar.models.loading.load import load_model
from attar.models.loading.single_experts import single_experts
from attar.quantization.plan import plan
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
from attar.quantization.write import loads_in
from tests import tiny_models
from tests.cases import mostly_slow

STACKED = ("gpt_oss", "granitemoe", "granitemoehybrid", "llama4")
FAMILIES = [f for f in tiny_models.MIXTURES if f not in STACKED]
SMALL = {"group_size": 32, "samples": 4, "sequence_length": 32, "batch_size": 4, "check_tokens": 0}


def quantized(tmp_path, family, **options):
    plain = family in tiny_models.MIXTURES and "layer_types" not in tiny_models.MIXTURES[family][2]
    layers = {"num_hidden_layers": 2} if plain else {}
    model, generator = tiny_models.build(family, **layers), torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):  # of a router's choice
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    source = tiny_models.save(model, tmp_path / "model")
    return model, quantize(source, tmp_path / "out", quantize_settings(**SMALL | options))


@pytest.mark.few(1)
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


def test_scored_inputs_have_no_other_tokens(tmp_path):
    """Llama 4 multiplies an expert's inputs by its score."""
    with pytest.raises(
        SettingsError, match=r"moe_calibrate.*an expert of llama4.* gets its own tokens times"
    ):
        quantized(tmp_path, "llama4", method="gptq", moe_calibrate="all")
    assert not (tmp_path / "out").exists()


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


def test_experts_apart_have_schemes_of_their_own(tmp_path):
    by_hand = {"method": "rtn", "moe_schemes": "apart", "overrides": (r"re:layers.1.*experts\.3\.w=W8A16",)}
    _, out = quantized(tmp_path, "mixtral", **by_hand)
    loads = out.card.details["loads_in"]
    assert loads["vllm"].startswith("no: it has one scheme for all experts")
    stem = "model.layers.1.block_sparse_moe.experts"
    sizes = [out.tensors[f"{stem}.{number}.w2.weight_packed"].nbytes for number in range(8)]
    assert sizes[3] == 2 * sizes[0] and len(set(sizes)) == 2


@pytest.mark.slow
def test_each_expert_gets_bits_by_its_sensitivity(tmp_path, monkeypatch):
    """Gate, up and down of one expert share a scheme."""
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    model, out = quantized(tmp_path, "mixtral", method="rtn", bits=5.0, moe_schemes="apart")
    schemes = out.card.details["mixed_precision"]["schemes"]
    experts = {name: scheme for name, scheme in schemes.items() if ".experts." in name}
    each = {}
    for name, scheme in experts.items():
        each.setdefault(name.rpartition(".")[0], set()).add(scheme)
    assert len(each) == 2 * 8 and all(len(one) == 1 for one in each.values())
    assert len({scheme for one in each.values() for scheme in one}) > 1
    tokens = tiny_models.tokens(model, batch=4, length=32)
    p, q = (tiny_models.logits(one, tokens).log_softmax(-1) for one in (model, load_model(out.path)))
    assert (p.exp() * (p - q)).sum(-1).mean() < 0.3


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
CASES = [("mixtral", options) for options in METHODS]
CASES += [("nemotron_h_moe", options) for options in METHODS if "kv_cache" not in options]  # without gates


@pytest.mark.slow
@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_every_method_takes_experts(tmp_path, family, options):
    model, out = quantized(tmp_path, family, **options)
    experts = [n for n in open_checkpoint(tmp_path / "model").tensors if ".experts." in n]
    kinds = {out.tensors[name].dtype for name in experts if name in out.tensors}
    assert len(experts) == 2 * 8 * (3 if family == "mixtral" else 2) and kinds <= {"I8", "F8_E4M3"}
    tokens = tiny_models.tokens(model, batch=4, length=32)
    p, q = (tiny_models.logits(one, tokens).log_softmax(-1) for one in (model, load_model(tmp_path / "out")))
    assert (p.exp() * (p - q)).sum(-1).mean() < 0.3
    if "kv_cache" in options:
        scale = "model.layers.1.block_sparse_moe.experts.3.w2.input_scale"
        assert out.load(scale) > 0


@pytest.mark.parametrize("family", mostly_slow(STACKED, ["granitemoe"]))
def test_experts_that_a_checkpoint_stores_stacked_are_rounded_one_by_one(tmp_path, family):
    """And are stacked again, bit for bit, where they are decoded: transformers then loads the family."""
    model, out = quantized(tmp_path, family, method="gptq", scheme="W8A16", check_tokens=64)
    experts = discover(unstack(copy.deepcopy(model))).blocks[1].mixture.experts
    names = [part.name for expert in experts for part in (expert.gate, expert.up, expert.down)]
    assert len(names) == 3 * 8 and all(f"{name}.weight_packed" in out.tensors for name in names)
    assert not any(len(info.shape) > 2 for name, info in out.tensors.items() if "conv1d" not in name)
    reports = {report["name"]: report for report in out.card.details["layers"]}
    assert all(reports[name]["routed"] >= 0 and reports[name]["error"] < 1e-3 for name in names)
    assert out.card.details["loads_in"]["transformers"].startswith("no: its code has the experts")
    export(tmp_path / "out", tmp_path / "dense", ExportSettings(format="dense"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    source, dense = (open_checkpoint(tmp_path / name) for name in ("model", "dense"))
    assert {n: i.shape for n, i in source.tensors.items()} == {n: i.shape for n, i in dense.tensors.items()}
    tokens = tiny_models.tokens(model, batch=4, length=32)
    got = tiny_models.logits(load_model(tmp_path / "out"), tokens)
    assert torch.equal(tiny_models.logits(theirs.eval(), tokens), got)
    p, q = (logits.log_softmax(-1) for logits in (tiny_models.logits(model, tokens), got))
    assert (p.exp() * (p - q)).sum(-1).mean() < 0.1


@pytest.mark.parametrize(("family", "names"), [("gpt_oss", ("gate_up_proj", "down_proj"))])
def test_one_expert_of_a_stack_is_read_at_a_time(tmp_path, monkeypatch, family, names):
    source = open_checkpoint(tiny_models.save(tiny_models.build(family), tmp_path / "model"))
    view, sizes = single_experts(source), []
    monkeypatch.setattr(reading, "read_tensor", lambda info: sizes.append(info.nbytes) or read_tensor(info))
    up, down = (source.load(f"model.layers.1.mlp.experts.{name}") for name in names)
    holder = "model.layers.1.mlp.experts.5"
    assert torch.equal(view.load(f"{holder}.gate_proj.weight"), up[5, :, 0::2].T)
    assert torch.equal(view.load(f"{holder}.up_proj.weight"), up[5, :, 1::2].T)
    assert torch.equal(view.load(f"{holder}.down_proj.weight"), down[5].T)
    bias = source.load("model.layers.1.mlp.experts.gate_up_proj_bias")
    assert torch.equal(view.load(f"{holder}.up_proj.bias"), bias[5, 1::2])
    assert max(sizes) == up.nbytes // 8
    assert sum(i.nbytes for i in view.tensors.values()) == sum(i.nbytes for i in source.tensors.values())


def test_a_stack_with_an_expert_missing_is_named(tmp_path):
    _, out = quantized(tmp_path, "granitemoe", method="rtn")
    name = "model.layers.1.block_sparse_moe.experts.3.up_proj.weight"
    for leaf in ("packed", "scale", "shape"):
        del out.tensors[f"{name}_{leaf}"]
    with pytest.raises(CheckpointError, match=f"no tensor for {name}"):
        load_model(out)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheme", "layout"),
    [
        ("mixtral", "W4A16", "gptq"),
        ("qwen2_moe", "W4A16_ASYM", "awq"),
        ("granitemoe", "W4A16", "gptq"),
        ("deepseek_v2", "W8A16", "gptq"),
    ],
)
def test_experts_go_into_other_layouts_with_their_codes(tmp_path, family, scheme, layout):
    """And the router is named as dense there."""
    model, out = quantized(tmp_path, family, method="rtn", scheme=scheme)
    exported = export(out, tmp_path / layout, ExportSettings(format=layout))
    experts = [name for name in exported.tensors if ".experts." in name and name.endswith(".qweight")]
    assert len(experts) >= 3 * 8
    tokens = tiny_models.tokens(model)
    got, wanted = (
        tiny_models.logits(load_model(one, dtype=torch.float32), tokens) for one in (exported, out)
    )
    assert (got - wanted).norm() < 5e-3 * wanted.norm()  # scales in float16
    config = exported.config["quantization_config"]
    dense = str(config.get("dynamic", {}).keys()) + str(config.get("modules_to_not_convert", []))
    router = discover(unstack(model)).blocks[-1].mixture.router
    assert router.rpartition(".")[2] in dense and "experts" not in dense.replace("shared_expert", "")


@pytest.mark.slow
def test_the_card_names_the_rarest_expert(tmp_path):
    _, out = quantized(tmp_path, "qwen3_moe", method="gptq")
    rarest = out.card.details["rarest_expert"]
    tokens = {r["name"]: r["routed"] for r in out.card.details["layers"] if "routed" in r}
    assert tokens[rarest["name"]] == rarest["tokens"] == min(tokens.values())


@pytest.mark.parametrize("family", ["llama4", "granitemoe", "mixtral"])
def test_a_checkpoint_fits_however_it_stores_its_experts(tmp_path, family):
    source = open_checkpoint(tiny_models.save(tiny_models.build(family), tmp_path / "model"))
    admit(source)
    name = next(name for name in source.tensors if "expert" in name or "linear" in name)
    del source.tensors[name]
    with pytest.raises((CheckpointError, ModelError), match="no tensor for"):
        admit(source)
