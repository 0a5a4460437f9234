"""Verbs that stream a checkpoint, in several processes."""

from pathlib import Path

import torch

import attar
from attar.walks.stream import stream, stream_steps
from tests import tiny_models

SHARD = 30_000  # bytes: each output has several shards
DATA = str(Path(torch.__file__).parent / "amp")
MERGE = """
merge_method: {method}
base_model: {base}
models:
  - {{model: {one}, parameters: {{weight: 0.6, density: 0.5}}}}
  - {{model: {two}, parameters: {{weight: 0.5, density: 0.7}}}}
dtype: float32
"""
TWICE = """
name: middle
merge_method: linear
models:
  - {{model: {one}, parameters: {{weight: 0.5}}}}
  - {{model: {two}, parameters: {{weight: 0.5}}}}
dtype: float32
---
merge_method: slerp
base_model: {base}
models: [{{model: {base}}}, {{model: middle}}]
parameters: {{t: 0.4}}
dtype: float32
"""


def models(folder):
    """A model, two that were tuned from it, and a packed one."""
    folder = Path(folder)
    base = tiny_models.build("llama3")
    names = {"base": tiny_models.save(base, folder / "base")}
    for seed, name in enumerate(("one", "two")):
        generator = torch.Generator().manual_seed(seed)
        tuned = tiny_models.build("llama3")
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        names[name] = tiny_models.save(tuned, folder / name)
    options = {"method": "rtn", "scheme": "W4A16", "group_size": 32, "check_tokens": 0}
    names["packed"] = attar.quantize(names["base"], folder / "packed", **options).path
    return {name: str(path) for name, path in names.items()}


def stream_all(names, out):
    """Every verb in this process; the outputs are folders of ``out``."""
    out = Path(out)
    for function in (stream, stream_steps):
        function.__kwdefaults__["shard_bytes"] = SHARD
    base, packed = names["base"], names["packed"]
    rtn = {"method": "rtn", "check_tokens": 0}
    attar.quantize(base, out / "rtn", scheme="W4A16", group_size=32, **rtn)
    attar.quantize(base, out / "nvfp4", scheme="NVFP4A16", **rtn)
    attar.quantize(base, out / "rotated", scheme="W8A16", rotate=True, **rtn)
    attar.export(packed, out / "dense", format="dense")
    attar.export(packed, out / "gptq", format="gptq")
    attar.export(packed, out / "copy", format="compressed-tensors")
    attar.export(base, out / "gguf", format="gguf", type="Q4_0", imatrix="none")
    attar.prune(base, out / "magnitude", method="magnitude", sparsity="0.5")
    attar.extract(names["one"], base, out / "extract", rank=4)
    for method in ("ties", "dare_ties"):
        config = MERGE.format(method=method, **names)
        attar.merge(config, out / method, shard_size=str(SHARD), tokens=0)
    attar.merge(TWICE.format(**names), out / "twice", shard_size=str(SHARD), tokens=0)
