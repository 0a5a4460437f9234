"""Importance matrices against the gguf package's reader and writer, and against bytes laid out by hand."""

import math
import struct

import gguf
import numpy as np
import pytest
import torch

from attar.errors import CheckpointError
from attar.formats.gguf.container import read_gguf
from attar.formats.gguf.imatrix import (
    CHUNK_COUNT,
    CHUNK_SIZE,
    DATASETS,
    ImportanceEntry,
    read_imatrix,
    write_imatrix,
)


def random_entry(inputs, tokens=512.0, seed=0):
    return ImportanceEntry(torch.rand(inputs, generator=torch.Generator().manual_seed(seed)) * tokens, tokens)


def write_theirs(file, tensors, **changes):
    """A file by the gguf package."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", changes.get("datasets", ["wiki.txt", "code.txt"]))
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, value in tensors.items():
        writer.add_tensor(name, np.asarray(value, dtype=changes.get("dtype", np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_the_gguf_package_reads_what_is_written(tmp_path):
    entries = {
        "output.weight": random_entry(64),
        "blk.0.ffn_down.weight": random_entry(96, 1024.0, 1),
        "blk.0.attn_q.weight": random_entry(64, seed=2),
    }
    write_imatrix(tmp_path / "imatrix.gguf", entries, datasets=["python-stdlib"], chunks=12, chunk_size=256)
    reader = gguf.GGUFReader(tmp_path / "imatrix.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["python-stdlib"]
    assert reader.fields["imatrix.datasets"].types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]
    for key, value in (("chunk_count", 12), ("chunk_size", 256)):
        field = reader.fields[f"imatrix.{key}"]
        assert field.types == [gguf.GGUFValueType.UINT32] and field.contents() == value
    assert [one.name for one in reader.tensors] == [
        f"{name}.{leaf}" for name in sorted(entries) for leaf in ("in_sum2", "counts")
    ]
    for one in reader.tensors:
        name, _, leaf = one.name.rpartition(".")
        assert one.tensor_type == gguf.GGMLQuantizationType.F32
        wanted = entries[name].in_sum2.numpy() if leaf == "in_sum2" else [entries[name].count]
        assert list(one.shape) == [len(wanted)] and np.array_equal(one.data, wanted)


def test_what_is_written_is_read_back(tmp_path):
    experts = ImportanceEntry(torch.rand(4, 32), torch.tensor([[5.0], [0.0], [3.0], [8.0]]))
    entries = {"blk.0.attn_q.weight": random_entry(64), "blk.0.ffn_up_exps.weight": experts}
    write_imatrix(tmp_path / "i.gguf", entries, datasets=[], chunks=3, chunk_size=128)
    matrix = read_imatrix(tmp_path / "i.gguf")
    assert sorted(matrix) == sorted(entries)
    for name, entry in entries.items():
        assert torch.equal(matrix[name].in_sum2, entry.in_sum2)
        assert torch.equal(torch.as_tensor(matrix[name].count), torch.as_tensor(entry.count))
    assert isinstance(matrix["blk.0.attn_q.weight"].count, float)
    importance = matrix["blk.0.ffn_up_exps.weight"].importance()
    assert torch.equal(importance[0], experts.in_sum2[0] / 5)
    assert torch.equal(importance[1], torch.ones(32))  # an expert that no token reached
    metadata = read_gguf(tmp_path / "i.gguf").metadata
    assert [metadata[key] for key in (DATASETS, CHUNK_COUNT, CHUNK_SIZE)] == [[], 3, 128]


def test_a_file_of_llama_cpps_shapes_is_read(tmp_path):
    """It has counts (1, 1) and sums (1, K), whose leading 1 a writer may keep or drop."""
    sums = np.arange(1, 65, dtype=np.float32)
    tensors = {
        "blk.0.attn_q.weight.in_sum2": sums[None],
        "blk.0.attn_q.weight.counts": [[16.0]],
        "blk.1.attn_q.weight.in_sum2": sums * 2,
        "blk.1.attn_q.weight.counts": [16.0],
        "blk.1.ffn_up_exps.weight.in_sum2": sums.reshape(2, 32),
        "blk.1.ffn_up_exps.weight.counts": [[4.0], [8.0]],
    }
    file = write_theirs(tmp_path / "theirs.gguf", tensors)
    matrix = read_imatrix(file)
    assert list(matrix) == ["blk.0.attn_q.weight", "blk.1.attn_q.weight", "blk.1.ffn_up_exps.weight"]
    assert matrix["blk.0.attn_q.weight"].in_sum2.tolist() == sums.tolist()
    assert matrix["blk.0.attn_q.weight"].importance().tolist() == (sums / 16).tolist()
    assert matrix["blk.1.ffn_up_exps.weight"].importance()[1].tolist() == (sums[32:] / 8).tolist()


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"blk.0.attn_q.weight": np.zeros(4)}, "holds no importance matrix"),
        ({"a.in_sum2": np.ones(4)}, "a has no .in_sum2 and .counts in F32"),
        ({"a.in_sum2": np.ones(4), "a.counts": np.ones(3)}, "a has 4 sums for 3 counts"),
        ({"a.in_sum2": [1.0, math.nan], "a.counts": [1.0]}, "a holds what is no sum of squares"),
        ({"a.in_sum2": [1.0, -1.0], "a.counts": [1.0]}, "a holds what is no sum of squares"),
    ],
)
def test_what_is_no_importance_matrix_is_refused(tmp_path, tensors, why):
    file = write_theirs(tmp_path / "theirs.gguf", tensors)
    with pytest.raises(CheckpointError, match=why) as caught:
        read_imatrix(file)
    assert str(file) in str(caught.value)


def test_other_number_types_are_refused(tmp_path):
    tensors = {"a.in_sum2": np.ones(4), "a.counts": np.ones(1)}
    with pytest.raises(CheckpointError, match="in F32"):
        read_imatrix(write_theirs(tmp_path / "theirs.gguf", tensors, dtype=np.float16))


def test_entries_that_are_not_finite_are_not_written(tmp_path):
    with pytest.raises(CheckpointError, match="no sum of squares"):
        write_imatrix(
            tmp_path / "i.gguf", {"a": ImportanceEntry(torch.tensor([math.inf]), 1.0)}, ["text"], 1, 1
        )
    assert list(tmp_path.iterdir()) == []


def binary(entries, tail=b""):
    """The older flavour, byte by byte."""
    result = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        result += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        result += struct.pack(f"<{len(values)}f", *values)
    return result + tail


ENTRIES = [("blk.0.attn_k.weight", 4, [4.0, 8.0, 2.0]), ("output.weight", 0, [3.0])]


@pytest.mark.parametrize(
    "tail",
    [b"", struct.pack("<i", 9), struct.pack("<ii", 9, 0), struct.pack("<ii", 9, 8) + b"wiki.txt"],
)
def test_the_older_format_is_read(tmp_path, tail):
    file = tmp_path / "imatrix.dat"
    file.write_bytes(binary(ENTRIES, tail))
    matrix = read_imatrix(file)
    assert list(matrix) == ["blk.0.attn_k.weight", "output.weight"]
    assert matrix["blk.0.attn_k.weight"].importance().tolist() == [1.0, 2.0, 0.5]
    assert matrix["output.weight"].importance().tolist() == [3.0]  # llama.cpp divides by no calls


def test_a_cut_or_foreign_file_is_refused_by_name(tmp_path):
    file, whole = tmp_path / "imatrix.dat", binary(ENTRIES)
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        with pytest.raises(
            CheckpointError, match=r"imatrix\.dat: is no imatrix of llama\.cpp's, or is cut off"
        ):
            read_imatrix(file)
    file.write_bytes(binary([]))
    with pytest.raises(CheckpointError, match="holds no importance matrix"):
        read_imatrix(file)
    with pytest.raises(CheckpointError, match=r"missing\.dat"):
        read_imatrix(tmp_path / "missing.dat")
