"""The verb quantize, from folder to folder: what transformers loads, what the card says, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import attar
from attar.checkpoint import open_checkpoint
from attar.errors import NumericsError, SettingsError
from attar.models.loading.load import load_model
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
from tests import tiny_models
from tests.marks import slow_but

LINEAR_FAMILIES = [family for family in tiny_models.DECODERS if family != "gpt2"]
SMALL = {
    "samples": 8,
    "sequence_length": 32,
    "batch_size": 4,
    "group_size": 32,
    "check_tokens": 0,
    "data": str(Path(json.__file__).parent),  # a few files: the whole library takes seconds to read
}


@pytest.fixture
def saved(tmp_path):
    def save(family, **changes):
        return tiny_models.save(tiny_models.build(family, **changes), tmp_path / family, dtype=torch.bfloat16)

    return save


@torch.no_grad()
def logits(model):
    tokens = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(5))
    return model.eval()(input_ids=tokens).logits


@pytest.mark.parametrize("family", slow_but(LINEAR_FAMILIES, "llama3", "phi3"))
def test_transformers_gives_the_logits_of_our_decoded_weights(saved, tmp_path, family):
    out = tmp_path / "out"
    quantize(saved(family), out, quantize_settings(method="rtn", **SMALL))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    assert torch.equal(logits(theirs), logits(load_model(out)))


@pytest.mark.parametrize("family", slow_but(tiny_models.ENCODERS, "bert"))
def test_encoders_are_quantized_too(saved, tmp_path, family):
    quantized = quantize(saved(family), tmp_path / "out", quantize_settings(method="gptq", **SMALL))
    theirs = AutoModelForMaskedLM.from_pretrained(quantized.path, dtype=torch.bfloat16)
    assert torch.equal(logits(theirs), logits(load_model(quantized)))
    assert all(row["error"] < row["rtn_error"] for row in quantized.card.details["layers"])


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["W4A16", "W8A16"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("group_size", [32, 0])
def test_every_scheme_and_method_loads(saved, tmp_path, scheme, method, group_size):
    settings = quantize_settings(scheme=scheme, method=method, **{**SMALL, "group_size": group_size})
    folder = saved("smollm", intermediate_size=128)
    quantized = quantize(folder, tmp_path / "out", settings)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    ours = load_model(quantized)
    assert torch.equal(logits(theirs), logits(ours))
    far = (logits(ours).float() - logits(load_model(folder)).float()).norm() / logits(
        load_model(folder)
    ).float().norm()
    assert far < (0.5 if scheme == "W4A16" else 0.06)


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [True, False])
def test_int8_embedding_loads_and_shrinks(saved, tmp_path, tied, capfd):
    folder = saved("llama3", tie_word_embeddings=tied)
    overrides = ("down_proj=W8A16",)
    settings = quantize_settings(method="rtn", embedding_bits=8, overrides=overrides, **SMALL)
    quantized = quantize(folder, tmp_path / "out", settings)
    theirs = AutoModelForCausalLM.from_pretrained(quantized.path, dtype=torch.bfloat16)
    assert "Could not match" not in capfd.readouterr().err  # compressed-tensors warns of targets in vain
    assert torch.equal(logits(theirs), logits(load_model(quantized)))
    assert quantized.tensors["model.embed_tokens.weight"].dtype == "I8"
    assert ("lm_head.weight" in quantized.tensors) != tied


def test_gptq_is_closer_than_rtn_on_every_layer_and_in_the_logits(saved, tmp_path):
    folder = saved("llama3")
    close = {}
    for method in ("rtn", "gptq"):
        quantized = quantize(
            folder, tmp_path / method, quantize_settings(method=method, **{**SMALL, "samples": 64})
        )
        close[method] = (logits(load_model(quantized)).float() - logits(load_model(folder)).float()).norm()
    rows = quantized.card.details["layers"]
    assert len(rows) == 7 * 3
    assert all(row["error"] < row["rtn_error"] for row in rows)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"method": "autoround", "iterations": 2},
        {"method": "qat", "steps": 2},
        {"method": "qat", "steps": 2, "start": "qronos"},
        {"method": "autoround", "iterations": 2, "start": "gptq"},
        {"method": "gptq"},
        {"method": "rtn"},
        {"method": "gptq", "tune": 2},
    ],
    ids=str,
)
def test_what_engines_run_as_one_matrix_has_one_global_scale(saved, tmp_path, options):
    settings = quantize_settings(**{**SMALL, "scheme": "NVFP4", "check_tokens": 0, **options})
    written = quantize(saved("llama3"), tmp_path / "out", settings)
    layer = "model.layers.1"
    for parts in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
        for leaf in ("weight_global_scale", "input_global_scale"):
            scales = {written.load(f"{layer}.{part}_proj.{leaf}").item() for part in parts}
            assert len(scales) == 1, (parts, leaf, scales)
    assert written.load(f"{layer}.mlp.up_proj.weight_global_scale") != written.load(
        f"{layer}.mlp.down_proj.weight_global_scale"
    )


def test_v_may_have_more_bits_than_q_and_k_where_no_engine_joins_them(saved, tmp_path):
    options = {"overrides": ("v_proj=W8A16",), "check_tokens": 0, **SMALL}
    with pytest.raises(SettingsError, match="engines fuse"):
        quantize(saved("llama3"), tmp_path / "out", quantize_settings(**options))
    written = quantize(saved("llama3"), tmp_path / "out", quantize_settings(qkv="apart", **options))
    assert written.card.details["loads_in"]["vllm"].startswith("no") and "qkv" in str(written.card.details)
    theirs = AutoModelForCausalLM.from_pretrained(written.path, dtype=torch.bfloat16)
    assert torch.equal(logits(theirs), logits(load_model(written)))
    prompt = torch.arange(5, 25)[None]
    wanted = (
        load_model(written, dtype=torch.float32)
        .generate(prompt, max_new_tokens=12, do_sample=False)[0, 20:]
        .tolist()
    )
    greedy = attar.SamplingParams(temperature=0, max_tokens=12)
    for options in ({"runner": "modules"}, {"activations": 16}):
        served = attar.LLM(written.path, dtype="float32", **options).generate(prompt.tolist(), greedy)
        assert list(served[0].token_ids[: len(wanted)]) == wanted, options


def test_conv1d_is_packed_for_attar_and_refused_by_name_elsewhere(saved, tmp_path):
    folder = saved("gpt2")
    quantized = quantize(folder, tmp_path / "out", quantize_settings(scheme="W8A16", method="gptq", **SMALL))
    far = (logits(load_model(quantized)).float() - logits(load_model(folder)).float()).abs().max()
    assert 0 < far < 0.2
    assert quantized.nbytes < 0.8 * open_checkpoint(folder).nbytes
    with pytest.raises(Exception, match="attar-transposed"):
        AutoModelForCausalLM.from_pretrained(quantized.path)


def test_the_same_call_gives_the_same_bytes_and_leaves_the_input_alone(saved, tmp_path):
    folder = saved("llama3")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name in ("a", "b"):
        quantize(folder, tmp_path / name, quantize_settings(method="gptq", **SMALL))
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "llama3"]


def test_ignored_modules_stay_dense(saved, tmp_path):
    quantized = quantize(
        saved("llama3"),
        tmp_path / "out",
        quantize_settings(method="rtn", ignore=("re:layers.0", "down_proj"), **SMALL),
    )
    assert "model.layers.0.self_attn.q_proj.weight" in quantized.tensors
    assert "model.layers.1.mlp.down_proj.weight" in quantized.tensors
    assert "model.layers.1.mlp.up_proj.weight_packed" in quantized.tensors
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(quantized.path, dtype=torch.bfloat16)),
        logits(load_model(quantized)),
    )


def test_group_size_that_does_not_divide_names_layer_and_mend(saved, tmp_path):
    with pytest.raises(SettingsError, match=r"down_proj has 96 .* 32 or 16 fits") as raised:
        quantize(saved("llama3"), tmp_path / "out", quantize_settings(method="rtn", group_size=64))
    assert raised.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_codes_of_the_first_gptq_files_are_a_source_too(saved, tmp_path):
    """Their config stands in quantize_config.json."""
    folder = saved("llama3")
    quantized = quantize(folder, tmp_path / "packed", quantize_settings(method="rtn", **SMALL))
    attar.export(quantized.path, tmp_path / "gptq", format="gptq")
    config = json.loads((tmp_path / "gptq/config.json").read_text())
    message = config.pop("quantization_config")
    (tmp_path / "gptq/config.json").write_text(json.dumps(config))
    (tmp_path / "gptq/quantize_config.json").write_text(json.dumps(message))
    out = quantize(tmp_path / "gptq", tmp_path / "out", quantize_settings(method="rtn", **SMALL))
    assert out.card is not None and all(row["carried"] for row in out.card.details["layers"])


@pytest.mark.slow
def test_groups_in_act_order_go_into_gptqs_layout(saved, tmp_path):
    settings = quantize_settings(method="gptq", act_order="group", **SMALL)
    quantized = quantize(saved("llama3"), tmp_path / "out", settings)
    gptq = attar.export(quantized.path, tmp_path / "gptq", format="gptq")
    wanted, got = (logits(load_model(item, dtype=torch.float32)) for item in (quantized, gptq))
    assert (got - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_nan_weights_are_named_and_nothing_is_left(saved, tmp_path, method):
    folder = saved("llama3")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericsError, match=r"layers.1.mlp.up_proj.weight"):
        quantize(folder, tmp_path / "out", quantize_settings(method=method, **SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["llama3"]


def test_config_is_what_the_format_says(saved, tmp_path):
    quantized = quantize(saved("llama3"), tmp_path / "out", quantize_settings(method="rtn", **SMALL))
    config = json.loads((quantized.path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == "pack-quantized"
    assert config["ignore"] == ["lm_head"]
    assert config["config_groups"]["group_0"]["weights"] == {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
    }
    from compressed_tensors.quantization import QuantizationConfig

    QuantizationConfig.model_validate(config)


@pytest.mark.slow
def test_gptq_beats_rtn_on_every_layer_of_the_embedded_model(tmp_path):
    settings = quantize_settings(method="gptq", group_size=128, samples=16, sequence_length=256)
    rows = quantize("attar:tiny", tmp_path / "out", settings).card.details["layers"]
    assert len(rows) == 7 * 8
    assert all(row["error"] < row["rtn_error"] for row in rows)
    assert sum(row["error"] for row in rows) < 0.6 * sum(row["rtn_error"] for row in rows)
