"""Stored tensors: which one belongs to which parameter of a model, and the number type of a checkpoint's
weights.

Mostly the names are equal. Checkpoints saved from the bare model lack the prefix of the model with a head
("model.", "transformer.", "bert."), or the other way round; a tied parameter is stored once, under one of
its names. A head stored under an older name (GPT-NeoX: ``embed_out``) is the one tensor of its shape that
belongs to nothing else. A missing tensor of any other parameter is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attar.errors import CheckpointError
from attar.formats.readers import quant_method

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


def stored_names(model: nn.Module, checkpoint: Any, *, strict: bool = True) -> dict[str, str]:
    """Parameter name to stored tensor name, for every parameter (tied ones under each of their names that the
    module tree shows).

    Raises:
        CheckpointError: a parameter has no stored tensor, and ``strict``.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    stored_by_name: dict[str, str] = {}
    missing = []
    for name, _ in model.named_parameters(remove_duplicate=True):
        candidates = (name, name.removeprefix(prefix), prefix + name)
        stored = next((candidate for candidate in candidates if candidate in checkpoint.tensors), None)
        if stored is not None:
            stored_by_name[name] = stored
        else:
            missing.append(name)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    for name in [name for name in missing if name in tied]:
        renamed = _renamed(tuple(model.get_parameter(name).shape), stored_by_name, checkpoint)
        if renamed is not None:
            stored_by_name[name] = renamed
    absent = [name for name in missing if name not in tied]
    if absent and strict:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path}: no tensor for {absent[0]}{more}",
            hint="the checkpoint is incomplete or of another architecture",
        )
    return stored_by_name


def _renamed(shape: tuple[int, ...], stored_by_name: dict[str, str], checkpoint: Any) -> str | None:
    """The one stored tensor of a shape that belongs to no parameter yet; None where there is no or no single
    one."""
    known = frozenset(stored_by_name.values())
    spare = [
        stored
        for stored, info in checkpoint.tensors.items()
        if stored not in known and tuple(info.shape) == shape
    ]
    return spare[0] if len(spare) == 1 else None


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
    names = [part.get(key) for part in configs for key in ("dtype", "torch_dtype")]
    return next((kind for kind in KINDS.values() if str(kind).removeprefix("torch.") in names), None)
