"""What llama.cpp computes otherwise in Falcon-H1, Llama 4, Qwen3-Next, Qwen3.5, Gemma 3n and Gemma 4 is
refused in one line; multipliers of lists that do not fit, and heads that differ by their multiplier; what of
Gemma is in a file and not in a checkpoint, or otherwise."""

import json

import pytest
import torch

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.config import file_placements, hf_config
from attar.formats.gguf.metadata import metadata, notes
from attar.formats.gguf.rope import Rope, llama3_factors, rope_config
from attar.formats.gguf.tensor_map import architecture, expected_placements, placements, tiled
from tests.formats.gguf.variants import config, said

REFUSED = [
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate is true"),
    (
        "falcon_h1",
        {"mamba_d_ssm": 96},
        "8 heads of 16 in 1 groups, but llama.cpp needs whole groups, 96 wide",
    ),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias is True"),
    ("llama4", {"attention_chunk_size": 64}, r"attention_chunk_size is 64, but .* 8192 only"),
    ("llama4", {"moe_layers": [0]}, r"moe_layers is \[0\], but llama.cpp has experts in the blocks \[1, 3\]"),
    (
        "llama4",
        {"use_qk_norm": False},
        "use_qk_norm is False, which llama.cpp does not compute for 8 experts",
    ),
    ("llama4", {"layer_types": ["full_attention"] * 4}, r"layer_types is .*, but llama\.cpp has"),
    ("qwen3_next", {"linear_value_head_dim": 8}, "heads of keys and values are 16 wide"),
    ("qwen3_next", {"linear_num_value_heads": 5}, "no multiple of linear_num_key_heads"),
    ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("qwen3_next", {"layer_types": None, "full_attention_interval": "4"}, "full_attention_interval is '4'"),
    ("qwen3_5", {"linear_value_head_dim": 8}, "heads of keys and values are 16 wide"),
    ("qwen3_5_moe", {"linear_num_value_heads": 5}, "no multiple of linear_num_key_heads"),
    ("gemma3n", {"altup_num_inputs": 2}, "altup_num_inputs is 2, but llama.cpp's gemma3n has 4"),
    ("gemma3n", {"laurel_rank": 32}, "laurel_rank is 32, but llama.cpp's gemma3n has 64"),
    ("gemma3n", {"hidden_size_per_layer_input": 32}, "hidden_size_per_layer_input is 32"),
    ("gemma3n", {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1, but llama.cpp takes 0 for 3 blocks"),
    ("gemma3n", {"activation_sparsity_pattern": [0.0] * 3}, "activation_sparsity_pattern is"),
    ("gemma3n", {"activation_sparsity_pattern": None}, "activation_sparsity_pattern is None"),
    ("gemma3n", {"vocab_size_per_layer_input": 500}, "llama.cpp has 320 rows"),
    ("gemma3n", {"intermediate_size": [96, 96, 64]}, "intermediate_size is"),
    ("gemma3n", {"final_logit_softcapping": None}, "final_logit_softcapping is None"),
    (
        "gemma3n with shared keys",
        {"layer_types": ["full_attention", "sliding_attention"] * 11},
        "then one with",
    ),
    (
        "gemma4",
        {"layer_types": ["full_attention"] * 2 + ["sliding_attention"], "per_layer_config": None},
        "ends with a window",
    ),
    ("gemma4", {"num_kv_shared_layers": 1}, "needs one with a window, then one without"),
    ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3, of 3 blocks"),
    (
        "gemma4",
        {"hidden_size_per_layer_input": 16},
        "vocab_size_per_layer_input is 262144, but llama.cpp has",
    ),
    ("gemma4", {"enable_moe_block": True}, "enable_moe_block is True with 0 experts"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ("gemma4", {"per_layer_config": {"0": {"head_dim": 32}}}, "one width and number of KV heads for all"),
    ("gemma4", {"per_layer_config": {"2": {"intermediate_size": 32}}}, "per_layer_config is"),
    ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "has no rope_type 'yarn'"),
]


@pytest.mark.parametrize(("variant", "changes", "words"), REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused(variant, changes, words):
    with pytest.raises(ModelError, match=words) as raised:
        architecture({**said(config(variant)), **changes})
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("key", "value"), [("mlp_multipliers", [1.5]), ("ssm_multipliers", [0.5, 0.5]), ("key_multiplier", "a")]
)
def test_multipliers_that_are_no_numbers_or_too_few_are_refused(key, value):
    with pytest.raises(ModelError, match=f"{key} is"):
        expected_placements({**said(config("falcon_h1")), key: value})


def test_a_tied_head_of_another_multiplier_is_written_by_itself():
    tied = {**said(config("falcon_h1")), "tie_word_embeddings": True, "embedding_multiplier": 2.0}
    placed = {item.gguf: item for item in expected_placements(tied)}
    assert placed["output.weight"].stored == "model.embed_tokens.weight"
    assert placed["output.weight"].scales == () and placed["token_embd.weight"].scales == (2.0,)
    same = {item.gguf for item in expected_placements({**tied, "lm_head_multiplier": 2.0})}
    assert "output.weight" not in same


def test_a_file_whose_widths_of_linear_attention_differ_is_refused():
    stated = said(config("qwen3_next"))
    tensors = {item.piece: torch.empty(item.shape) for item in expected_placements(stated)}
    keys = metadata(stated, "tiny") | {"qwen3next.ssm.inner_size": 48}
    with pytest.raises(CheckpointError, match=r"ssm\.inner_size is 48, but its heads of values are 64 wide"):
        hf_config(keys, tensors)


def test_a_rope_of_llama3_without_a_transition_is_read_as_one():
    """Llama 4's two frequency factors are equal."""
    settings = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    factors = llama3_factors(Rope("llama3", 500000.0, 128, settings, 8192))
    arch = architecture(said(config("llama4")))
    measured = type("S", (), {"head": 128, "context": 1 << 18})
    get = {"rope.freq_base": 500000.0}.get
    read = rope_config(get, arch, measured, {"rope_freqs.weight": factors})["rope_parameters"]
    assert read["rope_type"] == "llama3" and read["original_max_position_embeddings"] == 8192
    assert {key: read[key] for key in settings} == settings


def test_heads_of_values_go_round_the_heads_of_keys():
    """ggml repeats keys: head j of the values has head j mod groups of the keys."""
    order = tiled(3, 12, 5).view(12, 5)
    assert [int(rows[0]) // 5 // 4 for rows in order] == [j % 3 for j in range(12)]
    assert sorted(order.flatten().tolist()) == list(range(60))
    assert all(rows.diff().eq(1).all() for rows in order)


def test_sections_that_are_no_numbers_are_refused():
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": ["a", 1, 1]}}
    with pytest.raises(ModelError, match="mrope_section is"):
        metadata({**said(config("qwen3_5")), **rope}, "tiny")


def test_keys_that_no_block_computes_are_zeros_and_are_not_read():
    stated = said(config("gemma3n with shared keys"))
    names = {item.stored: item for item in expected_placements(stated) if not item.unused}
    stored = {name: torch.empty(item.stored_shape) for name, item in names.items()}
    placed = {item.gguf: item for item in placements(stated, stored)}
    unused = [f"blk.{block}.attn_{part}.weight" for block in (20, 21) for part in ("k", "k_norm", "v")]
    assert all(placed[name].stored is None and not placed[name].value.any() for name in unused)
    tensors = {item.piece: torch.empty(item.shape) for item in placed.values()}
    tensors |= {item.piece: torch.empty(item.shape) for item in expected_placements(stated)}
    read = file_placements(stated, tensors)
    assert not {item.gguf for item in read}.intersection(unused)
    stored["model.layers.21.self_attn.k_proj.weight"] = torch.empty(32, 64)
    again = {item.gguf: item.stored for item in placements(stated, stored)}
    assert again["blk.21.attn_k.weight"] == "model.layers.21.self_attn.k_proj.weight"


def test_a_smaller_table_of_embeddings_for_blocks_is_filled_with_zeros():
    stated = {**said(config("gemma3n")), "vocab_size_per_layer_input": 300}
    (placed,) = [item for item in expected_placements(stated) if item.gguf == "per_layer_token_embd.weight"]
    table = torch.randn(300, 768)
    written = placed.apply(table)
    assert written.shape == (320, 768) and torch.equal(written[:300], table) and not written[300:].any()
    assert torch.equal(placed.undo(written), table) and placed.stored_shape == (300, 768)
    assert any("tokens from 300 on" in line for line in notes(stated))


@pytest.mark.parametrize("variant", ["gemma4 with keys for values", "gemma4"])
def test_published_and_transformers_configs_of_gemma_4_say_the_same(variant):
    stated = said(config(variant))
    (own,) = {json.dumps(block) for block in stated["per_layer_config"].values()}
    published = {key: value for key, value in stated.items() if key != "per_layer_config"}
    published |= {"global_head_dim": json.loads(own)["head_dim"]}
    published |= {"num_global_key_value_heads": json.loads(own).get("num_key_value_heads")}
    assert metadata(published, "tiny") == metadata(stated, "tiny")


def test_a_gemma_4_without_a_cap_says_so_because_llama_cpp_has_one():
    stated = said(config("gemma4"))
    keys = metadata(stated, "tiny")
    tensors = {item.piece: item.value if item.stored is None else torch.empty(item.shape)
               for item in expected_placements(stated)}  # fmt: skip
    assert keys["gemma4.final_logit_softcapping"] == 0.0
    assert hf_config(keys, tensors)["final_logit_softcapping"] is None
    del keys["gemma4.final_logit_softcapping"]
    assert hf_config(keys, tensors)["final_logit_softcapping"] == 30.0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.sliding_window_pattern", None, "sliding_window_pattern is None"),
        ("attention.head_count_kv", [2, 1, 2], "numbers of single blocks"),
        ("feed_forward_length", [96, 96, 64], "numbers of single blocks"),
        ("attention.value_length", 16, "value_length is not key_length"),
        ("rope.dimension_count", 16, "rope.dimension_count are not those of Gemma 4"),
    ],
)
def test_damaged_numbers_of_single_blocks_are_refused(key, value, words):
    stated = said(config("gemma4 with shared keys and embeddings for blocks"))
    tensors = {item.piece: item.value if item.stored is None else torch.empty(item.shape)
               for item in expected_placements(stated)}  # fmt: skip
    value = [*value, 2, 1][: len(stated["layer_types"])] if isinstance(value, list) else value
    with pytest.raises(CheckpointError, match=words):
        hf_config({**metadata(stated, "tiny"), f"gemma4.{key}": value}, tensors)
