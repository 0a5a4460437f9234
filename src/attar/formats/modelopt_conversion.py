"""Between compressed-tensors and ModelOpt: FP8 and NVFP4 checkpoints under each other's names. No code and no
scale of a group is changed.

    compressed-tensors                              ModelOpt
    weight, weight_packed                           weight
    weight_scale (1,), (N, 1) or (P, G)             weight_scale (), (N,) or (P, 1, G, 1), float32
    weight_global_scale, input_global_scale (1,)    weight_scale_2, input_scale (): the reciprocals
    input_scale (1,)                                input_scale ()
    self_attn.k_scale, .v_scale (1,)                self_attn.k_proj.k_scale, .v_proj.v_scale (), float32

A reciprocal is rounded to float32: there and back, a global scale may come out one unit in the last place
off.
Both classes are asked tensor by tensor, so that a walk over the source can write the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats import compressed_tensors, layouts, modelopt
from attar.formats.compressed_tensors import K_SCALE, V_SCALE, ConfigGroup
from attar.formats.modelopt_config import hf_quant_config, quantization_config
from attar.formats.modelopt_tensors import (
    ALGORITHMS,
    INPUT_SCALE,
    algorithm,
    from_compressed,
    layout,
    to_compressed,
)
from attar.formats.rules import NVFP4, ActivationRule, WeightRule, format_of

Slots = list[tuple[str, str, tuple[int, ...]]]
INPUT_GLOBAL = "input_global_scale"
KV_CACHE = ActivationRule("float", 8, "tensor", dynamic=False)
BESIDE = {K_SCALE: "k_proj", V_SCALE: "v_proj"}
CODES = {"F8_E4M3", "U8"}


class FromCompressedTensors:
    """A checkpoint of compressed-tensors as ModelOpt stores it.

    Attributes:
        source: what is converted.
        layers: ModelOpt's algorithm of each quantized module.
        config: the result's config.json.
        hf_quant_config: the result's hf_quant_config.json.

    Raises:
        ModelError: a layer is of a scheme that ModelOpt has not, or its shape does not divide into blocks.
        CheckpointError: config and tensors do not fit together.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._scheme = compressed_tensors.CompressedTensorsConfig(source.config["quantization_config"])
        self._reader = compressed_tensors.CompressedTensorsReader(source)
        if self._scheme.transposed:
            raise ModelError(
                f"{source.path}: ModelOpt has no transposed Linears ({source.config['model_type']})",
                hint="--format dense loads everywhere",
            )
        if self._scheme.kv_cache not in (None, KV_CACHE):
            raise ModelError(
                f"{source.path}: ModelOpt's KV cache is FP8 with one scale for keys and one for values",
                hint="quantize with --kv-cache fp8 or none",
            )
        self.layers = {
            name.rpartition(".")[0]: self._algorithm(name) for name in source.tensors if self._coded(name)
        }
        ignored, cached = self._ignored(), self._scheme.kv_cache is not None
        said = quantization_config(self.layers, ignored, kv_cache=cached)
        self.config = {**source.config, "quantization_config": said}
        self.hf_quant_config = hf_quant_config(self.layers, ignored, kv_cache=cached)

    def slots(self, info: Any) -> Slots:
        """Names, types and shapes of what a stored tensor becomes, known before it is read."""
        base, _, leaf = info.name.rpartition(".")
        if leaf in BESIDE:
            return [(f"{base}.{BESIDE[leaf]}.{leaf}", "F32", ())]
        if leaf in compressed_tensors.ASIDE:
            return []
        if not self._coded(info.name):
            return [(info.name, info.dtype, info.shape)]
        static = any(f"{base}.{part}" in self.source.tensors for part in (INPUT_SCALE, INPUT_GLOBAL))
        made = layout(_shape(info), self._rule(base), static=static)
        return [(f"{base}.{part}", kind, size) for part, (kind, size) in made.items()]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What a stored tensor becomes, as :meth:`slots` announces it."""
        base, _, leaf = name.rpartition(".")
        if leaf in BESIDE:
            return {f"{base}.{BESIDE[leaf]}.{leaf}": self.source.load(name).float().reshape(())}
        if leaf in compressed_tensors.ASIDE:
            return {}
        if not self._coded(name):
            return {name: self.source.load(name)}
        parts = (leaf, layouts.SCALE, layouts.GLOBAL, INPUT_SCALE, INPUT_GLOBAL)
        stored = {part: f"{base}.{part}" for part in parts if f"{base}.{part}" in self.source.tensors}
        loaded = {part: self.source.load(stored[part]) for part in stored}
        return {f"{base}.{part}": value for part, value in from_compressed(loaded, self._rule(base)).items()}

    def _coded(self, name: str) -> bool:
        return self._reader.coded(name)

    def _rule(self, module: str) -> WeightRule:
        return ALGORITHMS[self.layers[module]][0]

    def _algorithm(self, name: str) -> str:
        """ModelOpt's algorithm of a coded tensor, whose type and shape must be those of its group."""
        base, _, leaf = name.rpartition(".")
        info, group = self.source.tensors[name], self._scheme.group(base, "Linear")
        if info.dtype not in CODES or group is None:
            raise ModelError(
                f"{self.source.path}: {name} holds whole numbers, for which ModelOpt has no place here",
                hint="quantize with --scheme FP8, FP8_DYNAMIC, FP8_BLOCK or NVFP4A16",
            )
        found = algorithm(group.weights, group.activations)
        shape = _shape(info)
        layout(shape, group.weights)
        wanted = layouts.layout(shape, group.weights, group.form, "F32", info.dtype)
        scale = self.source.tensors.get(f"{base}.{layouts.SCALE}")
        if leaf not in wanted or scale is None or scale.shape not in (wanted[layouts.SCALE][1], ()):
            raise CheckpointError(
                f"{self.source.path}: the tensors of {base} do not fit config.json's quantization_config",
                hint="weights and config are of different versions",
            )
        return found

    def _ignored(self) -> list[str]:
        """Dense modules by name: those that the config names, and every matrix without codes."""
        named = [name for name in self._scheme.ignore if not name.startswith("re:")]
        matrices = [
            info.name.removesuffix(".weight")
            for info in self.source.tensors.values()
            if info.name.endswith(".weight") and len(info.shape) == 2 and not self._coded(info.name)
        ]
        return sorted(dict.fromkeys(named + matrices))


class ToCompressedTensors:
    """A checkpoint of ModelOpt's as compressed-tensors stores it; scales stay float32.

    Attributes:
        source: what is converted.
        layers: ModelOpt's algorithm of each quantized module.
        config: the result's config.json.

    Raises:
        CheckpointError: its layout is none that attar reads.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._reader = modelopt.ModelOptReader(source)
        self.layers = {
            name.removesuffix(".weight"): self._algorithm(name)
            for name in source.tensors
            if self._reader.coded(name)
        }
        said = source.config["quantization_config"]
        self.config = {**source.config, "quantization_config": self._config(said)}

    def slots(self, info: Any) -> Slots:
        """Names, types and shapes of what a stored tensor becomes, known before it is read."""
        base, _, leaf = info.name.rpartition(".")
        if leaf in BESIDE:
            return [(_beside_attention(base, leaf), "F32", (1,))]
        if leaf in modelopt.ASIDE:
            return []
        if not self._reader.coded(info.name):
            return [(info.name, info.dtype, info.shape)]
        rule, shape = self._reader.rule(info.name), self._reader.slot(info)[2]  # type: ignore[index]
        form = NVFP4 if rule.bits == 4 else format_of(rule, KV_CACHE)
        made = layouts.layout((shape[0], shape[1]), rule, form, "F32", info.dtype)
        if f"{base}.{INPUT_SCALE}" in self.source.tensors:
            made[INPUT_GLOBAL if rule.bits == 4 else INPUT_SCALE] = ("F32", (1,))
        return [(f"{base}.{part}", kind, size) for part, (kind, size) in made.items()]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What a stored tensor becomes, as :meth:`slots` announces it."""
        base, _, leaf = name.rpartition(".")
        if leaf in BESIDE:
            return {_beside_attention(base, leaf): self.source.load(name).to(torch.float32).reshape(1)}
        if leaf in modelopt.ASIDE:
            return {}
        if not self._reader.coded(name):
            return {name: self.source.load(name)}
        made = to_compressed(self._reader.tensors(name), self._reader.rule(name))
        return {f"{base}.{part}": value for part, value in made.items()}

    def _algorithm(self, name: str) -> str:
        """The algorithm of a coded tensor: rules of weights alone do not tell NVFP4 from W4A16_NVFP4."""
        rule = self._reader.rule(name)
        if rule.bits == 4:
            static = f"{name.removesuffix('weight')}{INPUT_SCALE}" in self.source.tensors
            return "NVFP4" if static else "W4A16_NVFP4"
        return next(known for known, (weights, _) in ALGORITHMS.items() if weights == rule)

    def _config(self, said: Mapping[str, Any]) -> dict[str, Any]:
        names = list(dict.fromkeys(self.layers.values()))
        groups = []
        for name in names:
            weights, activations = ALGORITHMS[name]
            modules = tuple(module for module, chosen in self.layers.items() if chosen == name)
            targets = ("Linear",) if len(names) == 1 else modules
            groups.append(ConfigGroup(targets, weights, activations, format_of(weights, activations)))
        ignore = [
            f"re:{re.escape(name).replace(re.escape('*'), '.*')}$" if "*" in name else name
            for name in said.get("ignore") or ()
        ]
        cached = KV_CACHE if said.get("kv_cache_scheme") else None
        made = compressed_tensors.quantization_config(groups, ignore=ignore, kv_cache=cached)
        for group in made["config_groups"].values():
            if (group["input_activations"] or {}).get("strategy") == "tensor_group":
                group["input_activations"]["dynamic"] = "local"  # scales of groups are, the global one is not
        return made


def _shape(info: Any) -> tuple[int, int]:
    """(N, K) of a coded weight of compressed-tensors."""
    rows, columns = info.shape
    return rows, columns * 2 if info.dtype == "U8" else columns


def _beside_attention(base: str, leaf: str) -> str:
    """Name of the scale of keys or values with compressed-tensors, whose place is the attention module."""
    return f"{base.removesuffix(f'.{BESIDE[leaf]}')}.{leaf}"
