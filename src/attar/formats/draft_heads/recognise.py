"""Which published layout of a draft head a folder is in, by its config and the names of its tensors. Free of
torch.

    speculators   ``speculators_model_type``
    deepspec      an architecture of DeepSpec, z-lab or SpecForge for block drafters
    eagle         EAGLE-3: ``midlayer.*``, or an architecture of SpecForge; EAGLE-1 and -2: a Llama of
                  ``layers.*`` and ``fc`` without the prefix ``model.``
    medusa        ``medusa_num_heads`` and heads alone
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

BLOCK_DRAFTERS = ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
EAGLE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle")


def published_layout(config: Mapping[str, Any], names: Collection[str]) -> str:
    """The name of the layout; empty for a folder that is no published draft head."""
    architectures = config.get("architectures") or [""]
    if "speculators_model_type" in config:
        return "speculators"
    if architectures[0] in BLOCK_DRAFTERS:
        return "deepspec"
    if architectures[0] in EAGLE or any(name.startswith("midlayer.") for name in names):
        return "eagle"
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
        return "eagle"
    if "medusa_num_heads" in config and "0.0.linear.weight" in names:
        return "medusa"
    return ""
