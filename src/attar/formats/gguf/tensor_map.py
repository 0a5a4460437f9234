"""Which models can be written as GGUF, and the placement of each of their tensors in the file.

    architecture(config)                              refuses what llama.cpp would compute differently
    for placement in placements(config, checkpoint.tensors):
        tensor = placement.apply(checkpoint.load(placement.stored)) if placement.stored else placement.value

How a tensor changes on its way is in placement.py.

Differs from llama.cpp's converter: a tensor that the table does not know is an error, and so is a config that
llama.cpp cannot follow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attar.errors import CheckpointError, ModelError, nearest
from attar.formats.gguf.architecture import (
    Architecture,
    ModuleMapping,
    Sizes,
    attends,
    number,
    sizes,
    window,
)
from attar.formats.gguf.families import ARCHITECTURES
from attar.formats.gguf.multipliers import multipliers
from attar.formats.gguf.placement import Placement
from attar.formats.gguf.rope import read_rope, rope_tensors
from attar.formats.stored_part import StoredPart

UNRANKED = (26, 27)
"""Blocks of DeepSeek-V2-Lite and its kin, by which llama.cpp's deepseek2 knows them."""
BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "rotary_emb.inv_freq",
)
"""Endings of stored buffers: old checkpoints have masks and frequencies."""


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The family of a config, checked.

    Raises:
        ModelError: GGUF or llama.cpp cannot express it; names the key or the family.
    """
    family = config.get("model_type")
    if "text_config" in config:
        raise ModelError(
            f"{family} is more than a language model, which is all that attar writes to GGUF",
            hint="save its language model alone",
        )
    if family not in ARCHITECTURES:
        raise ModelError(
            f"attar cannot write {family!r} as GGUF", hint=f"it can write {', '.join(sorted(ARCHITECTURES))}"
        )
    _check(config, ARCHITECTURES[family])
    return ARCHITECTURES[family]


def _check(config: Mapping[str, Any], arch: Architecture) -> None:
    for rule in arch.rules:
        value = config.get(rule.key, rule.default)
        fits = isinstance(value, int | float) if rule.allowed is None else value in rule.allowed
        if not fits:
            wanted = "a number" if rule.allowed is None else " or ".join(map(str, rule.allowed))
            raise ModelError(
                f"config of {arch.family}: {rule.key} is {value!r}, but llama.cpp's {arch.arch} knows "
                f"{wanted} only",
                hint="export to another format",
            )
    _check_tied(config, arch)
    measured = sizes(config, arch)
    _check_scale(config, arch, measured)
    _check_no_rope(config, arch, measured.layers)
    attends(config, arch, measured.layers)
    if misfit := arch.misfit(config, measured):
        raise ModelError(f"config of {arch.family}: {misfit}", hint="export to another format")
    if arch.latent and measured.of("q_rank") and measured.layers in UNRANKED:
        raise ModelError(
            f"config of {arch.family}: llama.cpp takes one of {measured.layers} blocks for a model without "
            "q_lora_rank",
            hint="this comes from removing layers; remove others too",
        )
    read_rope(config, arch, measured)
    if not window(config, arch, measured.layers) and arch.window_needed:
        raise ModelError(
            f"config of {arch.family}: no block has a sliding window; llama.cpp's {arch.arch} needs one",
            hint="export to another format",
        )


def _check_tied(config: Mapping[str, Any], arch: Architecture) -> None:
    tied = _tied(config, arch)
    if arch.head == "never" and not tied:
        raise ModelError(f"{arch.family}: GGUF's {arch.arch} has no separate head, so the head must be tied")
    if arch.head_bias and tied:
        raise ModelError(f"{arch.family}: GGUF's {arch.arch} has no tied head")


def _check_no_rope(config: Mapping[str, Any], arch: Architecture, layers: int) -> None:
    """llama.cpp applies no rotary embedding in each n-th block, whatever the config states."""
    if not arch.no_rope_interval:
        return
    usual = [int((index + 1) % arch.no_rope_interval != 0) for index in range(layers)]
    interval = config.get("no_rope_layer_interval", arch.no_rope_interval)
    layers_with_rope = config.get("no_rope_layers") or [
        int((index + 1) % interval != 0) for index in range(layers)
    ]
    if layers_with_rope != usual:
        raise ModelError(
            f"config of {arch.family}: no_rope_layers is {layers_with_rope}, but llama.cpp leaves out only "
            f"each {arch.no_rope_interval}th block",
            hint="this comes from removing layers; remove neurons or heads instead",
        )


def _check_scale(config: Mapping[str, Any], arch: Architecture, measured: Sizes) -> None:
    """llama.cpp chooses the scale of queries by the number of blocks."""
    if not arch.scale_by_layers:
        return
    scalar = number(config, arch, "query_pre_attn_scalar")
    if not isinstance(scalar, int | float) or not math.isclose(scalar, query_scalar(arch, measured)):
        raise ModelError(
            f"config of {arch.family}: query_pre_attn_scalar is {scalar}, but llama.cpp computes with "
            f"{query_scalar(arch, measured)} for {measured.layers} blocks of this width",
            hint="this comes from removing layers or heads of the largest model; remove neurons instead",
        )


def query_scalar(arch: Architecture, measured: Sizes) -> int:
    """Gemma's ``query_pre_attn_scalar``, as llama.cpp has it."""
    by_layers = measured.layers == arch.scale_by_layers
    return measured.hidden // measured.heads if by_layers else measured.head


def placements(config: Mapping[str, Any], stored: Mapping[str, Any]) -> list[Placement]:
    """Every tensor of the file, in its order.

    Args:
        stored: the checkpoint's tensors by name, each with a ``shape``.

    Raises:
        ModelError: as :func:`architecture`.
        CheckpointError: a tensor is missing, of another shape, or unknown; names it.
    """
    arch = architecture(config)
    resolved = [_resolve(placement, arch, stored) for placement in expected_placements(config, stored)]
    used = frozenset(placement.stored for placement in resolved)
    if _tied(config, arch):
        used |= {f"{name}.weight" for name in arch.head_names}
    for name in stored:
        if name not in used and not name.endswith(BUFFERS):
            raise CheckpointError(
                f"tensor {name!r} of the checkpoint has no place in a GGUF file of {arch.family}",
                hint="the config does not speak of it; is it of another architecture?",
            )
    return resolved


def _resolve(placement: Placement, arch: Architecture, stored: Mapping[str, Any]) -> Placement:
    """The placement under the checkpoint's name, which lacks the prefix where the bare model was saved."""
    usual = placement.stored
    if usual is None:
        return placement
    names = [usual, usual.removeprefix(arch.prefix)]
    leaf = usual.rsplit(".", 1)[1]
    if usual.rsplit(".", 1)[0] in arch.head_names:
        names = [f"{name}.{leaf}" for name in arch.head_names]
    singles = [placement.single, placement.single.removeprefix(arch.prefix)]
    single = next((name for name in singles if name and name in stored), None)
    if single is not None:  # quantized, which stores stacked experts one by one
        placement = replace(placement, part=None, transposed=False, single="")
        names = [single]
    name = next((name for name in names if name in stored), None)
    if name is None and placement.unused:
        return replace(placement, stored=None, value=torch.zeros(placement.shape))
    if name is None:
        close = nearest(usual, stored)
        raise CheckpointError(
            f"the checkpoint has no tensor {usual!r}",
            hint=f"is it {close!r}? The config says that the model is {arch.family}" if close else None,
        )
    shape = tuple(stored[name].shape)
    if shape != placement.stored_shape:
        raise CheckpointError(
            f"tensor {name!r} is {list(shape)}, but the config says {list(placement.stored_shape)}",
            hint="GGUF has one width for all blocks, from the config",
        )
    return replace(placement, stored=name)


def expected_placements(config: Mapping[str, Any], names: Collection[str] = ()) -> list[Placement]:
    """The tensors that a config implies, under transformers' usual names; nothing is checked against a
    file.

    Args:
        names: of the checkpoint's tensors or of the file's, which say how many blocks predict further tokens.
    """
    arch = architecture(config)
    measured = sizes(config, arch)
    rows = _orders(arch, measured)
    rope = read_rope(config, arch, measured)
    computed = [
        Placement(name, None, tuple(value.shape), matrix=False, value=value)
        for name, value in (rope_tensors(rope) if rope else {}).items()
    ]
    outer = [module for module in arch.outer if not module.needs or measured.of(module.needs)]
    marks = attends(config, arch, measured.layers)
    blocks = [
        (_in_block(module, index), block_sizes)
        for index in range(measured.layers)
        for block_sizes in [arch.in_block(config, measured, index, names)]
        for module in arch.blocks
        if _present(module, index, config, block_sizes)
        and (not module.mixer or (module.mixer == "attention") == marks[index])
    ]
    blocks += _nextn_modules(config, arch, measured, names)
    outside, inside = (
        [
            placement
            for module, block_sizes in modules
            for placement in _tensors(config, arch, block_sizes, module, rows)
        ]
        for modules in ([(module, measured) for module in [*outer, *_head(config, arch)]], blocks)
    )
    return outside + computed + inside


def nextn_count(arch: Architecture, layers: int, names: Collection[str]) -> int:
    """How many blocks that predict further tokens a checkpoint or a file has, by its tensors' names."""
    count = 0
    if arch.nextn is None:
        return count
    stored = [f"{arch.prefix}layers.{{}}.", "layers.{}."]
    first = layers
    if arch.nextn.stored:
        stored, first = [f"{arch.nextn.stored}."], 0
    while any(
        name.startswith((f"blk.{layers + count}.", *(block.format(first + count) for block in stored)))
        for name in names
    ):
        count += 1
    return count


def _nextn_modules(
    config: Mapping[str, Any], arch: Architecture, measured: Sizes, names: Collection[str]
) -> list[tuple[ModuleMapping, Sizes]]:
    """The modules of the blocks that predict further tokens, with the sizes of their block: a block with
    attention, and what joins it."""
    modules: list[tuple[ModuleMapping, Sizes]] = []
    for position in range(nextn_count(arch, measured.layers, names)):
        assert arch.nextn is not None, "they were counted"
        index, inside = measured.layers + position, arch.nextn.stored.format(position)
        block_sizes = arch.in_block(config, measured, index, names)
        for module in arch.blocks:
            if module.mixer != "state" and _present(module, index, config, block_sizes):
                moved = (
                    replace(module, stored=module.stored.replace("layers.{}", inside, 1))
                    if inside
                    else module
                )
                modules.append((_in_block(moved, index), block_sizes))
        for module in (
            _in_block(module, index) for module in arch.nextn.modules if not (inside and position)
        ):
            if not module.optional or any(name in names for name in _both_names(module, arch)):
                modules.append((module, block_sizes))
    return modules


def _both_names(module: ModuleMapping, arch: Architecture) -> tuple[str, ...]:
    stored = f"{module.stored}{module.leaves[1]}"
    return f"{module.gguf}{module.leaves[0]}", stored, f"{arch.prefix}{stored}"


def _in_block(module: ModuleMapping, index: int) -> ModuleMapping:
    return replace(
        module,
        gguf=module.gguf.format(index),
        stored=module.stored.format(index),
        stacked=module.stacked.format(index),
    )


def _orders(arch: Architecture, measured: Sizes) -> dict[str, Tensor]:
    """Orders of rows and inputs by name; none for heads that are in order."""
    heads = {"q": measured.heads, "k": measured.kv_heads}
    groups, values, width = (measured.more.get(f"delta_{of}", 0) for of in ("groups", "heads", "state"))
    orders = sorted({order for module in arch.blocks for order in (module.order, module.columns) if order})
    order_of = {}
    for order in orders:
        if order in heads:
            order_of[order] = paired(heads[order], measured.head)
        elif order == "delta":
            order_of[order] = sorted_delta(groups, values, width)
        elif order == "groups":
            order_of[order] = sorted_groups(measured.heads, measured.kv_heads, measured.head)
        elif groups != values:
            order_of[order] = tiled(groups, values, 1 if order == "tiled heads" else width)
            if order == "tiled qkv":
                keys = 2 * groups * width
                order_of[order] = torch.cat([torch.arange(keys), keys + order_of[order]])
    return order_of


def _head(config: Mapping[str, Any], arch: Architecture) -> list[ModuleMapping]:
    """The head, unless the embedding replaces it; a needed tied head is a copy of the embedding, and so is
    one that is multiplied by another number."""
    shape, scales = ("vocabulary", "hidden"), (arch.head_scale,) if arch.head_scale else ()
    if not _tied(config, arch):
        return [ModuleMapping("output", arch.head_names[0], shape, bias=arch.head_bias, scales=scales)]
    embedding = next(module for module in arch.outer if module.gguf == "token_embd")
    other = multipliers(config, embedding.scales, ()) != multipliers(config, scales, ())
    needed = arch.head == "needed" or other
    return [ModuleMapping("output", embedding.stored, shape, scales=scales)] if needed else []


def _tied(config: Mapping[str, Any], arch: Architecture) -> bool:
    keys = ("tie_embedding", "tie_word_embeddings")  # the first is LFM2's
    default = arch.defaults.get("tie_word_embeddings", False)
    return bool(next((config[key] for key in keys if key in config), default))


def _tensors(
    config: Mapping[str, Any],
    arch: Architecture,
    measured: Sizes,
    module: ModuleMapping,
    rows: Mapping[str, Tensor],
) -> Iterator[Placement]:
    """Weight and bias of a module."""
    apart = module.stored in arch.head_names or module.stored.startswith("mtp.")
    prefix = "" if apart else arch.prefix
    stored, shape = f"{prefix}{module.stored}", tuple(measured.of(size) for size in module.shape)
    weight = Placement(
        f"{module.gguf}{module.leaves[0]}",
        f"{stored}{module.leaves[1]}",
        shape,
        transposed=module.transposed and not module.stacked,
        rows=rows.get(module.order),
        columns=rows.get(module.columns),
        stored_rows=measured.of(module.rows) if module.rows else 0,
        plus=module.plus,
        matrix=module.matrix,
        form=tuple(measured.of(size) for size in module.form),
        negative_exp=module.negative_exp,
        scales=multipliers(config, module.scales, measured.ssm_rows),
        unused=module.unused,
    )
    if module.experts:
        count = measured.of(module.count)
        for expert in range(count):
            part = _part(module, shape, measured, expert if module.stacked else None)
            name = str(weight.stored).format(expert)
            single = (
                f"{arch.prefix}{module.stacked.format(expert)}{module.leaves[0]}" if module.stacked else ""
            )
            yield replace(weight, stored=name, part=part, expert=expert, experts=count, single=single)
    else:
        yield replace(weight, part=_part(module, shape, measured, None))
    if _biased(config, module):
        yield Placement(
            f"{module.gguf}.bias", f"{stored}.bias", shape[:1], rows=rows.get(module.order), matrix=False
        )


def _part(
    module: ModuleMapping, shape: tuple[int, ...], measured: Sizes, expert: int | None
) -> StoredPart | None:
    """What a module is of its stored tensor; None: all of it."""
    if module.part in ("keys", "values"):
        heads, nope = measured.heads, measured.of("nope")
        both = (heads * (nope + measured.of("value")), measured.of("kv_rank"))
        keys = module.part == "keys"
        return StoredPart(
            both, heads=heads, axis=1, rows=slice(nope) if keys else slice(nope, None), turned=keys
        )
    if module.part in ("qkv", "gate"):
        groups, qkv = measured.of("delta_groups"), measured.of("delta_qkv") // measured.of("delta_groups")
        part = slice(qkv) if module.part == "qkv" else slice(qkv, None)
        return StoredPart((measured.of("delta_qkvz"), *shape[1:]), heads=groups, axis=1, rows=part)
    if not module.part and expert is None:
        return None
    count = shape[0]
    rows = {
        "first": slice(count),
        "second": slice(count, None),
        "even": slice(0, None, 2),
        "odd": slice(1, None, 2),
        "": None,
    }[module.part]
    stored_shape: tuple[int, ...] = (count * 2 if module.part else count, *shape[1:])
    turned = module.transposed and bool(module.stacked)
    if turned:
        stored_shape = stored_shape[::-1]
    stack = (measured.of("experts"),) if expert is not None else ()
    return StoredPart(
        (*stack, *stored_shape), expert, axis=len(stored_shape) - 1 if turned else 0, rows=rows, turned=turned
    )


def _present(module: ModuleMapping, index: int, config: Mapping[str, Any], measured: Sizes) -> bool:
    """Whether a block has a module."""
    step = measured.of("moe_step")
    dense = bool((index + 1) % step) if step else index < measured.of("dense")
    if module.blocks and (module.blocks == "dense") != dense:
        return False
    if (module.needs and not measured.of(module.needs)) or (module.lacks and measured.of(module.lacks)):
        return False
    return not module.flag or bool(config.get(module.flag, False))


def _biased(config: Mapping[str, Any], module: ModuleMapping) -> bool:
    return bool(config.get(module.bias, False)) if isinstance(module.bias, str) else module.bias


def paired(heads: int, width: int) -> Tensor:
    """Row order (heads * width,) from half-split rotary heads to neighbouring pairs."""
    return torch.arange(heads * width).view(heads, 2, width // 2).transpose(1, 2).reshape(-1)


def sorted_groups(heads: int, kv_heads: int, width: int) -> Tensor:
    """Row order ((heads + 2 kv_heads) * width,) from groups of (q.., k, v) to all q, all k, all v."""
    count = heads // kv_heads
    groups = torch.arange((heads + 2 * kv_heads) * width).view(kv_heads, count + 2, width)
    return torch.cat([groups[:, :count].reshape(-1), groups[:, count].reshape(-1), groups[:, -1].reshape(-1)])


def tiled(groups: int, heads: int, width: int) -> Tensor:
    """Order (heads * width,) from heads of values that lie beside their head of keys to the first of every
    head of keys, the second of every one, ..."""
    return torch.arange(heads * width).view(groups, heads // groups, width).transpose(0, 1).reshape(-1)


def sorted_delta(groups: int, heads: int, width: int) -> Tensor:
    """Row order ((2 groups + heads) * width,) from groups of (q, k, v..) of linear attention to all q, all k,
    all v."""
    rows = torch.arange((2 * groups + heads) * width).view(groups, -1)
    parts = rows.split((width, width, heads // groups * width), 1)
    return torch.cat([part.reshape(-1) for part in parts])
