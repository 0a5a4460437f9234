"""The gate of all verbs: whether config.json, tensors and tokenizer belong together, before any work.

:func:`admit` opens a model. What its headers alone tell was judged at the opening
(:mod:`attar.checkpoint.normal_form`); here its family and its tokenizer are asked. The table of what works,
works with a note, or is refused is :mod:`attar.checkpoint.oddities`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from attar.checkpoint.companions import CODE_KEYS, GENERATION, tokenizer_files
from attar.checkpoint.geometry import geometry
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.oddities import ANOTHER_VERSION, REFUSED, Oddity, oddity
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.weight_files import more
from attar.errors import AttarError, CheckpointError, ModelError
from attar.formats.readers import Decoded, quant_method
from attar.models.draft_heads.kind import refuse_draft_head
from attar.models.loading.plain_config import FAMILIES, HEAD, plain_shapes
from attar.models.loading.plain_tokenizer import plain_tokenizer
from attar.progress import Progress

_OLD_BUFFERS = r"rotary_emb\.inv_freq|(^|\.)position_ids$|\.(attn|attention)\.(masked_)?bias$"
"""Stored by older versions of transformers, which now computes them."""

logger = logging.getLogger(__name__)


def admit(
    model: str | Path | Checkpoint,
    progress: Progress | None = None,
    *,
    text: bool = False,
    causal: bool = False,
    dense: bool = False,
) -> Checkpoint:
    """Open a model that a verb is to work on, and print what a user should know of it. Reads headers and the
    tokenizer's files, no weights.

    Args:
        progress: prints the notes; None: they are warnings of the log.
        text: the verb reads text, so a tokenizer is needed; otherwise only a present one must load.
        causal: it predicts next tokens.
        dense: the verb makes weights of its own, so that a packed model comes as a view that decodes it
            (:func:`attar.models.loading.single_experts.decoded_view`), its activations not rounded.

    Raises:
        CheckpointError: the model is missing or damaged; a tensor is missing, has another shape than the
            config asks for, or holds codes where the config names no quantization or another one; the
            tokenizer is missing, damaged or of another model.
        ModelError: the architecture has no such tensor or does not predict tokens, or it is a draft head.
    """
    checkpoint = open_checkpoint(model)
    if not checkpoint.fits:
        checkpoint = fitting(checkpoint)
        for note in checkpoint.notes:
            line = f"{checkpoint.name}: {note}"
            progress.log(f"note: {line}") if progress is not None else logger.warning(line)
    if causal and not geometry(checkpoint.config, "float32").causal:
        architecture = checkpoint.config["architectures"][0]
        raise oddity("headless class", architecture=architecture).error(checkpoint.name)
    if text and not tokenizer_files(checkpoint.path):
        _check_tokenizer(checkpoint)
    if dense and quant_method(checkpoint) is not None:
        from attar.models.loading.single_experts import decoded_view

        return decoded_view(checkpoint)  # type: ignore[no-any-return]
    return checkpoint


def fitting(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint compared with its family and its tokenizer, with what is odd about them. Raises as
    :func:`admit`."""
    refuse_draft_head(checkpoint)
    if (checkpoint.path / GENERATION).is_file():
        read_json(checkpoint.path / GENERATION)  # every verb copies it, and what loads the result reads it
    packed = quant_method(checkpoint) is not None
    checkpoint = _without_code(checkpoint)
    view: Any = checkpoint
    if packed:
        view = Decoded(checkpoint)
        view.check_one_layout()
    model = None if _plainly_fits(view) else _known_model(view)
    odd = [] if model is None else _check_tensors(view, model)
    odd += _check_tokenizer(checkpoint) if tokenizer_files(checkpoint.path) else []
    return replace(checkpoint, oddities=(*checkpoint.oddities, *odd), fits=True)


def judged(checkpoint: Checkpoint) -> tuple[Oddity, ...]:
    """What is odd about an open checkpoint, what is refused included; raises nothing."""
    if any(odd.verdict == REFUSED for odd in checkpoint.oddities):
        return checkpoint.oddities
    try:
        return fitting(checkpoint).oddities
    except AttarError as error:
        reason = error.message.removeprefix(f"{checkpoint.path}: ")
        return (*checkpoint.oddities, oddity("misfit", reason=reason, hint=error.hint or ""))


def _without_code(checkpoint: Checkpoint) -> Checkpoint:
    """Without the keys that name Python files, where transformers has the family itself."""
    if not any(key in checkpoint.config for key in CODE_KEYS) or not _is_known(checkpoint.config):
        return checkpoint
    config = {key: value for key, value in checkpoint.config.items() if key not in CODE_KEYS}
    return replace(checkpoint, config=config, oddities=(*checkpoint.oddities, oddity("code files")))


def _is_known(config: Mapping[str, Any]) -> bool:
    if config["model_type"] in FAMILIES:
        return True
    from attar.models.loading.configs import is_known

    return is_known(config)


def _plainly_fits(view: Any) -> bool:
    """Whether the tensors are those of the config, for families known without transformers; for all others
    transformers' own model decides."""
    wanted = plain_shapes(view.config)
    if wanted is None:
        return False
    tied = HEAD not in view.tensors and view.config.get("tie_word_embeddings") is True
    expected = {name: shape for name, shape in wanted.items() if not (tied and name == HEAD)}
    return {name: tuple(info.shape) for name, info in view.tensors.items()} == expected


def _check_tokenizer(checkpoint: Checkpoint) -> list[Oddity]:
    """What is odd about the tokenizer. Raises where it is missing, damaged or of another model."""
    if plain_tokenizer(checkpoint.path, checkpoint.config) is not None:
        return []
    from attar.models.loading.load import load_tokenizer

    return getattr(load_tokenizer(checkpoint), "oddities", [])


def _known_model(view: Any) -> Any | None:
    """The model without weights, its experts as they are stored: stacked, or one by one; None for an
    architecture unknown to transformers, which some exports do not need."""
    from attar.models.loading.configs import is_known
    from attar.models.loading.empty import empty_model
    from attar.models.loading.experts import stack_of, unstack
    from attar.models.loading.stored import stored_names

    if not is_known(view.config):
        return None
    try:
        model = empty_model(view.config)
    except ModelError as error:
        raise ModelError(f"{view.path / 'config.json'}: {error.message}", hint=error.hint) from error
    names = stored_names(model, view, strict=False)
    stacks = [name for name, module in model.named_modules() if stack_of(module) is not None]
    stored = all(any(known.startswith(f"{name}.") for known in names) for name in stacks)
    return model if stored else unstack(model)


def _check_tensors(view: Any, model: nn.Module) -> list[Oddity]:
    """Compare stored tensors and architecture. Returns what is passed over."""
    from attar.models.loading.stored import report_misfits, stored_buffers, stored_names

    where = f"{view.path} ({type(model).__name__})"
    names = stored_names(model, view, strict=False)
    wanted = {stored: tuple(model.get_parameter(name).shape) for name, stored in names.items()}
    buffers = {stored: model.get_buffer(name) for name, stored in stored_buffers(model, view).items()}
    wanted |= {stored: tuple(buffer.shape) for stored, buffer in buffers.items()}
    shapes = {stored: tuple(view.tensors[stored].shape) for stored in sorted(wanted)}
    wrong = {stored: (shape, wanted[stored]) for stored, shape in shapes.items() if shape != wanted[stored]}
    further = [name for name in view.tensors if name not in wanted]
    extra = sorted(_unknown_names(model, further))
    report_misfits(where, model, wrong=wrong, extra=[])
    try:
        stored_names(model, view)
    except CheckpointError as error:
        if _converts(model, extra):
            return []
        if any(odd.what == "absent tensor" for odd in getattr(view, "oddities", ())):
            error.hint = ANOTHER_VERSION
        raise
    report_misfits(where, model, wrong={}, extra=extra)
    passed = sorted({*extra, *_ignored_names(model, further)})
    architecture = type(model).__name__
    named = {"tensor": f"{passed[0]}{more(passed)}" if passed else "", "architecture": architecture}
    return [oddity("passed over", **named)] if passed else []


def _converts(model: Any, names: list[str]) -> bool:
    """Whether transformers makes the model's tensors out of stored ones of such names (splits, joins)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightConverter)]
    patterns = [
        re.compile(pattern.replace("*", r"\d+")) for rule in rules for pattern in rule.source_patterns
    ]
    return any(pattern.search(name) for name in names for pattern in patterns)


def _unknown_names(model: Any, names: list[str]) -> Iterator[str]:
    """Stored names that are no part of the model and not ignored by transformers."""
    ignored = frozenset(_ignored_names(model, names))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    known = model.state_dict().keys()
    for name in names:
        spellings = (name, name.removeprefix(prefix), prefix + name)
        buffer = re.search(_OLD_BUFFERS, name)
        if name not in ignored and not buffer and not any(spelling in known for spelling in spellings):
            yield name


def _ignored_names(model: Any, names: list[str]) -> list[str]:
    """Stored names that transformers ignores in this family, such as layers that only training needs."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    passed = [re.compile(pattern) for pattern in patterns]
    return [
        name
        for name in names
        if not re.search(_OLD_BUFFERS, name) and any(pattern.search(name) for pattern in passed)
    ]
