"""compressed-tensors: the checkpoints that transformers and vLLM load (``quant_method: compressed-tensors``).

``quantization_config`` in config.json holds groups, each with targets (module names, ``re:`` patterns or
class names, the more exact first), rules for weights and input activations, and the layout of its tensors;
layouts.py has the bytes. Beside a Linear's weight:

    input_scale       float (1,)   static activation scale
    k_scale, v_scale  float (1,)   of an attention module, with ``kv_cache_scheme``

An int8 embedding is ``naive-quantized``: ``weight`` int8 (V, D) and ``weight_scale`` (V, 1). A head tied to
it stores a scale of its own and no weight: transformers ties the int8 weight and then decodes embedding and
head each with its scale.

A Conv1D (GPT-2) stores its weight transposed, and transformers' reader of this format passes Conv1D by,
leaving random weights. Such a checkpoint is written with ``format: attar-transposed``, which that reader
refuses by name; attar itself reads it, and exports it dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.errors import CheckpointError, NumericsError
from attar.formats.coded import Coded
from attar.formats.dense_pack import dense_unpack
from attar.formats.layouts import GLOBAL, ORDER, PACKED, SCALE, SHAPE, WEIGHT, ZERO, decode, layout
from attar.formats.patterns import begins
from attar.formats.rules import MXFP4, NAIVE, NVFP4, PACK, ActivationRule, WeightRule, format_of

METHOD = "compressed-tensors"
TRANSPOSED = "attar-transposed"
EMBEDDING = WeightRule("int", 8, "channel")
INPUT_SCALE, INPUT_ZERO, K_SCALE, V_SCALE = "input_scale", "input_zero_point", "k_scale", "v_scale"
PARTS = (SCALE, SHAPE, ZERO, GLOBAL, ORDER)
ASIDE = (*PARTS, INPUT_SCALE, INPUT_ZERO, "input_global_scale", K_SCALE, V_SCALE, "output_scale")
"""Last parts of names of tensors that belong to a weight or an activation and are none themselves."""
CONSTANT = 0.999  # a layer whose codes are all but one in a thousand the same is broken
CODES = {"I8", "F8_E4M3", "F8_E5M2"}


@dataclass(frozen=True)
class ConfigGroup:
    """A config group: what happens to the modules it names.

    Attributes:
        targets: module names, ``re:`` patterns, or class names such as ``Linear``.
        weights: how their weights are coded.
        activations: how their inputs are rounded, or None.
        form: the layout of their tensors.
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
        groups: in order; where two name a module, the more exact name decides.
        ignore: modules that keep their dense weight.
        kv_cache: how keys and values are rounded.
        transposed: the Linears are Conv1D modules.
        dequantize: tell transformers to decode while it loads. Its other way, to decode on the first pass,
            fails in compressed-tensors 0.20 on zero points and on FP4 where the model is not bfloat16. One
            group alone can be loaded so, and activations are not rounded.
    """
    forms = [TRANSPOSED if transposed and group.form != NAIVE else group.form for group in groups]
    whole = forms[0] if len(dict.fromkeys(forms)) == 1 else "mixed-precision"
    whole = TRANSPOSED if TRANSPOSED in forms else whole
    said = {
        f"group_{number}": {
            "targets": list(group.targets),
            "format": form,
            "weights": group.weights.config(),
            "input_activations": group.activations.config() if group.activations else None,
        }
        for number, (group, form) in enumerate(zip(groups, forms, strict=True))
    }
    made = {
        "quant_method": METHOD,
        "format": whole,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": said,
    }
    if kv_cache:
        made["kv_cache_scheme"] = kv_cache.config()
    return {**made, "dequantize": True} if dequantize else made


class CompressedTensorsConfig:
    """A ``quantization_config`` as it is read: which group a module belongs to.

    Attributes:
        groups: the config groups in order.
        ignore: names and patterns of modules that are dense.
        kv_cache: how keys and values are rounded, or None.
        transposed: weights are those of Conv1D modules.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.transposed = config.get("format") == TRANSPOSED
        self.groups = tuple(
            _group(said, config.get("format")) for said in (config.get("config_groups") or {}).values()
        )
        self.ignore = tuple(config.get("ignore") or ())
        said = config.get("kv_cache_scheme")
        self.kv_cache = ActivationRule.read(said) if said else None
        self.exact = {target: group for group in self.groups for target in group.targets}

    def named(self, module: str) -> ConfigGroup | None:
        """The group that names a module or has a pattern for it. A stored name may lack the model's prefix or
        have one more."""
        if module in self.exact:
            return self.exact[module]
        names = {target: group for target, group in self.exact.items() if not target.startswith("re:")}
        for target, group in names.items():
            if "." in target and (target.endswith(f".{module}") or module.endswith(f".{target}")):
                return group
        patterns = sorted(target for target in self.exact if target.startswith("re:"))
        found = next((target for target in patterns if begins(target[3:], module)), None)
        return self.exact[found] if found else None

    def group(self, module: str, kind: str) -> ConfigGroup | None:
        """The group of a module of class ``kind``, None where it is dense."""
        for name in self.ignore:
            if name in (module, kind) or (name.startswith("re:") and begins(name[3:], module)):
                return None
        return self.named(module) or self.exact.get(kind)


def _group(said: Mapping[str, Any], whole: str | None) -> ConfigGroup:
    if not said.get("weights"):
        raise CheckpointError("config.json: a config group quantizes no weights", hint="attar cannot read it")
    weights = WeightRule.read(said["weights"])
    activations = ActivationRule.read(said["input_activations"]) if said.get("input_activations") else None
    form = said.get("format") or (whole if whole != "mixed-precision" else None)
    if form in (None, TRANSPOSED):
        form = format_of(weights, activations)
    return ConfigGroup(tuple(said["targets"]), weights, activations, form)


class CompressedTensorsReader:
    """Reads a packed checkpoint tensor by tensor.

    Attributes:
        checkpoint: what is read.
        scheme: its ``quantization_config``.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        self.scheme = CompressedTensorsConfig(checkpoint.config["quantization_config"])

    def coded(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of a weight."""
        base, _, leaf = name.rpartition(".")
        if leaf == PACKED:
            return True
        tensors = self.checkpoint.tensors
        return leaf == WEIGHT and tensors[name].dtype in CODES and f"{base}.{SCALE}" in tensors

    def slot(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor stands for; None for scales and the like."""
        base, _, leaf = info.name.rpartition(".")
        if leaf in ASIDE:
            return None
        if not self.coded(info.name):
            return info.name, info.dtype, info.shape
        group = self._group(info.name)
        fp4 = group.form in (NVFP4, MXFP4)
        shape = self._shape(info.name, group.form)
        kind = "BF16" if fp4 else self._part(base, SCALE).dtype
        return f"{base}.{WEIGHT}", kind, shape[::-1] if self._turned(group) else shape

    def dense(self, name: str) -> Tensor | None:
        """What a stored tensor stands for: a decoded weight for codes, None for scales and the like, itself
        otherwise.

        Raises:
            CheckpointError: a tensor of a coded weight is missing, or the config does not fit it.
        """
        if name.rpartition(".")[2] in ASIDE:
            return None
        if not self.coded(name):
            tensor: Tensor = self.checkpoint.load(name)
            return tensor
        group = self._group(name)
        weight = decode(self._tensors(name), group.weights, group.form)
        return weight.T.contiguous() if self._turned(group) else weight

    def described(self, name: str) -> tuple[WeightRule, tuple[int, int]] | None:
        """Rule and shape (N, K) of a coded weight, from headers; None for any other tensor."""
        if not self.coded(name):
            return None
        group = self._group(name)
        return group.weights, self._shape(name, group.form)

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """The codes of a stored weight as they are, and what they are; None for any other tensor.

        The rule is ``ordered`` where the groups are not neighbours, whatever the config says.

        Raises:
            CheckpointError: a tensor of the weight is missing, or the config does not fit it.
        """
        if not self.coded(name):
            return None
        group = self._group(name)
        weight, rule = _undecoded(self._tensors(name), group.weights, group.form), group.weights
        columns = weight.codes.shape[1]
        if weight.order is not None:
            neighbours = torch.arange(columns) // (rule.group_size or columns)
            if torch.equal(weight.order.long(), neighbours):
                weight = replace(weight, order=None)
        return weight, replace(rule, ordered=weight.order is not None)

    def check(self, name: str) -> None:
        """Raise where scales cannot be right or all codes are the same.

        Raises:
            NumericsError: names the layer.
        """
        if not self.coded(name):
            return
        base = name.rpartition(".")[0]
        scales = [self.checkpoint.load(f"{base}.{SCALE}").float()]
        if self._group(name).form == PACK:  # symmetric codes of few bits may have negative ones
            scales = [scales[0].abs()]
        elif self._group(name).form == MXFP4:
            scales = [torch.where(scales[0] == 255, torch.nan, torch.exp2(scales[0] - 127))]
        for leaf in (GLOBAL, INPUT_SCALE):
            if f"{base}.{leaf}" in self.checkpoint.tensors:
                scales.append(self.checkpoint.load(f"{base}.{leaf}").float())
        check_scales(f"{base}.{SCALE}", scales)
        check_codes(base, self.checkpoint.load(name))

    def _turned(self, group: ConfigGroup) -> bool:
        return self.scheme.transposed and group.form != NAIVE

    def _part(self, base: str, leaf: str) -> Any:
        info = self.checkpoint.tensors.get(f"{base}.{leaf}")
        if info is None:
            raise CheckpointError(
                f"{self.checkpoint.path}: {base}.{leaf} is missing",
                hint="the packed checkpoint is incomplete",
            )
        return info

    def _tensors(self, name: str) -> dict[str, Tensor]:
        """Everything that decodes a weight, by the last part of its name."""
        base, _, leaf = name.rpartition(".")
        found = [part for part in PARTS if f"{base}.{part}" in self.checkpoint.tensors]
        return {part: self.checkpoint.load(f"{base}.{part}") for part in (leaf, *found)}

    def _shape(self, name: str, form: str) -> tuple[int, int]:
        """(N, K) of a coded weight."""
        base, shape = name.rpartition(".")[0], self.checkpoint.tensors[name].shape
        if form == PACK:
            rows, columns = (int(size) for size in self.checkpoint.load(self._part(base, SHAPE).name))
            return rows, columns
        return shape[0], shape[1] * 2 if form in (NVFP4, MXFP4) else shape[1]

    def _group(self, name: str) -> ConfigGroup:
        """The group of a coded weight: the one that names it, else the first whose class names and tensors
        fit."""
        base = name.rpartition(".")[0]
        self._part(base, SCALE)
        if name.endswith(PACKED) and self.checkpoint.tensors[name].dtype == "I32":
            self._part(base, SHAPE)
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
        """Whether the stored types and shapes are those of the group's layout."""
        base, _, leaf = name.rpartition(".")
        info, scale = self.checkpoint.tensors[name], self._part(base, SCALE)
        if (group.form == PACK) != (info.dtype == "I32"):
            return False
        shape = self._shape(name, group.form)
        wanted = layout(shape, group.weights, group.form, scale.dtype, info.dtype)
        if leaf not in wanted or wanted[leaf] != (info.dtype, info.shape):
            return False
        kind, tiles = wanted[SCALE]
        return kind == scale.dtype and scale.shape in (tiles, () if tiles == (1,) else tiles)


def _undecoded(tensors: Mapping[str, Tensor], rule: WeightRule, form: str) -> Coded:
    """What :func:`attar.formats.layouts.encode` made the tensors of a weight from."""
    if form in (NVFP4, MXFP4):
        packed = tensors[PACKED]
        codes = torch.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)
        if form == MXFP4:
            return Coded(codes, torch.exp2(tensors[SCALE].float() - 127.0))
        return Coded(codes, tensors[SCALE].float() / tensors[GLOBAL].float(), global_scale=tensors[GLOBAL])
    scale, zero, codes = tensors[SCALE].float(), tensors.get(ZERO), tensors.get(WEIGHT)
    table = (1, 1) if scale.numel() == 1 else scale.shape
    offset = 2 ** (rule.bits - 1)
    if codes is None:
        codes = dense_unpack(tensors[PACKED], rule.bits, int(tensors[SHAPE][1]))
        codes = (codes - offset).view(torch.int8)
    if zero is not None and zero.dtype == torch.int32:
        zero = dense_unpack(zero.T.contiguous(), rule.bits, table[0]).T.float() - offset
    signed = None if zero is None else zero.float().reshape(table).contiguous()
    return Coded(codes, scale.reshape(table), signed, order=tensors.get(ORDER))


def check_scales(name: str, scales: Sequence[Tensor]) -> None:
    """Raise where a scale is zero, negative or not finite.

    Raises:
        NumericsError: names the tensor.
    """
    for scale in scales:
        if not (torch.isfinite(scale).all() and (scale > 0).all()):
            raise NumericsError(
                f"{name} holds zero, negative or infinite scales", hint="quantize the model again"
            )


def check_codes(module: str, codes: Tensor) -> None:
    """Raise where nearly all codes (or words of codes) are the same.

    Raises:
        NumericsError: names the module.
    """
    words = codes.flatten()
    words = words.view(torch.uint8) if words.element_size() == 1 else words
    if words.numel() > 64 and float((words == words[0]).float().mean()) > CONSTANT:
        raise NumericsError(
            f"{module}: nearly all codes are the same", hint="the weights were zero or damaged before"
        )


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that its weights are in this layout."""
    return (config.get("quantization_config") or {}).get("quant_method") == METHOD


def dequantize_state(checkpoint: Any) -> dict[str, Tensor]:
    """Every tensor of a packed checkpoint, decoded to dense ones under the names of the unquantized model.

    Raises:
        CheckpointError: a tensor of a packed Linear is missing, or the layout is another one.
    """
    reader = CompressedTensorsReader(checkpoint)
    state: dict[str, Tensor] = {}
    for name in checkpoint.tensors:
        tensor = reader.dense(name)
        if tensor is not None:
            state[name.removesuffix("_packed")] = tensor
    return state
