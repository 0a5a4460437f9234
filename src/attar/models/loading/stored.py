"""Stored tensors: which one belongs to which parameter of a model, and the number type of a checkpoint's
weights.

Mostly the names are equal. Checkpoints saved from the bare model lack the prefix of the model with a head
("model.", "transformer.", "bert."), or the other way round; a tied parameter is stored once, under one of
its names. A head stored under an older name (GPT-NeoX: ``embed_out``) is the one tensor of its shape that
belongs to nothing else. Families whose checkpoints spell their modules otherwise (Mixtral's
``block_sparse_moe``) are renamed by transformers' own rules. A missing tensor of any other parameter is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from attar.checkpoint.normal_form import stated_tie
from attar.checkpoint.oddities import ANOTHER_MODEL, oddity
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.weight_files import more
from attar.errors import CheckpointError, ModelError
from attar.formats import mlx
from attar.formats.readers import Decoded, quant_method


def stored_names(model: nn.Module, checkpoint: Any, *, strict: bool = True) -> dict[str, str]:
    """Parameter name to stored tensor name, for every parameter (tied ones under each of their names that the
    module tree shows).

    Raises:
        CheckpointError: a parameter has no stored tensor, a head that is not tied neither, and ``strict``.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=True)]
    stored_by_name = stored_of(model, names, checkpoint)
    missing = [name for name in names if name not in stored_by_name]
    ties = getattr(model, "_tied_weights_keys", None) or {}
    for name in [name for name in missing if name in ties]:
        renamed = _renamed(tuple(model.get_parameter(name).shape), stored_by_name, checkpoint)
        if renamed is not None:
            stored_by_name[name] = renamed
    absent = [name for name in missing if name not in stored_by_name]
    if strict and absent and absent == [name for name in absent if name in ties]:
        flag = stated_tie(checkpoint.config)
        stated = f"not set, so false for {checkpoint.config['model_type']}" if flag is None else "false"
        raise oddity("no head", head=absent[0], flag=stated).error(checkpoint.path)
    stacked = _stacked(model, absent, checkpoint) if strict else None
    if stacked is not None:
        family = getattr(model, "config", None)
        raise ModelError(
            f"{checkpoint.path}: {getattr(family, 'model_type', '')} stores experts stacked, as {stacked}",
            hint="attar takes experts that a checkpoint stores one by one",
        )
    if absent and strict:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path}: no tensor for {absent[0]}{more}",
            hint="the checkpoint is incomplete or of another architecture",
        )
    return stored_by_name


def stored_buffers(model: nn.Module, checkpoint: Any) -> dict[str, str]:
    """Buffer name to stored tensor name, for the buffers that a checkpoint holds (a router's correction)."""
    return stored_of(model, [name for name, _ in model.named_buffers()], checkpoint)


def stored_of(model: nn.Module, names: list[str], checkpoint: Any) -> dict[str, str]:
    """Stored tensor of each name that has one: a parameter, a buffer, or a scale beside them."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    known: dict[str, str] = {}
    spelled: dict[str, str] | None = None
    for name in names:
        candidates = (name, name.removeprefix(prefix), prefix + name)
        stored = next((candidate for candidate in candidates if candidate in checkpoint.tensors), None)
        if stored is None:
            spelled = _respelled(model, checkpoint) if spelled is None else spelled
            stored = next((spelled[candidate] for candidate in candidates if candidate in spelled), None)
        if stored is not None:
            known[name] = stored
    return known


def _respelled(model: Any, checkpoint: Any) -> dict[str, str]:
    """Stored names by what transformers renames them to."""
    if not hasattr(model, "config"):
        return {}
    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    return {apply_renamings(stored, rules): stored for stored in checkpoint.tensors} if rules else {}


def _stacked(model: Any, absent: list[str], checkpoint: Any) -> str | None:
    """The stored tensor that holds the experts of which the first absent parameter is one, if there is."""
    expert = re.match(r"(.*\.experts)\.\d+\.", absent[0]) if absent else None
    if expert is None:
        return None
    names = [f"{expert[1]}.{leaf}" for leaf in ("gate_up_proj", "up_proj")]
    names += [f"{name}_blocks" for name in names]
    return next(iter(stored_of(model, names, checkpoint).values()), None)


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


def decoded_precision(checkpoint: Checkpoint) -> torch.dtype | None:
    """The type of :func:`stored_precision` where weights decode to float32: blocks of GGUF, and MLX; None
    elsewhere."""
    blocks = any(info.block for info in checkpoint.tensors.values())
    return stored_precision(checkpoint) if blocks or quant_method(checkpoint) == mlx.METHOD else None


def precision_note(checkpoint: Checkpoint) -> str | None:
    """One line on the type of :func:`stored_precision` where the checkpoint is quantized; None elsewhere."""
    if quant_method(checkpoint) is None and not isinstance(checkpoint, Decoded):
        return None
    name = str(stored_precision(checkpoint)).removeprefix("torch.")
    return f"{checkpoint.name} is quantized: its weights are decoded and stored dense, as {name}"


def _named(config: dict[str, Any]) -> torch.dtype | None:
    """The floating-point type that a config.json names, where it is one of :data:`KINDS`."""
    text = config.get("text_config")
    configs = (config, text) if isinstance(text, dict) else (config,)
    names = [part.get(key) for part in configs for key in ("dtype", "torch_dtype")]
    return next((kind for kind in KINDS.values() if str(kind).removeprefix("torch.") in names), None)


def report_misfits(
    where: str,
    model: nn.Module,
    *,
    wrong: Mapping[str, tuple[Any, Any]],
    extra: list[str],
    missing: list[str] | None = None,
) -> None:
    """Raise where the stored tensors and the architecture's differ.

    Args:
        wrong: stored and wanted shape by name.
        extra: tensors that no parameter takes; those of a module that the model lacks are spare.
        missing: parameters without a tensor.
    """
    for name, (stored, wanted) in wrong.items():
        raise CheckpointError(
            f"{where}: tensor {name} is {list(stored)}, but the config asks for {list(wanted)}{more(wrong)}",
            hint=ANOTHER_MODEL,
        )
    if missing:
        raise ModelError(f"{where}: tensor {missing[0]} is missing{more(missing)}", hint=ANOTHER_MODEL)
    extra = [name for name in extra if not _is_spare(model, name)]
    if extra:
        raise ModelError(
            f"{where}: tensor {extra[0]} has no place in the model{more(extra)}", hint=ANOTHER_MODEL
        )


def _is_spare(model: nn.Module, name: str) -> bool:
    """Whether a tensor belongs to a module, outside the layers, that the model lacks."""
    steps = name.split(".")
    if any(step.isdigit() for step in steps):
        return False
    path = ""
    for step in steps[:-1]:
        path = f"{path}.{step}".lstrip(".")
        try:
            model.get_submodule(path)
        except AttributeError:
            return True
    return False
