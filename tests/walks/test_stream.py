"""The stream walk: bytes, resuming, and memory (measured by benchmarks/memory.py in a process of its own)."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.checkpoint.shards import TensorSpec
from attar.walks.stream import stream
from benchmarks import memory


def make(folder, tensors, shards=1):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        index = {}
        for number in range(shards):
            part = {name: tensors[name] for name in names[number::shards]}
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            save_file(part, folder / file)
            index.update(dict.fromkeys(part, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return open_checkpoint(folder)


def keep(info):
    return [TensorSpec(info.name, info.dtype, info.shape)]


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    return {f"layer.{i}.weight": torch.randn(8, 16, generator=g) for i in range(9)}


@pytest.mark.parametrize("shards", [1, 3])
def test_identity_gives_the_tensors_back(tmp_path, tensors, shards):
    checkpoint = make(tmp_path / "in", tensors, shards)
    (tmp_path / "out").mkdir()
    stream(checkpoint, keep, lambda name, load: {name: load()}, tmp_path / "out")
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensors[name]) for name in got)


def test_tensors_can_be_dropped_split_and_not_even_read(tmp_path, tensors):
    checkpoint = make(tmp_path / "in", tensors)
    (tmp_path / "out").mkdir()

    def layout(info):
        if info.name == "layer.0.weight":
            return []
        if info.name == "layer.1.weight":
            return [TensorSpec("a", "F32", (1,)), TensorSpec("b", "F32", (2,))]
        return keep(info)

    def transform(name, load):
        return {"a": torch.ones(1), "b": torch.zeros(2)} if name == "layer.1.weight" else {name: load() * 2}

    stream(checkpoint, layout, transform, tmp_path / "out")
    got = load_file(tmp_path / "out/model.safetensors")
    assert "layer.0.weight" not in got and got["a"].item() == 1.0 and len(got) == 9
    assert torch.equal(got["layer.5.weight"], tensors["layer.5.weight"] * 2)


@pytest.mark.parametrize("dies_at", range(9))
def test_a_killed_stream_goes_on_and_gives_the_same_bytes(tmp_path, tensors, dies_at):
    checkpoint = make(tmp_path / "in", tensors)
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    stream(checkpoint, keep, lambda name, load: {name: load()}, tmp_path / "whole", shard_bytes=1100)
    seen = []

    def dying(name, load):
        if len(seen) == dies_at:
            raise KeyboardInterrupt
        seen.append(name)
        return {name: load()}

    work = tmp_path / "work"
    with pytest.raises(KeyboardInterrupt):
        stream(checkpoint, keep, dying, tmp_path / "cut", work=work, shard_bytes=1100)
    again = []

    def counting(name, load):
        again.append(name)
        return {name: load()}

    stream(checkpoint, keep, counting, tmp_path / "cut", work=work, shard_bytes=1100)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "cut").iterdir()) and len(files) > 2
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    assert len(again) <= 9 - dies_at + 1  # at most one unfinished shard of two tensors is done again


@pytest.mark.slow
def test_memory_over_a_2_gb_checkpoint_stays_under_700_mb(tmp_path):
    used, size = memory.stream_peak(tmp_path)
    assert size > 2e9 and 20e6 < used < 700e6, f"{used / 1e6:.0f} MB above the bare interpreter"
