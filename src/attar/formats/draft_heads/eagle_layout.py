"""The layout of SafeAILab/EAGLE, SpecForge and SGLang: EAGLE-1, -2 and -3.

    EAGLE-3      architectures ["LlamaForCausalLMEagle3"]; midlayer.*, fc, norm, lm_head, d2t, t2d
    EAGLE-1, -2  fc.{weight,bias}, layers.0.* without an input norm; ``bias`` says whether fc has one; further
                 layers have an input norm

EAGLE-1's readers do not look at ``bias`` but at the class: SGLang's LlamaForCausalLMEagle has one, vLLM's
EagleLlamaForCausalLM, which it makes of LlamaForCausalLM, has none. So the class follows the head. Both take
``bias: true`` for one of attention, and EAGLE has it where nothing is said: it is written where it is false.
What these heads read is the state after the target's final norm.

EAGLE-3's layers are written twice: as SGLang numbers them, ours, under ``eagle_config``, and as vLLM and
llama.cpp do, ours plus 1, at the top. Without them they are the usual ones (``eagle3_head.py``). SpecForge's
``norm_output`` is on where a config does not say, vLLM's off; it is always written.

Read: SafeAILab/EAGLE cb7e084, eagle/model/cnets.py, cnets1.py and ea_model.py; SpecForge a6b6b023,
specforge/modeling/draft/llama3_eagle.py and export/to_sglang.py; vLLM 0.33.0, models/llama_eagle.py,
llama_eagle3.py and configs/eagle.py; SGLang's models/llama_eagle.py and set_eagle3_layers_to_capture;
llama.cpp of llama-cpp-python 0.3.36, conversion/llama.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats.draft_heads import eagle3_layout as eagle3_head
from attar.formats.draft_heads.content import (
    HeadContent,
    HeadTarget,
    entry,
    known_layers,
    rename,
    rest_of,
    with_rest,
)
from attar.formats.draft_heads.decoder_config import (
    DecoderLayers,
    check_depth,
    with_output_bias,
    without_output_bias,
)

KINDS = ("eagle", "eagle3")
SAYS = ("layers", "context")  # of the target
WEIGHTS = "model.safetensors"
LAYOUT = "EAGLE's layout"
DRAFTS = 5  # of a folder that says nothing: EAGLE's own depth of trees


def encode(head: HeadContent) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of the layout.

    Raises:
        ModelError: the layout does not have what the head has.
    """
    values = head.values
    if values["shape"]["head_norms"]:
        raise ModelError(f"{LAYOUT} has no norms of queries and keys", hint="--format speculators has")
    layers = DecoderLayers(**values["shape"])
    config = layers.to_config(values["hidden"], values["vocabulary"], head.target)
    config["num_target_layers"] = head.target.layers
    if head.kind == "eagle3":
        if layers.depth > 1:
            raise ModelError(f"{LAYOUT} has EAGLE-3 of one layer", hint="--format speculators has more")
        keys, tensors = eagle3_head.encode(head, 1, "midlayer.")
        ours = [layer - 1 for layer in keys["eagle_aux_hidden_state_layer_ids"]]
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": values["draft_vocabulary"] or values["vocabulary"],
            "target_hidden_size": values["hidden"],
            "num_aux_hidden_states": len(ours),
            **keys,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ours, "use_aux_hidden_state": True},
        }
    else:
        config["architectures"] = ["LlamaForCausalLMEagle" if values["bias"] else "LlamaForCausalLM"]
        config |= {} if values["bias"] else {"bias": False}
        tensors = with_output_bias(head.tensors, layers)
    return with_rest(config, decode(config, tensors, head.target), head, SAYS), tensors


def decode(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: HeadTarget) -> HeadContent:
    """The head of a folder.

    Args:
        target: what is known of the target besides.

    Raises:
        CheckpointError: a key or a tensor is missing or wrong.
        ModelError: a part that attar's heads do not have, or the number of the target's layers is not known.
    """
    stated, of_target = rest_of(config)
    facts = {"layers": config.get("num_target_layers") or target.layers, **of_target}
    facts.setdefault("context", config.get("max_position_embeddings") or target.context)
    target, decoder = target.stated(facts), DecoderLayers.from_config(config, LAYOUT)
    if any(name.startswith("midlayer.") for name in tensors) or "d2t" in tensors:
        head = eagle3_head.decode(config, _layers(config), DRAFTS, tensors, target, decoder, LAYOUT)
    else:
        head = _first(config, tensors, target, decoder)
    return HeadContent({**head.values, **stated}, head.tensors, head.target)


def _layers(config: Mapping[str, Any]) -> list[int] | None:
    """Ours, as SGLang states them, or as vLLM does; None: not stated."""
    inner = config.get("eagle_config")
    nested = inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, dict) else None
    top = config.get("eagle_aux_hidden_state_layer_ids")
    return list(nested) if nested else [layer - 1 for layer in top] if top else None


def _first(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: HeadTarget, decoder: DecoderLayers
) -> HeadContent:
    """An EAGLE-1 head."""
    rules = ((r"(?:embed_tokens|lm_head)\.weight", ""), (r"(fc\..+|layers\.\d+\..+)", r"\1"))
    ours = without_output_bias(rename(tensors, rules, LAYOUT), LAYOUT)
    check_depth(ours, decoder, LAYOUT)
    if "layers.0.input_layernorm.weight" in ours:
        raise CheckpointError(f"{LAYOUT}: EAGLE's layer has no input_layernorm, this one has")
    values = {
        "kind": "eagle",
        "hidden": entry(config, "hidden_size", int, LAYOUT),
        "vocabulary": entry(config, "vocab_size", int, LAYOUT),
        "layers": [known_layers(target, LAYOUT)],
        "drafts": DRAFTS,
        "draft_vocabulary": 0,
        "shape": asdict(decoder),
        "branches": 1,
        "bias": "fc.bias" in ours,
    }
    return HeadContent(values, ours, target)
