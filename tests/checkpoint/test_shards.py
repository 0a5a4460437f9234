from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attar.checkpoint import ShardWriter, write_checkpoint_tensors
from attar.checkpoint.shards import tensor_spec
from attar.checkpoint.tensors import read_header
from attar.errors import OutputError
from tests.checkpoint.checkpoint_files import llama_tensors
from tests.flushes import record_flushes


def layout_of(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [tensor_spec(name, tensor) for name, tensor in tensors.items()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return sorted(a) == sorted(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_one_shard(tmp_path):
    tensors = llama_tensors()
    paths = write_checkpoint_tensors(tmp_path, tensors)
    assert [path.name for path in paths] == ["model.safetensors"]
    assert list(contents(tmp_path)) == ["model.safetensors"]
    assert same(loaded(tmp_path), tensors)


def test_many_shards_with_an_index(tmp_path):
    tensors = llama_tensors()
    paths = write_checkpoint_tensors(tmp_path, tensors, max_shard_bytes=700)
    assert len(paths) == 5
    assert all(sum(entry.end - entry.begin for entry in read_header(path)) <= 700 for path in paths)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(tensors)
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in tensors.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert same(loaded(tmp_path), tensors)


def test_a_tensor_larger_than_a_shard(tmp_path):
    tensors = {"a": torch.ones(10), "big": torch.ones(1000), "b": torch.ones(10)}
    assert len(write_checkpoint_tensors(tmp_path, tensors, max_shard_bytes=100)) == 3
    assert same(loaded(tmp_path), tensors)


def test_mixed_types_are_aligned(tmp_path):
    tensors = {"odd": torch.ones(3, dtype=torch.uint8), "wide": torch.ones(2, dtype=torch.int64),
               "half": torch.ones(5, dtype=torch.float16), "scalar": torch.tensor(2.0)}  # fmt: skip
    (path,) = write_checkpoint_tensors(tmp_path, tensors)
    for entry in read_header(path):
        assert entry.begin % tensors[entry.name].element_size() == 0
    assert same(loaded(tmp_path), tensors)


def test_inputs_of_any_memory_layout_stay_untouched(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"t": base.T, "slice": base[1:, ::2], "parameter": torch.nn.Parameter(base.clone())}
    write_checkpoint_tensors(tmp_path, tensors)
    assert same(loaded(tmp_path), {name: tensor.detach() for name, tensor in tensors.items()})
    assert torch.equal(base, torch.arange(24.0).reshape(4, 6))


def test_order_of_adding_does_not_matter(tmp_path):
    tensors = llama_tensors()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    write_checkpoint_tensors(tmp_path / "a", tensors, max_shard_bytes=700)
    writer = ShardWriter(tmp_path / "b", layout_of(tensors), max_shard_bytes=700)
    shuffled = list(tensors)
    random.Random(0).shuffle(shuffled)
    for name in shuffled:
        writer.add(name, tensors[name])
    writer.finish()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_an_iterator_gives_the_same_bytes(tmp_path):
    tensors = llama_tensors()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    write_checkpoint_tensors(tmp_path / "a", tensors, max_shard_bytes=700)
    write_checkpoint_tensors(tmp_path / "b", ((n, t) for n, t in tensors.items()), max_shard_bytes=700)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_failing_iterator_leaves_no_spool(tmp_path):
    def broken():
        yield "a", torch.ones(3)
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        write_checkpoint_tensors(tmp_path, broken())
    assert contents(tmp_path) == {}


def test_misuse_is_caught(tmp_path):
    writer = ShardWriter(tmp_path, [("a", "F32", (3,)), ("b", "F32", (3,))])
    with pytest.raises(AssertionError, match="layout says"):
        writer.add("a", torch.ones(4))
    with pytest.raises(AssertionError, match="layout says"):
        writer.add("a", torch.ones(3).half())
    writer.add("a", torch.ones(3))
    with pytest.raises(AssertionError, match="never added, first b"):
        writer.finish()


@pytest.mark.parametrize("stop", range(0, 20, 3))
def test_a_stopped_writer_goes_on_at_the_unfinished_shards(tmp_path, stop):
    tensors = llama_tensors()
    for name in ("whole", "out", "work"):
        (tmp_path / name).mkdir()
    write_checkpoint_tensors(tmp_path / "whole", tensors, max_shard_bytes=700)
    layout = layout_of(tensors)
    first = ShardWriter(tmp_path / "out", layout, max_shard_bytes=700, work=tmp_path / "work")
    for name in first.missing()[:stop]:
        first.add(name, tensors[name])
    still = first.missing()
    second = ShardWriter(tmp_path / "out", layout, max_shard_bytes=700, work=tmp_path / "work")
    assert set(still) <= set(second.missing())
    assert len(second.missing()) - len(still) < 6  # at most the tensors of the one open shard again
    for name in second.missing():
        second.add(name, tensors[name])
    second.finish()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_kill_during_finish_loses_nothing(tmp_path):
    tensors = llama_tensors()
    for name in ("whole", "out", "work"):
        (tmp_path / name).mkdir()
    write_checkpoint_tensors(tmp_path / "whole", tensors, max_shard_bytes=700)
    writer = ShardWriter(tmp_path / "out", layout_of(tensors), max_shard_bytes=700, work=tmp_path / "work")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    (tmp_path / "out").rename(tmp_path / "lost")  # the next run starts with an empty output folder
    (tmp_path / "out").mkdir()
    again = ShardWriter(tmp_path / "out", layout_of(tensors), max_shard_bytes=700, work=tmp_path / "work")
    assert again.missing() == []
    again.finish()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_another_layout_starts_over(tmp_path):
    tensors = llama_tensors()
    write_checkpoint_tensors(tmp_path, tensors, max_shard_bytes=700)
    other = {name: tensor.float() for name, tensor in tensors.items()}
    writer = ShardWriter(tmp_path, layout_of(other))
    assert writer.missing() == list(other)
    for name, tensor in other.items():
        writer.add(name, tensor)
    writer.finish()
    assert list(contents(tmp_path)) == ["model.safetensors"]


def test_a_finished_shard_of_the_wrong_size_is_written_again(tmp_path):
    tensors = llama_tensors()
    writer = ShardWriter(tmp_path, layout_of(tensors), max_shard_bytes=700)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    os.truncate(tmp_path / "model-00002-of-00005.safetensors", 10)
    again = ShardWriter(tmp_path, layout_of(tensors), max_shard_bytes=700)
    assert again.missing()
    assert set(again.missing()) < set(tensors)


MEMORY = """
import sys
from pathlib import Path
import torch
from attar.checkpoint import ShardWriter
from attar.memory import peak_rss_bytes
torch.ones(2_000_000)
before = peak_rss_bytes()
names = [f"t{i}" for i in range(24)]
layout = [(name, "F32", (2_000_000,)) for name in names]
writer = ShardWriter(Path(sys.argv[1]), layout, max_shard_bytes=64_000_000)
for name in names:
    writer.add(name, torch.ones(2_000_000))
writer.finish()
print(peak_rss_bytes() - before)
"""


@pytest.mark.slow
def test_writing_needs_the_memory_of_one_tensor(tmp_path):
    run = subprocess.run([sys.executable, "-c", MEMORY, tmp_path], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 40_000_000  # for 192 MB of 8 MB tensors


def test_a_full_disk_is_reported_before_the_work(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mount.returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        writer = ShardWriter(disk, [("a", "F32", (10,)), ("b", "F32", (1_000_000,))])
        with pytest.raises(OutputError, match=r"no space left on the disk \(4\.00 MB needed, .* free\)"):
            writer.add("a", torch.ones(10))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_shard_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    tensors = llama_tensors()
    work = tmp_path / "work"
    work.mkdir()
    events = record_flushes(monkeypatch)
    writer = ShardWriter(tmp_path, layout_of(tensors), max_shard_bytes=500, work=work)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    assert len(writer.files) > 1
    for file in writer.files:
        at = events.index(("rename", work / file.name))
        assert events[at - 1] == ("flush", work / f".{file.name}.partial") and events[at + 1] == (
            "flush",
            work,
        )
