"""What a draft head says of itself, ours or in a published layout, as far as its config and the names of its
tensors tell. Free of torch; reading and writing heads is in ``formats/draft_heads/``, their modules in
``models/draft_heads/``.

    speculators   ``speculators_model_type``
    deepspec      an architecture of DeepSpec, z-lab or SpecForge for block drafters
    eagle         EAGLE-3: ``midlayer.*``, or an architecture of SpecForge; EAGLE-1 and -2: a Llama of
                  ``layers.*`` and ``fc`` without the prefix ``model.``
    medusa        ``medusa_num_heads`` and heads alone

What a layout has no field for is under ``attar`` in a config of ours, which other readers ignore.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

ARCHITECTURE = "AttarDraftHead"
MODEL_TYPE = "attar_draft_head"  # of our own folders
OURS = "attar"
BLOCK_DRAFTERS = ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
EAGLE = (*EAGLE3, "LlamaForCausalLMEagle")
_IDS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


def draft_head_of(config: dict[str, Any], names: Collection[str] = ()) -> dict[str, Any] | None:
    """``kind``, ``target``, ``drafts``, ``layers``, ``hidden``, ``vocabulary`` and ``draft_vocabulary`` of a
    draft head's ``config.json``; None for a model.

    Args:
        names: of the tensors, by which published layouts are recognised that the config does not tell.
    """
    if layout := published_layout(config, names):
        return published_head(config, layout)
    head = config.get("head")
    if config.get("model_type") != MODEL_TYPE or not isinstance(head, dict):
        return None
    names = ("kind", "drafts", "layers", "hidden", "vocabulary", "draft_vocabulary")
    return {"target": config.get("target") or "MODEL"} | {name: head.get(name) for name in names}


def published_layout(config: Mapping[str, Any], names: Collection[str] = ()) -> str:
    """The name of the layout; empty for a folder that is no published draft head, or is ours.

    Args:
        names: of the tensors; without them an EAGLE-1 head that others made may be taken for a Llama.
    """
    architecture = (config.get("architectures") or [""])[0]
    if config.get("model_type") == MODEL_TYPE:
        return ""
    if "speculators_model_type" in config:
        return "speculators"
    if architecture in BLOCK_DRAFTERS:
        return "deepspec"
    if architecture in EAGLE or any(name.startswith("midlayer.") for name in names):
        return "eagle"
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
        return "eagle"
    if "medusa_num_heads" in config and (not names or "0.0.linear.weight" in names):
        return "medusa" if names or config.get("model_type", "medusa") == "medusa" else ""
    return "eagle" if architecture == "LlamaForCausalLM" and "num_target_layers" in config else ""


def published_target(config: Mapping[str, Any]) -> str:
    """The name of the model that it drafts for; empty where the config names none."""
    method = config.get("speculators_config")
    verifier = method.get("verifier") if isinstance(method, dict) else None
    ours = config.get(OURS)
    target = ours.get("target") if isinstance(ours, dict) else None
    names = (
        config.get("base_model_name_or_path"),
        verifier.get("name_or_path") if isinstance(verifier, dict) else None,
        target.get("name") if isinstance(target, dict) else None,
        config.get("target_model_name_or_path"),
    )
    return next((name for name in names if isinstance(name, str) and name), "")


def published_head(config: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """What the config says of the head, as :func:`draft_head_of` gives it; what
    it does not say is None."""
    flat: dict[str, Any] = {}
    for key in ("transformer_layer_config", "dflash_config", "eagle_config"):
        flat |= config[key] if isinstance(config.get(key), dict) else {}
    flat |= config
    kind = _kind(config, flat, layout)
    ours = config.get(OURS)
    stated = ours.get("head") if isinstance(ours, dict) else None
    draft_tokens, vocabulary = flat.get("draft_vocab_size"), flat.get("vocab_size")
    head = {
        "kind": kind,
        "drafts": _drafts(config, flat, kind),
        "layers": _layers(config, flat),
        "hidden": flat.get("hidden_size"),
        "vocabulary": vocabulary,
        "draft_vocabulary": draft_tokens if draft_tokens and draft_tokens != vocabulary else 0,
    }
    more = {key: stated[key] for key in head if isinstance(stated, dict) and key in stated}
    return {"target": published_target(config) or "MODEL", **head, **more}


def _kind(config: Mapping[str, Any], flat: Mapping[str, Any], layout: str) -> str:
    if layout == "medusa":
        return "medusa"
    if layout == "eagle":
        third = (config.get("architectures") or [""])[0] in EAGLE3 or "draft_vocab_size" in flat
        return "eagle3" if third else "eagle"
    kind = str(config.get("speculators_model_type", "dspark"))
    if layout == "deepspec" and config["architectures"][0] == "DFlashDraftModel":
        kind = "dflash"
    if kind not in ("dspark", "dflash"):
        return kind
    return "dspark" if flat.get("sample_from_anchor", kind == "dspark") else "dflash"


def _drafts(config: Mapping[str, Any], flat: Mapping[str, Any], kind: str) -> int | None:
    if kind in ("dspark", "dflash"):
        size = flat.get("block_size")
        return size - (kind == "dflash") if isinstance(size, int) else None
    method = config.get("speculators_config")
    methods = method.get("proposal_methods") if isinstance(method, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else {}
    drafts: int | None = config.get("medusa_num_heads") or first.get("speculative_tokens")
    return drafts


def _layers(config: Mapping[str, Any], flat: Mapping[str, Any]) -> list[int] | None:
    """Ours: after these blocks."""
    after, entering, eagle = (flat.get(key) for key in _IDS)
    nested = config.get("eagle_config")
    if isinstance(nested, dict) and isinstance(nested.get(_IDS[2]), list):
        return list(nested[_IDS[2]])
    if isinstance(after, list):
        return after
    states = entering or eagle
    return [layer - 1 for layer in states] if isinstance(states, list) else None
