"""Bytes of the KV cache: known numbers, the stores' own, the edge of a budget, windows; the verb."""

import json

import pytest
import torch

from attar.cli.main import call
from attar.errors import CheckpointError, ModelError, SettingsError
from attar.runtime.kv.memory import (
    KV_FORMATS,
    LayerShape,
    block_bytes,
    cache_bytes,
    describe_layers,
    formats_of,
    layer_shapes,
    longest_context,
    plan_kv,
    plan_table,
    read_config,
    residual_bytes,
)
from attar.runtime.kv.store import STORES, PoolGeometry, make_store
from attar.runtime.runner.kept_shapes import kept_shapes
from attar.runtime.runner.probe import probe
from tests import tiny_models

LLAMA_2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
LLAMA_3_8B = {**LLAMA_2_7B, "num_key_value_heads": 8, "max_position_embeddings": 8192}
DEEPSEEK_V3 = {"num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168}
DEEPSEEK_V3 |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
LAYERS = layer_shapes(LLAMA_3_8B)


def test_known_models():
    assert cache_bytes(layer_shapes(LLAMA_2_7B), "float16", 4096) == 2_147_483_648
    assert cache_bytes(layer_shapes(LLAMA_3_8B), "bfloat16", 8192) == 2**30
    falcon = {"n_layer": 32, "n_head": 71, "hidden_size": 4544, "multi_query": True}
    assert layer_shapes(falcon)[0] == LayerShape(1, 64)
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
    assert block_bytes(layer_shapes(gpt2), "float32", 1) == 12 * 2 * 768 * 4
    gemma = {**LLAMA_3_8B, "head_dim": 256}
    assert layer_shapes({"text_config": gemma})[0].head_dim == 256


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("head_dim", [32, 80])
def test_a_store_takes_exactly_these_bytes(name, head_dim):
    geometry = PoolGeometry(layers=3, blocks=5, block_size=32, kv_heads=2, head_dim=head_dim)
    store = make_store(name, geometry, torch.device("cpu"))
    assert store.nbytes == 5 * block_bytes([LayerShape(2, head_dim)] * 3, name, 32)


def test_latents_are_stored_once():
    """DeepSeek-V3's cache, 70,272 bytes a token in bfloat16 (arXiv 2412.19437, figure 2's sizes): 576 numbers
    a layer, where keys and values of 128 heads would be 40,960."""
    layers = layer_shapes(DEEPSEEK_V3)
    assert block_bytes(layers, "bfloat16", 1) == 61 * 2 * 576 == 70_272
    assert formats_of(layers) == ("float32", "bfloat16", "float16", "int8", "fp8", "int4")
    assert describe_layers(layers) == "61 layers, 1 latents of 576: 70,272 bytes a token in bfloat16"
    for name in formats_of(layers):
        store = make_store(name, PoolGeometry(3, 5, 32, 1, 48, latent=32), torch.device("cpu"))
        assert store.nbytes == 5 * block_bytes([LayerShape(1, 48, latent=32)] * 3, name, 32)
    plan = plan_kv(layers, contexts=[4096], batches=[1])
    assert {cell.kv_dtype: cell.bytes for cell in plan.cells}["bfloat16"] == 4096 * 70_272


def test_the_formats_are_those_of_the_stores():
    assert list(KV_FORMATS) == list(STORES)


def test_the_residual_is_what_a_store_adds_for_an_open_block():
    store = make_store("kivi2", PoolGeometry(3, 5, 32, 2, 64), torch.device("cpu"))
    before = store.nbytes
    store.begin_([40])
    assert store.nbytes - before == residual_bytes([LayerShape(2, 64)] * 3, "kivi2", 32)
    assert residual_bytes([LayerShape(2, 64)], "int8", 32) == 0


def test_windows_save_blocks_only_where_every_layer_has_one():
    mistral = layer_shapes({**LLAMA_3_8B, "sliding_window": 4096})
    assert cache_bytes(mistral, "float16", 100_000) == (256 + 1) * block_bytes(mistral, "float16", 16)
    kinds = ["sliding_attention", "full_attention"] * 16
    gemma = layer_shapes({**LLAMA_3_8B, "sliding_window": 1024, "layer_types": kinds})
    assert [layer.window for layer in gemma[:2]] == [1024, None]
    full = layer_shapes(LLAMA_3_8B)
    assert cache_bytes(gemma, "int8", 16_384, 2) == cache_bytes(full, "int8", 16_384, 2)
    unused = {**LLAMA_3_8B, "sliding_window": 1024, "use_sliding_window": False}
    assert layer_shapes(unused) == full


def test_what_is_not_known_is_refused_by_name():
    with pytest.raises(SettingsError, match="did you mean kivi4"):
        cache_bytes(layer_shapes(LLAMA_2_7B), "kivi_4", 10)
    with pytest.raises(SettingsError, match=r"one of float32, .*int4 for latents"):
        cache_bytes(layer_shapes(DEEPSEEK_V3), "kivi4", 10)
    with pytest.raises(ModelError, match="no qk_rope_head_dim"):
        layer_shapes({**LLAMA_2_7B, "kv_lora_rank": 512})
    with pytest.raises(ModelError, match="linear_attention"):
        layer_shapes({**LLAMA_2_7B, "layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(ModelError, match="no num_hidden_layers or n_layer"):
        layer_shapes({"hidden_size": 8})


def test_every_context_with_every_batch_in_every_format():
    plan = plan_kv(LAYERS, contexts=[1024, 8192], batches=[1, 4])
    assert len(plan.cells) == 2 * 2 * len(KV_FORMATS) and plan.rooms == ()
    sizes = {(cell.kv_dtype, cell.context, cell.batch): cell.bytes for cell in plan.cells}
    assert sizes["bfloat16", 8192, 1] == 2**30 and sizes["bfloat16", 8192, 4] == 4 * 2**30
    assert sizes["int8", 1024, 4] == cache_bytes(LAYERS, "int8", 1024, 4, 32)
    assert plan.token_bytes["bfloat16"] == 131_072 and plan.token_bytes["kivi4"] == 32 * 2 * 8 * (64 + 16)
    assert {cell.fits for cell in plan.cells} == {None}


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_longest_context_fits_and_a_block_more_does_not(name, batch):
    budget = 123_456_789
    plan = plan_kv(LAYERS, contexts=[512], batches=[batch], kv_dtypes=[name], budget=budget)
    (room,) = plan.rooms
    assert cache_bytes(LAYERS, name, room.context, batch, 32) <= budget
    assert cache_bytes(LAYERS, name, room.context + 1, batch, 32) > budget
    assert plan.cells[0].fits == (room.context >= 512)


def test_windows_in_every_layer_make_any_length_fit():
    mistral = layer_shapes({**LLAMA_3_8B, "sliding_window": 4096})
    need = cache_bytes(mistral, "bfloat16", 10**6, 1, 32)
    assert longest_context(mistral, "bfloat16", 1, need, 32) is None
    assert longest_context(mistral, "bfloat16", 1, need - 1, 32) == 4096
    assert longest_context(LAYERS, "bfloat16", 1, 0, 32) == 0
    head, rows = plan_table(plan_kv(mistral, contexts=[9999], batches=[1], kv_dtypes=["int8"], budget=need))
    assert head[-1] == "longest x 1" and rows[0][-1] == "any"


@pytest.mark.parametrize("changes", [{"contexts": [0]}, {"batches": [0]}, {"block_size": 0}, {"budget": -1}])
def test_sizes_below_one_are_refused(changes):
    with pytest.raises(SettingsError, match="at least 1"):
        plan_kv(LAYERS, **{"contexts": [1], "batches": [1], **changes})


def test_a_config_alone_is_enough(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_8B))
    assert read_config(file) == read_config(tmp_path) == LLAMA_3_8B
    assert read_config("attar:tiny")["num_hidden_layers"] == 8
    with pytest.raises(CheckpointError):
        read_config(tmp_path / "none.json")


@pytest.mark.parametrize("family", ["jamba", "mamba2"])
def test_states_of_a_config(tmp_path, capsys, family):
    """Keys and values of the layers that attend, and states of a sequence, as a loaded model has them."""
    model = tiny_models.build(family)
    model.config.save_pretrained(tmp_path)
    shape = probe(model)
    assert call(["plan-kv", str(tmp_path), "--context", "64", "--batch", "3", "--budget", "1GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 layers, 2 kv heads of 16" if shape.layers else "no layers")
    assert lines[1].startswith(f"{shape.state_bytes:,} bytes of states a sequence")
    options = ["--context", "64", "--batch", "3", "--dtype", "float32", "--json"]
    assert call(["plan-kv", str(tmp_path), *options]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert cell["bytes"] == 3 * (64 * 4 * shape.token_numbers + 2 * shape.state_bytes) > 0


def test_a_family_that_cannot_be_counted_is_named(monkeypatch):
    def failing(model):
        raise NotImplementedError("no meta kernel")

    monkeypatch.setattr("attar.runtime.runner.probe.probe", failing)
    with pytest.raises(ModelError, match="mamba2: its states cannot be counted by its config: no meta"):
        kept_shapes(tiny_models.config("mamba2").to_dict())


def test_layers_of_int4_that_keep_8_bits_are_counted(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    asked = ["plan-kv", str(tmp_path), "--dtype", "int4", "--dtype", "int8", "--json"]
    sizes = {}
    for wide in (0, 5, 32):
        formats = ["int8"] * wide + ["int4"] * (32 - wide)
        (tmp_path / "attar-kv.json").write_text(json.dumps({"formats": formats}))
        assert call(asked) == 0
        sizes[wide] = json.loads(capsys.readouterr().out)["token_bytes"]
    assert sizes[32]["int4"] == sizes[0]["int8"] and sizes[5]["int8"] == sizes[0]["int8"]
    assert sizes[5]["int4"] - sizes[0]["int4"] == 5 * 2 * 8 * 64
    (tmp_path / "attar-kv.json").write_text(json.dumps({"formats": ["int8"]}))
    assert call(asked) != 0
    assert "formats are not int4 or int8 for each of 32 layers" in capsys.readouterr().err


def test_the_verb(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert call(["plan-kv", str(tmp_path), "--budget", "1GiB", "--dtype", "bfloat16", "--dtype", "int8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "32 layers, 8 kv heads of 128: 131,072 bytes a token in bfloat16"
    wide = "bfloat16  131,072  128.0 MiB  1.00 GiB  512.0 MiB  4.00 GiB !  1.00 GiB  8.00 GiB !  8,192  1,024"
    assert lines[3].split() == wide.split()
    assert lines[-1] == "! more than the budget"
    assert call(["plan-kv", str(tmp_path), "--context", "4096", "--batch", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {cell["kv_dtype"]: cell["bytes"] for cell in record["cells"]}["float16"] == 2**30
    for wrong, words in ((["--dtype", "kivi5"], "did you mean"), (["--batch", "x"], "whole number")):
        assert call(["plan-kv", str(tmp_path), *wrong]) != 0
        assert words in capsys.readouterr().err
