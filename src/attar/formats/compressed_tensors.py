"""compressed-tensors: the checkpoints that transformers and vLLM load (``quant_method: compressed-tensors``).

``quantization_config`` in config.json holds config groups, each with targets (module names, ``re:`` patterns
or class names; the more exact target decides), rules for weights and input activations, and the layout of its
tensors; layouts.py has the bytes. Further tensors of a module:

    input_scale       float (1,)   static activation scale
    input_global_scale   float32 (1,)   of NVFP4's inputs: multiplies the scales of their groups
    k_scale, v_scale  float (1,)   of an attention module, with ``kv_cache_scheme``

An int8 embedding is ``naive-quantized``: ``weight`` int8 (V, D) and ``weight_scale`` (V, 1). A head tied to
it stores a separate scale and no weight: transformers ties the int8 weight and then decodes embedding and
head each with its scale.

A Conv1D (GPT-2) stores its weight transposed, and transformers' reader of this format ignores Conv1D and
leaves random weights. attar writes such a checkpoint with ``format: attar-transposed``, which that reader
refuses by name; attar reads it and exports it dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.tensors import TORCH
from attar.errors import CheckpointError, NumericsError
from attar.formats.coded import Coded
from attar.formats.layouts import G_IDX, GLOBAL, PACKED, SCALE, SHAPE, WEIGHT, ZERO, decode, layout, unpack
from attar.formats.packed_reader import PackedReader, check_codes, check_scales
from attar.formats.rules import (
    BFLOAT16,
    FLOAT,
    INT,
    MXFP4,
    MXFP8,
    NAIVE,
    NVFP4,
    PACK,
    ActivationRule,
    WeightRule,
    format_of,
    mapping,
    one_of,
    texts,
)
from attar.patterns import matches_start

METHOD = "compressed-tensors"
TRANSPOSED = "attar-transposed"
FORMS = (PACK, INT, FLOAT, NAIVE, *BFLOAT16)
EMBEDDING = WeightRule("int", 8, "channel")
INPUT_SCALE, INPUT_ZERO, K_SCALE, V_SCALE = "input_scale", "input_zero_point", "k_scale", "v_scale"
INPUT_GLOBAL = "input_global_scale"
PARTS = (SCALE, SHAPE, ZERO, GLOBAL, G_IDX)
AUXILIARY = (*PARTS, INPUT_SCALE, INPUT_ZERO, INPUT_GLOBAL, K_SCALE, V_SCALE, "output_scale")
"""Last parts of the names of tensors that belong to a weight or an activation."""
CODES = {"I8", "F8_E4M3", "F8_E5M2"}


@dataclass(frozen=True)
class ConfigGroup:
    """A config group: how the modules that it targets are quantized.

    Attributes:
        targets: module names, ``re:`` patterns, or class names such as ``Linear``.
        activations: how their inputs are rounded, or None.
    """

    targets: tuple[str, ...]
    weights: WeightRule
    activations: ActivationRule | None = None
    form: str = PACK


def quantization_config(
    groups: Sequence[ConfigGroup],
    *,
    ignore: Sequence[str],
    kv_cache: ActivationRule | None = None,
    transposed: bool = False,
    dequantize: bool = False,
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        groups: in order; where two target a module, the more exact target decides.
        ignore: modules that keep their dense weight.
        transposed: the Linears are Conv1D modules.
        dequantize: ask transformers to decode while it loads. Its other way, decoding on the first pass,
            fails in compressed-tensors 0.20 on zero points and on FP4 where the model is not bfloat16. Only
            one group can be loaded so, and activations are not rounded.
    """
    forms = [TRANSPOSED if transposed and group.form != NAIVE else group.form for group in groups]
    form = forms[0] if len(dict.fromkeys(forms)) == 1 else "mixed-precision"
    config = {
        "quant_method": METHOD,
        "format": TRANSPOSED if TRANSPOSED in forms else form,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {
            f"group_{number}": {
                "targets": list(group.targets),
                "format": form,
                "weights": group.weights.config(),
                "input_activations": group.activations.config() if group.activations else None,
            }
            for number, (group, form) in enumerate(zip(groups, forms, strict=True))
        },
    }
    if kv_cache:
        config["kv_cache_scheme"] = kv_cache.config()
    return {**config, "dequantize": True} if dequantize else config


class CompressedTensorsConfig:
    """A parsed ``quantization_config``: finds the config group of a module.

    Attributes:
        groups: the config groups in order.
        ignore: names and patterns of dense modules.
        kv_cache: how keys and values are rounded, or None.
        transposed: weights of Conv1D modules, (in, out).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.transposed = config.get("format") == TRANSPOSED
        groups = mapping(config.get("config_groups") or {}, "config_groups")
        self.groups = tuple(
            _read_group(mapping(entry, f"config_groups.{name}"), config.get("format"))
            for name, entry in groups.items()
        )
        self.ignore = texts(config.get("ignore") or [], "ignore")
        kv_cache = config.get("kv_cache_scheme")
        self.kv_cache = ActivationRule.read(mapping(kv_cache, "kv_cache_scheme")) if kv_cache else None
        self.exact = {target: group for group in self.groups for target in group.targets}

    def named(self, module: str) -> ConfigGroup | None:
        """The group whose target is the module's name or a pattern that matches it. A stored name may lack
        the model's prefix or have one more."""
        if module in self.exact:
            return self.exact[module]
        for target, group in self.exact.items():
            if target.startswith("re:") or "." not in target:
                continue
            if target.endswith(f".{module}") or module.endswith(f".{target}"):
                return group
        patterns = sorted(target for target in self.exact if target.startswith("re:"))
        match = next((target for target in patterns if _matches(target, module)), None)
        return self.exact[match] if match else None

    def group(self, module: str, kind: str) -> ConfigGroup | None:
        """The group of a module of class ``kind``, None where it is dense."""
        for name in self.ignore:
            if name in (module, kind) or _matches(name, module):
                return None
        return self.named(module) or self.exact.get(kind)


def _matches(target: str, module: str) -> bool:
    """Whether a target is a pattern that matches a module."""
    return target.startswith("re:") and matches_start(target[3:], module, "config.json")


def _read_group(entry: Mapping[str, Any], default_form: str | None) -> ConfigGroup:
    if not entry.get("weights"):
        raise CheckpointError("config.json: a config group quantizes no weights", hint="attar cannot read it")
    weights = WeightRule.read(mapping(entry["weights"], "weights"))
    inputs = entry.get("input_activations")
    activations = ActivationRule.read(mapping(inputs, "input_activations")) if inputs else None
    form = entry.get("format") or (default_form if default_form != "mixed-precision" else None)
    if form in (None, TRANSPOSED):
        form = format_of(weights, activations)
    one_of({"format": form}, "format", FORMS, form)
    return ConfigGroup(texts(entry.get("targets"), "targets"), weights, activations, form)


class CompressedTensorsReader(PackedReader):
    """Reads a packed checkpoint tensor by tensor.

    Attributes:
        scheme: its ``quantization_config``.
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        self.scheme = CompressedTensorsConfig(checkpoint.config["quantization_config"])

    def is_coded(self, name: str) -> bool:
        base, _, leaf = name.rpartition(".")
        if leaf == PACKED:
            return True
        tensors = self.checkpoint.tensors
        return leaf == WEIGHT and tensors[name].dtype in CODES and f"{base}.{SCALE}" in tensors

    def is_auxiliary(self, name: str) -> bool:
        return name.rpartition(".")[2] in AUXILIARY

    def is_transposed(self, name: str) -> bool:
        return self.scheme.transposed and self._group(name).form != NAIVE

    def weight_header(self, name: str) -> tuple[str, str, tuple[int, int]]:
        base = name.rpartition(".")[0]
        form = self._group(name).form
        dtype = "BF16" if form in BFLOAT16 else self.stored(f"{base}.{SCALE}").dtype
        return f"{base}.{WEIGHT}", dtype, self._shape(name, form)

    def weight(self, name: str) -> Tensor:
        group = self._group(name)
        return decode(self._tensors(name), group.weights, group.form)

    def covers(self, module: str) -> bool:
        """Whether engines make quantized parameters for a Linear."""
        return self.scheme.group(module, "Linear") is not None

    def rule_and_shape(self, name: str) -> tuple[WeightRule, tuple[int, int]] | None:
        """Rule and shape (N, K) of a coded weight, from headers; None for any other tensor."""
        if not self.is_coded(name):
            return None
        group = self._group(name)
        return group.weights, self._shape(name, group.form)

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """As in the base class. The rule is ``ordered`` where the groups are not neighbours, whatever the
        config states."""
        if not self.is_coded(name):
            return None
        group = self._group(name)
        weight, rule = unpack(self._tensors(name), group.weights, group.form), group.weights
        columns = weight.codes.shape[1]
        if weight.g_idx is not None:
            neighbours = torch.arange(columns) // (rule.group_size or columns)
            if torch.equal(weight.g_idx.long(), neighbours):
                weight = replace(weight, g_idx=None)
        return weight, replace(rule, ordered=weight.g_idx is not None)

    def grid(self, name: str) -> tuple[WeightRule, torch.dtype] | None:
        if not self.is_coded(name):
            return None
        rule, dtype = self._group(name).weights, self.weight_header(name)[1]
        return rule, getattr(torch, TORCH[dtype])

    def check(self, name: str) -> None:
        if not self.is_coded(name):
            return
        base = name.rpartition(".")[0]
        scales = [self.checkpoint.load(f"{base}.{SCALE}").float()]
        if self._group(name).form == PACK:  # symmetric codes of few bits may have negative scales
            scales = [scales[0].abs()]
        elif self._group(name).form in (MXFP4, MXFP8):
            scales = [torch.where(scales[0] == 255, torch.nan, torch.exp2(scales[0] - 127))]
        optional = self.load_present(f"{base}.", (GLOBAL, INPUT_SCALE, INPUT_GLOBAL))
        activations = self._group(name).activations
        if (
            activations is not None
            and activations.static
            and not {INPUT_SCALE, INPUT_GLOBAL} & optional.keys()
        ):
            raise NumericsError(f"{base} has no scale of its inputs", hint="quantize the model again")
        check_scales(f"{base}.{SCALE}", [*scales, *(scale.float() for scale in optional.values())])
        check_codes(base, self.checkpoint.load(name), scales[0])

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """Everything that decodes a weight, by the last part of its name."""
        base, _, leaf = name.rpartition(".")
        return self.load_present(f"{base}.", (leaf, *PARTS))

    def _shape(self, name: str, form: str) -> tuple[int, int]:
        """(N, K) of a coded weight."""
        base, shape = name.rpartition(".")[0], self.checkpoint.tensors[name].shape
        if form == PACK:
            info = self.stored(f"{base}.{SHAPE}")
            if tuple(info.shape) != (2,):
                raise CheckpointError(
                    f"{self.checkpoint.path}: {info.name} is {list(info.shape)}, but must be two numbers",
                    hint="the file is damaged; get it again",
                )
            rows, columns = (int(size) for size in self.checkpoint.load(info.name))
            return rows, columns
        return shape[0], shape[1] * 2 if form in (NVFP4, MXFP4) else shape[1]

    def _group(self, name: str) -> ConfigGroup:
        """The config group of a coded weight: the group that names the weight, else the first group of a
        class name whose layout fits the tensors."""
        base = name.rpartition(".")[0]
        self.stored(f"{base}.{SCALE}")
        if name.endswith(PACKED) and self.checkpoint.tensors[name].dtype == "I32":
            self.stored(f"{base}.{SHAPE}")
        named = self.scheme.named(base)
        main_first = sorted(self.scheme.groups, key=lambda group: "Linear" not in group.targets)
        for group in (named,) if named else main_first:
            if self._fits(name, group):
                return group
        raise CheckpointError(
            f"{self.checkpoint.path}: the tensors of {base} do not fit config.json's quantization_config",
            hint="weights and config are of different versions, or the format is one that attar cannot read",
        )

    def _fits(self, name: str, group: ConfigGroup) -> bool:
        """Whether the stored types and shapes are the types and shapes of the group's layout."""
        base, _, leaf = name.rpartition(".")
        info, scale = self.checkpoint.tensors[name], self.stored(f"{base}.{SCALE}")
        if (group.form == PACK) != (info.dtype == "I32"):
            return False
        shape = self._shape(name, group.form)
        specs = layout(shape, group.weights, group.form, scale.dtype, info.dtype)
        if leaf not in specs or specs[leaf] != (info.dtype, info.shape):
            return False
        if any(part in specs and f"{base}.{part}" not in self.checkpoint.tensors for part in (ZERO, G_IDX)):
            return False
        above = self.checkpoint.tensors.get(f"{base}.{GLOBAL}")
        if above is not None and above.shape not in ((), (1,)):
            return False
        dtype, tiles = specs[SCALE]
        return dtype == scale.dtype and scale.shape in (tiles, () if tiles == (1,) else tiles)
