"""GGUF files against bytes made by hand, the gguf library, and damage of every kind."""

from __future__ import annotations

import gc
import os
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf import GGUFWriter as PeerWriter

from attar.errors import CheckpointError, ModelError, OutputError
from attar.formats.gguf import container
from attar.formats.gguf.container import GGUFTensorInfo, GGUFWriter, TypedValue, read_gguf
from tests.flushes import record_flushes
from tests.formats.gguf.making import typed

EVERY = {
    "general.architecture": "llama",
    "a.u8": TypedValue("u8", 255),
    "a.i8": TypedValue("i8", -128),
    "a.u16": TypedValue("u16", 65535),
    "a.i16": TypedValue("i16", -3),
    "a.u32": 7,
    "a.i32": -7,
    "a.f32": 0.5,
    "a.bool": True,
    "a.str": "grüße 𝄞\0x",
    "a.u64": 1 << 40,
    "a.i64": -(1 << 40),
    "a.f64": TypedValue("f64", 1e300),
    "b.strings": ["a", "", "ß", "\n"],
    "b.floats": [0.0, -1.5, 3],
    "b.signed": [1, -1],
    "b.i32": TypedValue("i32", [1, 2]),
    "b.bools": [True, False],
    "b.empty": [],
}
PLAIN = {key: value.value if isinstance(value, TypedValue) else value for key, value in EVERY.items()}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def info(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def file_of(keys: list[bytes], infos: list[bytes], data: bytes, version: int = 3, align: int = 32) -> bytes:
    """A file, laid out by hand."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(keys)) + b"".join(keys + infos)
    return head + bytes(-len(head) % align) + data


ARCH = text("general.architecture") + struct.pack("<I", 8) + text("llama")
TWO = file_of(
    [ARCH, text("n.list") + struct.pack("<IIQ3h", 9, 3, 3, -1, 0, 1)],
    [info("w", [4, 2], 1, 0), info("b", [3], 0, 32)],
    np.arange(8, dtype="<f2").tobytes() + bytes(16) + np.arange(3, dtype="<f4").tobytes() + bytes(20),
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(TWO)
    return path


def written(path: Path, metadata: dict[str, Any], tensors: dict[str, Any], **options: Any) -> list[Path]:
    """Write (kind, shape, data) tensors."""
    writer = GGUFWriter(
        path,
        metadata,
        [GGUFTensorInfo(name, kind, shape) for name, (kind, shape, _) in tensors.items()],
        **options,
    )
    for name, (_, _, data) in tensors.items():
        writer.add(name, data)
    return writer.finish()


def some_tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 2 * 144), dtype=torch.uint8)
    experts = torch.randint(0, 256, (2, 3, 34), dtype=torch.uint8)
    return {
        "blk.0.attn_q.weight": ("Q4_K", (3, 512), blocks),
        "norm.weight": ("F32", (5,), torch.randn(5)),
        "half.weight": ("F16", (3, 5), torch.randn(3, 5).half()),
        "brain.weight": ("BF16", (2, 7), torch.randn(2, 7).bfloat16()),
        "experts.weight": ("Q8_0", (2, 3, 32), experts),
        "scalar": ("I32", (), torch.tensor(5, dtype=torch.int32)),
    }


def test_bytes_by_hand(tmp_path: Path, small: Path) -> None:
    opened = read_gguf(small)
    assert opened.metadata == {"general.architecture": "llama", "n.list": [-1, 0, 1]}
    assert opened.kinds == {"general.architecture": "str", "n.list": "[i16]"}
    assert opened.tensors["w"].shape == (2, 4) and opened.tensors["w"].kind == "F16"
    assert torch.equal(opened.load("w"), torch.arange(8).half().view(2, 4))
    assert torch.equal(opened.load("b"), torch.arange(3).float())
    tensors = {"w": ("F16", (2, 4), opened.load("w")), "b": ("F32", (3,), opened.load("b"))}
    written(tmp_path / "again.gguf", typed(opened), tensors)
    assert (tmp_path / "again.gguf").read_bytes() == TWO


def test_version_2_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(TWO[:4] + struct.pack("<I", 2) + TWO[8:])
    assert read_gguf(path).version == 2 and set(read_gguf(path).tensors) == {"w", "b"}


def test_the_gguf_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = some_tensors()
    written(tmp_path / "m.gguf", EVERY, tensors)
    reader = GGUFReader(tmp_path / "m.gguf")
    for key, value in PLAIN.items():
        assert reader.fields[key].contents() == value, key
    kinds = {key: [kind.name for kind in reader.fields[key].types] for key in EVERY}
    assert kinds["a.u8"] == ["UINT8"] and kinds["a.u64"] == ["UINT64"] and kinds["a.i64"] == ["INT64"]
    assert (
        kinds["a.u32"] == ["UINT32"] and kinds["a.i32"] == ["INT32"] and kinds["b.i32"] == ["ARRAY", "INT32"]
    )
    assert kinds["b.signed"] == ["ARRAY", "INT32"] and kinds["b.floats"] == ["ARRAY", "FLOAT32"]
    actual = {tensor.name: tensor for tensor in reader.tensors}
    assert list(actual) == list(tensors)
    for name, (kind, shape, data) in tensors.items():
        assert actual[name].tensor_type == GGMLQuantizationType[kind], name
        assert actual[name].shape.tolist() == list(reversed(shape)), name
        assert actual[name].data.tobytes() == data.view(torch.uint8).numpy().tobytes() if shape else True, (
            name
        )


def test_we_read_what_the_gguf_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "peer.gguf"
    peer = PeerWriter(path, "llama")
    peer.add_key_value("x.i64", -5, GGUFValueType.INT64)
    peer.add_float64("x.f64", 0.1)
    peer.add_bool("x.no", False)
    peer.add_array("x.tokens", ["a", "ü", ""])
    peer.add_array("x.numbers", [1, -2, 3])
    rng = np.random.default_rng(0)
    data = {
        "f": rng.standard_normal((3, 4)).astype(np.float32),
        "h": rng.standard_normal(6).astype(np.float16),
    }
    blocks = gguf.quants.quantize(rng.standard_normal((4, 64)).astype(np.float32), GGMLQuantizationType.Q8_0)
    for name, array in data.items():
        peer.add_tensor(name, array)
    peer.add_tensor("q", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    peer.write_header_to_file()
    peer.write_kv_data_to_file()
    peer.write_tensors_to_file()
    peer.close()
    opened = read_gguf(path)
    assert opened.metadata["x.i64"] == -5 and opened.metadata["x.f64"] == 0.1
    assert opened.metadata["x.no"] is False and opened.metadata["x.tokens"] == ["a", "ü", ""]
    assert opened.metadata["x.numbers"] == [1, -2, 3] and opened.kinds["x.numbers"] == "[i32]"
    for name, array in data.items():
        assert np.array_equal(opened.load(name).numpy(), array)
    assert opened.tensors["q"].shape == (4, 64) and np.array_equal(opened.load("q").numpy(), blocks)


def test_every_type_survives(tmp_path: Path) -> None:
    nested = TypedValue("[[i16]]", [[1, -2], [], [3]])
    deep = [["a"], ["b", ""]]
    metadata = {**EVERY, "c.nested": nested, "c.deep": deep}
    tensors = some_tensors()
    written(tmp_path / "m.gguf", metadata, tensors)
    opened = read_gguf(tmp_path / "m.gguf")
    assert opened.metadata == {**PLAIN, "c.nested": nested.value, "c.deep": deep}
    assert opened.kinds["c.nested"] == "[[i16]]" and opened.kinds["a.i8"] == "i8"
    assert list(opened.tensors) == list(tensors)
    for name, (kind, shape, data) in tensors.items():
        assert (opened.tensors[name].kind, opened.tensors[name].shape) == (kind, shape)
        assert torch.equal(opened.load(name), data)
    written(tmp_path / "again.gguf", typed(opened), tensors)
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


def test_order_does_not_matter(tmp_path: Path) -> None:
    tensors = some_tensors()
    written(tmp_path / "a.gguf", EVERY, tensors)
    slots = [GGUFTensorInfo(name, kind, shape) for name, (kind, shape, _) in tensors.items()]
    writer = GGUFWriter(tmp_path / "b.gguf", EVERY, slots)
    for name in reversed(tensors):
        assert name in writer.missing()
        writer.add(name, tensors[name][2])
    assert writer.missing() == []
    assert writer.finish() == [tmp_path / "b.gguf"]
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert writer.nbytes == (tmp_path / "b.gguf").stat().st_size


def test_alignment(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", {"general.architecture": "x"}, some_tensors(), alignment=256)
    opened = read_gguf(tmp_path / "m.gguf")
    assert opened.metadata["general.alignment"] == 256
    assert all(tensor.offset % 256 == 0 for tensor in opened.tensors.values())
    assert len(GGUFReader(tmp_path / "m.gguf").tensors) == 6
    assert torch.equal(opened.load("norm.weight"), some_tensors()["norm.weight"][2])


def test_tensors_may_have_gaps(tmp_path: Path) -> None:
    path = tmp_path / "gap.gguf"
    path.write_bytes(file_of([], [info("b", [1], 0, 96), info("a", [1], 0, 0)], bytes(100)))
    assert list(read_gguf(path).tensors) == ["b", "a"]


def test_no_tensors_at_all(tmp_path: Path) -> None:
    assert written(tmp_path / "vocab.gguf", {"x.y": 1}, {}) == [tmp_path / "vocab.gguf"]
    assert read_gguf(tmp_path / "vocab.gguf").tensors == {}
    path = tmp_path / "bare.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert read_gguf(path).metadata == {}


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model of eight tensors in files of at most 600 bytes; one tensor is larger than that."""
    tensors = {f"t{index}": ("F32", (40,), torch.full((40,), float(index))) for index in range(7)}
    tensors["large"] = ("F32", (400,), torch.arange(400.0))
    return written(tmp_path / "m.gguf", {"general.architecture": "llama", "x.y": 3}, tensors, max_bytes=600)


def test_split_files(tmp_path: Path, parts: list[Path]) -> None:
    count = len(parts)
    assert [path.name for path in parts] == [f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    assert sorted(tmp_path.iterdir()) == parts
    assert all(path.stat().st_size <= 600 for path in parts[:-1]) and count == 5
    for number, path in enumerate(parts):
        fields = GGUFReader(path).fields
        assert [fields[f"split.{key}"].contents() for key in ("no", "count", "tensors.count")] == [
            number,
            count,
            8,
        ]
        assert fields["split.no"].types == [GGUFValueType.UINT16]
        assert fields["split.tensors.count"].types == [GGUFValueType.INT32]
        assert ("x.y" in fields) == (number == 0)
        opened = read_gguf(path)
        assert opened.files == tuple(parts) and opened.metadata == {"general.architecture": "llama", "x.y": 3}
        assert list(opened.tensors) == [*(f"t{index}" for index in range(7)), "large"]
        assert float(opened.load("t5")[0]) == 5 and float(opened.load("large")[-1]) == 399


def test_a_limit_that_is_not_reached_makes_one_file(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.gguf", EVERY, some_tensors())
    size = whole[0].stat().st_size
    assert written(tmp_path / "b.gguf", EVERY, some_tensors(), max_bytes=size) == [tmp_path / "b.gguf"]
    assert len(written(tmp_path / "c.gguf", EVERY, some_tensors(), max_bytes=size - 1)) == 2


def test_faulty_splits(tmp_path: Path, parts: list[Path]) -> None:
    held = {path: path.read_bytes() for path in parts}

    def refused(match: str, path: Path = parts[0]) -> None:
        with pytest.raises(CheckpointError, match=match):
            read_gguf(path)
        for path, data in held.items():
            path.write_bytes(data)

    parts[2].unlink()
    refused(rf"{parts[2].name}: is missing, one of 5 parts")
    parts[1].write_bytes(held[parts[2]])
    refused(rf"{parts[1].name}: split.no is 2, but the 5 parts make it 1")
    parts[3].write_bytes(held[parts[3]].replace(b"t6", b"t0"))
    refused(rf"{parts[3].name}: tensor 't0' is also in {parts[0].name}")
    written(parts[4], {"x.y": 1}, {"other": ("F32", (1,), torch.zeros(1))})
    refused(rf"{parts[4].name}: split.no is None, not a whole number")
    parts[0].write_bytes(held[parts[0]].replace(struct.pack("<Ii", 5, 8), struct.pack("<Ii", 5, 9)))
    refused(rf"{parts[0].name}: split.tensors.count is 9, but the 5 parts make it 8")
    (tmp_path / "renamed.gguf").write_bytes(held[parts[1]])
    refused(r"renamed.gguf: is part 2 of 5 by its split.no", tmp_path / "renamed.gguf")


def patched(at: bytes, new: bytes, offset: int = 0) -> bytes:
    """The small file with some bytes replaced, beginning ``offset`` bytes after the end of ``at``."""
    index = TWO.index(at) + len(at) + offset
    return TWO[:index] + new + TWO[index + len(new) :]


def second(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    """The small file with another second tensor."""
    return TWO.replace(info("b", [3], 0, 32), info(name, sizes, kind, offset))


HUGE = struct.pack("<Q", 1 << 60)
DAMAGED = {
    "magic": (b"GGML" + TWO[4:], "begins with b'GGML'"),
    "empty": (b"", "ends inside the header"),
    "version 1": (TWO[:4] + struct.pack("<I", 1) + TWO[8:], "of version 1; attar reads 2 and 3"),
    "big-endian": (TWO[:4] + struct.pack(">I", 3) + TWO[8:], "the file is big-endian"),
    "tensors": (TWO[:8] + HUGE + TWO[16:], "1152921504606846976 tensors and 2 keys do not fit"),
    "keys": (TWO[:16] + HUGE + TWO[24:], "2 tensors and 1152921504606846976 keys do not fit"),
    "key length": (TWO[:24] + HUGE + TWO[32:], "a key is 1152921504606846976 bytes long"),
    "string length": (patched(b"architecture", HUGE, 4), "the value of general.architecture is 11529215"),
    "value type": (patched(b"architecture", b"\x0d"), "general.architecture has the unknown type 13"),
    "array length": (patched(b"n.list", HUGE, 8), "n.list has 1152921504606846976 elements"),
    "array beyond": (patched(b"n.list", struct.pack("<Q", 9999), 8), "ends inside the value of n.list"),
    "array type": (patched(b"n.list", b"\x0e", 4), "n.list has elements of the type 14"),
    "key not UTF-8": (TWO.replace(b"n.list", b"n.\xfflis"), "a key is not UTF-8"),
    "key not ASCII": (TWO.replace(b"n.list", "n.ßis".encode()), "is not ASCII"),
    "text not UTF-8": (TWO.replace(b"llama", b"\xffxxxx"), "architecture is not UTF-8"),
    "tensor type": (second("b", [3], 77, 32), "'b': tensors of ggml type 77"),
    "old type": (second("b", [3], 4, 32), "ggml type 4 (Q4_2)"),
    "dimensions": (patched(text("w"), b"\x05"), "'w' has 5 dimensions"),
    "no elements": (second("b", [0], 0, 32), "'b' is [0] in F32"),
    "blocks": (second("b", [3], 8, 32), "'b' is [3] in Q8_0, whose blocks hold 32"),
    "unaligned": (second("b", [3], 0, 33), "'b' at byte 225 is not aligned to 32"),
    "overlap": (second("b", [3], 0, 0), "'b' at byte 192 overlaps tensor 'w'"),
    "beyond": (second("b", [3], 0, 1 << 62), "'b' at byte 4611686018427388096 has"),
    "huge tensor": (second("b", [1 << 60], 0, 32), "'b' at byte 224 has"),
    "data": (TWO[:-30], "tensor 'b' at byte 224 has 12 bytes, but the file ends at 226"),
    "twice": (second("w", [3], 0, 32), "tensor 'w' stands twice"),
    "key twice": (file_of([ARCH, ARCH], [], b""), "key 'general.architecture' stands twice"),
    "bool": (file_of([text("x") + struct.pack("<IB", 7, 2)], [], b""), "a bool that is neither 0 nor 1"),
    "alignment": (
        file_of([text("general.alignment") + struct.pack("<II", 4, 12)], [], b""),
        "general.alignment is 12, not a multiple of 8",
    ),
    "strings": (
        file_of([text("x") + struct.pack("<IIQ", 9, 8, 2) + text("a") + HUGE], [], bytes(8)),
        "ends inside the value of x",
    ),
    "string in list not UTF-8": (
        file_of([text("x") + struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff"], [], bytes(8)),
        "the value of x holds a string that is not UTF-8",
    ),
    "too deep": (
        file_of([text("x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50], [], b""),
        "elements of the type 9, unknown or too deep",
    ),
    "mixed": (
        file_of([text("x") + struct.pack("<IIQIQbIQh", 9, 9, 2, 1, 1, 0, 3, 1, 0)], [], b""),
        "the value of x mixes [i8] and [i16]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    data, message = DAMAGED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert message in caught.value.message and caught.value.message.startswith(str(path))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.gguf: no such file"):
        read_gguf(tmp_path / "no.gguf")
    with pytest.raises(CheckpointError, match=r"cannot be read: Is a directory"):
        read_gguf(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    end = len(TWO) - 20  # the padding behind the last tensor may be missing
    for length in range(end):
        path.write_bytes(TWO[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)
    path.write_bytes(TWO[:end])
    assert torch.equal(read_gguf(path).load("b"), torch.arange(3).float())


def test_flipped_bytes_parse_or_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "m.gguf", {**EVERY, "c.nested": [[1], [2, 3]]}, some_tensors())
    data = (tmp_path / "m.gguf").read_bytes()
    start = min(tensor.offset for tensor in read_gguf(tmp_path / "m.gguf").tensors.values())
    draw, path, parsed = random.Random(0), tmp_path / "flip.gguf", 0
    for _ in range(600):
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 1, 2, 8))):
            changed[draw.randrange(start)] = draw.randrange(256)
        path.write_bytes(changed)
        try:
            opened = read_gguf(path)
            for name in opened.tensors:
                opened.load(name)
            parsed += 1
        except CheckpointError:
            pass
    assert 50 < parsed < 550


@pytest.mark.slow
def test_a_large_vocabulary_parses_at_once(tmp_path: Path) -> None:
    tokens = [f"token ▁{index}" for index in range(150_000)]
    metadata = {
        "t.tokens": tokens,
        "t.scores": [-float(i) for i in range(150_000)],
        "t.types": TypedValue("i32", [1] * 150_000),
    }
    written(tmp_path / "v.gguf", metadata, {})
    start = time.process_time()
    opened = read_gguf(tmp_path / "v.gguf")
    assert time.process_time() - start < 1.5  # 0.1 s on an idle machine
    assert opened.metadata["t.tokens"] == tokens and opened.metadata["t.scores"][-1] == -149_999


def test_only_the_head_is_read(tmp_path: Path) -> None:
    path, columns = tmp_path / "sparse.gguf", 1 << 34
    path.write_bytes(file_of([], [info("w", [columns], 0, 0), info("v", [4], 0, 4 * columns)], b""))
    os.truncate(path, path.stat().st_size + 4 * columns + 16)  # 64 GB, none of it on the disk
    assert torch.equal(read_gguf(path).load("v"), torch.zeros(4))


@pytest.mark.parametrize(
    ("metadata", "slots", "message"),
    [
        ({"ü": 1}, [], "'ü' cannot be a key"),
        ({"x": TypedValue("u8", 256)}, [], "metadata x: the value does not fit its type"),
        ({"x": 1e40}, [], "metadata x: the value does not fit its type"),
        ({"x": "\ud800"}, [], "metadata x: the value does not fit its type"),
        ({"x": None}, [], "metadata x: GGUF has no type for None"),
        ({"x": ["a", 1]}, [], "metadata x: a list cannot hold str and u32"),
        ({"x": TypedValue("u7", 1)}, [], "metadata x: the value does not fit its type"),
        ({}, [GGUFTensorInfo("w" * 64, "F32", (1,))], "names of 1 to 63 bytes"),
        ({}, [GGUFTensorInfo("w", "Q4_K", (2, 128))], "rows of 128 weights cannot be stored as Q4_K"),
        ({}, [GGUFTensorInfo("w", "F32", (1, 1, 1, 1, 1))], r"GGUF has no shape \[1, 1, 1, 1, 1\]"),
        ({}, [GGUFTensorInfo("w", "F32", (0,))], r"GGUF has no shape \[0\]"),
    ],
)
def test_what_the_format_cannot_hold(
    tmp_path: Path, metadata: Any, slots: list[GGUFTensorInfo], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        GGUFWriter(tmp_path / "m.gguf", metadata, slots)
    assert list(tmp_path.iterdir()) == []


def test_wrong_tensors_are_bugs(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", {}, [GGUFTensorInfo("w", "Q8_0", (2, 32))])
    for tensor in (torch.zeros(2, 32), torch.zeros(2, 33, dtype=torch.uint8)):
        with pytest.raises(AssertionError, match="must be"):
            writer.add("w", tensor)
    with pytest.raises(AssertionError, match="never added, first w"):
        writer.finish()


def test_nothing_half_written_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    slots = [GGUFTensorInfo("w", "F32", (4,)), GGUFTensorInfo("v", "F32", (4,))]
    writer = GGUFWriter(path, {}, slots, max_bytes=100)
    assert len(list(tmp_path.iterdir())) == 3
    del writer
    gc.collect()
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(KeyError), GGUFWriter(path, {}, slots) as writer:
        raise KeyError("anything")
    assert list(tmp_path.iterdir()) == [path]
    writer = GGUFWriter(path, {}, slots, max_bytes=100)

    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("attar.checkpoint.shards.os.pwrite", full)
        with pytest.raises(OutputError, match=r"m\.gguf: no space left on the disk \(384 B needed"):
            writer.add("w", torch.zeros(4))
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_a_failing_rename_leaves_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [GGUFTensorInfo("w", "F32", (4,)), GGUFTensorInfo("v", "F32", (4,))]
    writer = GGUFWriter(tmp_path / "m.gguf", {}, slots, max_bytes=100)
    for slot in slots:
        writer.add(slot.name, torch.zeros(4))
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if "00001-of" in self.name:
            raise OSError(30, "Read-only file system", str(self))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OutputError, match="read-only file system"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a folder"):
        GGUFWriter(tmp_path, {}, [])
    with pytest.raises(OutputError, match=r"m\.gguf: there is no folder"):
        GGUFWriter(tmp_path / "none" / "m.gguf", {}, [])


def test_the_writer_is_found_where_it_is_looked_for() -> None:
    assert container.GGUFWriter is GGUFWriter and container.GGUFTensorInfo is GGUFTensorInfo


def test_a_long_table_of_bytes_is_kept_as_bytes(tmp_path):
    """48 MB in a header were 816 MB of Python numbers."""
    table = random.Random(0).randbytes(1 << 20)
    first, again = tmp_path / "a.gguf", tmp_path / "b.gguf"
    GGUFWriter(first, {"general.architecture": "llama", "x": TypedValue("[u8]", list(table))}, []).finish()
    tracemalloc.start()
    opened = read_gguf(first)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert bytes(opened.metadata["x"]) == table and opened.kinds["x"] == "[u8]"
    assert peak < 3 * len(table)
    GGUFWriter(again, typed(opened), []).finish()
    assert again.read_bytes() == first.read_bytes()


def test_every_part_is_on_the_disk_before_any_has_its_name(tmp_path: Path, monkeypatch: Any) -> None:
    slots = [GGUFTensorInfo(name, "F32", (64, 32)) for name in "abc"]
    events = record_flushes(monkeypatch)
    writer = GGUFWriter(tmp_path / "m.gguf", {}, slots, max_bytes=9000)
    for name in "abc":
        writer.add(name, torch.zeros(64, 32))
    files = writer.finish()
    partials = [file.with_name(f".{file.name}.partial") for file in files]
    assert len(files) > 1
    assert events == [
        *(("flush", partial) for partial in partials),
        *(("rename", file) for file in reversed(files)),
        ("flush", tmp_path),
    ]
