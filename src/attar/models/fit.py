"""Whether config.json, the stored tensors and the tokenizer belong together: checked before any work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from attar.checkpoint.companions import tokenizer_files
from attar.checkpoint.geometry import geometry
from attar.errors import CheckpointError, ModelError
from attar.formats.readers import Decoded, quant_method
from attar.models.draft_heads.kind import refuse_draft_head
from attar.models.plain_config import HEAD, plain_shapes
from attar.models.plain_tokenizer import plain_tokenizer

if TYPE_CHECKING:
    from attar.checkpoint.open import Checkpoint

HINT = "config.json belongs to another model"

_OLD_BUFFERS = r"rotary_emb\.inv_freq|(^|\.)position_ids$"
"""Stored by older versions of transformers, which now computes them."""


def check_fit(checkpoint: Checkpoint, *, text: bool = False) -> None:
    """Refuse a checkpoint that no stage can work on. Reads headers and the tokenizer's files, no weights.

    Args:
        checkpoint: dense, or quantized in a way that attar reads.
        text: the stage reads text, so a tokenizer is needed; otherwise only a present one must load.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the config asks for, or holds codes where
            the config names no quantization; the tokenizer is missing, damaged or of another model.
        ModelError: the architecture has no such tensor, or it is a draft head.
    """
    refuse_draft_head(checkpoint)
    packed = quant_method(checkpoint) is not None
    view: Any = Decoded(checkpoint) if packed else checkpoint
    _check_layers(checkpoint)
    model = None if _plainly_fits(view, packed) else _known_model(view)
    if model is not None:
        _check_tensors(view, model, packed)
    if text or tokenizer_files(checkpoint.path):
        _check_tokenizer(checkpoint, text)


def _plainly_fits(view: Any, packed: bool) -> bool:
    """Whether the tensors are those of the config, for families known without transformers; for all others
    transformers' own model decides."""
    wanted = plain_shapes(view.config)
    if wanted is None:
        return False
    tied = HEAD not in view.tensors and view.config.get("tie_word_embeddings") is True
    expected = {name: shape for name, shape in wanted.items() if not (tied and name == HEAD)}
    numbers = all(info.dtype[0] not in "IU" and info.dtype != "BOOL" for info in view.tensors.values())
    shapes = {name: tuple(info.shape) for name, info in view.tensors.items()}
    return shapes == expected and (packed or numbers)


def _check_tokenizer(checkpoint: Checkpoint, text: bool) -> None:
    if plain_tokenizer(checkpoint.path, checkpoint.config) is not None:
        return
    from attar.models.load import load_tokenizer, read_tokenizer

    if text:
        load_tokenizer(checkpoint)
    else:
        read_tokenizer(checkpoint.path)


def _check_layers(checkpoint: Checkpoint) -> None:
    """Refuse a config with more layers than there are tensors, before a module is built for each."""
    layers = geometry(checkpoint.config, "float32").layers
    if layers is not None and layers > len(checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.path}: config.json says {layers} layers, but there are "
            f"{len(checkpoint.tensors)} tensors",
            hint=HINT,
        )


def _known_model(view: Any) -> Any | None:
    """The model without weights, its experts as they are stored: stacked, or one by one; None for an
    architecture unknown to transformers, which some exports do not need."""
    from attar.models.experts import stack_of, unstack
    from attar.models.load import empty_model
    from attar.models.stored import stored_names

    try:
        model = empty_model(view.config)
    except ModelError:
        return None
    names = stored_names(model, view, strict=False)
    stacks = [name for name, module in model.named_modules() if stack_of(module) is not None]
    stored = all(any(known.startswith(f"{name}.") for known in names) for name in stacks)
    return model if stored else unstack(model)


def _check_tensors(view: Any, model: nn.Module, packed: bool) -> None:
    from attar.models.stored import stored_names

    names = stored_names(model, view, strict=False)
    wanted = {stored: tuple(model.get_parameter(name).shape) for name, stored in names.items()}
    shapes = {stored: tuple(view.tensors[stored].shape) for stored in sorted(wanted)}
    wrong = {stored: (shape, wanted[stored]) for stored, shape in shapes.items() if shape != wanted[stored]}
    extra = sorted(_unknown_names(model, [name for name in view.tensors if name not in wanted]))
    report_misfits(f"{view.path} ({type(model).__name__})", model, wrong=wrong, extra=[])
    try:
        stored_names(model, view)
    except CheckpointError:
        if extra:  # other names: refused by the stage that needs them
            return
        raise
    report_misfits(f"{view.path} ({type(model).__name__})", model, wrong={}, extra=extra)
    codes = [
        name for name in wanted if view.tensors[name].dtype[0] in "IU" or view.tensors[name].dtype == "BOOL"
    ]
    if codes and not packed:
        raise CheckpointError(
            f"{view.path}: tensor {codes[0]} is {view.tensors[codes[0]].dtype}{_more(codes)}, "
            "but config.json has no quantization_config",
            hint="the codes of a quantized model need its config.json",
        )


def _unknown_names(model: Any, names: list[str]) -> Iterator[str]:
    """Stored names that are no part of the model and not ignored by transformers."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    known = model.state_dict().keys()
    patterns = [_OLD_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    passed = re.compile("|".join(f"({pattern})" for pattern in patterns))
    for name in names:
        spellings = (name, name.removeprefix(prefix), prefix + name)
        if not passed.search(name) and not any(spelling in known for spelling in spellings):
            yield name


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
            f"{where}: tensor {name} is {list(stored)}, but the config asks for {list(wanted)}{_more(wrong)}",
            hint=HINT,
        )
    if missing:
        raise ModelError(f"{where}: tensor {missing[0]} is missing{_more(missing)}", hint=HINT)
    extra = [name for name in extra if not _is_spare(model, name)]
    if extra:
        raise ModelError(f"{where}: tensor {extra[0]} has no place in the model{_more(extra)}", hint=HINT)


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


def _more(items: Any) -> str:
    return f", and {len(items) - 1} more" if len(items) > 1 else ""
