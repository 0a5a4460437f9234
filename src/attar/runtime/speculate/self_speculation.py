"""Self-speculation: the draft model is the target's copy with int4 weights, or without some of its layers.

    int4      all layers, weights rounded to 4 bits, a scale for each 32 inputs; run by the compiled step,
              loaded from the checkpoint again
    layers    part of the layers: the first, the last, and others at even distances. No weight is copied: the
              modules, or the list of packed layers, share the tensors of the target

Both have a KV cache of their own. "int4" is used where the compiled step runs the model and its weights are
not packed already; else "layers" (Zhang et al., arXiv 2309.08168, who search for the best layers; here they
are fixed, and the policy measures the acceptance rate).
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from torch.nn import ModuleList

from attar.checkpoint import Checkpoint, open_checkpoint
from attar.errors import ModelError, SettingsError
from attar.formats import readers
from attar.kernels.decode import pool_bytes
from attar.models.anatomy.discover import text_config
from attar.runtime.loading import Loaded, load
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.device.runner import Device
from attar.runtime.runner.modules import Modules
from attar.runtime.speculate.draft_model import DraftModel
from attar.runtime.speculate.vocabulary import SameVocabulary, map_vocabularies

WAYS = ("auto", "int4", "layers")
SHARE = 0.5  # of the layers
NAME = "self"

logger = logging.getLogger(__name__)


def load_self_draft(
    model: str | Path | Checkpoint,
    target: Loaded,
    *,
    way: str = "auto",
    share: float = SHARE,
    kv_tokens: int | None = None,
    **settings: Any,
) -> DraftModel:
    """A draft model made from the target's own checkpoint; ``nbytes`` has its memory.

    Args:
        model: from which the target was loaded.
        target: the loaded target.
        way: int4, layers, or auto: int4 where possible.
        share: of the layers that "layers" keeps, in (0, 1).
        kv_tokens: capacity of its KV pool in tokens; None: that of the target's.
        settings: of :class:`DraftModel`.

    Raises:
        SettingsError: a setting out of range.
        ModelError: int4 is not possible, or "layers" of a model with one layer.
    """
    if way not in WAYS:
        raise SettingsError("way", way, "auto, int4 or layers")
    if not 0 < share < 1:
        raise SettingsError("share", share, "above 0 and below 1")
    tokens = kv_tokens or target.runner.capacity * target.runner.block_size
    if way != "layers":
        try:
            return _low_bit(model, target, tokens, settings)
        except ModelError as problem:
            if way == "int4":
                raise
            logger.debug("%s drafts with part of its layers: %s", target.name, problem.message)
    return _skipping(target, share, tokens, settings)


def draft_of(draft: Loaded, target: Loaded, **settings: Any) -> DraftModel:
    """A draft model of another loaded model.

    Args:
        draft: with any tokenizer, without eviction.
        target: for which it drafts.
        settings: of :class:`DraftModel`.

    Raises:
        SettingsError: the draft's keys and values are evicted.
        ModelError: its tokenizer shares too few tokens with the target's.
    """
    if draft.eviction is not None:
        raise SettingsError("eviction of the draft", type(draft.eviction).__name__, "None")
    columns = (draft.runner.vocabulary, vocabulary_of(target))
    vocabulary = map_vocabularies(draft.tokenizer, target.tokenizer, columns, (draft.name, target.name))
    return DraftModel(draft.runner, vocabulary, name=draft.name, ends=target.ends, **settings)


def vocabulary_of(target: Loaded) -> int:
    """V: columns of the target's logits without padding."""
    columns = target.runner.vocabulary
    return columns if target.tokenizer is None else min(columns, len(target.tokenizer))


def spread(layers: int, share: float) -> tuple[int, ...]:
    """The layers to keep: about that share but not all; the first, and from two on also the last."""
    count = min(max(ceil(share * layers), 1), layers - 1)
    if count == 1:
        return (0,)
    return tuple(round(position * (layers - 1) / (count - 1)) for position in range(count))


def without_layers(model: Any, keep: tuple[int, ...]) -> Any:
    """A copy of a model with some of its layers, which shares all tensors with the model.

    Modules without children are shared, their parents are copied. Neither model may be modified afterwards.
    """
    leaves = [module for module in model.modules() if not any(module.children())]
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(module): module for module in (*leaves, *tensors)})
    config = text_config(copied)
    layers = config.num_hidden_layers
    stack = next(
        module for module in copied.modules() if isinstance(module, ModuleList) and len(module) == layers
    )
    kept = [stack[layer] for layer in keep]
    del stack[len(keep) :]
    for position, block in enumerate(kept):
        stack[position] = block
        for module in block.modules():
            if getattr(module, "layer_idx", None) is not None:
                module.layer_idx = position
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == layers and "layer" in name:
            setattr(config, name, [value[layer] for layer in keep])
    config.num_hidden_layers = len(keep)
    return copied


def _low_bit(
    model: str | Path | Checkpoint, target: Loaded, kv_tokens: int, settings: dict[str, Any]
) -> DraftModel:
    checkpoint = open_checkpoint(model)
    runner = target.runner
    if readers.quant_method(checkpoint) or (isinstance(runner, Compiled | Device) and _packed(runner)):
        raise ModelError(f"{target.name}: its weights are packed already, int4 would not be much less")
    if isinstance(runner, Device):
        where: dict[str, Any] = {"runner": "device", "device": str(runner.device)}
    else:
        where = {"runner": "compiled"}
    loaded = load(checkpoint, **where, weights="int4", kv_tokens=kv_tokens)
    copied = loaded.runner
    assert isinstance(copied, Compiled | Device)
    weights = copied.weights
    nbytes = weights.nbytes + weights.embedding.nbytes + _pool_bytes(copied)
    return _drafter(copied, target, nbytes, "int4", settings)


def _skipping(target: Loaded, share: float, kv_tokens: int, settings: dict[str, Any]) -> DraftModel:
    runner = target.runner
    blocks = -(-kv_tokens // runner.block_size)
    if isinstance(runner, Compiled | Device):
        weights = runner.weights
        keep = _kept(target, len(weights.layers), share)
        less = replace(weights, layers=tuple(weights.layers[layer] for layer in keep))
        small: Compiled | Device | Modules
        if isinstance(runner, Device):
            small = runner.of(less, blocks)
        else:
            small = Compiled(less, blocks=blocks, block_size=runner.block_size, bits=runner.bits)
        nbytes = _pool_bytes(small)
    else:
        assert isinstance(runner, Modules)
        keep = _kept(target, text_config(runner.model).num_hidden_layers, share)
        small = Modules(without_layers(runner.model, keep), blocks=blocks, block_size=runner.block_size)
        nbytes = small.pool.nbytes
    return _drafter(small, target, nbytes, f"layers {', '.join(map(str, keep))}", settings)


def _kept(target: Loaded, layers: int, share: float) -> tuple[int, ...]:
    if layers < 2:
        raise ModelError(f"{target.name} has one layer: no part of it can draft")
    return spread(layers, share)


def _pool_bytes(runner: Compiled | Device) -> int:
    if isinstance(runner, Device):
        return int(runner.facts["kv_bytes"])
    return pool_bytes(runner.weights, runner.capacity, runner.block_size)


def _packed(runner: Compiled | Device) -> bool:
    """Whether the linear layers have less than 8 bits a weight."""
    layers = runner.weights.layers
    products = [packed for layer in layers for packed in layer.products if packed is not None]
    counts = [module.rows * module.columns * getattr(module, "experts", 1) for module in products]
    return sum(module.nbytes for module in products) < sum(counts)


def _drafter(
    runner: Compiled | Device | Modules, target: Loaded, nbytes: int, how: str, settings: dict[str, Any]
) -> DraftModel:
    logger.info("%s drafts for itself: %s, %.1f MiB more memory", target.name, how, nbytes / 2**20)
    vocabulary = SameVocabulary(runner.vocabulary, vocabulary_of(target))
    return DraftModel(runner, vocabulary, name=NAME, ends=target.ends, nbytes=nbytes, **settings)
