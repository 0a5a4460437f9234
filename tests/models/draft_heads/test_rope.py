"""The positions of a head's own layers are those of its target, as transformers makes them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import attar
from attar.distillation.heads.start import layer_shape
from attar.distillation.rollouts import teacher
from attar.formats.draft_heads.rope_scaling import rope_scaling
from attar.models.draft_heads.decoder_layer import DraftLayerShape, rotary
from attar.models.draft_heads.folder import load_draft_head
from attar.runtime.speculate.heads.compiled_block import rotary_table
from tests import tiny_models
from tests.cases import mostly_slow

OLD = {"original_max_position_embeddings": 64}
KINDS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **OLD},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **OLD},
    "yarn with its own factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, **OLD},
}


def shape_with(scaling, theta=5e4):
    return DraftLayerShape(
        depth=1, heads=2, kv_heads=1, head_dim=16, intermediate=8, rope_theta=theta, rope_scaling=scaling
    )


@pytest.mark.parametrize("kind", KINDS)
def test_cosines_and_sines_are_those_of_transformers(kind):
    parameters = {"rope_type": "default", **KINDS[kind], "rope_theta": 5e4}
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16, rope_parameters=parameters)
    positions = torch.arange(300)
    wanted = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    scaling = rope_scaling(config.rope_parameters, 256)
    assert bool(scaling) == (kind != "default")
    for ours, theirs in zip(rotary(positions, shape_with(scaling)), wanted, strict=True):
        torch.testing.assert_close(ours[:, 0], theirs[0])
    table = rotary_table(shape_with(scaling), 300)
    torch.testing.assert_close(table, torch.cat([part[0, :, :8] for part in wanted], 1))


def test_what_changes_with_the_length_is_named():
    for kind in ("dynamic", "longrope"):
        with pytest.raises(ValueError, match=kind):
            rope_scaling({"rope_type": kind, "factor": 2.0}, 64)
    with pytest.raises(ValueError, match="low_freq_factor None"):
        rope_scaling({"rope_type": "llama3", "factor": 2.0}, 64)
    assert rope_scaling({"type": "yarn", "factor": 2.0}, 64)["original_max_position_embeddings"] == 64


def test_a_head_of_a_target_whose_positions_change_has_plain_ones():
    model = tiny_models.build(
        "llama3", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 3e4}
    )
    shape = layer_shape(model)
    assert shape.rope_scaling == {} and shape.rope_theta == 3e4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "head"),
    mostly_slow([("yarn", "dspark"), ("llama3", "eagle3"), ("linear", "eagle")], fast=[("yarn", "dspark")]),
)
def test_a_head_of_a_target_with_scaled_positions_drafts_for_it(kind, head, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "HELD_OUT_TOKENS", 64)
    scaled = {"rope_parameters": {**KINDS[kind], "rope_theta": 5e4}}
    target = tiny_models.save(tiny_models.build("llama3", **scaled), tmp_path / "target")
    steps = {"steps": 3, "batch_size": 2, "sequence_length": 32, "num_rollouts": 4, "precision": "fp32"}
    made = attar.train_head(target, tmp_path / "head", data="python-stdlib", head=head, drafts=3, **steps)
    scaling = load_draft_head(made).config.shape.rope_scaling
    assert scaling["rope_type"] == kind and scaling["factor"] == KINDS[kind]["factor"]
    prompts, greedy = [[5, 6, 7, 8, 9], [10, 11, 12]], attar.SamplingParams(max_tokens=20, temperature=0.0)
    for dtype in ("float32", "auto"):
        plain = attar.LLM(target, dtype=dtype).generate(prompts, greedy)
        drafted = attar.LLM(target, draft=made.path, dtype=dtype).generate(prompts, greedy)
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
