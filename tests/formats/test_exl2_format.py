"""EXL2 files: hand-computed words, announced shapes, a decoder made of loops over bits, what is refused."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, ModelError, NumericsError
from attar.formats import exl2
from attar.formats.exl2 import decode, encode, layout, refuse, scales, sections_of
from attar.formats.readers import reader
from attar.models.loading.load import load_model
from tests.quantization.packing import save

SECTIONS = ((8, 32), (6, 32), (5, 64), (4, 32), (3, 64), (2, 64), (2, 32))
COLUMNS = sum(width for _, width in SECTIONS)


def packed_tensors(rows, sections=SECTIONS, seed=0, largest=None):
    """Random codes, scales and order."""
    g = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-(2 ** (b - 1)), 2 ** (b - 1), (rows, w), generator=g) for b, w in sections]
    codes = torch.cat(parts, 1).to(torch.int8)
    scale_codes = torch.randint(1, 17, (rows, len(sections)), generator=g, dtype=torch.uint8)
    if largest is None:
        largest = (torch.rand(len(sections), generator=g) * 0.1 + 1e-3).half()
    return codes, scale_codes, largest, sections, torch.randperm(codes.shape[1], generator=g)


def half(number):
    """A float rounded to float16, half to even, by the C library's rules."""
    return struct.unpack("<e", struct.pack("<e", number))[0]


def by_loops(tensors, rows):
    """The weight in float16, element by element, from strings of bits."""
    groups = [int(word) & 0xFFFF for word in tensors["q_groups"]]
    outputs, columns = tensors["q_weight"].shape[1], len(tensors["q_invperm"])
    weight = [[None] * columns for _ in range(rows)]
    table = {int(index): column for column, index in enumerate(tensors["q_invperm"])}
    for n in range(rows):
        words = [int(word) & 0xFFFFFFFF for word in tensors["q_weight"][:, n]]
        index = 0
        for number in range(len(groups) // 2):
            bits, first = groups[2 * number : 2 * number + 2]
            last = groups[2 * number + 3] if 2 * number + 3 < len(groups) else len(words)
            text = "".join(format(word, "032b")[::-1] for word in words[first:last])
            word = int(tensors["q_scale"][number, n // 8]) & 0xFFFFFFFF
            sub = (word >> (4 * (n % 8)) & 15) + 1
            step = half(float(tensors["q_scale_max"][number]) / 256)
            scale = half(sub * sub * step)
            for start in range(0, len(text), bits):
                code = int(text[start : start + bits][::-1], 2) - 2 ** (bits - 1)
                weight[n][table[index]] = half(code * scale)
                index += 1
        assert index == columns
    assert outputs % 32 == 0
    return torch.tensor(weight, dtype=torch.float16)


@pytest.mark.parametrize("rows", [32, 5, 40])
def test_decoding_agrees_with_loops_over_the_description(rows):
    weight = packed_tensors(rows)
    tensors = encode(*weight)
    assert layout((rows, COLUMNS), SECTIONS) == {
        name: (stored_dtype(value.dtype), tuple(value.shape)) for name, value in tensors.items()
    }
    assert torch.equal(decode(tensors, rows), by_loops(tensors, rows))
    assert sections_of(tensors) == list(SECTIONS)


@pytest.mark.few(10)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("largest", [6e-8, 1.6e-5, 1e-3, 0.5, 500.0])
def test_every_code_and_every_scale_in_float16(bits, largest):
    """Also where q_scale_max / 256 has few bits left."""
    largest = torch.tensor([largest]).half()
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).repeat(16, 1)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 32)).to(torch.int8)
    columns = codes.shape[1]
    scale_codes = torch.arange(1, 17, dtype=torch.uint8)[:, None]
    tensors = encode(codes, scale_codes, largest, ((bits, columns),), torch.arange(columns))
    got = decode(tensors, 16)
    assert torch.equal(got, by_loops(tensors, 16))
    assert torch.equal(
        scales(scale_codes, largest)[:, 0],
        torch.tensor([half((c * c) * half(float(largest) / 256)) for c in range(1, 17)], dtype=torch.float16),
    )


def test_hand_computed_words():
    """One group of 3 bits: stored codes 0 1 2 ... 7 and again; scale codes 1 and 16; inputs reversed."""
    codes = (torch.arange(32) % 8 - 4).to(torch.int8).repeat(2, 1)
    scale_codes = torch.tensor([[1], [16]], dtype=torch.uint8)
    order = torch.arange(31, -1, -1)
    tensors = encode(codes, scale_codes, torch.tensor([2.0]).half(), ((3, 32),), order)
    # 000 100 010 110 001 101 011 111, lowest bit first, is the 24-bit number 0xFAC688
    string = sum((0xFAC688 << (24 * i)) for i in range(4))
    words = [string >> (32 * i) & 0xFFFFFFFF for i in range(3)]
    assert words == [0x88FAC688, 0xC688FAC6, 0xFAC688FA]
    for n in (0, 1):
        assert [int(word) & 0xFFFFFFFF for word in tensors["q_weight"][:, n]] == words
    # stored code 4 everywhere in what fills up: 001 001 ... lowest bit first
    assert [int(word) & 0xFFFFFFFF for word in tensors["q_weight"][:, 2]] == [
        0x24924924,
        0x49249249,
        0x92492492,
    ]
    assert [int(word) & 0xFFFFFFFF for word in tensors["q_scale"][0]] == [0xFFFFFFF0, *[0xFFFFFFFF] * 3]
    assert tensors["q_groups"].tolist() == [3, 0] and tensors["q_invperm"].tolist() == order.tolist()
    weight = decode(tensors, 2)
    assert weight[0, 31] == -4 * 2 / 256 and weight[1, 31] == -8 and weight[1, 24] == 6


def test_first_rows_of_groups():
    tensors = encode(*packed_tensors(8))
    # 8 rows for 32 inputs of 8 bits, 6, then 10, 4, 6, 4, 2
    assert tensors["q_groups"].tolist() == [8, 0, 6, 8, 5, 14, 4, 24, 3, 28, 2, 34, 2, 38]
    assert tensors["q_weight"].shape == (40, 32)


def test_many_rows_do_not_fit_a_short_and_still_come_back():
    sections = ((8, 32768), (8, 32768))
    tensors = {
        "q_groups": torch.tensor([8, 0, 8, 8192], dtype=torch.int16),
        "q_weight": torch.empty(16384, 32, dtype=torch.int32, device="meta"),
        "q_invperm": torch.empty(65536, dtype=torch.int32, device="meta"),
    }
    assert sections_of(tensors) == list(sections)


def test_nothing_is_modified():
    weight = packed_tensors(8)
    before = [value.clone() for value in weight if torch.is_tensor(value)]
    encode(*weight)
    after = [value for value in weight if torch.is_tensor(value)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_shapes_and_groups_that_are_none():
    for shape in ((64, 48), (64, 1 << 17)):
        with pytest.raises(ModelError, match="multiple of 32 inputs"):
            refuse(shape)
    for sections in (((4, 32), (5, 32)), ((7, 64),), ((4, 48), (4, 16)), ((4, 32),)):
        with pytest.raises(ValueError, match="groups of"):
            layout((32, 64), sections)


def save_exl2(folder, family="llama3", **changes):
    """A float16 checkpoint with random codes; 40 neurons, and a vocabulary of 300 for the head."""
    sizes = {"intermediate_size": 64, "vocab_size": 300, "num_hidden_layers": 1, "pad_token_id": 1}
    checkpoint = open_checkpoint(save(folder, family, dtype=torch.float16, **{**sizes, **changes}))
    tensors, weights, rows = {name: checkpoint.load(name) for name in checkpoint.tensors}, {}, {}
    for seed, name in enumerate([name for name in tensors if "proj" in name or "lm_head" in name]):
        if not name.endswith(".weight"):
            continue
        (outputs, columns), base = tensors.pop(name).shape, name.removesuffix(".weight")
        largest = torch.tensor([0.01, 0.02]).half()
        sections = ((4, 32), (3, columns - 32))
        coded = encode(*packed_tensors(outputs, sections, seed, largest))
        tensors |= {f"{base}.{leaf}": value for leaf, value in coded.items()}
        weights[name] = decode(coded, outputs)
        rows |= {base: outputs} if outputs % 32 else {}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = exl2.quantization_config(3.2, 6, rows=rows)
    (folder / "config.json").write_text(json.dumps({**checkpoint.config, "quantization_config": config}))
    return open_checkpoint(folder), weights


NAME = "model.layers.0.mlp.down_proj"


def test_checkpoints_are_read(tmp_path):
    checkpoint, weights = save_exl2(tmp_path / "exl2")
    assert checkpoint.config["quantization_config"]["rows"] == {"lm_head": 300}
    read, state = reader(checkpoint), load_model(checkpoint).state_dict()
    assert read.codes(f"{NAME}.q_weight") is None
    for name, weight in weights.items():
        stored = f"{name.removesuffix('weight')}q_weight"
        read.check(stored)
        assert read.header(checkpoint.tensors[stored]) == (name, "F16", tuple(weight.shape))
        assert torch.equal(read.decode(stored), weight) and torch.equal(state[name], weight)
    assert read.header(checkpoint.tensors[f"{NAME}.q_invperm"]) is None
    assert read.decode("model.norm.weight").dtype == torch.float16


def test_outputs_are_known_without_the_config(tmp_path):
    """Files of ExLlamaV2's own: the vocabulary tells the head's outputs, a bias those of others."""
    folder = tmp_path / "exl2"
    checkpoint, weights = save_exl2(folder, "qwen2", num_key_value_heads=1)
    del checkpoint.config["quantization_config"]["rows"]
    read = reader(checkpoint)
    key = "model.layers.0.self_attn.k_proj"
    assert weights[f"{key}.weight"].shape[0] == 16
    for base in ("lm_head", key):
        assert torch.equal(read.decode(f"{base}.q_weight"), weights[f"{base}.weight"])


def test_damage_is_named(tmp_path):
    folder = tmp_path / "exl2"
    save_exl2(folder)
    before = load_file(folder / "model.safetensors")

    def change(alter):
        tensors = {name: value.clone() for name, value in before.items()}
        alter(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return reader(open_checkpoint(folder))

    for leaf, value, match in (
        ("q_scale", None, "q_scale is missing"),
        ("q_groups", torch.tensor([3, 0, 4, 3], dtype=torch.int16), "no groups of EXL2"),
        ("q_groups", torch.tensor([4, 0, 3, 5], dtype=torch.int16), "do not fit together"),
        ("q_scale_max", torch.ones(3).half(), "scales do not fit"),
        ("q_invperm", torch.zeros(64, dtype=torch.int32), "no order"),
        ("q_weight", torch.zeros(8, 128, dtype=torch.int32), "do not fit together"),
    ):
        name = f"{NAME}.{leaf}"
        alter = (
            (lambda tensors, name=name: tensors.pop(name))
            if value is None
            else (lambda tensors, name=name, value=value: tensors.update({name: value}))
        )
        with pytest.raises(CheckpointError, match=match):
            change(alter).decode(f"{NAME}.q_weight")
    for leaf, value, match in (
        ("q_scale_max", float("inf"), "infinite scales"),
        ("q_scale_max", 0.0, "zero"),
        ("q_weight", 0x11111111, "the same"),
    ):
        with pytest.raises(NumericsError, match=match):
            change(lambda tensors, leaf=leaf, value=value: tensors[f"{NAME}.{leaf}"].fill_(value)).check(
                f"{NAME}.q_weight"
            )
