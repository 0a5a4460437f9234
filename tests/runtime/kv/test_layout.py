"""Bytes of the KV cache: known numbers, and the stores' own."""

import pytest
import torch

from attar.errors import ModelError, SettingsError
from attar.runtime.kv import layout
from attar.runtime.kv.layout import LayerShape, block_bytes, cache_bytes, layer_shapes, needed_bytes
from attar.runtime.kv.store import STORES, PoolGeometry, make_store

LLAMA_2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
LLAMA_3_8B = {**LLAMA_2_7B, "num_key_value_heads": 8}


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


def test_the_formats_are_those_of_the_stores():
    assert list(layout.KV_FORMATS) == list(STORES)


def test_the_residual_is_what_a_store_adds_for_an_open_block():
    store = make_store("kivi2", PoolGeometry(3, 5, 32, 2, 64), torch.device("cpu"))
    before = store.nbytes
    store.begin_(torch.tensor([40]))
    assert store.nbytes - before == layout.residual_bytes([LayerShape(2, 64)] * 3, "kivi2", 32)
    assert layout.residual_bytes([LayerShape(2, 64)], "int8", 32) == 0


def test_windows_save_blocks_only_where_every_layer_has_one():
    mistral = layer_shapes({**LLAMA_3_8B, "sliding_window": 4096})
    assert cache_bytes(mistral, "float16", 100_000) == (256 + 1) * block_bytes(mistral, "float16", 16)
    kinds = ["sliding_attention", "full_attention"] * 16
    gemma = layer_shapes({**LLAMA_3_8B, "sliding_window": 1024, "layer_types": kinds})
    assert [layer.window for layer in gemma[:2]] == [1024, None]
    full = layer_shapes(LLAMA_3_8B)
    assert cache_bytes(gemma, "int8", 16_384, 2) == cache_bytes(full, "int8", 16_384, 2)
    share = needed_bytes(gemma, "int8", 16_384, 2) / needed_bytes(full, "int8", 16_384, 2)
    assert share == pytest.approx((1 + (1024 + 16) / 16_384) / 2)
    unused = {**LLAMA_3_8B, "sliding_window": 1024, "use_sliding_window": False}
    assert layer_shapes(unused) == full


def test_a_budget_gives_whole_blocks():
    layers = layer_shapes(LLAMA_3_8B)
    each = block_bytes(layers, "int8", 16)
    assert layout.blocks_within(layers, "int8", 16, 3 * each - 1) == 2
    with pytest.raises(SettingsError, match=f"at least {each:,} bytes"):
        layout.blocks_within(layers, "int8", 16, each - 1)


def test_what_is_not_known_is_refused_by_name():
    with pytest.raises(SettingsError, match="did you mean kivi4"):
        cache_bytes(layer_shapes(LLAMA_2_7B), "kivi_4", 10)
    with pytest.raises(ModelError, match="kv_lora_rank"):
        layer_shapes({**LLAMA_2_7B, "kv_lora_rank": 512})
    with pytest.raises(ModelError, match="linear_attention"):
        layer_shapes({**LLAMA_2_7B, "layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(ModelError, match="no num_hidden_layers or n_layer"):
        layer_shapes({"hidden_size": 8})


def test_the_table_is_for_people():
    lines = layout.table(layer_shapes(LLAMA_2_7B), (4096,), (1, 8), ("float16", "int8")).splitlines()
    assert lines == [
        "32 layers, 32 kv heads of 128: 524,288 bytes a token in bfloat16",
        "KV cache, GiB  4,096 x 1  4,096 x 8",
        "float16            2.000     16.000",
        "int8               1.031      8.250",
    ]
