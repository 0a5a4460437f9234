"""The number type of a checkpoint's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attar.formats.readers import quant_method

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored_precision(checkpoint: Checkpoint) -> torch.dtype:
    """The type in which a dense model made from this checkpoint is stored.

    A dense checkpoint: the floating-point type of most of its bytes. A quantized one: the type that its
    config names. A GGUF file with quantized blocks: bfloat16, as it does not say what it was made from, and
    float32 would make a 4-bit file five times as large.
    """
    if any(info.block for info in checkpoint.tensors.values()):
        return torch.bfloat16
    if quant_method(checkpoint) is not None and (named := _named(checkpoint.config)) is not None:
        return named
    sizes = dict.fromkeys(KINDS, 0)
    for info in checkpoint.tensors.values():
        if info.dtype in sizes:
            sizes[info.dtype] += info.nbytes
    return KINDS[max(sizes, key=lambda name: sizes[name])]


def precision_note(checkpoint: Checkpoint) -> str | None:
    """One line on the type of :func:`stored_precision` where the checkpoint is quantized; None elsewhere."""
    if quant_method(checkpoint) is None:
        return None
    name = str(stored_precision(checkpoint)).removeprefix("torch.")
    return f"{checkpoint.name} is quantized: its weights are decoded and stored dense, as {name}"


def _named(config: dict[str, Any]) -> torch.dtype | None:
    """The floating-point type that a config.json names, where it is one of :data:`KINDS`."""
    text = config.get("text_config")
    configs = (config, text) if isinstance(text, dict) else (config,)
    names = [each.get(key) for each in configs for key in ("dtype", "torch_dtype")]
    return next((kind for kind in KINDS.values() if str(kind).removeprefix("torch.") in names), None)
