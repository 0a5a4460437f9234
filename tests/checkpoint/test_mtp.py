"""Which tensors are a multi-token prediction head, by the names that families have."""

from __future__ import annotations

import pytest

from attar.checkpoint.inspect import inspect
from attar.checkpoint.mtp import missing_part, mtp_names, renumbered, without_mtp
from attar.checkpoint.open import open_checkpoint
from tests import tiny_mtp

DEEPSEEK = ["eh_proj", "enorm", "hnorm", "self_attn.o_proj"]
STACK = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)]


@pytest.mark.parametrize(
    "head",
    [
        [f"model.layers.3.{part}.weight" for part in DEEPSEEK],
        ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.5.norm.weight"],
        ["model.mtp.layers.0.eh_proj.weight"],
        ["model.mtp_layers.0.input_proj.weight"],
        ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"],
    ],
)
def test_every_spelling_of_a_head(head):
    config = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    assert mtp_names(config, [*STACK, *head, "lm_head.weight"]) == head
    assert mtp_names({"text_config": config}, [*STACK, *head]) == head


def test_layers_behind_the_last_are_a_head_only_as_far_as_the_config_says():
    behind = [f"model.layers.{layer}.enorm.weight" for layer in (3, 4)]
    assert mtp_names({"num_hidden_layers": 3}, [*STACK, *behind]) == []
    assert mtp_names({"num_hidden_layers": 3, "num_nextn_predict_layers": 1}, [*STACK, *behind]) == []
    assert mtp_names({"num_hidden_layers": 3, "num_nextn_predict_layers": 2}, [*STACK, *behind]) == behind


def test_a_longer_tower_is_no_head():
    tower = [f"visual.layers.{layer}.mlp.up_proj.weight" for layer in range(8)]
    assert mtp_names({"num_hidden_layers": 3, "num_nextn_predict_layers": 1}, [*tower, *STACK]) == []


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["mtp.fc.weight"], "pre_fc_norm_embedding"),
        (["model.layers.3.self_attn.q_proj.weight"], "eh_proj"),
        (["model.layers.3.eh_proj.weight", "model.layers.3.hnorm.weight"], "enorm"),
        ([f"model.layers.3.{part}.weight" for part in DEEPSEEK], ""),
        (["mtp.0.e_proj.weight", "mtp.0.h_proj.weight"], ""),
    ],
)
def test_what_half_a_head_lacks(names, missing):
    assert missing_part(names) == missing


def test_a_head_behind_fewer_layers_gets_their_number():
    assert renumbered("model.layers.62.enorm.weight", 61, 40) == "model.layers.41.enorm.weight"
    assert renumbered("mtp.layers.0.norm.weight", 61, 40) == "mtp.layers.0.norm.weight"


def test_a_config_without_its_head():
    text = {"num_nextn_predict_layers": 1, "hidden_size": 8}
    assert without_mtp({"text_config": text, "mtp_num_hidden_layers": 2}) == {
        "text_config": {"num_nextn_predict_layers": 0, "hidden_size": 8},
        "mtp_num_hidden_layers": 0,
    }


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_an_open_checkpoint_has_its_head_apart(family, tmp_path):
    folder = tiny_mtp.save(family, tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    assert sorted(checkpoint.mtp) == tiny_mtp.names(family, folder)
    assert not checkpoint.notes and checkpoint.mtp.keys().isdisjoint(checkpoint.tensors)
    assert checkpoint.with_mtp.tensors == checkpoint.stored and not checkpoint.with_mtp.mtp
    parts = {part.name: part.bytes for part in inspect(folder).parts}
    assert parts["mtp"] == sum(info.nbytes for info in checkpoint.mtp.values())
