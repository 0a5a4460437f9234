"""EXL3 files: GPTQModel's values of every codebook and bit width, a decoder made of loops over bits, weights
that were filled up, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.checkpoint.inspect import inspect
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import CheckpointError, NumericsError
from attar.formats import exl3
from attar.formats.readers import reader
from attar.models.loading.load import load_model
from tests.peers.decode_exl3 import CASES, digest, numbers, tensors
from tests.quantization.packing import save

GOLDEN = json.loads((Path(__file__).parent / "exl3_golden.json").read_text())
"""By tests/peers/decode_exl3.py with GPTQModel 7.7."""


@pytest.mark.parametrize(("bits", "codebook"), CASES)
def test_values_are_gptqmodels(bits, codebook):
    trellis = tensors(bits, codebook)["trellis"]
    assert digest(exl3.values(trellis, codebook, bits)) == GOLDEN[f"{codebook} {bits}"]


@pytest.mark.parametrize("bits", [1.5, 2.5, 3.5, 3])
def test_states_agree_with_loops_over_the_description(bits):
    """The ring as a string, steps of two lengths in turn."""
    trellis = numbers(1, 2, int(16 * bits), seed=7)
    for tile, states in zip(trellis[0], exl3.states(trellis, bits)[0], strict=True):
        words = [int(word) & 0xFFFF for word in tile]
        swapped = [words[i ^ 1] for i in range(len(words))]
        ring = "".join(format(word, "016b") for word in swapped)
        end = 0
        for i in range(256):
            end += int(bits) + (1 if bits % 1 and i % 2 else 0)
            start = end - 16
            window = ring[start:end] if start >= 0 else ring[start:] + ring[:end]
            assert int(states[i]) == int(window, 2)
        assert end == len(ring)


def test_packing_is_the_inverse():
    for bits in range(1, 9):
        trellis = numbers(2, 3, 16 * bits, seed=bits)
        assert torch.equal(exl3.pack(exl3.states(trellis, bits), bits), trellis)


def test_signs_of_older_files():
    parts = tensors(4, "3inst")
    signs = {"su": numbers(16, seed=1), "sv": numbers(8, seed=2)}
    scales = [
        torch.tensor([-1.0 if int(word) >> i & 1 else 1.0 for word in signs[name] for i in range(16)]).half()
        for name in ("su", "sv")
    ]
    wanted = exl3.decode({**parts, "suh": scales[0], "svh": scales[1]})
    assert torch.equal(exl3.decode({"trellis": parts["trellis"], **signs}), wanted)


def save_exl3(folder, codebook="mul1", bits=3, **changes):
    """A float16 checkpoint with random codes: widths of 192 and keys of 64 are filled up to 256 and 128."""
    sizes = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"intermediate_size": 256, "num_hidden_layers": 1, "tie_word_embeddings": False}
    checkpoint = open_checkpoint(save(folder, "llama3", dtype=torch.float16, **{**sizes, **changes}))
    stored, weights = {name: checkpoint.load(name) for name in checkpoint.tensors}, {}
    for seed, name in enumerate(list(stored)):
        if "proj" not in name and "lm_head" not in name:
            continue
        (outputs, inputs), base = stored.pop(name).shape, name.removesuffix(".weight")
        rows, columns = inputs + -inputs % 128, outputs + -outputs % 128
        parts = {"trellis": numbers(rows // 16, columns // 16, int(16 * bits), seed=seed)}
        parts |= {"suh": torch.full((rows,), 0.02).half(), "svh": torch.linspace(0.5, 2, columns).half()}
        if codebook in exl3.MULTIPLIERS:
            parts[codebook] = torch.tensor(exl3.MULTIPLIERS[codebook] - (1 << 32), dtype=torch.int32)
        stored |= {f"{base}.{leaf}": value for leaf, value in parts.items()}
        weights[name] = exl3.decode(parts)[:outputs, :inputs]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"quant_method": "exl3", "version": "1.6.5", "bits": bits, "head_bits": bits}
    config = {**checkpoint.config, "quantization_config": {**config, "codebook": codebook}}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder), weights


NAME = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(("codebook", "bits"), [("mul1", 2.5), ("3inst", 4)])
def test_checkpoints_are_read(tmp_path, codebook, bits):
    checkpoint, weights = save_exl3(tmp_path / "exl3", codebook, bits)
    read, state = reader(checkpoint), load_model(checkpoint).state_dict()
    assert read.codes(f"{NAME}.trellis") is None
    for name, weight in weights.items():
        stored = f"{name.removesuffix('weight')}trellis"
        read.check(stored)
        assert read.header(checkpoint.tensors[stored]) == (name, "F16", tuple(weight.shape))
        assert torch.equal(read.decode(stored), weight) and torch.equal(state[name], weight)
    assert read.header(checkpoint.tensors[f"{NAME}.suh"]) is None
    quantization = inspect(checkpoint).quantization
    assert quantization["tensors"] == 8 and quantization["format"] == codebook
    assert bits < quantization["bits_per_weight"] < bits + 0.3


def test_export_to_dense(tmp_path):
    checkpoint, weights = save_exl3(tmp_path / "exl3")
    dense = export(checkpoint, tmp_path / "dense", ExportSettings(format="dense"))
    assert torch.equal(dense.load(f"{NAME}.weight"), weights[f"{NAME}.weight"])


def test_damage_is_named(tmp_path):
    folder = tmp_path / "exl3"
    save_exl3(folder)
    before = load_file(folder / "model.safetensors")

    def change(leaf, value):
        tensors = dict(before)
        tensors.pop(f"{NAME}.{leaf}", None)
        tensors |= {} if value is None else {f"{NAME}.{leaf}": value}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return reader(open_checkpoint(folder))

    for leaf, value, match in (
        ("suh", None, r"down_proj\.suh is missing"),
        ("trellis", torch.zeros(16, 16, 40, dtype=torch.int16), None),
        ("trellis", torch.zeros(16, 16, 41, dtype=torch.int16), "16x16x41 is no trellis"),
        ("trellis", torch.zeros(15, 16, 48, dtype=torch.int16), "15x16x48 is no trellis"),
        ("trellis", torch.zeros(8, 16, 48, dtype=torch.int16), "scales do not fit"),
        ("svh", torch.ones(128).half(), "scales do not fit"),
        ("mcg", torch.tensor(1, dtype=torch.int32), "codebooks mcg and mul1"),
        ("mul1", torch.tensor(12, dtype=torch.int32), "mul1 0xc is no codebook"),
    ):
        read = change(leaf, value)
        if match is None:
            assert read.decode(f"{NAME}.trellis").shape == (192, 256)
            continue
        with pytest.raises(CheckpointError, match=match):
            header = read.header(read.checkpoint.tensors[f"{NAME}.trellis"])
            read.decode(f"{NAME}.trellis")
            assert header
    with pytest.raises(NumericsError, match="infinite scales"):
        change("svh", torch.full((256,), float("inf")).half()).check(f"{NAME}.trellis")
    with pytest.raises(NumericsError, match="the same"):
        change("trellis", torch.ones(16, 16, 48, dtype=torch.int16)).check(f"{NAME}.trellis")


def test_odd_configs_are_named(tmp_path):
    checkpoint, _ = save_exl3(tmp_path / "exl3")
    checkpoint.config["moe_intermediate_size"] = 200
    with pytest.raises(CheckpointError, match="256 may stand for 200 or 256"):
        reader(checkpoint).header(checkpoint.tensors[f"{NAME}.trellis"])
    checkpoint.config["quantization_config"]["codebook"] = "2mad"
    with pytest.raises(CheckpointError, match="codebook '2mad'"):
        reader(checkpoint)
