"""What llama.cpp computes otherwise in Falcon-H1, Llama 4 and Qwen3-Next is refused in one line; multipliers
of lists that do not fit, and heads that differ by their multiplier."""

import pytest
import torch

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.config import hf_config
from attar.formats.gguf.metadata import metadata
from attar.formats.gguf.rope import Rope, llama3_factors, rope_config
from attar.formats.gguf.tensor_map import architecture, expected_placements
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
