"""Multi-token prediction heads: which stored tensors are one, and what becomes of them where a verb changes
the model.

Such a head predicts the token after the next from the last hidden state and the next token's embedding: a
projection of the two joined, a block like the model's own, a norm. Engines draft with it; transformers does
not load it. Families store it as

    mtp.*  model.mtp.*  model.mtp_layers.0.*  model.mtp_block.0.*      Qwen3-Next, Qwen3.5, MiMo, Ernie 4.5
    model.layers.N.*, N from num_hidden_layers on                      DeepSeek V3, GLM-4.5 and later

(DeepSeek-V3, arXiv:2412.19437, 2.2). An open checkpoint has these tensors apart from the model's
(:attr:`attar.checkpoint.open.Checkpoint.mtp`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attar.checkpoint.geometry import geometry

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers")
"""Keys of a config for the number of layers of the head."""
LEFT_OUT = "the multi-token prediction head is left out: {}"

_NAMED = re.compile(r"(^|\.)mtp(_[a-z_]+)?\.")
_LAYER = re.compile(r"^(.*?\.|)layers\.(\d+)\.")
JOINTS = (
    ("eh_proj", "enorm", "hnorm"),
    ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    ("input_proj", "token_layernorm", "hidden_layernorm"),
    ("mtp_linear_proj", "mtp_emb_norm", "mtp_hidden_norm"),
)
"""What joins hidden state and embedding: the projection and the norms of its two inputs, by family."""


def mtp_names(config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The tensors of the head, in order: modules of that name, and layers behind the last one, as many as the
    config says."""
    layers = geometry(dict(config), "float32").layers or 0
    behind = layers + mtp_layers(config)
    matched = {name: match for name in names if (match := _LAYER.match(name))}
    last: dict[str, int] = {}
    for match in matched.values():
        last[match[1]] = max(last.get(match[1], 0), int(match[2]))

    def is_behind(name: str) -> bool:
        layer = matched.get(name)
        return layer is not None and 0 < layers <= int(layer[2]) <= last[layer[1]] < behind

    return [name for name in names if is_behind(name) or _NAMED.search(name)]


def mtp_layers(config: Mapping[str, Any]) -> int:
    """The layers of the head that a config states."""
    counts = [_text(config).get(key) for key in COUNTS]
    return next((count for count in counts if type(count) is int), 0)


def missing_part(names: Iterable[str]) -> str:
    """What a head lacks of that which joins state and embedding; empty where it is whole, or of a family that
    joins them otherwise."""
    steps = {step for name in names for step in name.split(".")}
    joint = max(JOINTS, key=lambda joint: sum(part in steps for part in joint))
    missing = [part for part in joint if part not in steps]
    known = len(missing) < len(joint)
    if known or not any(_NAMED.search(name) for name in names):
        return missing[0] if missing else ""
    return ""


def renumbered(name: str, before: int, after: int) -> str:
    """The name of a head's tensor in a model of another number of layers."""
    match = _LAYER.match(name)
    if match is None or _NAMED.search(name):
        return name
    return f"{match[1]}layers.{int(match[2]) - before + after}.{name[match.end() :]}"


def without_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config that states no head, where it stated one."""
    changed = {key: 0 if key in COUNTS and type(value) is int else value for key, value in config.items()}
    text = changed.get("text_config")
    return {**changed, "text_config": without_mtp(text)} if isinstance(text, Mapping) else changed


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config
