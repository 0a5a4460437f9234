"""Gemma 4's language model in the table of architectures.

Blocks of full attention have wider heads, perhaps another number of KV heads, and perhaps no separate values;
the last blocks may take keys and values of earlier ones, and be twice as wide. llama.cpp
(src/models/gemma4.cpp) takes those of the last two blocks that have them, the last with full attention and
the one before it with a window. A file without a cap of logits is computed with 30, so that the file of a
config without one says 0.

A router's scale and the scales of experts are tensors beside ``ffn_gate_inp`` and ``ffn_down_exps``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.architecture import (
    GELU,
    NO_BIAS,
    Architecture,
    ConfigCount,
    ConfigRule,
    ModuleMapping,
    Sizes,
    window,
)
from attar.formats.gguf.modules import (
    around_norms,
    attention,
    expert_counts,
    gated_mlp,
    head_norms,
    norm,
    outside,
    router,
    stacked_experts,
)
from attar.formats.gguf.placement import piece_name

CAP = 30.0
"""llama.cpp's cap of logits where a file has none."""
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""Keys of ``per_layer_config`` (transformers), and of published configs."""
_PATTERN = 6


TABLES = (
    ModuleMapping(
        "per_layer_token_embd", "embed_tokens_per_layer", ("vocabulary", "per_layers"), needs="per_layer"
    ),
    ModuleMapping(
        "per_layer_model_proj", "per_layer_model_projection", ("per_layers", "hidden"), needs="per_layer"
    ),
    replace(norm("per_layer_proj_norm", "per_layer_projection_norm", size="per_layer"), needs="per_layer"),
)
"""The embedding for each block."""
BLOCK_EMBEDDING = (
    ModuleMapping(
        "blk.{}.inp_gate", "layers.{}.per_layer_input_gate", ("per_layer", "hidden"), needs="per_layer"
    ),
    ModuleMapping(
        "blk.{}.proj", "layers.{}.per_layer_projection", ("hidden", "per_layer"), needs="per_layer"
    ),
    replace(norm("blk.{}.post_norm", "layers.{}.post_per_layer_input_norm"), needs="per_layer"),
)
"""What a block adds of it."""


def with_shared_keys(modules: tuple[ModuleMapping, ...]) -> tuple[ModuleMapping, ...]:
    """Modules of attention of which keys and values are not in all blocks."""
    needs = {"k_proj": "has_keys", "k_norm": "has_keys", "v_proj": "has_values"}
    return tuple(replace(module, needs=needs.get(module.stored.rpartition(".")[2], "")) for module in modules)


def stores_keys(index: int, names: Collection[str]) -> bool:
    """Whether a checkpoint or a file has keys of a block."""
    name = f"layers.{index}.self_attn.k_proj.weight"
    return any(stored in names for stored in (f"blk.{index}.attn_k.weight", name, f"model.{name}"))


def misfit_of_shared_keys(blocks: tuple[bool, ...], shared: int) -> str:
    """Why llama.cpp takes keys of other blocks; empty: it takes the same.

    Args:
        blocks: for each, whether it has a window.
        shared: how many of the last take keys and values of earlier ones.
    """
    last = blocks[: len(blocks) - shared][-2:]
    if shared and last != (True, False):
        return (
            f"num_kv_shared_layers is {shared}, but of the last two blocks before them llama.cpp needs one "
            "with a window, then one without"
        )
    return ""


def _plain_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    plain = {**config, "rope_parameters": config.get("rope_parameters") or _ROPES}
    blocks = config.get("per_layer_config")
    if not blocks:
        return plain
    marked = config.get("layer_types")
    full = {str(i) for i, kind in enumerate(marked or ()) if kind == "full_attention"}
    values = list(blocks.values()) if isinstance(blocks, Mapping) else []
    keys = set().union(*(value.keys() for value in values if isinstance(value, Mapping)))
    if set(map(str, blocks)) != full or any(value != values[0] for value in values) or keys - _FULL.keys():
        raise ModelError(
            f"config of {GEMMA4.family}: per_layer_config is {blocks!r}, but llama.cpp's {GEMMA4.arch} has "
            "one width and number of KV heads for all blocks of full attention",
            hint="export to another format",
        )
    return plain | {_FULL[key]: value for key, value in values[0].items()}


def _blocks(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """For each block, whether it has a window."""
    seen = window(config, GEMMA4, layers)
    return seen.blocks if seen else (False,) * layers


def _misfit(config: Mapping[str, Any], sizes: Sizes) -> str:
    blocks, shared = _blocks(config, sizes.layers), sizes.of("shared_kv")
    table = config.get("vocab_size_per_layer_input", 262_144)
    if blocks[-1]:
        return "layer_types ends with a window, but the last block of a Gemma 4 has full attention"
    if shared >= sizes.layers or (why := misfit_of_shared_keys(blocks, shared)):
        return why if shared < sizes.layers else f"num_kv_shared_layers is {shared}, of {sizes.layers} blocks"
    if sizes.of("per_layer") and table != sizes.vocabulary:
        return f"vocab_size_per_layer_input is {table!r}, but llama.cpp has vocab_size, {sizes.vocabulary}"
    if bool(config.get("enable_moe_block")) != bool(sizes.of("experts")):
        return f"enable_moe_block is {config.get('enable_moe_block')!r} with {sizes.of('experts')} experts"
    return ""


def _in_block(config: Mapping[str, Any], sizes: Sizes, index: int, names: Collection[str]) -> Sizes:
    full = not _blocks(config, sizes.layers)[index]
    shared = index >= sizes.layers - sizes.of("shared_kv")
    same = full and bool(config.get("attention_k_eq_v"))
    kv_heads = sizes.of("global_kv") if same and sizes.of("global_kv") else sizes.kv_heads
    keys = not shared or stores_keys(index, names)
    single = f"layers.{index}.experts.0.gate_proj.weight"
    split = (piece_name(f"blk.{index}.ffn_gate_exps.weight", 0), single, f"model.{single}")
    apart = any(name in names for name in split)
    more = {"has_keys": int(keys), "has_values": int(keys and not same)}
    more |= {"joint_experts": sizes.of("experts") and int(not apart)}
    more |= {"split_experts": sizes.of("experts") and int(apart)}
    wide = bool(config.get("use_double_wide_mlp")) and shared
    return replace(
        sizes,
        head=sizes.of("global_head") if full else sizes.head,
        kv_heads=kv_heads,
        ff=sizes.ff * (2 if wide else 1),
        more={**sizes.more, **more},
    )


def _more_keys(config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    marks, width = _blocks(config, sizes.layers), sizes.of("global_head")
    blocks = [_in_block(config, sizes, index, ()) for index in range(sizes.layers)]
    keys = {
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.key_length_swa": sizes.head,
        "attention.value_length_swa": sizes.head,
        "attention.sliding_window_pattern": list(marks),
        "rope.dimension_count_swa": sizes.head,
        "final_logit_softcapping": float(config.get("final_logit_softcapping") or 0.0),
    }
    if sizes.of("global_kv"):
        keys["attention.head_count_kv"] = [block.kv_heads for block in blocks]
    if config.get("use_double_wide_mlp"):
        keys["feed_forward_length"] = [block.ff for block in blocks]
    return keys


def _plain_keys(get: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The numbers of the first block with a window."""
    marks = get("attention.sliding_window_pattern", None)
    if not isinstance(marks, list) or not any(marks):
        raise CheckpointError(
            f"GGUF: gemma4.attention.sliding_window_pattern is {marks!r}, but must mark blocks",
            hint="convert the model again, with a recent llama.cpp",
        )
    plain = {
        f"attention.{kind}_length": get(f"attention.{kind}_length_swa", None) for kind in ("key", "value")
    }
    for key in ("attention.head_count_kv", "feed_forward_length"):
        value = get(key, None)
        plain[key] = (
            value[marks.index(True)] if isinstance(value, list) and len(value) == len(marks) else value
        )
    return plain


def _more_config(get: Callable[[str, Any], Any], sizes: Sizes, names: Collection[str]) -> dict[str, Any]:
    marks, cap = get("attention.sliding_window_pattern", []), get("final_logit_softcapping", CAP)
    counts, widths = get("attention.head_count_kv", None), get("feed_forward_length", None)
    shared = sizes.of("shared_kv")
    full = [index for index, mark in enumerate(marks[: sizes.layers - shared]) if not mark]
    other = (
        {count for index, count in enumerate(counts) if not marks[index]}
        if isinstance(counts, list)
        else set()
    )
    doubled = [sizes.ff * (2 if index >= sizes.layers - shared else 1) for index in range(sizes.layers)]
    wide = isinstance(widths, list) and len(set(widths)) > 1
    if len(other) > 1 or len(marks) != sizes.layers or not full or (wide and widths != doubled):
        raise CheckpointError(
            "GGUF: gemma4's numbers of single blocks (head_count_kv, feed_forward_length, "
            "sliding_window_pattern) are not those of a Gemma 4",
            hint="the file is damaged; get it again",
        )
    key, value = (get(f"attention.{kind}_length", 0) for kind in ("key", "value"))
    if key != value:
        raise CheckpointError("GGUF: gemma4.attention.value_length is not key_length")
    same = f"blk.{full[0]}.attn_v.weight" not in names
    return {
        "global_head_dim": key,
        "num_global_key_value_heads": other.pop() if other else None,
        "attention_k_eq_v": same,
        "use_double_wide_mlp": wide,
        "enable_moe_block": bool(sizes.of("experts")),
        "num_experts": sizes.of("experts") or None,
        "top_k_experts": sizes.of("used") or None,
        "final_logit_softcapping": cap or None,
        **({"vocab_size_per_layer_input": sizes.vocabulary} if sizes.of("per_layer") else {}),
    }


_ROUTER = "layers.{}.router"
_EXPERTS = "layers.{}.experts"
_MIXTURE = (
    router(f"{_ROUTER}.proj", needs="experts"),
    *(
        ModuleMapping(gguf, stored, size, matrix=False, leaves=(".scale", ""), needs="experts")
        for gguf, stored, size in (
            ("blk.{}.ffn_gate_inp", f"{_ROUTER}.scale", ("hidden",)),
            ("blk.{}.ffn_down_exps", f"{_ROUTER}.per_expert_scale", ("experts",)),
        )
    ),
    *(
        replace(norm(f"blk.{{}}.{gguf}", f"layers.{{}}.{stored}"), needs="experts")
        for gguf, stored in (
            ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
            ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
            ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
        )
    ),
    ModuleMapping(
        "blk.{}.ffn_gate_up_exps",
        f"{_EXPERTS}.gate_up_proj",
        ("expert_gate_up", "hidden"),
        leaves=(".weight", ""),
        experts=True,
        stacked=f"{_EXPERTS}.{{{{}}}}.gate_proj",
        needs="joint_experts",
    ),
    *(
        replace(module, needs="experts" if "down" in module.gguf else "split_experts")
        for module in stacked_experts(_EXPERTS, "gate_up_proj", "down_proj", width="expert_ff", modules="")
    ),
)

GEMMA4 = Architecture(
    family="gemma4_text",
    arch="gemma4",
    model_class="Gemma4ForCausalLM",
    outer=(*outside(), *TABLES),
    blocks=(
        *with_shared_keys((*attention(), *head_norms())),
        *gated_mlp(),
        *around_norms(0.0),
        *_MIXTURE,
        *BLOCK_EMBEDDING,
        ModuleMapping(
            "blk.{}.layer_output_scale",
            "layers.{}.layer_scalar",
            ("one",),
            matrix=False,
            leaves=(".weight", ""),
        ),
    ),
    defaults={
        "epsilon": 1e-6,
        "kv_heads": 4,
        "head": 256,
        "context": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
    },
    counts=(
        ConfigCount(
            "per_layer", "embedding_length_per_layer_input", ("hidden_size_per_layer_input",), 256, True
        ),
        ConfigCount("shared_kv", "attention.shared_kv_layers", ("num_kv_shared_layers",), 0, True),
        ConfigCount("global_head", "", ("global_head_dim",), 512),
        ConfigCount("global_kv", "", ("num_global_key_value_heads",), 0, True),
        *(
            replace(count, keys=("top_k_experts",) if count.size == "used" else count.keys, zero=True)
            for count in expert_counts("num_experts")
        ),
        ConfigCount("expert_ff", "expert_feed_forward_length", ("moe_intermediate_size",), 0, True),
    ),
    rules=(
        ConfigRule("hidden_activation", GELU, "gelu_pytorch_tanh"),
        NO_BIAS,
        ConfigRule("use_bidirectional_attention", (None, "vision"), None),
    ),
    ropes=("proportional",),
    local_rope=True,
    window=_PATTERN,
    window_applied=True,
    window_needed=True,
    misfit=_misfit,
    more_keys=_more_keys,
    more_config=_more_config,
    plain_config=_plain_config,
    plain_keys=_plain_keys,
    in_block=_in_block,
)
