"""GGUF files of tiny models for tests, quantized by the gguf library or filled with random blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.formats.gguf.metadata import metadata
from attar.formats.gguf.tensor_map import placements
from attar.formats.gguf.types import FILE_TYPES, TYPES
from attar.formats.gguf.writer import GGUFTensorInfo, GGUFWriter, stored_form

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "MXFP4": (),
    "NVFP4": (),
}  # fmt: skip
"""Where a block has float16 numbers."""


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bytes at all, with finite float16 numbers where they stand, uint8 (..., row bytes)."""
    generator = torch.Generator().manual_seed(seed)
    _, stored = stored_form(GGUFTensorInfo("w", kind, shape))
    data = torch.randint(0, 256, stored, dtype=torch.uint8, generator=generator)
    view = data.view(-1, TYPES[kind].size)
    for at in HALVES[kind]:
        scale = (torch.randn(len(view), 1, generator=generator) * 0.01).half()
        view[:, at : at + 2] = scale.view(torch.uint8)
    if kind == "MXFP4":
        view[:, 0] = view[:, 0] % 8 + 118
    if kind == "NVFP4":
        view[:, :4] = view[:, :4] % 16 + 8
    return data


def blocks_of(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """A weight quantized by the gguf library, uint8 (N, row bytes)."""
    return torch.from_numpy(quantize(tensor.float().numpy(), GGMLQuantizationType[kind]).copy())


def write_gguf(
    model: str | Path | Checkpoint,
    path: Path,
    kind: str = "F16",
    *,
    extra: dict[str, Any] | None = None,
    replace: dict[str, tuple[str, torch.Tensor]] | None = None,
    max_bytes: int | None = None,
) -> Path:
    """A dense checkpoint as GGUF, its matrices in one type.

    Args:
        extra: metadata besides those of the config; None takes a key away.
        replace: type and data of some tensors.
    """
    source, replace = open_checkpoint(model), replace or {}
    placed = placements(source.config, source.tensors)
    data: dict[str, tuple[str, torch.Tensor]] = {}
    for one in placed:
        tensor = one.apply(source.load(one.stored)) if one.stored else one.value
        chosen = kind if one.matrix else "F32"
        result = tensor.to(FLOATS[chosen]) if chosen in FLOATS else blocks_of(chosen, tensor)
        data[one.gguf] = replace.get(one.gguf, (chosen, result))
    keys = {**metadata(source.config, "tiny"), "general.file_type": FILE_TYPES.get(kind, 0), **(extra or {})}
    keys = {key: value for key, value in keys.items() if value is not None}
    slots = [GGUFTensorInfo(one.gguf, data[one.gguf][0], one.shape) for one in placed]
    writer = GGUFWriter(path, keys, slots, max_bytes=max_bytes)
    for name, (_, tensor) in data.items():
        writer.add(name, tensor)
    return writer.finish()[0]
