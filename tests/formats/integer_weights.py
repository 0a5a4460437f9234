"""Random integer codes, checkpoint folders of them, and bit strings: for the tests of integer layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from attar.checkpoint import open_checkpoint
from attar.formats.coded import Coded
from attar.formats.rules import WeightRule


def rule(bits: int = 4, size: int = 16, **fields: Any) -> WeightRule:
    """Groups of ``size``; 0: the whole row."""
    return WeightRule("int", bits, "group" if size else "channel", size, **fields)


def random_coded(made: WeightRule, shape: tuple[int, int] = (8, 64), seed: int = 0) -> Coded:
    """Every code of a rule, float16 scales, zero points that are not all the middle, groups in any order."""
    g = torch.Generator().manual_seed(seed)
    half, tiles = 2 ** (made.bits - 1), made.tiles(shape)
    codes = torch.randint(-half, half, shape, generator=g).to(torch.int8)
    codes[0, 0], codes[-1, -1] = -half, half - 1
    scale = (torch.rand(tiles, generator=g) * 0.05 + 1e-4).half().float()
    zero = g_idx = None
    if not made.symmetric:
        zero = torch.randint(1 - half, half, tiles, generator=g).float()
        zero[0, 0], zero[-1, -1] = 1 - half, half - 1
    if made.ordered:
        g_idx = (torch.arange(shape[1]) // made.group_size)[torch.randperm(shape[1], generator=g)]
    return Coded(codes, scale, zero, g_idx=g_idx)


def field(words: torch.Tensor, index: int, bits: int) -> int:
    """Field ``index`` of a little-endian string of 32-bit words."""
    number = sum((int(word) & 0xFFFFFFFF) << (32 * position) for position, word in enumerate(words))
    return number >> (index * bits) & (2**bits - 1)


def words(tensor: torch.Tensor) -> list[int]:
    """32-bit words as unsigned numbers."""
    return [int(word) & 0xFFFFFFFF for word in tensor.flatten()]


def half(number: float) -> float:
    """The nearest float16 of an exact number."""
    return float(torch.tensor(number, dtype=torch.float64).half())


def folder(
    path: Path,
    tensors: dict[str, torch.Tensor],
    quantization_config: dict[str, Any] | None,
    *,
    config_file: tuple[str, dict[str, Any]] | None = None,
    family: str = "llama",
) -> Any:
    """An opened checkpoint of these tensors with its ``quantization_config``, or with a config file more."""
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    config: dict[str, Any] = {"model_type": family, "architectures": ["LlamaForCausalLM"]}
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    (path / "config.json").write_text(json.dumps(config))
    if config_file:
        (path / config_file[0]).write_text(json.dumps(config_file[1]))
    return open_checkpoint(path)


def equal(one: Coded, other: Coded) -> bool:
    """Whether two weights have the same codes, scales, zero points and g_idx, to the bit."""

    def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.shape == b.shape and torch.equal(a, b.to(a.dtype))

    return one.codes.dtype == other.codes.dtype and all(
        same(getattr(one, part), getattr(other, part)) for part in ("codes", "scale", "zero", "g_idx")
    )
