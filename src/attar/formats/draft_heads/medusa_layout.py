"""Medusa's own layout: ``medusa_lm_head.safetensors`` and a config of three fields.

    ours, head k, layer j of n          theirs
    blocks.{k}.{j}.linear.{weight,bias} {k}.{j}.linear.{weight,bias}
    heads.{k}.weight                    {k}.{n}.weight

The config is not to be believed: published ones of five heads say ``medusa_num_heads: 2``. Heads, layers and
shapes are the tensors'. What the heads read is the state after the target's final norm. A matrix that all
heads share is written once for each.

Read: FasterDecoding/Medusa e2a5d20, medusa/model/medusa_model.py and medusa/train/train_legacy.py. Neither
vLLM 0.33 nor SGLang 0.5.23 reads Medusa any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats.draft_heads.content import (
    HeadContent,
    HeadTarget,
    known_layers,
    rename,
    rest_of,
    with_rest,
)

KINDS = ("medusa",)
SAYS = ("name",)  # of the target
WEIGHTS = "medusa_lm_head.safetensors"
LAYOUT = "Medusa's layout"


def encode(head: HeadContent) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the layout.

    Raises:
        ModelError: the heads have a vocabulary of their own.
    """
    if head.values["draft_vocabulary"]:
        raise ModelError(f"{LAYOUT} has no reduced vocabulary", hint="train with --draft-vocabulary 0")
    count, layers = head.values["drafts"], head.values["residual_layers"]
    shared = {f"heads.{k}.weight": head.tensors["heads.0.weight"].clone() for k in range(count)}
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": head.target.name,
        "medusa_num_heads": count,
        "medusa_num_layers": layers,
        "hidden_size": head.values["hidden"],
        "vocab_size": head.values["vocabulary"],
    }
    rules = ((r"blocks\.(\d+\.\d+\.linear\.\w+)", r"\1"), (r"heads\.(\d+)\.weight", rf"\1.{layers}.weight"))
    tensors = rename({**head.tensors, **shared} if head.values["shared"] else head.tensors, rules, LAYOUT)
    return with_rest(config, decode(config, tensors, head.target), head, SAYS), tensors


def decode(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: HeadTarget) -> HeadContent:
    """The head of a folder.

    Args:
        target: what is known of the target besides.

    Raises:
        CheckpointError: a tensor is missing or has another name.
        ModelError: the number of the target's layers is not known.
    """
    rules = ((r"(\d+\.\d+\.linear\.\w+)", r"blocks.\1"), (r"(\d+)\.\d+\.weight", r"heads.\1.weight"))
    ours = rename(tensors, rules, LAYOUT)
    counts = [sum(name.startswith(start) for name in ours) for start in ("heads.", "blocks.0.")]
    if "heads.0.weight" not in ours:
        raise CheckpointError(f"{LAYOUT}: the tensors of head 0 are missing")
    vocabulary, hidden = ours["heads.0.weight"].shape
    stated, of_target = rest_of(config)
    target = target.stated({"name": config.get("base_model_name_or_path"), **of_target})
    values = {
        "kind": "medusa",
        "hidden": hidden,
        "vocabulary": vocabulary,
        "layers": [known_layers(target, LAYOUT)],
        "drafts": counts[0],
        "draft_vocabulary": 0,
        "residual_layers": counts[1] // 2,
        "shared": False,
        "tree": [],
    }
    if stated.get("shared"):
        ours = {
            name: x for name, x in ours.items() if not name.startswith("heads.") or name == "heads.0.weight"
        }
    return HeadContent({**values, **stated}, ours, target)
