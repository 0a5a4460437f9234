"""EXL2: the bits asked for, better than nearest, the same network as the codes say."""

import pytest
import torch

from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import ModelError
from attar.formats.exl2 import decode
from attar.models.loading.load import load_model
from tests import tiny_models
from tests.quantization.packing import save

CALIBRATION = {"samples": 8, "sequence_length": 32, "batch_size": 4, "precision": "fp32"}


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True])
def test_export_meets_its_bits_and_loads(tmp_path, tied):
    source = save(tmp_path / "model", tie_word_embeddings=tied, num_hidden_layers=1)
    exported = export(source, tmp_path / "out", ExportSettings(format="exl2", bits=4.6, **CALIBRATION))
    assert 4.2 < exported.card.details["bits_per_weight"] <= 4.6
    layers = exported.card.details["layers"]
    assert len(layers) == 7 and all(row["error"] < row["rtn_error"] for row in layers)
    assert len({row["pattern"] for row in layers}) > 1
    model, dense = load_model(exported, dtype=torch.float32), load_model(source, dtype=torch.float32)
    name = "model.layers.0.mlp.down_proj"
    parts = {
        leaf: exported.load(f"{name}.{leaf}") for leaf in ("q_weight", "q_invperm", "q_scale", "q_groups")
    }
    wanted = decode({**parts, "q_scale_max": exported.load(f"{name}.q_scale_max")}, 128)
    assert torch.equal(model.get_submodule(name).weight, wanted.float())
    rows = tiny_models.tokens(dense)
    lost = tiny_models.logits(model, rows) - tiny_models.logits(dense, rows)
    assert lost.norm() / tiny_models.logits(dense, rows).norm() < 0.5


def test_what_exl2_cannot_hold_is_refused(tmp_path):
    settings = ExportSettings(format="exl2", bits=4.0, **CALIBRATION)
    odd = tiny_models.save(tiny_models.build("llama3", hidden_size=80), tmp_path / "odd")
    with pytest.raises(ModelError, match="multiple of 32"):
        export(odd, tmp_path / "out", settings)
    gpt2 = save(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ModelError, match="transposed"):
        export(gpt2, tmp_path / "out", settings)
