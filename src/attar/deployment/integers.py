"""Integer codes from one layout into another, tensor by tensor: compressed-tensors, GPTQ, AWQ, bitsandbytes'
INT8, and those of GGUF files.

Linears keep their codes; a coded tensor that is no Linear (an int8 embedding) is decoded. Targets of float16
take everything else as float16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.shards import TensorSpec
from attar.deployment.verify import check_fits
from attar.errors import ModelError
from attar.formats import awq, bitsandbytes, compressed_tensors, gptq, layouts
from attar.formats.coded import Coded
from attar.formats.convert import convert, converted_rule, misfit
from attar.formats.dense_names import dense_names
from attar.formats.gguf.codes import with_positive_scales
from attar.formats.readers import reader
from attar.formats.rules import PACK, WeightRule
from attar.models.anatomy.discover import discover
from attar.models.anatomy.roles import is_linear
from attar.models.loading.empty import empty_model
from attar.models.loading.experts import Experts
from attar.models.loading.stored import stored_names
from attar.progress import SILENT, Progress

FLOATS = ("F64", "F32", "F16", "BF16")
HALF = ("gptq", "awq")
"""Targets whose numbers are float16."""
BITSANDBYTES = "bitsandbytes"


@dataclass(frozen=True)
class CarriedLinear:
    """A Linear whose codes are carried over.

    Attributes:
        base: the stored name of its dense weight, without ``.weight``.
        shape: (N, K).
    """

    module: str
    base: str
    shape: tuple[int, int]
    rule: WeightRule


def refuse_source(source: Checkpoint, target: str) -> None:
    """Raise where the first Linear's codes cannot be stored in the target; the others are checked by the
    scan.

    Raises:
        ModelError: names the Linear and why.
    """
    read = reader(source)
    coded = (name for name in source.tensors if read.is_coded(name))  # type: ignore[attr-defined]
    codes = ((name, with_usual_scales(read.codes(name))) for name in coded)  # type: ignore[attr-defined]
    name, first = next((pair for pair in codes if pair[1] is not None), ("", None))
    if first is None:
        raise ModelError(
            f"{source.path}: its weights are no integer codes, which is all that {target} holds",
            hint="--format dense loads everywhere",
        )
    if rounds_activations(source) and target != BITSANDBYTES:
        raise ModelError(
            f"{source.path} rounds activations as well, for which {target} has no place",
            hint="quantize with a scheme of weights alone, such as W4A16",
        )
    weight, rule = first
    _check(source, name, weight, rule, target)


def rounds_activations(source: Checkpoint) -> bool:
    """Whether a checkpoint's config rounds what products take, or keys and values."""
    quantization = source.config.get("quantization_config") or {}
    groups = (quantization.get("config_groups") or {}).values()
    return any(group.get("input_activations") for group in groups) or bool(
        quantization.get("kv_cache_scheme")
    )


def _check(source: Checkpoint, name: str, weight: Coded, rule: WeightRule, target: str) -> None:
    if target == BITSANDBYTES:
        bitsandbytes.refuse_int8(rule)
        return
    why = misfit(rule, (weight.codes.shape[0], weight.codes.shape[1]), target)
    if why:
        raise ModelError(
            f"{source.path}: {name} cannot be {target}: {why}", hint="--format dense loads everywhere"
        )


def with_usual_scales(coded: tuple[Coded, WeightRule] | None) -> Any:
    """Codes under positive scales, as every layout but llama.cpp's has them; the numbers are the same.

    A block of zeros has scale 0 there; here its codes are those of zero under scale 1.
    """
    if coded is None or coded[1].kind != "int" or coded[0].g_idx is not None:
        return coded
    weight, rule = coded
    empty = weight.scale == 0
    if empty.any():
        width = weight.codes.shape[1] // weight.scale.shape[1]
        zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
        spread = (empty.repeat_interleave(width, 1), zero.repeat_interleave(width, 1))
        codes = torch.where(spread[0], spread[1], weight.codes.float()).to(weight.codes.dtype)
        weight = replace(weight, codes=codes, scale=torch.where(empty, 1.0, weight.scale))
    return with_positive_scales(weight, rule)


class IntegerConversion:
    """A checkpoint's tensors as another integer layout stores them.

    Attributes:
        linears: those whose codes are carried over, by stored name.
        dense: modules that stay dense, beside the model's Linears without codes.
        notes: sentences for the card and the terminal: scales that changed.

    Raises:
        ModelError: codes have no place in the target; names the Linear.
    """

    def __init__(self, source: Checkpoint, target: str, progress: Progress = SILENT) -> None:
        self.source, self.target = source, target
        self.read: Any = reader(source)
        self.linears: dict[str, CarriedLinear] = {}
        self.changes: list[float] = []
        self.zeros = False
        self._scan(progress)
        self.config = self._config()
        self.notes = self._notes()

    def headers(self, info: Any) -> Sequence[tuple[str, str, tuple[int, ...]]]:
        """Names, types and shapes of the output of a stored tensor, known before it is read."""
        linear = self.linears.get(info.name)
        if linear is not None:
            parts = self._layout(linear).items()
            return [(f"{linear.base}.{leaf}", kind, shape) for leaf, (kind, shape) in parts]
        slot = self.read.header(info)
        if slot is None:
            return []
        name, kind, shape = slot
        return [(name, "F16" if self.target in HALF and kind in FLOATS else kind, shape)]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The output of a stored tensor, see :meth:`headers`."""
        linear = self.linears.get(name)
        if linear is not None:
            return {f"{linear.base}.{leaf}": value for leaf, value in self._encoded(name, linear).items()}
        slot, tensor = self.read.header(self.source.tensors[name]), self.read.decode(name)
        if slot is None or tensor is None:
            return {}
        if self.target in HALF and tensor.is_floating_point():
            tensor = tensor.half()
            check_fits(slot[0], tensor)
        return {slot[0]: tensor}

    def _scan(self, progress: Progress) -> None:
        """Read every Linear's codes once, for checks and rules."""
        config = {key: value for key, value in self.source.config.items() if key != "quantization_config"}
        model = empty_model(config, unstacked=True)
        slots = {
            info.name: TensorSpec(*slot)
            for info in self.source.tensors.values()
            if (slot := self.read.header(info))
        }
        dense = {slot.name: stored for stored, slot in slots.items()}
        headers = {slot.name: slot for slot in slots.values()}
        names = stored_names(model, _DenseTensors(self.source.path, headers))
        known = frozenset(names.values())
        further = {name: slot for name, slot in headers.items() if name not in known}
        self.dense = [*routers_of(model, names), *dense_names(further, (), config)]
        modules = [name for name, module in model.named_modules() if is_linear(module)]
        linears = {names.get(f"{module}.weight", ""): module for module in modules}
        with progress.task("scan", total=len(dense)) as task:
            for name, stored in dense.items():
                coded = with_usual_scales(self.read.codes(stored)) if name in linears else None
                if coded is not None:
                    self._add_linear(name, stored, linears[name], *coded)
                task.advance()

    def _add_linear(self, name: str, stored: str, module: str, weight: Coded, rule: WeightRule) -> None:
        _check(self.source, name, weight, rule, self.target)
        self.zeros |= weight.zero is not None
        if self.target != BITSANDBYTES:
            self.changes.append(
                convert(weight, rule, self.target, dtype=self._dtype(stored), name=name).change
            )
            rule = converted_rule(rule, self.target)
        shape = (weight.codes.shape[0], weight.codes.shape[1])
        self.linears[stored] = CarriedLinear(module, name.removesuffix(".weight"), shape, rule)

    def _dtype(self, stored: str) -> torch.dtype:
        """Type of the scales: the target's, or their own."""
        if self.target in HALF:
            return torch.float16
        kind = self.read.header(self.source.tensors[stored])[1]
        return {"BF16": torch.bfloat16, "F16": torch.float16}.get(kind, torch.float32)

    def _encoded(self, stored: str, linear: CarriedLinear) -> Mapping[str, Tensor]:
        weight, rule = with_usual_scales(self.read.codes(stored))
        if self.target == BITSANDBYTES:
            return bitsandbytes.encode_int8(weight)
        together = self.target == "awq" or self._mixed_zeros()
        carried = convert(weight, rule, self.target, dtype=self._dtype(stored), zeros=together)
        if self.target == "gptq":
            return gptq.encode(carried.weight, carried.rule, self._version())
        if self.target == "awq":
            return awq.encode(carried.weight, carried.rule)
        return layouts.encode(carried.weight, carried.rule, PACK, carried.dtype)

    def _layout(self, linear: CarriedLinear) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        if self.target == BITSANDBYTES:
            return bitsandbytes.layout_int8(linear.shape)
        if self.target == "gptq":
            return gptq.layout(linear.shape, linear.rule)
        if self.target == "awq":
            return awq.layout(linear.shape, linear.rule)
        kinds = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
        stored = next(name for name, candidate in self.linears.items() if candidate is linear)
        return layouts.layout(linear.shape, linear.rule, PACK, kinds[self._dtype(stored)])

    def _mixed_zeros(self) -> bool:
        """GPTQ: a file that has asymmetric weights has zero points everywhere."""
        return self.target == "gptq" and self.zeros

    def _rules(self) -> dict[str, WeightRule]:
        return {linear.module: linear.rule for linear in self.linears.values()}

    def _version(self) -> str:
        return gptq.version_for(self._rules())

    def _config(self) -> dict[str, Any]:
        config = {key: value for key, value in self.source.config.items() if key != "quantization_config"}
        if self.target in HALF:
            config["dtype"] = "float16"
            config.pop("torch_dtype", None)
        model = empty_model(config, unstacked=True)
        modules = [name for name, module in model.named_modules() if is_linear(module)]
        rules = self._rules()
        ignore = list(dict.fromkeys([*(name for name in modules if name not in rules), *self.dense]))
        if self.target == "gptq":
            quantization = gptq.quantization_config(rules, ignore=ignore)
        elif self.target == "awq":
            quantization = awq.quantization_config(rules, ignore=ignore)
        elif self.target == BITSANDBYTES:
            quantization = bitsandbytes.int8_config(ignore)
        else:
            quantization = _compressed(rules, ignore)
        return {**config, "quantization_config": quantization}

    def _notes(self) -> list[str]:
        changed = [change for change in self.changes if change]
        if not changed:
            return []
        kind = "float16" if self.target in HALF else "the model's type"
        return [
            f"{len(changed)} of {len(self.changes)} Linears have scales that {kind} cannot hold; they are "
            f"rounded, by {max(changed):.1e} of themselves at most; no code changes"
        ]


@dataclass(frozen=True)
class _DenseTensors:
    """The part of a checkpoint that :func:`stored_names` reads: names and shapes of its dense tensors."""

    path: Path
    tensors: Mapping[str, TensorSpec]


def routers_of(model: Any, names: Mapping[str, str]) -> list[str]:
    """What chooses the experts of mixtures, which stays dense, under the model's names and the
    checkpoint's."""
    if not any(isinstance(module, Experts) for module in model.modules()):
        return []
    mixtures = [block.mixture for block in discover(model).blocks if block.mixture is not None]
    routers = [name for mixture in mixtures for name in mixture.dense]
    return [*routers, *(names[f"{name}.weight"].removesuffix(".weight") for name in routers)]


def _compressed(rules: Mapping[str, WeightRule], ignore: Sequence[str]) -> dict[str, Any]:
    """A group for each rule; the most common one takes every Linear that is left."""
    ranked = [rule for rule, _ in Counter(rules.values()).most_common()]
    groups = []
    for number, rule in enumerate(ranked):
        modules = tuple(name for name, module_rule in rules.items() if module_rule == rule)
        groups.append(compressed_tensors.ConfigGroup(modules if number else ("Linear",), rule, None, PACK))
    alone = len(groups) == 1 and not ranked[0].symmetric
    return compressed_tensors.quantization_config(groups, ignore=ignore, dequantize=alone)
