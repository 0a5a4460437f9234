"""EAGLE's heads on disk."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint.open import open_checkpoint
from attar.errors import CheckpointError
from attar.models.draft_heads.decoder_layer import DraftLayerShape
from attar.models.draft_heads.eagle3_module import Eagle3Config, Eagle3Head
from attar.models.draft_heads.eagle_module import EagleConfig, EagleHead
from attar.models.draft_heads.folder import load_draft_head, save_draft_head
from attar.models.draft_heads.vocabulary import set_vocabulary, tokens_of

SHAPE = DraftLayerShape(depth=1, heads=4, kv_heads=2, head_dim=4, intermediate=12, head_norms=False)
COMMON = {"hidden": 16, "vocabulary": 1000, "shape": SHAPE, "drafts": 4}


def stored(head, folder):
    folder.mkdir()
    save_draft_head(head, folder, target="target")
    return folder


def test_a_head_comes_back_as_it_was(tmp_path):
    head = Eagle3Head(Eagle3Config(layers=(0, 1, 2), draft_vocabulary=3, fc_norm=True, **COMMON))
    set_vocabulary(head, torch.tensor([5, 517, 999]))  # 517 is no number of bfloat16
    read = load_draft_head(open_checkpoint(stored(head, tmp_path / "head")))
    assert read.config == head.config and tokens_of(read).tolist() == [5, 517, 999]
    torch.testing.assert_close(read.fc.weight, head.fc.weight.bfloat16().float())


def test_the_names_are_those_of_published_heads(tmp_path):
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"]
    layer += ["mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"]
    first = EagleHead(EagleConfig(layers=(2,), **COMMON)).state_dict()
    assert set(first) == {"fc.weight", "fc.bias", *(f"layers.0.{name}.weight" for name in layer)}
    third = Eagle3Head(Eagle3Config(layers=(0, 1, 2), draft_vocabulary=3, **COMMON)).state_dict()
    norms = ["layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight"]
    names = {*(f"layers.0.{name}.weight" for name in layer), *norms, "fc.weight", "lm_head.weight", "d2t"}
    assert set(third) == names
    assert third["layers.0.self_attn.q_proj.weight"].shape == (16, 32)


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_of_fc_is_not_left_out_in_silence(bias, tmp_path):
    folder = stored(EagleHead(EagleConfig(layers=(2,), bias=bias, **COMMON)), tmp_path / "head")
    assert load_draft_head(open_checkpoint(folder)).config.bias == bias
    tensors = load_file(folder / "model.safetensors")
    if bias:
        del tensors["fc.bias"]
    else:
        tensors["fc.bias"] = torch.zeros(16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.bias"):
        load_draft_head(open_checkpoint(folder))


def test_an_unknown_size_of_the_layer_is_refused():
    values = EagleConfig(layers=(2,), **COMMON).to_dict()
    assert EagleConfig.from_dict(values, "config.json") == EagleConfig(layers=(2,), **COMMON)
    values["shape"]["experts"] = 4
    with pytest.raises(CheckpointError, match=r"config\.json.*experts"):
        EagleConfig.from_dict(values, "config.json")
