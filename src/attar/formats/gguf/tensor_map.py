"""Which models can be written as GGUF, and the placement of each of their tensors in the file.

    architecture(config)                              refuses what llama.cpp would compute differently
    for placement in placements(config, checkpoint.tensors):
        tensor = placement.apply(checkpoint.load(placement.stored)) if placement.stored else placement.value

A tensor changes in four steps, in this order, which :meth:`Placement.undo` reverses:

1. A Conv1D weight (in, out) is transposed to (out, in).
2. Rows are reordered: new[i] = old[rows[i]]. Two orders exist.
   *Paired* (where rotary embedding rotates neighbours, as in llama): within a head of width d the halves
   (x_0 .. x_{d/2-1}, y_0 .. y_{d/2-1}) become pairs (x_0, y_0, x_1, y_1, ...).
   *Sorted* (GPT-NeoX): the fused rows q, k, v of each KV group become all q, all k, all v.
3. Anything but matrices (norms, biases, position embeddings) becomes float32.
4. Gemma's norms gain 1, because llama.cpp multiplies by the weight where transformers multiplies by 1 +
weight.

Steps 1 to 3 lose nothing. Step 4 rounds to float32: a bfloat16 weight above 2^-15 or a float16 one above
2^-12 is restored bit for bit when ``undo`` is given its type, a float32 one within the rounding of the sum.

Differs from llama.cpp's converter: a tensor that the table does not know is an error, and so is a config that
llama.cpp cannot follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.errors import CheckpointError, ModelError, nearest
from attar.formats.gguf.architecture import Architecture, ModuleMapping, Sizes, number, sizes, window
from attar.formats.gguf.families import ARCHITECTURES
from attar.formats.gguf.rope import read_rope, rope_tensors


@dataclass(frozen=True, eq=False)
class Placement:
    """One tensor of a GGUF file.

    Attributes:
        stored: its name in the checkpoint; None where it is computed from the config (``value``).
        shape: its shape in the GGUF file, rows first.
        transposed: the checkpoint has it as (in, out).
        rows: int64 (N,): new[i] = old[rows[i]]; None: in order.
        plus: added to every value.
        matrix: a weight that may be quantized; anything else is kept in float32.
        value: float32, where ``stored`` is None.
    """

    gguf: str
    stored: str | None
    shape: tuple[int, ...]
    transposed: bool = False
    rows: Tensor | None = None
    plus: float = 0.0
    matrix: bool = True
    value: Tensor | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        return tuple(reversed(self.shape)) if self.transposed else self.shape

    def apply(self, tensor: Tensor) -> Tensor:
        """The file's tensor from the checkpoint's; matrices keep their dtype. Does not modify the input."""
        placed = tensor.T if self.transposed else tensor
        if self.rows is not None:
            placed = placed.index_select(0, self.rows)
        if not self.matrix:
            placed = placed.float()
        return (placed + self.plus if self.plus else placed).contiguous()

    def undo(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The checkpoint's tensor from the file's.

        Args:
            tensor: as :meth:`apply` returned it.
            dtype: of the result; None: that of ``tensor``.
        """
        restored = tensor - self.plus if self.plus else tensor
        if self.rows is not None:
            restored = restored.index_select(0, torch.argsort(self.rows))
        if self.transposed:
            restored = restored.T
        return restored.to(dtype or tensor.dtype).contiguous()


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
    read_rope(config, arch, measured)
    if not window(config, arch, measured.layers) and arch.window_needed:
        raise ModelError(
            f"config of {arch.family}: no block has a sliding window; llama.cpp's {arch.arch} needs one",
            hint="export to another format",
        )


def _check_tied(config: Mapping[str, Any], arch: Architecture) -> None:
    tied = _tied(config, arch)
    if arch.head == "never" and not tied:
        raise ModelError(f"{arch.family}: GGUF's {arch.arch} has no head of its own, so it must be tied")
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
    whole = measured.layers == arch.scale_by_layers
    return measured.hidden // measured.heads if whole else measured.head


def placements(config: Mapping[str, Any], stored: Mapping[str, Any]) -> list[Placement]:
    """Every tensor of the file, in its order.

    Args:
        stored: the checkpoint's tensors by name, each with a ``shape``.

    Raises:
        ModelError: as :func:`architecture`.
        CheckpointError: a tensor is missing, of another shape, or unknown; names it.
    """
    arch = architecture(config)
    resolved = [_resolve(placement, arch, stored) for placement in expected_placements(config)]
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
    if placement.stored is None:
        return placement
    names = [placement.stored, placement.stored.removeprefix(arch.prefix)]
    leaf = placement.stored.rsplit(".", 1)[1]
    if placement.stored.rsplit(".", 1)[0] in arch.head_names:
        names = [f"{name}.{leaf}" for name in arch.head_names]
    name = next((name for name in names if name in stored), None)
    if name is None:
        close = nearest(placement.stored, stored)
        raise CheckpointError(
            f"the checkpoint has no tensor {placement.stored!r}",
            hint=f"is it {close!r}? The config says that the model is {arch.family}" if close else None,
        )
    shape = tuple(stored[name].shape)
    if shape != placement.stored_shape:
        raise CheckpointError(
            f"tensor {name!r} is {list(shape)}, but the config says {list(placement.stored_shape)}",
            hint="GGUF has one width for all blocks, that of the config",
        )
    return replace(placement, stored=name)


def expected_placements(config: Mapping[str, Any]) -> list[Placement]:
    """The tensors that a config implies, under transformers' usual names; nothing is checked against a
    file."""
    arch = architecture(config)
    measured = sizes(config, arch)
    rows = _orders(arch, measured)
    rope = read_rope(config, arch, measured)
    computed = [
        Placement(name, None, tuple(value.shape), matrix=False, value=value)
        for name, value in (rope_tensors(rope) if rope else {}).items()
    ]
    outer = [*arch.outer, *_head(config, arch)]
    blocks = [_in_block(module, index) for index in range(measured.layers) for module in arch.blocks]
    outside, inside = (
        [placement for module in modules for placement in _tensors(config, arch, measured, module, rows)]
        for modules in (outer, blocks)
    )
    return outside + computed + inside


def _in_block(module: ModuleMapping, index: int) -> ModuleMapping:
    return replace(module, gguf=module.gguf.format(index), stored=module.stored.format(index))


def _orders(arch: Architecture, measured: Sizes) -> dict[str, Tensor]:
    """Row orders by name."""
    orders = sorted({module.order for module in arch.blocks if module.order})
    heads = {"q": measured.heads, "k": measured.kv_heads}
    return {
        order: paired(heads[order], measured.head)
        if order in heads
        else sorted_groups(measured.heads, measured.kv_heads, measured.head)
        for order in orders
    }


def _head(config: Mapping[str, Any], arch: Architecture) -> list[ModuleMapping]:
    """The head, unless the embedding replaces it; a needed tied head is a copy of the embedding."""
    shape = ("vocabulary", "hidden")
    if not _tied(config, arch):
        return [ModuleMapping("output", arch.head_names[0], shape, bias=arch.head_bias)]
    embedding = next(module.stored for module in arch.outer if module.gguf == "token_embd")
    return [ModuleMapping("output", embedding, shape)] if arch.head == "needed" else []


def _tied(config: Mapping[str, Any], arch: Architecture) -> bool:
    return bool(config.get("tie_word_embeddings", arch.defaults.get("tie_word_embeddings", False)))


def _tensors(
    config: Mapping[str, Any],
    arch: Architecture,
    measured: Sizes,
    module: ModuleMapping,
    rows: Mapping[str, Tensor],
) -> Iterator[Placement]:
    """Weight and bias of a module."""
    prefix = "" if module.stored in arch.head_names else arch.prefix
    stored, shape = f"{prefix}{module.stored}", tuple(measured.of(size) for size in module.shape)
    order = rows.get(module.order)
    yield Placement(
        f"{module.gguf}.weight",
        f"{stored}.weight",
        shape,
        transposed=module.transposed,
        rows=order,
        plus=module.plus,
        matrix=module.matrix,
    )
    if _biased(config, module):
        yield Placement(f"{module.gguf}.bias", f"{stored}.bias", shape[:1], rows=order, matrix=False)


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
