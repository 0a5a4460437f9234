"""DeepSeek V4's table of token ids to experts (``tid2eid``, in layers whose router chooses by it): every verb
carries it as it is, under its stored name; what would change its meaning is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.errors import CheckpointError, ModelError
from attar.formats.readers import Decoded
from attar.models.loading.load import load_model
from attar.verbs import merge, prune, quantize, recover
from tests import tiny_models

DATA = str(Path(json.__file__).parent)
TEXT: dict[str, Any] = {"data": DATA, "samples": 2, "sequence_length": 32}
TABLE = "model.layers.0.ffn.gate.tid2eid"
SHAPE: dict[str, Any] = {
    "vocab_size": tiny_models.VOCABULARY,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "hc_mult": 2,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "sliding_window": 16,
    "qk_rope_head_dim": 8,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 0,
    "compress_rate_csa": 4,
    "compress_rate_hca": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny DeepSeek V4 whose first layer takes experts i and i + 1, modulo 4, for token i."""
    config = transformers.DeepseekV4Config(**SHAPE)
    built = tiny_models.randomize(transformers.DeepseekV4ForCausalLM(config)).eval()
    ids = torch.arange(tiny_models.VOCABULARY)
    built.get_buffer("model.layers.0.mlp.gate.tid2eid").copy_(torch.stack([ids % 4, (ids + 1) % 4], 1))
    return tiny_models.save(built, tmp_path_factory.mktemp("v4") / "model")


def kept(source: Path, written: Checkpoint) -> bool:
    """Whether the table is there, bit for bit, and the model computes with it."""
    table, stored = open_checkpoint(source).load(TABLE), Decoded(written).load(TABLE)
    inside = load_model(written.path, dtype=torch.float32).get_buffer("model.layers.0.mlp.gate.tid2eid")
    return stored.dtype == torch.int64 and torch.equal(stored, table) and torch.equal(inside.long(), table)


def test_every_verb_carries_the_table(model, tmp_path):
    w8 = {"method": "rtn", "scheme": "W8A16", "group_size": 32, "check_tokens": 0}
    parents = [{"model": str(model), "parameters": {"weight": 1.0}}] * 2
    outputs = [
        quantize(model, tmp_path / "quantized", **w8),
        prune(model, tmp_path / "zeros", method="magnitude", sparsity="0.5", reconstruct="none"),
        recover(model, tmp_path / "recovered", teacher=model, data=DATA, sequence_length=32, steps=1,
                batch_size=2),
        merge({"merge_method": "linear", "models": parents, "dtype": "float32"}, tmp_path / "merged"),
    ]  # fmt: skip
    assert all(kept(model, output) for output in outputs)
    rows = torch.arange(3, 27)[None]
    first, second = (load_model(path, dtype=torch.float32)(rows).logits for path in (model, outputs[-1].path))
    assert torch.equal(first, second)


def test_what_would_change_its_meaning_is_refused(model, tmp_path):
    with pytest.raises(ModelError, match="names experts by the ids of tokens; they cannot be removed"):
        prune(model, tmp_path / "out", method="experts", ratio=0.5, **TEXT)
    with pytest.raises(ModelError, match="cannot be run one at a time: they take the ids of the tokens"):
        quantize(model, tmp_path / "out", method="gptq", scheme="W8A16", group_size=32, **TEXT)
    assert not (tmp_path / "out").exists()


def test_a_table_of_another_vocabulary_is_refused(model, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, TABLE: tensors[TABLE][:7].clone()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tid2eid is \[7, 2\], but the config asks for \[320, 2\]"):
        quantize(folder, tmp_path / "out", method="rtn", scheme="W8A16", group_size=32)
