"""Block drafters (DFlash, DSpark) in published layouts: tensors, layers of the target, slots, masks.

Names of tensors are ours, but for the input of the slots that are to be filled:

    ours                    theirs
    mask_embedding (H,)     row ``mask_token_id`` of the target's embedding, or of ``embed_tokens.weight``

A mask that is a row of the target's embedding needs no table. For a learned one the table is written, with
the mask in the row of the last token that the head cannot draft, or of the last of all: the least frequent,
or one that pads the vocabulary. Engines read a block behind that very token with a wrong input; what they
write stays the target's.

Numbers of layers: ours n is the state after block n; ``target_layer_ids`` are ours,
``aux_hidden_state_layer_ids`` (the state that enters a block) ours plus 1. The state after the final norm has
no number there.

Slots: DSpark drafts from the anchor's slot on (``sample_from_anchor``), so B slots are B drafts; DFlash has
one fewer. The key is always written: its default differs between readers.

Letters: B slots, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats.draft_heads.content import HeadContent, HeadTarget, entry
from attar.formats.draft_heads.decoder_config import DecoderLayers, with_output_bias, without_output_bias
from attar.formats.draft_heads.reduced import with_mask, without_mask

KINDS = ("dflash", "dspark")
MASK, TABLE = "mask_embedding", "embed_tokens.weight"
MARKOV_TYPES = {"plain": "vanilla", "gated": "gated", "rnn": "rnn"}


def sequential(values: Mapping[str, Any]) -> bool:
    """Whether a head has DSpark's parts: a Markov head or a confidence head."""
    return bool(values["markov_rank"] or values["confidence"])


def block_layers(values: Mapping[str, Any]) -> DecoderLayers:
    """The layers of our config.

    Raises:
        ModelError: they have no norms of queries and keys, which all published ones have.
    """
    layers = DecoderLayers(**values["shape"])
    if not layers.head_norms:
        raise ModelError(
            f"published {values['kind']} heads have norms of queries and keys, this one has none"
        )
    return layers


def layer_ids(head: HeadContent, offset: int) -> list[int]:
    """Numbers of the layers read, ours plus an offset.

    Raises:
        ModelError: one of them is the state after the final norm.
    """
    layers: list[int] = list(head.values["layers"])
    if head.target.layers and layers[-1] >= head.target.layers:
        raise ModelError(
            f"the head reads the state after the target's final norm (layer {layers[-1]})",
            hint="published layouts have states between blocks alone: train with other --layers",
        )
    return [layer + offset for layer in layers]


def sequential_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """DSpark's keys."""
    return {
        "markov_rank": values["markov_rank"],
        "markov_head_type": MARKOV_TYPES[values["markov"]],
        "enable_confidence_head": values["confidence"],
        "confidence_head_with_markov": bool(values["confidence"] and values["markov_rank"]),
    }


def slots(values: Mapping[str, Any]) -> dict[str, Any]:
    """B, and which slot drafts first."""
    anchor = values["kind"] == "dspark"
    return {"block_size": values["drafts"] + (not anchor), "sample_from_anchor": anchor}


def stored_tensors(head: HeadContent) -> tuple[dict[str, Tensor], int]:
    """The tensors of a folder, and its mask token.

    Raises:
        ModelError: the target's embedding is not known.
    """
    tensors = {name: x for name, x in head.tensors.items() if name != MASK}
    tensors = with_output_bias(tensors, block_layers(head.values))
    if head.target.embedding is None:
        raise ModelError(
            f"the mask of {head.kind} is a row of the target's embedding, which is not here",
            hint="name the model with --target MODEL",
        )
    mask, table = head.tensors[MASK], head.target.embedding().to(head.tensors[MASK].dtype)
    same = (table == mask).all(-1).nonzero().flatten()
    if len(same):
        return with_mask(tensors, head.values["vocabulary"]), int(same[0])
    token = _rarest(tensors.get("d2t"), head.values["vocabulary"])
    tensors[TABLE] = table.clone()
    tensors[TABLE][token] = mask
    return with_mask(tensors, head.values["vocabulary"]), token


def block_content(
    config: Mapping[str, Any],
    layers: list[int],
    tensors: Mapping[str, Tensor],
    target: HeadTarget,
    decoder: DecoderLayers,
    where: str,
) -> HeadContent:
    """The head of a folder.

    Args:
        config: ``vocab_size``, ``draft_vocab_size``, ``mask_token_id`` and the keys of :func:`slots` and
            :func:`sequential_config`.
        layers: ours.

    Raises:
        CheckpointError: a key or a tensor is missing or wrong.
        ModelError: a part that attar's heads do not have, or the target's embedding is not known.
    """
    vocabulary = entry(config, "vocab_size", int, where)
    anchor = entry(config, "sample_from_anchor", bool, where)
    rank = config.get("markov_rank") or 0
    types = {theirs: ours for ours, theirs in MARKOV_TYPES.items()}
    markov = config.get("markov_head_type", "vanilla")
    if rank and markov not in types:
        raise ModelError(f"{where}: markov_head_type is {markov!r}", hint=f"one of {', '.join(types)}")
    confidence = bool(config.get("enable_confidence_head") and "confidence_head.proj.weight" in tensors)
    if confidence and rank and not config.get("confidence_head_with_markov"):
        raise ModelError(f"{where}: a confidence head that does not see the Markov embedding is not read")
    kept = without_output_bias({name: x for name, x in tensors.items() if name != TABLE}, where)
    if len(kept.get("lm_head.weight", ())) == vocabulary and "d2t" not in kept:
        del kept["lm_head.weight"]  # the target's own, which trainers store
    mask = _mask(config, tensors, target, where)
    reduced = without_mask({**kept, MASK: mask.to(tensors["fc.weight"].dtype)}, vocabulary, where)
    values = {
        "kind": "dspark" if anchor else "dflash",
        "hidden": entry(config, "hidden_size", int, where),
        "vocabulary": vocabulary,
        "layers": layers,
        "drafts": entry(config, "block_size", int, where) - (not anchor),
        "draft_vocabulary": len(reduced["d2t"]) if "d2t" in reduced else 0,
        "shape": asdict(decoder),
        "markov_rank": rank,
        "markov": types.get(markov, "plain"),
        "confidence": confidence,
        "temperatures": [],
    }
    return HeadContent(values, reduced, target)


def _mask(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: HeadTarget, where: str) -> Tensor:
    """(H,)."""
    token = entry(config, "mask_token_id", int, where)
    if "fc.weight" not in tensors:
        raise CheckpointError(
            f"{where}: no tensor 'fc.weight'", hint="the folder is incomplete; copy it again"
        )
    if TABLE in tensors:
        table = tensors[TABLE]
    elif target.embedding is not None:
        table = target.embedding()
    else:
        raise ModelError(
            f"{where}: its mask is row {token} of the target's embedding, which is not here",
            hint="name the model with --target MODEL",
        )
    if not 0 <= token < len(table):
        raise CheckpointError(f"{where}: mask_token_id is {token}, the embedding has {len(table)} rows")
    return table[token].clone()


def _rarest(offsets: Tensor | None, vocabulary: int) -> int:
    """The last token that the head cannot draft; where it drafts all, the last of all."""
    if offsets is None:
        return vocabulary - 1
    drafted = set((offsets + torch.arange(len(offsets))).tolist())
    return next((token for token in reversed(range(vocabulary)) if token not in drafted), vocabulary - 1)
