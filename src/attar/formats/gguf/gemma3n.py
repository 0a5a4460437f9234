"""Gemma 3n's language model in the table of architectures (AltUp, LAuReL, embeddings for each block).

llama.cpp (src/models/gemma3n.cpp) fixes what config.json states: four streams, of which the first is active,
a rank of 64, a width of 256, 95 % of zeros in the first ten blocks, and separate keys and values in the first
twenty. It loads keys of the others too, and does not use them: where a checkpoint has none, they are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from attar.errors import CheckpointError
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
from attar.formats.gguf.gemma4 import BLOCK_EMBEDDING, TABLES, misfit_of_shared_keys, with_shared_keys
from attar.formats.gguf.modules import around_norms, attention, gated_mlp, head_norms, norm, outside

PATTERN = 5
STREAMS, RANK, WIDTH, OWN_KEYS, SPARSE, SPARSITY = 4, 64, 256, 20, 10, 0.95
"""Of llama.cpp: streams of AltUp, LAuReL's rank, the width of a block's embedding, blocks with keys, sparse
blocks and their share of zeros."""


def _sparsity(layers: int) -> list[float]:
    return [SPARSITY if index < SPARSE else 0.0 for index in range(layers)]


def _deviations(layers: int) -> list[float]:
    """By how many standard deviations activations must be above the mean, for each block."""
    normal = torch.distributions.normal.Normal(0, 1)
    return [float(normal.icdf(torch.tensor(share))) for share in _sparsity(layers)]


def _blocks(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """For each block, whether it has a window."""
    seen = window(config, GEMMA3N, layers)
    return seen.blocks if seen else (False,) * layers


def _plain_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    widths = config.get("intermediate_size")
    if isinstance(widths, list) and widths and all(width == widths[0] for width in widths):
        return {**config, "intermediate_size": widths[0]}
    return config


def _misfit(config: Mapping[str, Any], sizes: Sizes) -> str:
    shared, wanted = sizes.of("shared_kv"), max(sizes.layers - OWN_KEYS, 0)
    pattern, usual = config.get("activation_sparsity_pattern"), _sparsity(sizes.layers)
    fixed = {"altup_num_inputs": ("altup", STREAMS), "laurel_rank": ("laurel", RANK)}
    fixed["hidden_size_per_layer_input"] = ("per_layer", WIDTH)
    for key, (size, value) in fixed.items():
        if sizes.of(size) != value:
            return f"{key} is {sizes.of(size)}, but llama.cpp's gemma3n has {value}"
    if shared != wanted:
        return f"num_kv_shared_layers is {shared}, but llama.cpp takes {wanted} for {sizes.layers} blocks"
    if pattern not in (None, usual) or (pattern is None and sizes.layers <= SPARSE):
        return f"activation_sparsity_pattern is {pattern!r}, but llama.cpp has {usual}"
    if sizes.of("table") > sizes.vocabulary:
        return f"vocab_size_per_layer_input is {sizes.of('table')}, but llama.cpp has {sizes.vocabulary} rows"
    return misfit_of_shared_keys(_blocks(config, sizes.layers), shared)


def _in_block(config: Mapping[str, Any], sizes: Sizes, index: int, names: Collection[str]) -> Sizes:
    has_keys = index < sizes.layers - sizes.of("shared_kv")
    return replace(
        sizes,
        more={
            **sizes.more,
            "has_keys": int(has_keys),
            "has_values": int(has_keys),
            "no_keys": int(not has_keys),
        },
    )


def _more_keys(config: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    return {
        "feed_forward_length": [sizes.ff] * sizes.layers,
        "altup.active_idx": 0,
        "activation_sparsity_scale": _deviations(sizes.layers),
        "attention.sliding_window_pattern": list(_blocks(config, sizes.layers)),
    }


def _more_config(get: Callable[[str, Any], Any], sizes: Sizes, names: Collection[str]) -> dict[str, Any]:
    deviations = _deviations(sizes.layers)
    stated = get("activation_sparsity_scale", deviations)
    same = isinstance(stated, list) and torch.tensor(stated).equal(torch.tensor(deviations))
    if not same or get("altup.active_idx", 0) != 0:
        raise CheckpointError(
            "GGUF: gemma3n.activation_sparsity_scale or altup.active_idx is not what llama.cpp computes",
            hint="convert the model again",
        )
    return {
        "activation_sparsity_pattern": _sparsity(sizes.layers),
        "laurel_rank": RANK,
        "vocab_size_per_layer_input": sizes.vocabulary,
    }


def _differences(config: Mapping[str, Any], sizes: Sizes) -> list[str]:
    lines = ["llama.cpp divides the variance of sparse activations by one neuron fewer than transformers"]
    if sizes.of("table") < sizes.vocabulary:
        lines.append(
            f"tokens from {sizes.of('table')} on have no embeddings for blocks, in transformers token 0's"
        )
    return lines


def _altup(gguf: str, stored: str, shape: tuple[str, ...], **more: Any) -> ModuleMapping:
    return ModuleMapping(f"blk.{{}}.altup_{gguf}", f"layers.{{}}.altup.{stored}", shape, **more)


_STREAMS = tuple(
    ModuleMapping(gguf, f"{stored}.{{}}", ("hidden", "hidden"), experts=True, count="altup_others")
    for gguf, stored in (
        ("altup_proj", "altup_projections"),
        ("altup_unembd_proj", "altup_unembed_projections"),
    )
)
_KEYS = (*attention(), *head_norms())

GEMMA3N = Architecture(
    family="gemma3n_text",
    arch="gemma3n",
    model_class="Gemma3nForCausalLM",
    outer=(
        *outside(),
        *(replace(module, rows="table" if "token" in module.gguf else "") for module in TABLES),
        *_STREAMS,
    ),
    blocks=(
        *with_shared_keys(_KEYS),
        *(
            replace(module, needs="no_keys", unused=True)
            for module in with_shared_keys(_KEYS)
            if module.needs
        ),
        *gated_mlp(),
        *around_norms(0.0),
        *BLOCK_EMBEDDING,
        _altup("correct_coef", "correction_coefs", ("altup", "altup"), matrix=False),
        _altup("correct_scale", "correct_output_scale", ("hidden",), matrix=False, leaves=(".weight", "")),
        _altup("predict_coef", "prediction_coefs", ("altup_squared", "altup"), matrix=False),
        _altup("router", "modality_router", ("altup", "hidden")),
        norm("blk.{}.altup_router_norm", "layers.{}.altup.router_norm"),
        ModuleMapping("blk.{}.laurel_l", "layers.{}.laurel.linear_left", ("laurel", "hidden")),
        ModuleMapping("blk.{}.laurel_r", "layers.{}.laurel.linear_right", ("hidden", "laurel")),
        norm("blk.{}.laurel_post_norm", "layers.{}.laurel.post_laurel_norm"),
    ),
    defaults={
        "epsilon": 1e-6,
        "kv_heads": 2,
        "head": 256,
        "context": 32768,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
    },
    counts=(
        ConfigCount("altup", "altup.num_inputs", ("altup_num_inputs",), STREAMS),
        ConfigCount("per_layer", "embedding_length_per_layer_input", ("hidden_size_per_layer_input",), WIDTH),
        ConfigCount("shared_kv", "attention.shared_kv_layers", ("num_kv_shared_layers",), 15, zero=True),
        ConfigCount("laurel", "", ("laurel_rank",), RANK),
        ConfigCount("table", "", ("vocab_size_per_layer_input",), 262_144),
    ),
    rules=(
        ConfigRule("hidden_activation", GELU, "gelu_pytorch_tanh"),
        NO_BIAS,
        ConfigRule("altup_active_idx", (0,), 0),
        ConfigRule("altup_correct_scale", (True,), True),
        ConfigRule("final_logit_softcapping", (30.0,), 30.0),
    ),
    extras=(("final_logit_softcapping", "final_logit_softcapping"),),
    ropes=("default",),
    local_rope=True,
    window=PATTERN,
    window_applied=True,
    window_needed=True,
    misfit=_misfit,
    more_keys=_more_keys,
    more_config=_more_config,
    plain_config=_plain_config,
    in_block=_in_block,
    differences=_differences,
)
