"""Conversion between compressed-tensors and ModelOpt, FP8 and NVFP4. No code and no scale of a group changes.

    compressed-tensors                              ModelOpt
    weight, weight_packed                           weight
    weight_scale (1,), (N, 1) or (P, G)             weight_scale (), (N,) or (P, 1, G, 1), float32
    weight_global_scale, input_global_scale (1,)    weight_scale_2, input_scale (): the reciprocals
    input_scale (1,)                                input_scale ()
    self_attn.k_scale, .v_scale (1,)                self_attn.k_proj.k_scale, .v_proj.v_scale (), float32

A reciprocal is rounded to float32: there and back, a global scale may be off by one unit in the last place.
Both classes convert tensor by tensor, so that a walk over the source can write the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats import compressed_tensors, layouts, modelopt
from attar.formats.compressed_tensors import INPUT_GLOBAL, K_SCALE, V_SCALE, ConfigGroup
from attar.formats.modelopt import ALGORITHMS, INPUT_SCALE
from attar.formats.rules import NVFP4, ActivationRule, WeightRule, format_of, texts

TensorHeaders = list[tuple[str, str, tuple[int, ...]]]
"""Name, type and shape of each tensor."""
KV_CACHE = ActivationRule("float", 8, "tensor", dynamic=False)
KV_MODULES = {K_SCALE: "k_proj", V_SCALE: "v_proj"}  # where ModelOpt stores the scales of the KV cache
CODES = {"F8_E4M3", "U8"}


class FromCompressedTensors:
    """Converts a checkpoint of compressed-tensors to ModelOpt.

    Attributes:
        layers: ModelOpt's algorithm of each quantized module.

    Raises:
        ModelError: ModelOpt has no such scheme, or a shape does not divide into blocks.
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
        config = modelopt.quantization_config(self.layers, ignored, kv_cache=cached)
        self.config = {**source.config, "quantization_config": config}
        self.hf_quant_config = modelopt.hf_quant_config(self.layers, ignored, kv_cache=cached)

    def headers(self, info: Any) -> TensorHeaders:
        """Names, types and shapes of the tensors that a stored tensor becomes, from its header."""
        base, _, leaf = info.name.rpartition(".")
        if leaf in KV_MODULES:
            return [(f"{base}.{KV_MODULES[leaf]}.{leaf}", "F32", ())]
        if leaf in compressed_tensors.AUXILIARY:
            return []
        if not self._coded(info.name):
            return [(info.name, info.dtype, info.shape)]
        static = any(f"{base}.{part}" in self.source.tensors for part in (INPUT_SCALE, INPUT_GLOBAL))
        specs = modelopt.layout(_shape(info), self._rule(base), static=static)
        return [(f"{base}.{part}", *spec) for part, spec in specs.items()]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors that a stored tensor becomes, with the headers of :meth:`headers`."""
        base, _, leaf = name.rpartition(".")
        if leaf in KV_MODULES:
            return {f"{base}.{KV_MODULES[leaf]}.{leaf}": self.source.load(name).float().reshape(())}
        if leaf in compressed_tensors.AUXILIARY:
            return {}
        if not self._coded(name):
            return {name: self.source.load(name)}
        parts = (leaf, layouts.SCALE, layouts.GLOBAL, INPUT_SCALE, INPUT_GLOBAL)
        stored = {part: f"{base}.{part}" for part in parts if f"{base}.{part}" in self.source.tensors}
        loaded = {part: self.source.load(stored[part]) for part in stored}
        renamed = modelopt.from_compressed(loaded, self._rule(base))
        return {f"{base}.{part}": value for part, value in renamed.items()}

    def _coded(self, name: str) -> bool:
        return self._reader.is_coded(name)

    def _rule(self, module: str) -> WeightRule:
        return ALGORITHMS[self.layers[module]][0]

    def _algorithm(self, name: str) -> str:
        """ModelOpt's algorithm of a coded tensor, whose type and shape must fit its config group."""
        base, _, leaf = name.rpartition(".")
        info, group = self.source.tensors[name], self._scheme.group(base, "Linear")
        if info.dtype not in CODES or group is None:
            raise ModelError(
                f"{self.source.path}: {name} holds integer codes, which ModelOpt does not have here",
                hint="quantize with --scheme FP8, FP8_DYNAMIC, FP8_BLOCK, NVFP4 or NVFP4A16",
            )
        algorithm = modelopt.algorithm(group.weights, group.activations)
        shape = _shape(info)
        modelopt.layout(shape, group.weights)
        specs = layouts.layout(shape, group.weights, group.form, "F32", info.dtype)
        scale = self.source.tensors.get(f"{base}.{layouts.SCALE}")
        if leaf not in specs or scale is None or scale.shape not in (specs[layouts.SCALE][1], ()):
            raise CheckpointError(
                f"{self.source.path}: the tensors of {base} do not fit config.json's quantization_config",
                hint="weights and config are of different versions",
            )
        return algorithm

    def _ignored(self) -> list[str]:
        """Dense modules by name: modules that the config names, and every matrix without codes."""
        named = [name for name in self._scheme.ignore if not name.startswith("re:")]
        matrices = [
            info.name.removesuffix(".weight")
            for info in self.source.tensors.values()
            if info.name.endswith(".weight") and len(info.shape) == 2 and not self._coded(info.name)
        ]
        return sorted(dict.fromkeys(named + matrices))


class ToCompressedTensors:
    """Converts a checkpoint of ModelOpt's to compressed-tensors; scales stay float32.

    Attributes:
        layers: ModelOpt's algorithm of each quantized module.

    Raises:
        CheckpointError: its layout is none that attar reads.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._reader = modelopt.ModelOptReader(source)
        self.layers = {
            name.removesuffix(".weight"): self._algorithm(name)
            for name in source.tensors
            if self._reader.is_coded(name)
        }
        config = self._config(source.config.get("quantization_config") or {})
        self.config = {**source.config, "quantization_config": config}

    def headers(self, info: Any) -> TensorHeaders:
        """Names, types and shapes of the tensors that a stored tensor becomes, from its header."""
        base, _, leaf = info.name.rpartition(".")
        if leaf in KV_MODULES:
            return [(_attention_scale(base, leaf), "F32", (1,))]
        if leaf in modelopt.AUXILIARY:
            return []
        if not self._reader.is_coded(info.name):
            return [(info.name, info.dtype, info.shape)]
        rule, shape = self._reader.rule(info.name), self._reader.weight_header(info.name)[2]
        form = NVFP4 if rule.bits == 4 else format_of(rule, KV_CACHE)
        specs = layouts.layout(shape, rule, form, "F32", info.dtype)
        if f"{base}.{INPUT_SCALE}" in self.source.tensors:
            specs[INPUT_GLOBAL if rule.bits == 4 else INPUT_SCALE] = ("F32", (1,))
        return [(f"{base}.{part}", *spec) for part, spec in specs.items()]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors that a stored tensor becomes, with the headers of :meth:`headers`."""
        base, _, leaf = name.rpartition(".")
        if leaf in KV_MODULES:
            return {_attention_scale(base, leaf): self.source.load(name).to(torch.float32).reshape(1)}
        if leaf in modelopt.AUXILIARY:
            return {}
        if not self._reader.is_coded(name):
            return {name: self.source.load(name)}
        renamed = modelopt.to_compressed(self._reader.tensors(name), self._reader.rule(name))
        return {f"{base}.{part}": value for part, value in renamed.items()}

    def _algorithm(self, name: str) -> str:
        """The algorithm of a coded tensor; NVFP4 and W4A16_NVFP4 differ only in the input scale."""
        rule = self._reader.rule(name)
        if rule.bits == 4:
            static = f"{name.removesuffix('weight')}{INPUT_SCALE}" in self.source.tensors
            return "NVFP4" if static else "W4A16_NVFP4"
        return next(known for known, (weights, _) in ALGORITHMS.items() if weights == rule)

    def _config(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        names = list(dict.fromkeys(self.layers.values()))
        groups = []
        for name in names:
            weights, activations = ALGORITHMS[name]
            modules = tuple(module for module, chosen in self.layers.items() if chosen == name)
            targets = ("Linear",) if len(names) == 1 else modules
            groups.append(ConfigGroup(targets, weights, activations, format_of(weights, activations)))
        ignore = [
            f"re:{re.escape(name).replace(re.escape('*'), '.*')}$" if "*" in name else name
            for name in texts(stored.get("ignore") or [], "ignore")
        ]
        cached = KV_CACHE if stored.get("kv_cache_scheme") else None
        return compressed_tensors.quantization_config(groups, ignore=ignore, kv_cache=cached)


def _shape(info: Any) -> tuple[int, int]:
    """(N, K) of a coded weight of compressed-tensors."""
    rows, columns = info.shape
    return rows, columns * 2 if info.dtype == "U8" else columns


def _attention_scale(base: str, leaf: str) -> str:
    """compressed-tensors' name of the scale of keys or values, a tensor of the attention module."""
    return f"{base.removesuffix(f'.{KV_MODULES[leaf]}')}.{leaf}"
