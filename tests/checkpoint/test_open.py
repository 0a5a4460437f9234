from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from attar.checkpoint import check_finite, open_checkpoint
from attar.checkpoint.open import open_anyway
from attar.checkpoint.tensors import TORCH
from attar.errors import CheckpointError, NumericsError
from tests.checkpoint.checkpoint_files import CONFIG, llama_tensors


def test_tensors_come_back_with_their_bits(make):
    tensors = llama_tensors()
    checkpoint = open_checkpoint(make(tensors=tensors))
    assert checkpoint.name == "model"
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.card is None
    assert sorted(checkpoint.tensors) == sorted(tensors)
    for name, tensor in ((name, checkpoint.load(name)) for name in tensors):
        assert torch.equal(tensor, tensors[name])
    assert checkpoint.nbytes == sum(t.numel() * 2 for t in tensors.values())


@pytest.mark.parametrize("dtype", [name for name in TORCH if name != "F8_E8M0"])
def test_every_dtype(make, dtype):
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 2 if dtype == "BOOL" else 100, (48,), generator=generator, dtype=torch.uint8)
    tensor = raw.view(getattr(torch, TORCH[dtype])).reshape(2, -1)
    checkpoint = open_anyway(make(tensors={"a": torch.ones(3), "x": tensor}))
    loaded = checkpoint.load("x")
    assert checkpoint.tensors["x"].dtype == dtype
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(loaded.reshape(-1).view(torch.uint8), raw)


def test_scalars_and_empty_tensors(make):
    tensors = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "x": torch.ones(2)}
    checkpoint = open_checkpoint(make(tensors=tensors))
    assert checkpoint.load("scalar").item() == 3.5
    assert checkpoint.load("empty").shape == (0, 4)


@pytest.mark.timeout(20)
def test_a_file_without_tensors_is_opened_at_once(make):
    assert open_anyway(make(tensors={})).tensors == {}


def test_a_loaded_tensor_owns_its_memory(make):
    checkpoint = open_checkpoint(make())
    name = next(iter(checkpoint.tensors))
    loaded = checkpoint.load(name)
    before = loaded.clone()
    checkpoint.weight_files[0].write_bytes(b"\0" * checkpoint.weight_files[0].stat().st_size)
    assert torch.equal(loaded, before)


def test_order_is_shard_name_then_offset(tmp_path):
    from attar.checkpoint import write_checkpoint_tensors

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names = ["z", "a", "m", "b"]
    write_checkpoint_tensors(tmp_path, {name: torch.ones(4) for name in names}, max_shard_bytes=32)
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == names
    assert [path.name for path in checkpoint.weight_files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_an_open_checkpoint_is_passed_through(make):
    checkpoint = open_checkpoint(make())
    assert open_checkpoint(checkpoint) is checkpoint


def test_unknown_tensor_names_the_nearest(make):
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        open_checkpoint(make()).load("model.norm.wieght")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "no architectures"),
        ({"architectures": []}, "no model_type"),
        ({"model_type": "llama", "architectures": []}, "no architectures"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "no architectures"),
    ],
)
def test_config_without_architecture(make, config, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(make(config=config))


def test_config_missing_or_damaged(make):
    folder = make()
    (folder / "config.json").write_text('{"model_type": "llama",\n oops}')
    with pytest.raises(CheckpointError, match=r"config\.json:2: not JSON"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        open_checkpoint(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(folder)


def test_pickled_weights_are_refused(make):
    folder = make()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled \(pytorch_model\.bin\)"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        open_checkpoint(folder)


def sharded(folder: Path) -> Path:
    from attar.checkpoint import write_checkpoint_tensors

    tensors = llama_tensors()
    (folder / "model.safetensors").unlink()
    write_checkpoint_tensors(folder, tensors, max_shard_bytes=700)
    return folder / "model.safetensors.index.json"


def test_index_that_names_a_missing_shard(make):
    folder = make()
    sharded(folder)
    (folder / "model-00002-of-00005.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names the shard model-00002-of-00005\.safetensors"):
        open_checkpoint(folder)


def test_index_that_promises_a_tensor_no_shard_has(make):
    folder = make()
    index = sharded(folder)
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = "model-00001-of-00005.safetensors"
    index.write_text(json.dumps(content))
    assert "model.extra, which no shard has" in open_checkpoint(folder).notes[0]


def test_index_that_leaves_the_folder(make):
    folder = make()
    index = sharded(folder)
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="not a file name"):
        open_checkpoint(folder)


def test_tensor_in_two_shards(make):
    folder = make()
    sharded(folder)
    shard = folder / "model-00002-of-00005.safetensors"
    save_file({"model.norm.weight": torch.ones(8)}, shard)
    with pytest.raises(CheckpointError, match=r"00001-of-00005.*, with other values, in model-00002"):
        open_checkpoint(folder)


def test_shards_without_index(make):
    folder = make()
    sharded(folder).unlink()
    with pytest.raises(CheckpointError, match="shards without"):
        open_checkpoint(folder)


def test_file_that_shrinks_after_opening(make):
    checkpoint = open_checkpoint(make())
    file = checkpoint.weight_files[0]
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(CheckpointError, match="ends inside tensor"):
        checkpoint.load(list(checkpoint.tensors)[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_nan_is_refused(dtype):
    good = torch.ones(5).to(dtype)
    check_finite("w", good, Path("f"))
    bad = torch.tensor([1.0, float("nan")]).to(dtype)
    with pytest.raises(NumericsError, match=r"model\.safetensors: tensor 'w' contains NaN"):
        check_finite("w", bad, Path("model.safetensors"))
    check_finite("codes", torch.ones(3, dtype=torch.int32), Path("f"))


def test_fingerprint_counts_config_weights_and_tokenizer_only(make):
    folder = make()
    first = open_checkpoint(folder).fingerprint()
    (folder / "README.md").write_text("words")
    assert open_checkpoint(folder).fingerprint() == first
    for file in ("tokenizer.json", "config.json"):
        text = (folder / file).read_text()
        (folder / file).write_text(text + " ")
        assert open_checkpoint(folder).fingerprint() != first
        (folder / file).write_text(text)
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x01")
    assert open_checkpoint(folder).fingerprint() != first


PASS = """
import sys, torch
from attar.checkpoint import open_checkpoint
from attar.memory import peak_rss_bytes
before = peak_rss_bytes()
checkpoint = open_checkpoint(sys.argv[1])
total = sum(float(checkpoint.load(name).sum()) for name in checkpoint.tensors)
print(peak_rss_bytes() - before)
"""


@pytest.mark.slow
def test_a_pass_needs_the_memory_of_one_tensor(make):
    tensors = {f"t{i}": torch.full((2_000_000,), 1.0) for i in range(24)}  # 8 MB each, 192 MB together
    folder = make(tensors=tensors)
    run = subprocess.run([sys.executable, "-c", PASS, folder], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 40_000_000


def test_opening_needs_no_torch(make):
    code = (
        "import sys; from attar.checkpoint import open_checkpoint as o; o(sys.argv[1]); "
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, make()], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"w": F32}, b"\0" * 7, "truncated: the header describes 77 bytes, the file has 76"),
        ({"w": F32}, b"\0" * 9, "damaged: the header describes 77 bytes, the file has 78"),
        (b"not json", b"", "header of 8 bytes:1: not JSON"),
        (b"[" * 100_000, b"", "JSON of more than 256 levels"),
        (b'{"w":' + b"9" * 5000 + b"}", b"", "has a number of 5000 digits"),
        ({"__metadata__": ["x"], "w": F32}, b"\0" * 8, "__metadata__ is not a mapping of texts"),
        ({"w": {**F32, "shape": [2**62] * 2000}}, b"\0" * 8, "has shape"),
        (b"[]", b"", "not a JSON object"),
        (b'{"w":1,"w":2}', b"", "names a tensor twice"),
        ({"w": {"dtype": "F32"}}, b"", "has no dtype, shape or data_offsets"),
        ({"w": {**F32, "dtype": "F31"}}, b"\0" * 8, "unknown dtype 'F31'"),
        ({"w": {**F32, "shape": [-2]}}, b"\0" * 8, r"shape \[-2\]"),
        ({"w": {**F32, "shape": [3]}}, b"\0" * 8, "has 8 bytes, expected 12"),
        ({"w": {**F32, "data_offsets": [8, 16]}}, b"\0" * 16, "begins at byte"),
        ({"w": F32, "v": F32}, b"\0" * 8, "begins at byte"),
    ],
)
def test_damaged_safetensors(make, header, data, message):
    folder = make()
    write_raw(folder / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "model.safetensors" in str(caught.value)


def test_truncated_anywhere(make):
    folder = make()
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            open_checkpoint(folder)


def test_a_header_of_absurd_length(make):
    folder = make()
    write_raw(folder / "model.safetensors", {}, length=2**62)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_checkpoint(folder)


def test_a_flipped_byte_in_the_header_is_refused_or_harmless(make):
    """What we accept, the reference implementation accepts; the rest gets a CheckpointError."""
    folder = make(tensors={"a": torch.ones(3), "b": torch.ones(2, 2).half()})
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    draw, refused = random.Random(0), 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[draw.randrange(header)] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            tensors = open_checkpoint(folder).tensors
        except CheckpointError:
            refused += 1
            continue
        with safe_open(path, "pt") as file:
            assert sorted(file.keys()) == sorted(tensors)
    assert 100 < refused < 400


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP, "JSON of more than 256 levels"),
        ('{"a":' * 300 + "1" + "}" * 300, "JSON of more than 256 levels"),
        ('{"a": ' + "1" * 5000 + "}", "has a number of 5000 digits"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ("[]", "not a JSON object"),
        ("{", ":1: not JSON"),
    ],
    ids=["deep", "rather deep", "long", "surrogate", "list", "cut"],
)
@pytest.mark.parametrize("file", ["config.json", "attar.json", "model.safetensors.index.json"])
def test_json_of_every_kind_is_refused_in_a_line(make, file, content, message):
    folder = make()
    (folder / file).write_text(content)
    if "index" in file:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert file in caught.value.message and len(caught.value.message) < 400


def test_an_index_looks_at_each_shard_once(make, monkeypatch):
    folder = make(tensors={f"t{number}": torch.zeros(1) for number in range(200)})
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {"weight_map": {f"t{number}": "one.safetensors" for number in range(200)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    looked, is_file = [], Path.is_file

    def counted(path):
        looked.append(path.name)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", counted)
    assert len(open_checkpoint(folder).tensors) == 200
    assert looked.count("one.safetensors") == 1 and looked.count("model.safetensors.index.json") == 1
