"""The layout of vllm-project/speculators, which vLLM reads: DSpark, DFlash and EAGLE-3.

The config has the keys of the transformer layers under ``transformer_layer_config``, how to draft and the
target under ``speculators_config``, and the keys of the kind at the top; there is no ``model_type``, by which
vLLM knows the layout. What vLLM 0.33 assumes where a key is missing is not always what speculators assumes,
so these are always written:

    sample_from_anchor         DSpark: speculators True, vLLM False
    sliding_window_non_causal  speculators False, by which vLLM makes every block causal: True
    norm_before_residual       speculators False, vLLM True
    num_aux_hidden_states      vLLM 3, and it looks for it under ``transformer_layer_config``

``aux_hidden_state_layer_ids`` number the state that enters a block: ours plus 1.

Read: speculators c05b95b3, src/speculators/config.py and models/*/config.py; vLLM 0.33.0,
transformers_utils/configs/speculators/algos.py and base.py, models/qwen3_dspark.py, qwen3_dflash.py,
llama_eagle3.py and qwen3_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attar.errors import ModelError
from attar.formats.draft_heads import block_layout as block_head
from attar.formats.draft_heads import eagle3_layout as eagle3_head
from attar.formats.draft_heads.content import HeadContent, HeadTarget, entry, rest_of, with_rest
from attar.formats.draft_heads.decoder_config import DecoderLayers

KINDS = (*block_head.KINDS, "eagle3")
SAYS = ("name", "architectures", "context")  # of the target
WEIGHTS = "model.safetensors"
LAYOUT = "speculators' layout"
_CLASSES = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "eagle3": "Eagle3Speculator"}


def encode(head: HeadContent) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the layout.

    Raises:
        ModelError: the layout does not have what the head reads, or the target's embedding is not known.
    """
    values = head.values
    if head.kind == "eagle3":
        kind, fields, tensors = "eagle3", *eagle3_head.encode(head, 1, "layers.0.")
        more = {"num_aux_hidden_states": len(values["layers"])}
    else:
        kind, (fields, tensors), more = (
            "dspark" if block_head.sequential(values) else "dflash",
            _block(head),
            {},
        )
    layers = DecoderLayers(**values["shape"])
    decoder = layers.to_config(values["hidden"], values["vocabulary"], head.target)
    config = {
        "architectures": [_CLASSES[kind]],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": values["drafts"]}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": head.target.name,
                "architectures": list(head.target.architectures),
            },
        },
        "transformer_layer_config": {**decoder, **more},
        "draft_vocab_size": values["draft_vocabulary"] or values["vocabulary"],
        "target_hidden_size": values["hidden"],
        **fields,
        "dtype": "bfloat16",
    }
    return with_rest(config, decode(config, tensors, head.target), head, SAYS), tensors


def decode(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: HeadTarget) -> HeadContent:
    """The head of a folder.

    Args:
        target: what is known of the target besides.

    Raises:
        CheckpointError: a key or a tensor is missing or wrong.
        ModelError: a kind or a part that attar's heads do not have, or the target is not known.
    """
    kind = config.get("speculators_model_type")
    if kind not in _CLASSES:
        raise ModelError(
            f"{LAYOUT}: heads of type {kind!r} are not read", hint=f"one of {', '.join(_CLASSES)}"
        )
    inner = entry(config, "transformer_layer_config", dict, LAYOUT)
    flat = {**inner, **config}
    stated, of_target = rest_of(config)
    method = entry(config, "speculators_config", dict, LAYOUT)
    verifier = entry(method, "verifier", dict, LAYOUT)
    facts = {
        "name": verifier.get("name_or_path"),
        "architectures": verifier.get("architectures"),
        "context": inner.get("max_position_embeddings") or target.context,
        **of_target,
    }
    target, decoder = target.stated(facts), DecoderLayers.from_config(inner, LAYOUT)
    if kind == "eagle3":
        methods = entry(method, "proposal_methods", list, LAYOUT)
        drafts = entry(methods[0] if methods else {}, "speculative_tokens", int, LAYOUT)
        ids = config.get("eagle_aux_hidden_state_layer_ids")
        layers = None if ids is None else [layer - 1 for layer in ids]
        head = eagle3_head.decode(flat, layers, drafts, tensors, target, decoder, LAYOUT)
    else:
        flat.setdefault("sample_from_anchor", kind == "dspark")
        flat.setdefault("block_size", 8)
        layers = [layer - 1 for layer in entry(config, "aux_hidden_state_layer_ids", list, LAYOUT)]
        head = block_head.block_content(flat, layers, tensors, target, decoder, LAYOUT)
    return HeadContent({**head.values, **stated}, head.tensors, head.target)


def _block(head: HeadContent) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The keys of a block drafter, and its tensors."""
    tensors, mask = block_head.stored_tensors(head)
    keys = {
        "aux_hidden_state_layer_ids": block_head.layer_ids(head, 1),
        "mask_token_id": mask,
        "sliding_window_non_causal": True,
        **block_head.slots(head.values),
    }
    more = block_head.sequential_config(head.values) if block_head.sequential(head.values) else {}
    return {**keys, **more}, tensors
