"""NVIDIA ModelOpt's "unified Hugging Face" checkpoints (``quant_method: modelopt``): FP8 and NVFP4 for vLLM,
TensorRT-LLM and SGLang. modelopt_conversion.py converts from compressed-tensors and back.

NVIDIA Model Optimizer, ``modelopt/torch/export/quant_utils.py``, ``convert_hf_config.py`` and
``quantization/qtensor/nvfp4_tensor.py``; what is read: vLLM, ``quantization/modelopt.py``. For a weight (N,
K):

    weight           float8_e4m3fn (N, K); NVFP4: uint8 (N, K / 2), the even input in the low nibble
    weight_scale     FP8: float32 (), (N,) or (N / 128, 1, K / 128, 1); NVFP4: float8_e4m3fn (N, K / 16)
    weight_scale_2   NVFP4: float32 (), which *multiplies* the scales; compressed-tensors stores its
                     reciprocal
    input_scale      float32 (): static scale of the inputs; NVFP4: the same kind of factor on their scales
    k_proj.k_scale, v_proj.v_scale   float32 () of an attention module with an FP8 KV cache

A decoded weight is code times scale in float32, rounded once to the model's type.

config.json has a ``quantization_config``, hf_quant_config.json the same in older terms. Readers recognize a
file by its producer's name, which attar therefore writes, too; vLLM needs group_size, kv_cache_quant_algo and
exclude_modules of an NVFP4 file. Dense modules are named in full: a reader also skips every module whose name
contains a listed one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.tensors import stored_dtype
from attar.errors import ModelError
from attar.formats import layouts
from attar.formats.coded import Coded, WeightLayout, fp4_levels, unpack_nibbles
from attar.formats.compressed_tensors import INPUT_GLOBAL
from attar.formats.packed_reader import PackedReader, check_codes, check_scales, weight_dtype
from attar.formats.rules import FLOAT, NVFP4, ActivationRule, WeightRule, mapping, texts

METHOD = "modelopt"
WEIGHT, SCALE, SCALE_2, INPUT_SCALE = "weight", "weight_scale", "weight_scale_2", "input_scale"
AUXILIARY = (SCALE, SCALE_2, INPUT_SCALE, "k_scale", "v_scale")
"""Last parts of the names of tensors that belong to a weight or an activation."""
CODES = ("U8", "I8", "F8_E4M3")
GROUP = 16
FILE = "hf_quant_config.json"
PRODUCER = {"name": "modelopt", "version": "0.39.0"}
MIXED = "MIXED_PRECISION"
MIXABLE = ("FP8", "NVFP4", "W4A16_NVFP4")
"""Algorithms that vLLM reads together in one checkpoint."""

_FP4 = WeightRule("float", 4, "tensor_group", GROUP)
ALGORITHMS: dict[str, tuple[WeightRule, ActivationRule | None]] = {
    "FP8": (WeightRule("float", 8, "tensor"), ActivationRule("float", 8, "tensor", dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": (WeightRule("float", 8, "channel"), ActivationRule("float", 8, "token")),
    "fp8_pb_wo": (
        WeightRule("float", 8, "block", block=(128, 128)),
        ActivationRule("float", 8, "group", group_size=128),
    ),
    "NVFP4": (_FP4, ActivationRule("float", 4, "tensor_group", group_size=GROUP)),
    "W4A16_NVFP4": (_FP4, None),
}
"""What vLLM reads, by ModelOpt's name; the block format is spelt as ModelOpt spells it."""


def algorithm(weights: WeightRule, activations: ActivationRule | None) -> str:
    """ModelOpt's name of a pair of rules.

    Raises:
        ModelError: it has none.
    """
    for name, rules in ALGORITHMS.items():
        if (weights, activations) == rules:
            return name
    inputs = f"{activations.kind}{activations.bits} by {activations.strategy}" if activations else "none"
    raise ModelError(
        f"ModelOpt has no algorithm for weights in {weights.kind}{weights.bits} by {weights.strategy} with "
        f"inputs in {inputs}",
        hint="quantize with --scheme FP8, FP8_DYNAMIC, FP8_BLOCK, NVFP4 or NVFP4A16",
    )


def encode(weight: Coded, rule: WeightRule, *, input_scale: float | None = None) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names. No code is changed.

    Args:
        weight: float8 codes, or 0 to 15 with ``global_scale``.
        rule: of the weight; one of :data:`ALGORITHMS`.
    """
    form = NVFP4 if rule.bits == 4 else FLOAT
    tensors = from_compressed(layouts.encode(weight, rule, form, torch.float32), rule)
    if input_scale is not None:
        tensors[INPUT_SCALE] = torch.tensor(input_scale, dtype=torch.float32)
    return tensors


def layout(shape: tuple[int, int], rule: WeightRule, *, static: bool = False) -> WeightLayout:
    """Type and shape of the tensors that :func:`encode` returns for a weight of ``shape`` (N, K).

    Args:
        static: there is an input scale.

    Raises:
        ModelError: the shape does not divide into blocks, which engines refuse.
    """
    (rows, columns), tiles = shape, rule.tiles(shape)
    height, width = rule.block or (1, rule.group_size or 1)
    if rows % height or columns % width:
        raise ModelError(
            f"ModelOpt's blocks of {height} x {width} do not divide a weight of {rows} x {columns}",
            hint="quantize with a scheme that has one scale for each output (FP8_DYNAMIC)",
        )
    if rule.bits == 4:
        specs: WeightLayout = {WEIGHT: ("U8", (rows, columns // 2))}
        specs |= {SCALE: ("F8_E4M3", tiles), SCALE_2: ("F32", ())}
    else:
        specs = {WEIGHT: ("F8_E4M3", shape), SCALE: ("F32", _scale_shape(rule, tiles))}
    return {**specs, INPUT_SCALE: ("F32", ())} if static else specs


def _scale_shape(rule: WeightRule, tiles: tuple[int, int]) -> tuple[int, ...]:
    """Shape of an FP8 weight's scales, a table (P, G) of tiles."""
    if rule.strategy == "tensor":
        return ()
    return (tiles[0], 1, tiles[1], 1) if rule.block else (tiles[0],)


def from_compressed(tensors: Mapping[str, Tensor], rule: WeightRule) -> dict[str, Tensor]:
    """The tensors of a Linear of compressed-tensors under ModelOpt's names. Codes and scales of groups keep
    their bytes; a global scale becomes its reciprocal, rounded to float32."""
    if rule.bits == 4:
        named = {WEIGHT: tensors[layouts.PACKED], SCALE: tensors[layouts.SCALE]}
        named[SCALE_2] = (1.0 / tensors[layouts.GLOBAL].float()).reshape(())
        if INPUT_GLOBAL in tensors:
            named[INPUT_SCALE] = (1.0 / tensors[INPUT_GLOBAL].float()).reshape(())
        return named
    scale = tensors[layouts.SCALE].float()
    tiles = (scale.shape[0], scale.shape[-1])
    named = {WEIGHT: tensors[layouts.WEIGHT], SCALE: scale.reshape(_scale_shape(rule, tiles))}
    if "input_scale" in tensors:
        named[INPUT_SCALE] = tensors["input_scale"].float().reshape(())
    return named


def to_compressed(tensors: Mapping[str, Tensor], rule: WeightRule) -> dict[str, Tensor]:
    """The inverse of :func:`from_compressed`; scales stay float32."""
    scale = tensors[SCALE]
    if rule.bits == 4:
        named = {layouts.PACKED: tensors[WEIGHT], layouts.SCALE: scale}
        named[layouts.GLOBAL] = (1.0 / tensors[SCALE_2].float()).reshape(1)
        if INPUT_SCALE in tensors:
            named[INPUT_GLOBAL] = (1.0 / tensors[INPUT_SCALE].float()).reshape(1)
        return named
    table = scale.float().reshape((1,) if rule.strategy == "tensor" else (scale.shape[0], -1))
    named = {layouts.WEIGHT: tensors[WEIGHT], layouts.SCALE: table}
    if INPUT_SCALE in tensors:
        named["input_scale"] = tensors[INPUT_SCALE].float().reshape(1)
    return named


def unpack(tensors: Mapping[str, Tensor]) -> Coded:
    """The codes of stored tensors, and their scales (P, G) as an engine computes them.

    Raises:
        RuntimeError: the tensors do not fit together.
    """
    codes, scale = tensors[WEIGHT], tensors[SCALE].float()
    if codes.dtype != torch.uint8:
        return Coded(codes, scale.reshape(scale.shape[0] if scale.dim() else 1, -1))
    above = tensors[SCALE_2].float()
    scale = scale.reshape(len(codes), -1) * above
    return Coded(unpack_nibbles(codes), scale, global_scale=(1.0 / above).reshape(1))


def decode(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The weight (N, K) of a Linear in ``dtype``. Raises as :func:`unpack`."""
    weight = unpack(tensors)
    fp4 = weight.codes.dtype == torch.uint8
    codes = fp4_levels(weight.codes.device)[weight.codes.int()] if fp4 else weight.codes.float()
    (rows, columns), scale = codes.shape, weight.scale
    height = -(-rows // scale.shape[0])
    scale = scale if height == 1 or len(scale) == 1 else scale.repeat_interleave(height, 0)
    width = -(-columns // scale.shape[1])
    return (codes.reshape(rows, -1, width) * scale[:, :, None]).reshape(rows, columns).to(dtype)


def quantization_config(
    layers: Mapping[str, str], ignore: Sequence[str], *, kv_cache: bool = False
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        layers: the algorithm of each quantized module.
        ignore: modules that keep their dense weight; ``*`` stands for anything.
        kv_cache: keys and values are FP8.

    Raises:
        ModelError: engines do not read these algorithms in one checkpoint.
    """
    modules = _by_algorithm(layers)
    mixed = len(modules) > 1
    config: dict[str, Any] = {
        "quant_method": METHOD,
        "quant_algo": MIXED if mixed else next(iter(modules)),
        "config_groups": {
            f"group_{number}": {**_config_group(name), "targets": targets if mixed else ["Linear"]}
            for number, (name, targets) in enumerate(modules.items())
        },
        "ignore": list(ignore),
        "producer": PRODUCER,
    }
    if mixed:
        config["quantized_layers"] = {name: _layer_entry(layers[name]) for name in layers}
    if kv_cache:
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return config


def hf_quant_config(
    layers: Mapping[str, str], ignore: Sequence[str], *, kv_cache: bool = False
) -> dict[str, Any]:
    """The content of hf_quant_config.json. Arguments and errors as :func:`quantization_config`."""
    modules = _by_algorithm(layers)
    if len(modules) == 1:
        inner = _layer_entry(next(iter(modules)))
    else:
        inner = {
            "quant_algo": MIXED,
            "quantized_layers": {name: _layer_entry(layers[name]) for name in layers},
        }
    inner |= {"kv_cache_quant_algo": "FP8" if kv_cache else None, "exclude_modules": list(ignore)}
    return {"producer": PRODUCER, "quantization": inner}


def _by_algorithm(layers: Mapping[str, str]) -> dict[str, list[str]]:
    """Modules by algorithm."""
    assert layers, "a checkpoint of ModelOpt's has a quantized layer"
    names = dict.fromkeys(layers.values())
    other = next((name for name in names if name not in MIXABLE), None)
    if len(names) > 1 and other:
        raise ModelError(
            f"engines read ModelOpt's {other} in a separate checkpoint, not with {', '.join(names)}",
            hint="one scheme for all layers",
        )
    return {name: [module for module, chosen in layers.items() if chosen == name] for name in names}


def _layer_entry(name: str) -> dict[str, Any]:
    """The entry of a layer in ``quantized_layers``."""
    size = ALGORITHMS[name][0].group_size
    return {"quant_algo": name, "group_size": size} if size else {"quant_algo": name}


def _config_group(name: str) -> dict[str, Any]:
    """A config group in ModelOpt's terms: only strategies of channels and blocks are named."""
    weights, activations = ALGORITHMS[name]

    def entry(rule: WeightRule | ActivationRule) -> dict[str, Any]:
        terms: dict[str, Any] = {"dynamic": False, "num_bits": rule.bits, "type": "float"}
        if rule.group_size:
            terms["group_size"] = rule.group_size
        return {**terms, "strategy": rule.strategy} if rule.strategy in ("channel", "block") else terms

    group = {"weights": entry(weights)}
    return {**group, "input_activations": entry(activations)} if activations else group


class ModelOptReader(PackedReader):
    """Reads an FP8 or NVFP4 checkpoint of ModelOpt's tensor by tensor."""

    hint = "of ModelOpt's layouts attar reads FP8 and NVFP4"

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        self.dtype = weight_dtype(checkpoint)

    def is_coded(self, name: str) -> bool:
        info = self.checkpoint.tensors.get(name)
        return name.endswith(".weight") and info is not None and info.dtype in CODES

    def is_auxiliary(self, name: str) -> bool:
        return name.rpartition(".")[2] in AUXILIARY

    def weight_header(self, name: str) -> tuple[str, str, tuple[int, int]]:
        return name, stored_dtype(self.dtype), self._shape(name)

    def weight(self, name: str) -> Tensor:
        self.rule(name)
        try:
            return decode(self.tensors(name), self.dtype)
        except RuntimeError as error:
            raise self.unfit(name) from error

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        return (unpack(self.tensors(name)), self.rule(name)) if self.is_coded(name) else None

    def grid(self, name: str) -> tuple[WeightRule, torch.dtype] | None:
        return (self.rule(name), torch.float32) if self.is_coded(name) else None

    def covers(self, module: str) -> bool:
        """Whether engines make quantized parameters for a Linear; never for the head."""
        config = self.checkpoint.config["quantization_config"]
        if config.get("quant_algo") == MIXED:
            return module in mapping(config.get("quantized_layers") or {}, "quantized_layers")
        dense = texts(config.get("ignore") or config.get("exclude_modules") or (), "ignore")
        skipped = any(name in module or fnmatchcase(module, name) for name in dense)
        return not skipped and module.rpartition(".")[2] != "lm_head"

    def rule(self, name: str) -> WeightRule:
        """The rule of a coded weight, by the types and shapes of its tensors.

        Raises:
            CheckpointError: they are of no layout that attar reads.
        """
        base, info = name.removesuffix(WEIGHT), self.checkpoint.tensors[name]
        scale = self.stored(base + SCALE)
        if info.dtype == "U8":
            self.stored(base + SCALE_2)
            algorithm = "NVFP4"
        elif len(scale.shape) == 4:
            algorithm = "fp8_pb_wo"
        else:
            algorithm = "FP8" if scale.shape in ((), (1,)) else "FP8_PER_CHANNEL_PER_TOKEN"
        rule = ALGORITHMS[algorithm][0]
        try:
            specs = layout(self._shape(name), rule)
        except ModelError as error:
            raise self.unfit(name) from error
        dtype, shape = specs[SCALE]
        fits = scale.dtype == dtype and scale.shape in (shape, (1,) if shape == () else shape)
        if not fits or specs[WEIGHT] != (info.dtype, info.shape):
            raise self.unfit(name)
        return rule

    def check(self, name: str) -> None:
        if not self.is_coded(name):
            return
        base, tensors = name.removesuffix(".weight"), self.tensors(name)
        scales = [tensors[leaf].float() for leaf in (SCALE, SCALE_2, INPUT_SCALE) if leaf in tensors]
        check_scales(f"{base}.{SCALE}", scales)
        check_codes(base, tensors[WEIGHT], scales[0])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Everything that belongs to a weight, by the last part of its name."""
        return self.load_present(name.removesuffix(WEIGHT), (WEIGHT, SCALE, SCALE_2, INPUT_SCALE))

    def _shape(self, name: str) -> tuple[int, int]:
        """(N, K) of a coded weight."""
        info = self.checkpoint.tensors[name]
        rows, columns = info.shape
        return rows, columns * 2 if info.dtype == "U8" else columns
