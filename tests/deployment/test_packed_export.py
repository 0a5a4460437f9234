"""Packed checkpoints in other packed layouts: no code changes, and the logits are those of the source."""

import pytest
import torch

from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import ModelError, SettingsError
from attar.formats.readers import reader
from attar.models.loading.load import load_model
from tests import tiny_models
from tests.quantization.packing import pack, save


@pytest.fixture
def make(tmp_path):
    def packed(scheme, family="llama3", dtype=torch.float16, **changes):
        folder = save(tmp_path / "dense", family, dtype=dtype)
        return pack(folder, tmp_path / "packed", scheme=scheme, **changes)[1]

    return packed


def codes(checkpoint):
    """Codes of every Linear by the name of its module."""
    read = reader(checkpoint)
    actual = {name.rpartition(".")[0]: read.codes(name) for name in checkpoint.tensors if read.is_coded(name)}
    return {name: pair[0].codes.float() for name, pair in actual.items() if pair is not None}


def weights(checkpoint):
    """Decoded weights of every Linear, float32, by the name of its module."""
    read = reader(checkpoint)
    coded = [name for name in checkpoint.tensors if read.is_coded(name)]
    return {name.rpartition(".")[0]: read.decode(name).float() for name in coded}


def logits(checkpoint):
    model = load_model(checkpoint, dtype=torch.float32)
    return tiny_models.logits(model, tiny_models.tokens(model))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("scheme", "targets"),
    [
        ("W4A16", ("gptq", "awq", "compressed-tensors")),
        ("W4A16_ASYM", ("awq", "gptq", "compressed-tensors")),
        ("W3A16", ("gptq", "compressed-tensors")),
        ("W8A16", ("gptq", "compressed-tensors")),
        ("FP8", ("modelopt", "compressed-tensors")),
        ("NVFP4A16", ("modelopt", "compressed-tensors")),
    ],
)
def test_codes_travel_from_layout_to_layout(make, tmp_path, scheme, targets):
    source = make(scheme)
    first, wanted, dense = codes(source), logits(source), weights(source)
    assert len(first) == 21 and len(dense) == 21
    for number, target in enumerate(targets):
        source = export(source, tmp_path / f"{number}", ExportSettings(format=target))
        actual = codes(source)
        assert actual.keys() == first.keys()
        assert all(torch.equal(actual[name], first[name]) for name in first)
        for name, weight in weights(source).items():
            if scheme in ("NVFP4A16", "FP8"):  # a reciprocal is rounded; scales come back as float32
                assert torch.allclose(weight, dense[name], rtol=1e-2, atol=1e-6), name
            else:
                assert torch.equal(weight, dense[name]), name
        if scheme not in ("NVFP4A16", "FP8"):  # inputs on the edge of two codes fall to either side
            assert torch.equal(logits(source), wanted)
        assert any("same codes" in line for line in source.card.details["checks"])


def test_int8_goes_to_bitsandbytes(make, tmp_path):
    source = make("W8A16", group_size=0)
    exported = export(source, tmp_path / "bnb", ExportSettings(format="bitsandbytes"))
    assert exported.config["quantization_config"]["load_in_8bit"]
    assert torch.allclose(logits(exported), logits(source), rtol=1e-3, atol=1e-3)
    grouped = pack(tmp_path / "dense", tmp_path / "grouped", scheme="W8A16", group_size=32)[1]
    with pytest.raises(ModelError, match="one scale for each output"):
        export(grouped, tmp_path / "no", ExportSettings(format="bitsandbytes"))


@pytest.mark.slow
def test_scales_that_float16_rounds_are_reported(make, tmp_path):
    source = make("W4A16", dtype=torch.float32)
    exported = export(source, tmp_path / "gptq", ExportSettings(format="gptq"))
    assert any("scales that float16 cannot hold" in note for note in exported.card.details["notes"])
    assert exported.card.details["limits"][0].startswith("tensor parallel")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("scheme", "target", "match"),
    [
        ("W8A8", "gptq", "activations"),
        ("FP8", "gptq", "activations|no place"),
        ("W5A16", "awq", "4 bits at most"),
        ("W4A16", "modelopt", "integer codes"),
        ("NF4", "gptq", "no place"),
    ],
)
def test_codes_without_a_place_are_refused(make, tmp_path, scheme, target, match):
    source = make(scheme)
    with pytest.raises(ModelError, match=match):
        export(source, tmp_path / "out", ExportSettings(format=target))
    assert not (tmp_path / "out").exists()


def test_settings_that_a_format_ignores_are_refused():
    for change in ({"type": "Q4_K_M"}, {"rounding": "gptq"}, {"size": "1GB"}, {"bits": 4.0}):
        with pytest.raises(SettingsError, match="gguf"):
            ExportSettings(format="gptq", **change)
    with pytest.raises(SettingsError, match="average"):
        ExportSettings(format="exl2")
    with pytest.raises(SettingsError, match="alone"):
        ExportSettings(format="gguf", type="Q4_0", bits=4.0)
    with pytest.raises(SettingsError, match=r"4\.5GB"):
        ExportSettings(format="gguf", size="many")


@pytest.mark.slow
def test_a_head_under_another_name_is_found(make, tmp_path):
    """GPT-NeoX stores its head as ``embed_out``."""
    source = make("W4A16", family="gpt_neox")
    exported = export(source, tmp_path / "gptq", ExportSettings(format="gptq"))
    assert torch.equal(logits(exported), logits(source))
