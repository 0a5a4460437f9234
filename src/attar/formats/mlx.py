"""MLX's layout of one quantized matrix: codes in 32-bit words, a scale for each group of neighbouring inputs.

For a weight (N, K), b bits, groups of g inputs:

    weight    uint32 (N, K b / 32)    codes without gaps, the first input in the lowest bits (dense_pack)
    scales    (N, K / g)              affine: a floating-point type; mxfp4, mxfp8: uint8, 2^(byte - 127);
                                      nvfp4: uint8, the byte of a float8_e4m3fn
    biases    (N, K / g)              affine alone, in the type of the scales

    affine    w = scale u + bias      u = 0 .. 2^b - 1: a signed code q with zero z is u = q + 2^(b-1), and
                                      bias = -scale (2^(b-1) + z)
    mxfp4, nvfp4                      w = scale F[u], F of e2m1
    mxfp8                             w = scale u, u a float8_e4m3fn

    global_scale  float32, nvfp4 of experts alone, where mlx-lm was asked for it: a weight is multiplied with
                  global_scale / (448 * 6) too

Experts are stacked: every tensor has a first dimension of experts. A module that config.json does not name
has the parameters of the whole model; where its scales are bytes, their number tells the mode.
Source: mlx 0.32 ``mx.quantize``; mlx-lm 0.32 ``utils.load_model``.

Letters: N outputs, K inputs, b bits, g inputs of a group, P and G rows and columns of a table of tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint import mlx_folder
from attar.checkpoint.mlx_folder import mlx_name
from attar.errors import NumericsError
from attar.formats.coded import Coded, UniformWeight, WeightLayout, fp4_levels, uniform_of_codes
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.packed_reader import FLOATS as FLOAT_TYPES
from attar.formats.packed_reader import PackedReader, check_codes
from attar.formats.rules import CONV1D, WeightRule, mapping, one_of, whole_number

METHOD = mlx_folder.METHOD
WEIGHT, SCALES, BIASES, GLOBAL = "weight", "scales", "biases", "global_scale"
LEAVES = (WEIGHT, SCALES, BIASES, GLOBAL)
AFFINE = "affine"
FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Bits and group size of the modes without a choice."""
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (128, 64, 32)
E8M0_BIAS = 127
GLOBAL_STEP = 448.0 * 6.0
"""What a global scale is divided by: the largest weight of nvfp4 without one."""
TURNED = ("c_attn", "c_proj", "c_fc")
"""Modules that GPT-2 has in x out, and mlx-lm out x in."""


@dataclass(frozen=True)
class MLXRule:
    """How a matrix is coded: ``mode`` is :data:`AFFINE` or one of :data:`FLOATS`."""

    mode: str
    bits: int
    group_size: int

    def config(self) -> dict[str, Any]:
        """An entry of ``quantization`` in config.json."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def float_rule(mode: str) -> MLXRule:
    """The rule of one of :data:`FLOATS`."""
    return MLXRule(mode, *FLOATS[mode])


def carried_rule(rule: WeightRule, shape: tuple[int, int]) -> MLXRule | str:
    """The rule under which MLX holds unchanged codes of a rule and shape (N, K); else why it holds none."""
    if rule.ordered:
        return "its groups are not neighbouring inputs (act-order)"
    if rule.block:
        return f"it has scales for blocks of {rule.block[0]} x {rule.block[1]} weights"
    width = rule.group_size or shape[1]
    if shape[1] % width:
        return f"its {shape[1]} inputs are no multiple of its groups of {width}"
    if rule.kind == "float":
        modes = {"tensor_group": "nvfp4", "group": "mxfp4" if rule.bits == 4 else "mxfp8"}
        mode = modes.get(rule.strategy, "")
        fits = FLOATS.get(mode) == (rule.bits, rule.group_size)
        return (
            float_rule(mode) if fits else f"MLX has no float{rule.bits} codes with a scale by {rule.strategy}"
        )
    if rule.kind != "int" or rule.bits > max(BITS):
        return f"MLX has no {rule.kind} codes of {rule.bits} bits"
    group = next((size for size in GROUPS if width % size == 0), 0)
    if not group:
        return f"its groups of {width} are no multiple of 32, the least that MLX has"
    return MLXRule(AFFINE, next(bits for bits in BITS if bits >= rule.bits), group)


def layout(shape: tuple[int, int], rule: MLXRule, dtype: str) -> WeightLayout:
    """Type and shape of the tensors of a weight (N, K); ``dtype`` is safetensors' name of affine scales'."""
    rows, columns = shape
    groups = (rows, columns // rule.group_size)
    specs: WeightLayout = {WEIGHT: ("U32", (rows, columns * rule.bits // 32))}
    if rule.mode == AFFINE:
        return {**specs, SCALES: (dtype, groups), BIASES: (dtype, groups)}
    return {**specs, SCALES: ("U8", groups)}


def affine(codes: Tensor, scale: Tensor, bias: Tensor, bits: int) -> dict[str, Tensor]:
    """The tensors of codes u (N, K) from 0 to 2^bits - 1, scales and biases (N, K / g) in their type."""
    return {WEIGHT: _words(dense_pack(codes, bits)), SCALES: scale.contiguous(), BIASES: bias.contiguous()}


def encode(weight: Coded, rule: WeightRule, target: MLXRule, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of carried codes. Does not modify its inputs.

    Args:
        rule: of the codes.
        target: what :func:`carried_rule` returned for it.
        dtype: of affine scales and biases; both are rounded to it.
    """
    if target.mode != AFFINE:
        return encode_float(weight.codes, weight.scale, target)
    rows, columns = weight.codes.shape
    groups, half = columns // target.group_size, 2 ** (rule.bits - 1)

    def spread(table: Tensor) -> Tensor:
        wide = table.float().repeat_interleave(groups // table.shape[1], 1)
        return wide.expand(rows, groups)

    scale = spread(weight.scale).to(dtype)
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    bias = -spread(weight.scale) * (spread(zero) + half)
    return affine(weight.codes.to(torch.int16) + half, scale, bias.to(dtype), target.bits)


def encode_float(codes: Tensor, scale: Tensor, rule: MLXRule) -> dict[str, Tensor]:
    """The tensors of e2m1 or e4m3 codes (N, K) under scales (N, K / g) that the mode holds exactly."""
    if rule.mode == "nvfp4":
        stored = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        stored = (torch.frexp(scale).exponent.to(torch.int16) - 1 + E8M0_BIAS).to(torch.uint8)
    codes = codes.view(torch.uint8) if rule.bits == 8 else codes.to(torch.uint8)
    return {WEIGHT: _words(dense_pack(codes, rule.bits)), SCALES: stored.contiguous()}


def unpack(tensors: Mapping[str, Tensor], rule: MLXRule) -> Coded:
    """Codes 0 to 2^b - 1 (float8 of mxfp8) and scales of stored tensors; of affine without its biases."""
    words = tensors[WEIGHT].view(torch.int32)
    codes, scales = dense_unpack(words, rule.bits, words.shape[1] * 32 // rule.bits), tensors[SCALES]
    if rule.mode == AFFINE:
        return Coded(codes, scales.float())
    codes = codes.view(torch.float8_e4m3fn) if rule.bits == 8 else codes
    if rule.mode != "nvfp4":
        return Coded(codes, torch.exp2(scales.float() - E8M0_BIAS))
    above = tensors[GLOBAL].float() / GLOBAL_STEP if GLOBAL in tensors else torch.ones(())
    return Coded(codes, scales.view(torch.float8_e4m3fn).float() * above, global_scale=(1 / above).reshape(1))


def decode(tensors: Mapping[str, Tensor], rule: MLXRule) -> Tensor:
    """The weight (N, K) of stored tensors, float32."""
    weight = unpack(tensors, rule)
    fp4 = rule.mode != AFFINE and rule.bits == 4
    values = fp4_levels()[weight.codes.int()] if fp4 else weight.codes.float()
    tiled = values.unflatten(1, (-1, rule.group_size)) * weight.scale[..., None]
    tiled = tiled + tensors[BIASES].float()[..., None] if rule.mode == AFFINE else tiled
    return tiled.flatten(1)


def zero_points(scale: Tensor, bias: Tensor, bits: int) -> Tensor:
    """Zero points z, float32, of signed codes: w = scale (q - z)."""
    return -(bias.double() / scale.double()).float() - 2 ** (bits - 1)


def read_rule(entry: Mapping[str, Any]) -> MLXRule:
    """The rule of an entry of ``quantization``.

    Raises:
        CheckpointError: a field is none that MLX has; names it.
    """
    mode = one_of(entry, "mode", (AFFINE, *FLOATS), AFFINE)
    bits, group = FLOATS.get(mode, (4, 64))
    checked = {
        "bits": whole_number(entry, "bits", default=bits),
        "group_size": whole_number(entry, "group_size", default=group),
    }
    allowed = (
        {"bits": BITS, "group_size": GROUPS} if mode == AFFINE else {"bits": (bits,), "group_size": (group,)}
    )
    for name, values in allowed.items():
        one_of(checked, name, values, None)
    return MLXRule(mode, **checked)


class MLXReader(PackedReader):
    """Reads a quantized folder of mlx-lm tensor by tensor, experts one by one.

    Attributes:
        stated: ``quantization`` of the config.
        usual: the rule of modules that it does not name.

    Raises:
        CheckpointError: the config has a quantization that MLX has not.
    """

    hint = "get the whole model again, or convert it again with mlx_lm.convert"

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        self.stated = mapping(checkpoint.config["quantization_config"], "quantization")
        self.usual = read_rule(self.stated)

    def is_coded(self, name: str) -> bool:
        info = self.checkpoint.tensors.get(name)
        return name.endswith(f".{WEIGHT}") and info is not None and info.dtype == "U32"

    def is_auxiliary(self, name: str) -> bool:
        base, _, leaf = name.rpartition(".")
        return leaf in LEAVES[1:] and self.is_coded(f"{base}.{WEIGHT}")

    def is_transposed(self, name: str) -> bool:
        gpt2 = self.checkpoint.config["model_type"] in CONV1D
        return gpt2 and name.split(".")[-2] in TURNED and name.endswith(f".{WEIGHT}")

    def header(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """As of other layouts; dense weights of GPT-2 are turned too."""
        turned = not self.is_coded(info.name) and self.is_transposed(info.name)
        return (info.name, info.dtype, info.shape[::-1]) if turned else super().header(info)

    def decode(self, name: str) -> Tensor | None:
        """As of other layouts; dense weights of GPT-2 are turned too."""
        tensor = super().decode(name)
        turned = tensor is not None and not self.is_coded(name) and self.is_transposed(name)
        return tensor.T.contiguous() if tensor is not None and turned else tensor

    def weight_header(self, name: str) -> tuple[str, str, tuple[int, int]]:
        return name, "F32", self._rule_and_shape(name)[1]

    def weight(self, name: str) -> Tensor:
        return decode(self._tensors(name), self._rule_and_shape(name)[0])

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        grid = self.grid(name)
        if grid is None:
            return None
        (rule, _), tensors, half = grid, self._tensors(name), 2 ** (grid[0].bits - 1)
        weight = unpack(tensors, self._rule_and_shape(name)[0])
        if rule.kind == "float":
            return weight, rule
        zero = None if rule.symmetric else zero_points(weight.scale, tensors[BIASES], rule.bits)
        return Coded((weight.codes.to(torch.int16) - half).to(torch.int8), weight.scale, zero), rule

    def grid(self, name: str) -> tuple[WeightRule, torch.dtype] | None:
        """As of other layouts. Reads scales and biases of affine, which decide whether zero points are whole
        numbers; where one is none, no other layout holds the codes."""
        if not self.is_coded(name):
            return None
        rule, _ = self._rule_and_shape(name)
        if rule.mode != AFFINE:
            strategy = "tensor_group" if rule.mode == "nvfp4" else "group"
            return WeightRule("float", rule.bits, strategy, rule.group_size), torch.float32
        tensors, half = self._tensors(name, SCALES, BIASES), 2 ** (rule.bits - 1)
        scale, bias = tensors[SCALES].double(), tensors[BIASES].double()
        zero = -(bias / scale).round() - half
        if not bool(((scale > 0) & (bias == -scale * (zero + half)) & (zero >= -half) & (zero < half)).all()):
            return None
        symmetric = not bool(zero.any())
        return WeightRule("int", rule.bits, "group", rule.group_size, symmetric), tensors[SCALES].dtype

    def uniform(self, name: str) -> UniformWeight | None:
        """A coded weight on its uniform grid, out x in; None for other tensors and for mxfp8."""
        if not self.is_coded(name):
            return None
        rule, _ = self._rule_and_shape(name)
        if rule.mode != AFFINE:
            coded = self.codes(name)
            return None if coded is None else uniform_of_codes(*coded)
        tensors = self._tensors(name)
        weight = unpack(tensors, rule)
        if not bool(weight.scale.all()):
            return None
        codes = (weight.codes.to(torch.int16) - 2 ** (rule.bits - 1)).to(torch.int8)
        zero = zero_points(weight.scale, tensors[BIASES], rule.bits)
        return UniformWeight(codes, rule.bits, weight.scale, zero, rule.group_size)

    def check(self, name: str) -> None:
        if not self.is_coded(name):
            return
        base, tensors = name.removesuffix(f".{WEIGHT}"), self._tensors(name)
        scale = unpack(tensors, self._rule_and_shape(name)[0]).scale
        if not all(bool(torch.isfinite(table).all()) for table in (scale, tensors.get(BIASES, scale))):
            raise NumericsError(f"{base} holds scales or biases that are no numbers", hint=self.hint)
        check_codes(base, tensors[WEIGHT], scale)

    def _tensors(self, name: str, *leaves: str) -> dict[str, Tensor]:
        return self.load_present(name.removesuffix(WEIGHT), leaves or LEAVES)

    def _rule_and_shape(self, name: str) -> tuple[MLXRule, tuple[int, int]]:
        """Rule and shape (N, K) of a coded weight, from config and headers.

        Raises:
            CheckpointError: a tensor is missing, or they do not fit together.
        """
        module = name.removesuffix(f".{WEIGHT}")
        words, scales = self.stored(name), self.stored(f"{module}.{SCALES}")
        key = mlx_name(module, self.checkpoint.config["model_type"])
        stated = self.stated.get(key)
        rule = self.usual if stated in (None, True) else read_rule(mapping(stated, key))
        if len(words.shape) != 2 or len(scales.shape) != 2 or not scales.shape[1]:
            raise self.unfit(module, f"{WEIGHT} {list(words.shape)}, {SCALES} {list(scales.shape)}")
        ratio = words.shape[1] / scales.shape[1]
        if stated is None and scales.dtype == "U8":
            modes = (float_rule(mode) for mode in FLOATS)
            rule = next((mode for mode in modes if mode.bits * mode.group_size == 32 * ratio), rule)
        shape = words.shape[0], scales.shape[1] * rule.group_size
        wanted = layout(shape, rule, scales.dtype)
        if rule.mode == AFFINE and scales.dtype not in FLOAT_TYPES:
            wanted[SCALES] = ("BF16", wanted[SCALES][1])
        for leaf, (dtype, size) in wanted.items():
            info = self.stored(f"{module}.{leaf}")
            if (info.dtype, tuple(info.shape)) != (dtype, size):
                stored, needed = f"{info.dtype} {list(info.shape)}", f"{dtype} {list(size)}"
                reason = f"{leaf} is {stored}; {rule.mode} of {rule.bits} bits needs {needed}"
                raise self.unfit(module, reason)
        return rule, shape


def _words(packed: Tensor) -> Tensor:
    return packed.view(torch.uint32)
