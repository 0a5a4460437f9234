"""Experts that a checkpoint stores in one tensor, as weights of their own, and back.

gpt-oss, Granite MoE and Llama 4 store the experts of a layer stacked: ``experts.gate_up_proj`` (E, H, 2I).
:class:`SingleExperts` is such a checkpoint with ``experts.3.gate_proj.weight`` (I, H) and so on in its place,
the names that they have once :func:`attar.models.loading.experts.unstack` has made modules of them. One
expert is read at a time. So a plan, a sweep or a writer treats every mixture alike, and what they write has
experts one by one.

transformers loads these families stacked alone: :class:`StackedReader` reads a checkpoint of single experts
(one that was quantized so, or a dense one) as the family has it.

Letters: E experts, H hidden size, I neurons of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from attar.checkpoint.tensors import TensorInfo, read_tensor
from attar.errors import CheckpointError
from attar.formats import mxfp4
from attar.formats.coded import Coded
from attar.formats.readers import Decoded, quant_method, reader
from attar.formats.rules import WeightRule
from attar.formats.stored_part import StoredPart
from attar.models.loading.empty import empty_model
from attar.models.loading.experts import ExpertModule, expert_modules, gate_and_up_rows
from attar.models.loading.stored import decoded_precision, stored_of

NUMBERED = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class ExpertPart:
    """One weight or bias of one expert.

    Attributes:
        stack: name of the stored tensor that it is a part of.
        shape: its own, (N, K) or (N,).
    """

    stack: str
    part: StoredPart
    shape: tuple[int, ...]


class SingleExperts:
    """The view; all attributes but tensors are the checkpoint's.

    Attributes:
        stacked: the checkpoint as it is stored.
        parts: what each expert's tensor is, by name.
        stacks: names of the parts, by the stored tensor that they are parts of.
        tensors: headers by name, experts in the place of their stack.
    """

    def __init__(self, checkpoint: Any, parts: Mapping[str, ExpertPart]) -> None:
        self.stacked, self.parts = checkpoint, parts
        self._last: tuple[str, Tensor] | None = None
        self.stacks: dict[str, list[str]] = {}
        for name, part in parts.items():
            self.stacks.setdefault(part.stack, []).append(name)
        self.tensors: dict[str, Any] = {}
        for name, info in checkpoint.tensors.items():
            for single in self.stacks.get(name, []):
                shape = parts[single].shape
                self.tensors[single] = replace(info, name=single, shape=shape, **_size(info, shape))
            if name not in self.stacks:
                self.tensors[name] = info

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stacked, name)

    def load(self, name: str) -> Tensor:
        """One tensor, or one expert's weight (N, K) or bias (N,), in separate memory."""
        expert = self.parts.get(name)
        if expert is None:
            tensor: Tensor = self.stacked.load(name)
            return tensor
        return expert.part.inside(self._expert(expert)).clone(memory_format=torch.contiguous_format)

    def filled(self, stack: str, changed: Callable[[str, Callable[[], Tensor]], Tensor]) -> Tensor:
        """A stored tensor with changed experts.

        Args:
            changed: gives each expert's tensor; called with its name, and a function that reads it as it is.
        """
        tensor: Tensor = self.stacked.load(stack)
        for name in self.stacks[stack]:
            expert = self.parts[name].part.view(tensor)
            expert.copy_(changed(name, expert.clone))
        return tensor

    def grid(self, name: str) -> tuple[WeightRule, torch.dtype] | None:
        """As that of the view that decodes (:class:`attar.formats.readers.Decoded`), for experts as well."""
        stack = self.parts[name].stack if name in self.parts else ""
        if stack and self.stacked.has_expert_codes(stack):
            return mxfp4.RULE, torch.float32
        stored: tuple[WeightRule, torch.dtype] | None = self.stacked.grid(name)
        return stored

    def codes(self, name: str) -> Coded:
        """The unchanged codes (N, K) of a weight that has a :meth:`grid`."""
        expert = self.parts.get(name)
        if expert is None or not self.stacked.has_expert_codes(expert.stack):
            coded: Coded = self.stacked.codes(name)
            return coded
        stacked, _ = self.stacked.expert_codes(expert.stack, expert.part.index)
        rows = slice(None) if expert.part.rows is None else expert.part.rows
        return Coded(stacked.codes[rows], stacked.scale[rows])

    def _expert(self, expert: ExpertPart) -> Tensor:
        """What the stack holds of an expert; where its bytes lie next to each other, no others are read."""
        info, index = self.stacked.tensors[expert.stack], expert.part.index
        assert index is not None
        if isinstance(self.stacked, Decoded):
            decoded = self.stacked.load_expert(expert.stack, index)
            if decoded is not None:
                return decoded
        if not isinstance(info, TensorInfo) or info.block:  # decoded as a whole, and kept for the next expert
            if self._last is None or self._last[0] != expert.stack:
                self._last = None
                self._last = expert.stack, self.stacked.load(expert.stack)
            return self._last[1][index]
        size = info.nbytes // info.shape[0]
        return read_tensor(
            replace(info, shape=info.shape[1:], nbytes=size, offset=info.offset + index * size)
        )


def _size(info: Any, shape: tuple[int, ...]) -> dict[str, int]:
    """``nbytes`` of a part, where the header has one."""
    if not isinstance(info, TensorInfo):
        return {}
    total, part = (torch.Size(dims).numel() for dims in (info.shape, shape))
    return {"nbytes": info.nbytes * part // total}


def single_experts(checkpoint: Any) -> Any:
    """The view of a checkpoint in which each expert is a separate weight; the checkpoint itself, where it
    stores none stacked. Reads headers only."""
    if isinstance(checkpoint, SingleExperts) or not any(
        len(info.shape) > 2 for info in checkpoint.tensors.values()
    ):
        return checkpoint
    model = empty_model(checkpoint.config)
    parts: dict[str, ExpertPart] = {}
    for expert_module in expert_modules(model):
        for leaf in (expert_module.stack.up, expert_module.stack.down):
            for kind in ("weight", "bias"):
                parts |= _parts(model, checkpoint, expert_module, leaf, kind)
    return SingleExperts(checkpoint, parts) if parts else checkpoint


def _parts(
    model: Any, checkpoint: Any, expert_module: ExpertModule, leaf: str, kind: str
) -> dict[str, ExpertPart]:
    """The weights or biases of one stack, by the names of single experts."""
    parameter = f"{expert_module.name}.{leaf}" + ("_bias" if kind == "bias" else "")
    stored = stored_of(model, [parameter], checkpoint).get(parameter)
    if stored is None:
        return {}
    leaf_name = parameter.rpartition(".")[2]  # a prefix of the checkpoint's own stays
    name = stored.removesuffix(f".{leaf_name}") if stored.endswith(f".{leaf_name}") else expert_module.name
    shape, parts = tuple(checkpoint.tensors[stored].shape), {}
    for number in range(expert_module.stack.count):
        for single, part in single_parts(expert_module, leaf, shape, number):
            size = tuple(part.view(torch.empty(shape, device="meta")).shape)
            parts[f"{name}.{number}.{single}.{kind}"] = ExpertPart(stored, part, size)
    return parts


def single_parts(
    expert_module: ExpertModule, leaf: str, shape: tuple[int, ...], number: int
) -> list[tuple[str, StoredPart]]:
    """Names of an expert's Linears, and where they are in a stack of weights (three dimensions) or biases.

    Args:
        leaf: name of the stacked parameter.
        shape: of the stack.
    """
    stack = expert_module.stack
    turned = stack.transposed and len(shape) == 3
    part = StoredPart(shape, number, axis=1 if turned else 0, turned=turned)
    if leaf == stack.down:
        return [(expert_module.leaves[-1], part)]
    if not stack.gated:
        return [(expert_module.leaves[-2], part)]
    rows = gate_and_up_rows(stack)
    return [(name, replace(part, rows=run)) for name, run in zip(expert_module.leaves[:2], rows, strict=True)]


@dataclass(frozen=True)
class Stacked:
    """A tensor that single experts make together.

    Attributes:
        name: as checkpoints of the family store it.
        parts: by the name of the single expert's tensor, without a prefix of the checkpoint's own.
    """

    name: str
    shape: tuple[int, ...]
    parts: dict[str, StoredPart]


class StackedReader:
    """A reader (see :class:`~attar.formats.packed_reader.FormatReader`) of a checkpoint that stores single
    experts of a family whose experts are stacked: a stack is read where the first of its experts is.

    Attributes:
        singles: stored names of the experts' tensors, by what they decode to.

    Args:
        read: the reader of the checkpoint.
        checkpoint: its headers.
    """

    def __init__(self, read: Any, checkpoint: Any, stacks: list[Stacked]) -> None:
        self.read, self._stacks = read, stacks
        slots = {name: read.header(info) for name, info in checkpoint.tensors.items()}
        self._slots = {name: slot for name, slot in slots.items() if slot is not None}
        self._stored = {slot[0]: name for name, slot in self._slots.items()}
        self._of: dict[str, tuple[Stacked, bool]] = {}
        self.singles: dict[str, str] = {}
        for stack in stacks:
            for number, single in enumerate(stack.parts):
                if single not in self._stored:
                    raise CheckpointError(
                        f"{checkpoint.path}: no tensor for {single}", hint="the checkpoint is incomplete"
                    )
                self._of[self._stored[single]] = (stack, number == 0)
                self.singles[single] = self._stored[single]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.read, name)

    def header(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor decodes to, or of the stack that starts with it."""
        if info.name not in self._of:
            slot: tuple[str, str, tuple[int, ...]] | None = self.read.header(info)
            return slot
        stack, first = self._of[info.name]
        return (stack.name, self._slots[info.name][1], stack.shape) if first else None

    def decode(self, name: str) -> Tensor | None:
        """What a stored tensor decodes to, or the stack that starts with it."""
        if name not in self._of:
            tensor: Tensor | None = self.read.decode(name)
            return tensor
        stack, first = self._of[name]
        if not first:
            return None
        stacked: Tensor | None = None
        for single, part in stack.parts.items():
            decoded = self.read.decode(self._stored[single])
            stacked = torch.empty(stack.shape, dtype=decoded.dtype) if stacked is None else stacked
            part.view(stacked).copy_(decoded)
        return stacked

    def decode_expert(self, name: str, index: int) -> Tensor | None:
        """One expert of the stack that starts with a stored tensor; None for any other tensor."""
        if name not in self._of:
            return None
        stack, expert = self._of[name][0], None
        for single, part in stack.parts.items():
            if part.index == index:
                decoded = self.read.decode(self._stored[single])
                expert = torch.empty(stack.shape[1:], dtype=decoded.dtype) if expert is None else expert
                part.inside(expert).copy_(decoded)
        return expert

    def codes(self, name: str) -> Any:
        """None for single experts: a stack is no matrix."""
        return None if name in self._of else self.read.codes(name)


def stacked_reader(read: Any, checkpoint: Any) -> Any:
    """The reader, or a :class:`StackedReader` where the family stacks its experts and the checkpoint stores
    single ones."""
    stacks = stacks_of(checkpoint.config) if any(map(NUMBERED.search, checkpoint.tensors)) else []
    names = {slot[0] for info in checkpoint.tensors.values() if (slot := read.header(info)) is not None}
    single = [stack for stack in stacks if any(name in names for name in stack.parts)]
    return StackedReader(read, checkpoint, single) if single else read


def stacked_state(checkpoint: Any) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, decoded, under the names of the family's dense checkpoints."""
    if isinstance(checkpoint, Decoded):
        return {name: checkpoint.load(name) for name in checkpoint.tensors}
    read = stacked_reader(reader(checkpoint), checkpoint)
    slots = {name: read.header(info) for name, info in checkpoint.tensors.items()}
    return {slot[0]: read.decode(name) for name, slot in slots.items() if slot is not None}


def decoded_view(checkpoint: Any, *, exact: bool = False) -> Any:
    """A checkpoint as ``export --format dense`` writes it. A packed one is decoded tensor by tensor as it is
    read: experts in the stacks of their family, what decodes to float32 (blocks of GGUF, MLX) in the type of
    :func:`decoded_precision`. A dense one is itself.

    Args:
        exact: blocks of GGUF and MLX stay float32, as they decode.
    """
    if quant_method(checkpoint) is None:
        return checkpoint
    dtype = None if exact else decoded_precision(checkpoint)
    return Decoded(checkpoint, read=stacked_reader(reader(checkpoint.with_mtp), checkpoint), dtype=dtype)


def is_unstacked(checkpoint: Any) -> bool:
    """Whether a checkpoint stores single experts of a family whose experts are stacked."""
    return isinstance(stacked_reader(reader(checkpoint), checkpoint), StackedReader)


def stacks_of(config: Mapping[str, Any]) -> list[Stacked]:
    """The stacks of a family whose checkpoints store no experts one by one."""
    model = empty_model(config)
    stacks = []
    for expert_module in expert_modules(model):
        for leaf in () if expert_module.unstacked else (expert_module.stack.up, expert_module.stack.down):
            for kind, parameter in (("weight", leaf), ("bias", f"{leaf}_bias")):
                tensor = getattr(model.get_submodule(expert_module.name), parameter, None)
                if tensor is None:
                    continue
                shape = tuple(tensor.shape)
                parts = {
                    f"{expert_module.name}.{number}.{single}.{kind}": part
                    for number in range(expert_module.stack.count)
                    for single, part in single_parts(expert_module, leaf, shape, number)
                }
                stacks.append(Stacked(_published(model, f"{expert_module.name}.{parameter}"), shape, parts))
    return stacks


def _published(model: Any, parameter: str) -> str:
    """What checkpoints of the family call a parameter."""
    for rule in get_model_conversion_mapping(model):
        if isinstance(rule, WeightRenaming) and parameter.endswith(rule.target_patterns[0]):
            source = re.sub(r"\\(.)", r"\1", rule.source_patterns[0])
            return parameter.removesuffix(rule.target_patterns[0]) + source
    return parameter
