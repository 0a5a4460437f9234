"""Loss on held-out text: the same for a folder, for tensors in memory, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from attar.checkpoint.open import open_checkpoint
from attar.errors import CheckpointError, DataError, ModelError
from attar.merging.quality import HeldOutText, fill
from attar.merging.settings import MergeSettings
from attar.models.loading.empty import empty_model
from tests import tiny_models


def filled(checkpoint, state):
    return fill(empty_model(checkpoint.config), state, torch.device("cpu"))


def held_out(rows=6, length=12, mask_token=3):
    draw = torch.Generator().manual_seed(1)
    return HeldOutText(torch.randint(4, tiny_models.VOCABULARY, (rows, length), generator=draw), mask_token)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama2", "qwen3", "gpt2", "gpt_neox", "bert", "distilbert"])
def test_folder_and_memory_agree(family, tmp_path):
    folder = tiny_models.save(tiny_models.build(family), tmp_path / family)
    checkpoint = open_checkpoint(folder)
    state = {name: checkpoint.load(name) for name in checkpoint.tensors}
    before = {name: tensor.clone() for name, tensor in state.items()}
    text = held_out()
    assert text.loss_of(checkpoint.config, state) == text.loss(folder)
    assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in state)
    wrong = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in state.items()}
    assert text.loss_of(checkpoint.config, wrong) != text.loss(folder)


def test_loss_is_the_mean_over_predicted_tokens():
    model, text = tiny_models.build("llama2"), held_out(rows=11)
    with torch.no_grad():
        logits = model(input_ids=text.rows).logits.double()
    by_hand = F.cross_entropy(logits[:, :-1].flatten(0, 1), text.rows[:, 1:].flatten())
    assert text.score(model) == pytest.approx(float(by_hand), abs=2e-6)
    assert len(text.batches(model)) == 2, "rows of the last, smaller batch count as much as the others"


def test_half_precision_state_runs_in_float32(tmp_path):
    folder = tiny_models.save(tiny_models.build("llama2").bfloat16(), tmp_path / "half")
    checkpoint = open_checkpoint(folder)
    state = {name: checkpoint.load(name) for name in checkpoint.tensors}
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    text = held_out()
    assert text.loss_of(checkpoint.config, state) == text.loss(folder)
    assert all(parameter.dtype == torch.float32 for parameter in filled(checkpoint, state).parameters())


def test_text_is_packed_once_and_cut_to_the_context(tmp_path):
    folder = tiny_models.save(tiny_models.build("llama2"), tmp_path / "m")
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"import json  # {number}\n" * 30)
    config = open_checkpoint(folder).config

    def text(seed=0, length=32, data=tmp_path):
        settings = MergeSettings(data=str(data), samples=3, sequence_length=length, seed=seed)
        return HeldOutText.of(folder, config, settings)

    assert text().rows.shape == (3, 32) and text().mask_token is not None
    assert torch.equal(text().rows, text().rows)
    assert not torch.equal(text().rows, text(seed=1).rows)
    assert text(length=4096).rows.shape[1] == config["max_position_embeddings"]
    assert math.isfinite(text().loss(folder))
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one.txt").write_text("one")
    with pytest.raises(DataError, match="less than one row"):
        text(data=tmp_path / "few")


def test_a_model_that_fell_apart_is_infinitely_bad():
    model, text = tiny_models.build("llama2"), held_out()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert text.score(model) == math.inf


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    folder = tiny_models.save(tiny_models.build("llama2"), tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    state = {name: checkpoint.load(name) for name in checkpoint.tensors}
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ModelError, match=rf"{name} is \[3, 3\], but the config asks for \[96, 64\]"):
        held_out().loss_of(checkpoint.config, {**state, name: torch.zeros(3, 3)})
    del state[name]
    with pytest.raises(CheckpointError, match=rf"no tensor for {name}"):
        held_out().loss_of(checkpoint.config, state)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ModelError, match="BertForMaskedLM with this tokenizer has no loss"):
        held_out(mask_token=None).score(tiny_models.build("bert"))
