"""EAGLE-3 in published layouts: tensors, layers of the target, switches.

Names of tensors are ours, but for the prefix of the first layer, ``layers.0.`` or ``midlayer.``, and t2d. A
layout may leave the layers out, which are then the states that enter blocks 2, L // 2 and L - 3: ours are one
less.

Letters: L blocks of the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats.draft_heads.block_layout import layer_ids
from attar.formats.draft_heads.content import HeadContent, HeadTarget, entry, known_layers, rename
from attar.formats.draft_heads.decoder_config import (
    DecoderLayers,
    check_depth,
    with_output_bias,
    without_output_bias,
)
from attar.formats.draft_heads.reduced import with_mask, without_mask

SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def default_layers(target: HeadTarget, where: str) -> list[int]:
    """Ours, of a config that states none."""
    count = known_layers(target, where)
    return [1, count // 2 - 1, count - 4]


def encode(head: HeadContent, offset: int, prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys and tensors.

    Args:
        offset: of the layout's numbers of layers.
        prefix: of the first layer's tensors.

    Raises:
        ModelError: the head reads the state after the target's final norm.
    """
    tensors = with_output_bias(head.tensors, DecoderLayers(**head.values["shape"]))
    keys = {name: head.values[name] for name in SWITCHES}
    keys["eagle_aux_hidden_state_layer_ids"] = layer_ids(head, offset)
    rules = ((r"layers\.0\.(.+)", prefix + r"\1"), (r"(.+)", r"\1"))
    return keys, rename(with_mask(tensors, head.values["vocabulary"]), rules, "EAGLE-3's layout")


def decode(
    config: Mapping[str, Any],
    layers: list[int] | None,
    drafts: int,
    tensors: Mapping[str, Tensor],
    target: HeadTarget,
    decoder: DecoderLayers,
    where: str,
) -> HeadContent:
    """The head of a folder.

    Args:
        config: ``vocab_size``, ``hidden_size`` and the switches.
        layers: ours; None: the usual ones.

    Raises:
        CheckpointError: a key or a tensor is missing or wrong.
        ModelError: a part that attar's heads do not have, or the number of the target's layers is not known.
    """
    hidden, vocabulary = (entry(config, key, int, where) for key in ("hidden_size", "vocab_size"))
    if config.get("target_hidden_size") not in (None, hidden):
        raise ModelError(
            f"{where}: a head of {hidden} channels on a target of {config['target_hidden_size']}"
        )
    rules = (
        (r"embed_tokens\.weight", ""),  # the target's
        (r"midlayer\.(.+)", r"layers.0.\1"),
        (r"(layers\.\d+\..+|(?:fc|norm|input_norm|fc_norm|lm_head)\..+|d2t|t2d)", r"\1"),
    )
    ours = without_output_bias(rename(tensors, rules, where), where)
    ours = without_mask(ours, vocabulary, where)
    check_depth(ours, decoder, where)
    if "fc.weight" not in ours or "lm_head.weight" not in ours:
        raise CheckpointError(f"{where}: no tensor 'fc.weight' or 'lm_head.weight'")
    layers = layers or default_layers(target, where)
    if ours["fc.weight"].shape[1] != len(layers) * hidden:
        raise CheckpointError(
            f"{where}: fc.weight reads {ours['fc.weight'].shape[1]} channels, not {len(layers)} states"
        )
    values = {
        "kind": "eagle3",
        "hidden": hidden,
        "vocabulary": vocabulary,
        "layers": layers,
        "drafts": drafts,
        "draft_vocabulary": len(ours["d2t"]) if "d2t" in ours else 0,
        "shape": asdict(decoder),
        "branches": 1,
        **{name: bool(config.get(name, False)) for name in SWITCHES},
    }
    return HeadContent(values, ours, target)
