"""EXL3: every Linear at the bits asked for, the same network as the trellis says, odd widths filled up."""

import json

import pytest
import torch

from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import ModelError, SettingsError
from attar.formats.exl3 import LEAVES, decode
from attar.models.loading.load import load_model
from tests import tiny_models
from tests.quantization.packing import save

CALIBRATION = {"samples": 8, "sequence_length": 32, "batch_size": 4, "precision": "fp32"}
SIZES = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 1}
NAME = "model.layers.0.mlp.down_proj"


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [True, False])
def test_export_loads_as_it_was_rounded(tmp_path, tied):
    source = save(tmp_path / "model", tie_word_embeddings=tied, **SIZES)
    exported = export(source, tmp_path / "out", ExportSettings(format="exl3", bits=4, **CALIBRATION))
    details = exported.card.details
    assert len(details["layers"]) == 7 and all(row["error"] < 0.01 for row in details["layers"])
    assert any("are filled up with zeros" in note for note in details["notes"])
    model, dense = load_model(exported, dtype=torch.float32), load_model(source, dtype=torch.float32)
    stored = {leaf: f"{NAME}.{leaf}" for leaf in LEAVES if f"{NAME}.{leaf}" in exported.tensors}
    wanted = decode({leaf: exported.load(name) for leaf, name in stored.items()}, (96, 128))
    assert torch.equal(model.get_submodule(NAME).weight, wanted.float())
    rows = tiny_models.tokens(dense)
    lost = tiny_models.logits(model, rows) - tiny_models.logits(dense, rows)
    assert lost.norm() / tiny_models.logits(dense, rows).norm() < 0.3
    assert exported.config["tie_word_embeddings"] is False and "lm_head.trellis" in exported.tensors
    storage = json.loads((exported.path / "quantization_config.json").read_text())["tensor_storage"]
    assert len(storage) == 8 and storage["lm_head"]["bits_per_weight"] == 6
    for name, tensor in storage[NAME]["stored_tensors"].items():
        info = exported.tensors[name]
        assert tensor["shape"] == list(info.shape) and tensor["n_bytes"] == info.nbytes


def test_what_exl3_cannot_hold_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="1, 2, 3, 4, 5, 6, 7, 8 with format exl3"):
        ExportSettings(format="exl3", bits=2.5)
    gpt2 = save(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ModelError, match="EXL3 has no transposed"):
        export(gpt2, tmp_path / "out", ExportSettings(format="exl3", bits=4, **CALIBRATION))
