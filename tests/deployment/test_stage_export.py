"""The verb export: dense files equal what the codes say, packed ones are checked."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import CheckpointError, ModelError, NumericsError
from attar.models.loading.load import load_model
from attar.quantization.schemes import SCHEMES
from tests import tiny_models
from tests.quantization.packing import pack, save


@pytest.fixture
def packed(tmp_path):
    def make(family="smollm", **settings):
        folder = tiny_models.save(tiny_models.build(family), tmp_path / "dense", dtype=torch.bfloat16)
        return pack(folder, tmp_path / "packed", **settings)[1]

    return make


def logits(model):
    return tiny_models.logits(model.eval(), tiny_models.tokens(model))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["smollm", "gpt2", "phi3"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_dense_export_is_the_decoded_model(packed, tmp_path, family, dtype):
    source = packed(family, embedding_bits=8 if family == "smollm" else 0)
    exported = export(source, tmp_path / "out", ExportSettings(format="dense", dtype=dtype))
    wanted = load_model(source, dtype=torch.float32)
    got = AutoModelForCausalLM.from_pretrained(exported.path, dtype=torch.float32)
    assert torch.equal(logits(got), logits(wanted))
    assert "quantization_config" not in exported.config
    kinds = {info.dtype for info in exported.tensors.values()}
    assert kinds == ({"BF16"} if dtype == "auto" else {"F32"})


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_every_scheme_leaves_dense_and_is_checked(tmp_path, family, name):
    source = pack(save(tmp_path / "dense", family), tmp_path / "packed", scheme=name)[1]
    exported = export(source, tmp_path / "out", ExportSettings(format="dense"))
    wanted, got = load_model(source).state_dict(), load_model(exported).state_dict()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(tensor, got[key]) for key, tensor in wanted.items())
    if family == "llama3" and name != "NF4":
        again = export(source, tmp_path / "again", ExportSettings(format="compressed-tensors"))
        assert again.tensors.keys() == source.tensors.keys()


def test_nf4_leaves_dense_alone(tmp_path):
    source = pack(save(tmp_path / "dense"), tmp_path / "packed", scheme="NF4")[1]
    with pytest.raises(ModelError, match="in the layout of bitsandbytes"):
        export(source, tmp_path / "out", ExportSettings())


def test_packed_export_is_the_same_bytes(packed, tmp_path):
    source = packed()
    exported = export(source, tmp_path / "out", ExportSettings())
    ours, theirs = (
        load_file(source.path / "model.safetensors"),
        load_file(exported.path / "model.safetensors"),
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any("read back equal" in line for line in exported.card.details["checks"])


def damage(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("leaf", "value", "match"),
    [
        ("weight_scale", 0.0, "zero, negative or infinite"),
        ("weight_scale", float("inf"), "zero, negative|does not fit"),
        ("weight_packed", 0x88888888 - 2**32, "same"),
    ],
)
def test_degenerate_layers_are_refused(packed, tmp_path, leaf, value, match):
    source = packed()
    damage(source.path, lambda tensors: tensors[f"model.layers.0.mlp.up_proj.{leaf}"].fill_(value))
    with pytest.raises(NumericsError, match=match):
        export(source.path, tmp_path / "out", ExportSettings())
    assert not (tmp_path / "out").exists()


def test_numbers_that_do_not_fit_the_type_are_refused(tmp_path):
    model = tiny_models.build("smollm")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    folder = tiny_models.save(model, tmp_path / "dense")
    with pytest.raises(NumericsError, match="does not fit float16") as raised:
        export(folder, tmp_path / "out", ExportSettings(format="dense", dtype="float16"))
    assert "bfloat16" in raised.value.hint


def test_what_a_format_cannot_hold_is_refused(packed, tmp_path):
    source = packed("gpt2")
    with pytest.raises(ModelError, match="transposed"):
        export(source, tmp_path / "out", ExportSettings())
    with pytest.raises(ModelError, match="not quantized"):
        export(tmp_path / "dense", tmp_path / "out", ExportSettings())


def test_whole_numbers_keep_their_type(tmp_path):
    folder = tiny_models.save(tiny_models.build("smollm"), tmp_path / "dense", dtype=torch.bfloat16)
    positions = torch.arange(5, dtype=torch.int32)
    damage(folder, lambda tensors: tensors.update({"model.position_ids": positions}))
    exported = export(folder, tmp_path / "out", ExportSettings(format="dense", dtype="float32"))
    assert torch.equal(exported.load("model.position_ids"), positions)
    assert exported.tensors["model.norm.weight"].dtype == "F32"


def test_dense_export_of_quantized_blocks_is_bfloat16_unless_asked(tmp_path):
    """A 4-bit file would become five times as large in float32; float32 keeps every value."""
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path / "dense")
    file = tmp_path / "m.gguf"
    export(folder, file, ExportSettings(format="gguf", type="Q8_0"))
    exact = export(file, tmp_path / "exact", ExportSettings(format="dense", dtype="float32"))
    exported = export(file, tmp_path / "out", ExportSettings(format="dense"))
    assert {info.dtype for info in exact.tensors.values()} == {"F32"} and exact.config["dtype"] == "float32"
    assert {info.dtype for info in exported.tensors.values()} == {"BF16"} and exported.config[
        "dtype"
    ] == "bfloat16"
    assert all(torch.equal(exported.load(name), exact.load(name).bfloat16()) for name in exported.tensors)
    assert "--dtype float32" in exported.card.details["notes"][0]
    assert "notes" not in exact.card.details


def test_a_checkpoint_with_names_of_its_own_is_exported_where_its_family_is_unknown(tmp_path):
    """Of a family that transformers has, they are refused: it would compute with random numbers."""
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path / "dense")
    damage(folder, lambda tensors: [tensors.update({f"old.{n}": tensors.pop(n)}) for n in list(tensors)])
    with pytest.raises(CheckpointError, match=r"no tensor for model\.embed_tokens"):
        export(folder, tmp_path / "out", ExportSettings(format="dense"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "made_up"}))
    exported = export(folder, tmp_path / "unknown", ExportSettings(format="dense"))
    assert all(name.startswith("old.") for name in exported.tensors)
