"""GGUF files of models with experts: stacked as llama.cpp has them, decoded by the gguf library, opened like
any checkpoint, importance by expert, codes carried over."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file

from attar.checkpoint import open_checkpoint
from attar.data.packing import calibration_batches
from attar.data.sources import COMPRESSION
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import CheckpointError, ModelError, SettingsError
from attar.formats.coded import Coded
from attar.formats.gguf import container, imatrix
from attar.formats.gguf.imatrix import ImportanceEntry
from attar.formats.gguf.tensor_map import architecture
from attar.formats.layouts import encode
from attar.formats.rules import PACK, WeightRule
from attar.models.loading.load import load_model, load_tokenizer
from tests import tiny_models
from tests.decoded import dequantize_state
from tests.formats.gguf import variants
from tests.formats.gguf.variants import build, said, stored

PER_EXPERT = ("mixtral", "qwen3_moe", "deepseek_v3")
STACKED = ("granitemoe", "gpt_oss")
CALIBRATION = {"samples": 8, "sequence_length": 32, "batch_size": 4, "precision": "fp32"}
CALIBRATION |= {"data": "python-docs"}


def saved(variant, tmp_path, dtype=torch.float32):
    return tiny_models.save(build(variant), tmp_path / "model", dtype=dtype)


def settings(**changes):
    return ExportSettings(**{"format": "gguf", "imatrix": "none", **changes})


def decoded(file):
    """What the gguf library decodes, by name."""
    return {
        tensor.name: torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        for tensor in gguf.GGUFReader(file).tensors
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("variant", [*PER_EXPERT, *STACKED])
def test_a_float_file_is_the_checkpoint_bit_for_bit(variant, tmp_path):
    folder = saved(variant, tmp_path, torch.bfloat16)
    exported = export(folder, tmp_path / "m.gguf", settings(type="BF16"))
    wanted = dequantize_state(open_checkpoint(folder))
    got = dequantize_state(exported)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name].to(tensor.dtype), tensor), name


def test_experts_are_stacked_in_their_order(tmp_path):
    """gate is w1, up is w3, down is w2; the library's own reader sees (E, N, K)."""
    folder = saved("mixtral", tmp_path)
    export(folder, tmp_path / "m.gguf", settings(type="F32"))
    source, actual = open_checkpoint(folder), decoded(tmp_path / "m.gguf")
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        tensor = actual[f"blk.1.ffn_{part}_exps.weight"]
        for expert in range(4):
            weight = source.load(f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight")
            assert torch.equal(tensor[expert], weight)
    router = source.load("model.layers.1.block_sparse_moe.gate.weight")
    assert torch.equal(actual["blk.1.ffn_gate_inp.weight"], router)


def test_latent_attention_is_split_as_llama_cpp_reads_it(tmp_path):
    """k_b is (heads, rank, nope), the transposed rows of keys; v_b (heads, value, rank)."""
    folder = saved("deepseek_v2", tmp_path)
    export(folder, tmp_path / "m.gguf", settings(type="F32"))
    weight = open_checkpoint(folder).load("model.layers.0.self_attn.kv_b_proj.weight")
    actual, (heads, nope, value) = decoded(tmp_path / "m.gguf"), (4, 16, 20)
    for head in range(heads):
        rows = weight[head * (nope + value) : (head + 1) * (nope + value)]
        assert torch.equal(actual["blk.0.attn_k_b.weight"][head], rows[:nope].T)
        assert torch.equal(actual["blk.0.attn_v_b.weight"][head], rows[nope:])


def test_gate_and_up_of_gpt_oss_alternate(tmp_path):
    folder = saved("gpt_oss", tmp_path)
    export(folder, tmp_path / "m.gguf", settings(type="F32"))
    source, actual = open_checkpoint(folder), decoded(tmp_path / "m.gguf")
    both = source.load("model.layers.1.mlp.experts.gate_up_proj")
    assert torch.equal(actual["blk.1.ffn_gate_exps.weight"], both[:, :, 0::2].mT)
    assert torch.equal(actual["blk.1.ffn_up_exps.weight"], both[:, :, 1::2].mT)
    bias = source.load("model.layers.1.mlp.experts.gate_up_proj_bias")
    assert torch.equal(actual["blk.1.ffn_up_exps.bias"], bias[:, 1::2])
    assert torch.equal(actual["blk.1.attn_sinks.weight"], source.load("model.layers.1.self_attn.sinks"))


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_quantized_experts_are_near_and_the_file_is_carried_over_unchanged(variant, tmp_path):
    folder = saved(variant, tmp_path)
    export(folder, tmp_path / "q8.gguf", settings(type="Q8_0"))
    wanted, got = decoded(tmp_path / "q8.gguf"), dequantize_state(open_checkpoint(folder))
    again = dequantize_state(open_checkpoint(tmp_path / "q8.gguf"))
    for name, tensor in got.items():
        assert (again[name].float() - tensor).norm() <= 0.02 * tensor.norm(), name
    kinds = {name: info.kind for name, info in container.read_gguf(tmp_path / "q8.gguf").tensors.items()}
    assert {kind for name, kind in kinds.items() if name.endswith("_exps.weight")} == {"Q8_0"}
    assert {kind for name, kind in kinds.items() if "gate_inp" in name or "_norm" in name} == {"F32"}
    carried = export(tmp_path / "q8.gguf", tmp_path / "auto.gguf", settings(type="auto"))
    assert carried.card.details["carried"] == sum(kind == "Q8_0" for kind in kinds.values())
    same = decoded(tmp_path / "auto.gguf")
    assert all(torch.equal(same[name], tensor) for name, tensor in wanted.items())


@pytest.mark.slow
def test_an_eight_expert_model_gets_llama_cpps_types(tmp_path):
    """llama.cpp keeps keys and values of eight-expert models in Q8_0."""
    model = build("mixtral")
    assert model.config.num_local_experts == 4
    folder = saved("mixtral", tmp_path)
    export(folder, tmp_path / "four.gguf", settings(type="Q4_0"))
    config = json.loads((folder / "config.json").read_text())
    state = stored(model)
    for name in [name for name in state if ".experts." in name]:
        prefix, _, rest = name.partition(".experts.")
        number, _, leaf = rest.partition(".")
        state[f"{prefix}.experts.{int(number) + 4}.{leaf}"] = state[name].clone()
    for name in [name for name in state if name.endswith("block_sparse_moe.gate.weight")]:
        state[name] = torch.cat([state[name], state[name] + 0.1])
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 8}))
    export(folder, tmp_path / "eight.gguf", settings(type="Q4_0"))
    four, eight = (
        {name: info.kind for name, info in container.read_gguf(tmp_path / f"{name}.gguf").tensors.items()}
        for name in ("four", "eight")
    )
    assert (four["blk.0.attn_v.weight"], eight["blk.0.attn_v.weight"]) == ("Q4_0", "Q8_0")
    assert (four["blk.0.attn_k.weight"], eight["blk.0.attn_k.weight"]) == ("Q4_0", "Q8_0")
    assert four["blk.0.ffn_up_exps.weight"] == eight["blk.0.ffn_up_exps.weight"] == "Q4_0"


@pytest.mark.slow
def test_each_expert_is_rounded_with_its_own_importance(tmp_path):
    folder = saved("qwen3_moe", tmp_path)
    name = "blk.0.ffn_up_exps.weight"
    sums = torch.ones(4, 64)
    sums[2, :8] = 1e4
    counts = torch.tensor([[4.0], [4.0], [4.0], [0.0]])
    imatrix.write_imatrix(tmp_path / "i.gguf", {name: ImportanceEntry(sums, counts)}, ["x"], 1, 4)
    export(folder, tmp_path / "plain.gguf", settings(type="Q4_0"))
    export(folder, tmp_path / "weighted.gguf", settings(type="Q4_0", imatrix=str(tmp_path / "i.gguf")))
    plain, weighted = decoded(tmp_path / "plain.gguf")[name], decoded(tmp_path / "weighted.gguf")[name]
    source = open_checkpoint(folder)
    weight = source.load("model.layers.0.mlp.experts.2.up_proj.weight")
    loss = [((one[2] - weight)[:, :8] ** 2).sum() for one in (plain, weighted)]
    assert loss[1] < 0.9 * loss[0]
    kinds = {key: info.kind for key, info in container.read_gguf(tmp_path / "weighted.gguf").tensors.items()}
    assert kinds[name] == "Q4_0"
    wrong = {name: ImportanceEntry(torch.ones(3, 64), torch.ones(3, 1))}
    imatrix.write_imatrix(tmp_path / "w.gguf", wrong, ["x"], 1, 4)
    with pytest.raises(SettingsError, match=r"has 256 inputs, 192 there"):
        export(folder, tmp_path / "w8.gguf", settings(type="Q4_0", imatrix=str(tmp_path / "w.gguf")))


def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path):
    folder = saved("qwen3_moe", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"num_local_experts": "four", "num_experts": "four"}, "whole number"),
        ({"model_type": "phimoe"}, "no tensor for model.layers.0.mlp.experts"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises((ModelError, CheckpointError), match=words):
            export(folder, tmp_path / "x.gguf", settings(type="F16"))
    for variant, change, words in (
        ("olmoe", {"num_key_value_heads": 2}, "needs as many KV heads"),
        ("deepseek_v3", {"num_hidden_layers": 27}, "takes one of 27 blocks"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
    ):
        with pytest.raises(ModelError, match=words):
            architecture(said(variants.config(variant)) | change)
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 5}))
    with pytest.raises(CheckpointError, match=r"is \[4, 64\], but the config asks for \[5, 64\]"):
        export(folder, tmp_path / "x.gguf", settings(type="F16"))


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", ["gpt_oss", "deepseek_v3"])
def test_types_under_a_budget_are_those_of_the_file(variant, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    folder = saved(variant, tmp_path, torch.bfloat16)
    options = {**CALIBRATION, "samples": 2, "size": "0.24MB"}
    exported = export(folder, tmp_path / "x.gguf", settings(**options))
    file = exported.weight_files[0]
    assert 220_000 < file.stat().st_size <= 240_000
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    experts = {kind for name, kind in kinds.items() if "_exps.weight" in name}
    assert experts and experts <= {"Q4_0", "IQ4_NL", "Q5_0", "Q8_0"}
    wanted = dequantize_state(open_checkpoint(folder))
    for name, tensor in dequantize_state(exported).items():
        assert torch.allclose(tensor.float(), wanted[name].float(), atol=0.05), name


@pytest.mark.few(1)
@pytest.mark.parametrize(("symmetric", "kind"), [(True, "Q4_0"), (False, "Q4_1")])
def test_int4_codes_of_experts_are_carried_over(tmp_path, symmetric, kind):
    """An int4 mixture in compressed-tensors keeps its codes; the gguf library decodes what its scales say."""
    folder = saved("qwen3_moe", tmp_path, torch.float16)
    state, generator = stored(build("qwen3_moe")), torch.Generator().manual_seed(5)
    rule = WeightRule("int", 4, "group", 32, symmetric=symmetric)
    wanted: dict[str, torch.Tensor] = {}
    for name in [name for name in state if ".experts." in name]:
        rows, columns = state.pop(name).shape
        codes = torch.randint(-8, 8, (rows, columns), generator=generator).to(torch.int8)
        scale = torch.randint(1, 64, (rows, columns // 32), generator=generator) / 1024
        zero = None if symmetric else torch.randint(-8, 8, scale.shape, generator=generator).float()
        tensors = encode(Coded(codes, scale.float(), zero), rule, PACK, torch.float16)
        state |= {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in tensors.items()}
        offset = 0 if zero is None else zero.repeat_interleave(32, 1)
        wanted[name] = (codes - offset) * scale.repeat_interleave(32, 1)
    save_file(
        {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": PACK,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": [r"re:.*experts\.\d+\..*"], "weights": rule.config()}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    exported = export(folder, tmp_path / "m.gguf", settings())
    assert exported.card.details["carried"] == 9
    actual = decoded(tmp_path / "m.gguf")
    kinds = {key: info.kind for key, info in container.read_gguf(tmp_path / "m.gguf").tensors.items()}
    for part in ("gate", "up", "down"):
        tensor = actual[f"blk.2.ffn_{part}_exps.weight"]
        assert kinds[f"blk.2.ffn_{part}_exps.weight"] == kind
        for expert in range(4):
            weight = wanted[f"model.layers.2.mlp.experts.{expert}.{part}_proj.weight"]
            assert torch.equal(tensor[expert], weight)


def routed_inputs(folder, block):
    """Inputs (T, K) of gate and up of each expert, and of its down, as transformers' stacked module routes
    the calibration text."""
    chosen = settings(**CALIBRATION)
    batches = calibration_batches(
        load_tokenizer(open_checkpoint(folder)),
        chosen.data,
        samples=8,
        sequence_length=32,
        batch_size=4,
        seed=chosen.seed,
        bos=chosen.bos,
        split=COMPRESSION,
    )
    model = load_model(folder, dtype=torch.float32)
    layer = model.model.layers[block]
    experts = getattr(layer, "mlp", None) or layer.block_sparse_moe
    seen = []
    experts.experts.register_forward_pre_hook(lambda _, args: seen.append([arg.detach() for arg in args]))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    hidden = torch.cat([args[0].flatten(0, -2) for args in seen])
    index = torch.cat([args[1].flatten(0, -2) for args in seen])
    inputs = [hidden[(index == expert).any(1)] for expert in range(model.config.num_local_experts)]
    with torch.no_grad():
        both = [x @ weight.T for x, weight in zip(inputs, experts.experts.gate_up_proj, strict=True)]
    return inputs, [torch.nn.functional.silu(gate) * up for gate, up in (x.chunk(2, -1) for x in both)]


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", ["mixtral", "granitemoe"])
def test_importance_of_experts_is_that_of_the_tokens_that_reach_them(variant, tmp_path):
    """Against transformers' own routing; llama.cpp's imatrix has the same names, shapes and counts."""
    folder = saved(variant, tmp_path)
    export(folder, tmp_path / "out", settings(type="Q4_0", **{**CALIBRATION, "imatrix": "compute"}))
    entries = imatrix.read_imatrix(tmp_path / "out" / "imatrix.gguf")
    inputs, inner = routed_inputs(folder, 1)
    for part, expected in (("gate", inputs), ("up", inputs), ("down", inner)):
        entry = entries[f"blk.1.ffn_{part}_exps.weight"]
        sums = torch.stack([x.square().sum(0) for x in expected])
        torch.testing.assert_close(entry.in_sum2, sums, rtol=1e-4, atol=1e-4)
        assert entry.count.flatten().tolist() == [len(x) for x in expected]
    assert len({len(x) for x in inputs}) > 1


@pytest.mark.slow
def test_rounding_with_data_sees_each_experts_own_tokens(tmp_path):
    """GPTQ against nearest at the same bytes, on the tokens that transformers routes to each expert."""
    folder = saved("mixtral", tmp_path)
    export(folder, tmp_path / "plain.gguf", settings(type="Q4_0"))
    export(folder, tmp_path / "gptq.gguf", settings(type="Q4_0", rounding="gptq", **CALIBRATION))
    assert (tmp_path / "plain.gguf").stat().st_size == (tmp_path / "gptq.gguf").stat().st_size
    inputs, _ = routed_inputs(folder, 0)
    source, loss = open_checkpoint(folder), {}
    for name in ("plain", "gptq"):
        actual = decoded(tmp_path / f"{name}.gguf")["blk.0.ffn_up_exps.weight"]
        weights = [
            source.load(f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight") for expert in range(4)
        ]
        loss[name] = sum(
            float((x @ (one - weight).T).square().sum())
            for x, one, weight in zip(inputs, actual, weights, strict=True)
        )
    assert loss["gptq"] < 0.8 * loss["plain"]
    stacked = tiny_models.save(build("granitemoe"), tmp_path / "granite")
    with pytest.raises(ModelError, match="stores its experts in one tensor"):
        export(stacked, tmp_path / "g.gguf", settings(type="Q4_0", rounding="gptq", **CALIBRATION))
