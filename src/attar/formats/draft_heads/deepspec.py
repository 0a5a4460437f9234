"""The layout of DeepSpec, z-lab and SpecForge for block drafters: a Qwen3 config with further keys.

    DSpark   architectures ["Qwen3DSparkModel"]; target_layer_ids, mask_token_id, block_size and the keys of
             the Markov and confidence heads next to those of Qwen3
    DFlash   architectures ["DFlashDraftModel"]; target_layer_ids and mask_token_id under ``dflash_config``

Both are written in both places, because readers differ: vLLM and DeepSpec look at the top, SGLang, SpecForge
and llama.cpp's DFlash under ``dflash_config``. Without ``sample_from_anchor`` DSpark drafts from the anchor's
slot on, and DFlash does not.

Read: deepseek-ai/DeepSpec afdfa7c, deepspec/modeling/dspark; sgl-project/SpecForge a6b6b023,
specforge/modeling/draft and configs; vLLM 0.33.0, models/qwen3_dspark.py and qwen3_dflash.py; llama.cpp of
llama-cpp-python 0.3.36, conversion/qwen.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attar.formats.draft_heads.block_layout import (
    KINDS,
    block_content,
    block_layers,
    layer_ids,
    sequential,
    sequential_config,
    slots,
    stored_tensors,
)
from attar.formats.draft_heads.content import HeadContent, HeadTarget, entry, rest_of, with_rest
from attar.formats.draft_heads.decoder_config import DecoderLayers

__all__ = ["KINDS", "WEIGHTS", "decode", "encode"]

SAYS = ("layers", "context")  # of the target
WEIGHTS = "model.safetensors"
LAYOUT = "DeepSpec's layout"
ANCHORS = 512  # DeepSpec's number of anchors a row in training, which its loader asks for


def encode(head: HeadContent) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the layout.

    Raises:
        ModelError: the layout does not have what the head reads, or the target's embedding is not known.
    """
    values, dspark = head.values, sequential(head.values)
    tensors, mask = stored_tensors(head)
    decoder = block_layers(values).to_config(values["hidden"], values["vocabulary"], head.target)
    inner = {"mask_token_id": mask, "target_layer_ids": layer_ids(head, 0), **slots(values)}
    inner |= sequential_config(values) if dspark else {}
    config = {
        "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
        **decoder,
        **inner,
        "draft_vocab_size": values["draft_vocabulary"] or values["vocabulary"],
        "num_target_layers": head.target.layers,
        "num_anchors": ANCHORS,
        "dflash_config": {**inner, "projector_type": "dspark"} if dspark else inner,
    }
    return with_rest(config, decode(config, tensors, head.target), head, SAYS), tensors


def decode(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: HeadTarget) -> HeadContent:
    """The head of a folder.

    Args:
        target: what is known of the target besides.

    Raises:
        CheckpointError: a key or a tensor is missing or wrong.
        ModelError: a part that attar's heads do not have, or the target's embedding is not known.
    """
    inner = config.get("dflash_config")
    flat = {**(inner if isinstance(inner, dict) else {}), **config}
    flat.setdefault("sample_from_anchor", config["architectures"][0] != "DFlashDraftModel")
    stated, of_target = rest_of(config)
    facts = {"layers": config.get("num_target_layers") or target.layers, **of_target}
    facts.setdefault("context", config.get("max_position_embeddings") or target.context)
    layers = entry(flat, "target_layer_ids", list, LAYOUT)
    decoder = DecoderLayers.from_config(flat, LAYOUT)
    head = block_content(flat, layers, tensors, target.stated(facts), decoder, LAYOUT)
    return HeadContent({**head.values, **stated}, head.tensors, head.target)
