"""The tensors of one Linear in NVIDIA ModelOpt's checkpoints: codes in, bytes out, and back.

NVIDIA Model Optimizer, ``modelopt/torch/export/quant_utils.py`` and ``quantization/qtensor/nvfp4_tensor.py``;
what is read: vLLM, ``quantization/modelopt.py``. For a weight (N, K):

    weight           float8_e4m3fn (N, K); NVFP4: uint8 (N, K / 2), the even input in the low nibble
    weight_scale     FP8: float32 (), (N,) or (N / 128, 1, K / 128, 1); NVFP4: float8_e4m3fn (N, K / 16)
    weight_scale_2   NVFP4: float32 (), which *multiplies* the scales; compressed-tensors stores its
                     reciprocal
    input_scale      float32 (): static scale of the inputs; NVFP4: the same kind of factor on their scales

A decoded weight is code times scale in float32, rounded once to the model's type.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.formats import layouts
from attar.formats.coded import Coded
from attar.formats.rules import FLOAT, NVFP4, ActivationRule, WeightRule

WEIGHT, SCALE, SCALE_2, INPUT_SCALE = "weight", "weight_scale", "weight_scale_2", "input_scale"
GROUP = 16

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
    for name, (rule, inputs) in ALGORITHMS.items():
        if weights == rule and activations == inputs:
            return name
    said = (
        "none" if activations is None else f"{activations.kind}{activations.bits} by {activations.strategy}"
    )
    raise ModelError(
        f"ModelOpt has no algorithm for weights in {weights.kind}{weights.bits} by {weights.strategy} with "
        f"inputs in {said}",
        hint="quantize with --scheme FP8, FP8_DYNAMIC, FP8_BLOCK or NVFP4A16",
    )


def encode(weight: Coded, rule: WeightRule, *, input_scale: float | None = None) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names. No code is changed.

    Args:
        weight: float8 codes, or 0 to 15 with ``global_scale``.
        rule: what they are; one of :data:`ALGORITHMS`.
        input_scale: static scale of the inputs.
    """
    form = NVFP4 if rule.bits == 4 else FLOAT
    tensors = from_compressed(layouts.encode(weight, rule, form, torch.float32), rule)
    if input_scale is not None:
        tensors[INPUT_SCALE] = torch.tensor(input_scale, dtype=torch.float32)
    return tensors


def layout(
    shape: tuple[int, int], rule: WeightRule, *, static: bool = False
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of the tensors that :func:`encode` makes, known before any weight is.

    Args:
        shape: (N, K).
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
        made: dict[str, tuple[str, tuple[int, ...]]] = {WEIGHT: ("U8", (rows, columns // 2))}
        made |= {SCALE: ("F8_E4M3", tiles), SCALE_2: ("F32", ())}
    else:
        made = {WEIGHT: ("F8_E4M3", shape), SCALE: ("F32", _scale_shape(rule, tiles))}
    return {**made, INPUT_SCALE: ("F32", ())} if static else made


def _scale_shape(rule: WeightRule, tiles: tuple[int, int]) -> tuple[int, ...]:
    """Shape of an FP8 weight's scales, a table (P, G) of tiles."""
    if rule.strategy == "tensor":
        return ()
    return (tiles[0], 1, tiles[1], 1) if rule.block else (tiles[0],)


def from_compressed(tensors: Mapping[str, Tensor], rule: WeightRule) -> dict[str, Tensor]:
    """The tensors of a Linear of compressed-tensors under ModelOpt's names. Codes and scales of groups are
    the same bytes; a global scale becomes its reciprocal, rounded to float32."""
    if rule.bits == 4:
        made = {WEIGHT: tensors[layouts.PACKED], SCALE: tensors[layouts.SCALE]}
        made[SCALE_2] = (1.0 / tensors[layouts.GLOBAL].float()).reshape(())
        if "input_global_scale" in tensors:
            made[INPUT_SCALE] = (1.0 / tensors["input_global_scale"].float()).reshape(())
        return made
    scale = tensors[layouts.SCALE].float()
    tiles = (scale.shape[0], scale.shape[-1])
    made = {WEIGHT: tensors[layouts.WEIGHT], SCALE: scale.reshape(_scale_shape(rule, tiles))}
    if "input_scale" in tensors:
        made[INPUT_SCALE] = tensors["input_scale"].float().reshape(())
    return made


def to_compressed(tensors: Mapping[str, Tensor], rule: WeightRule) -> dict[str, Tensor]:
    """The inverse of :func:`from_compressed`; scales stay float32."""
    scale = tensors[SCALE]
    if rule.bits == 4:
        made = {layouts.PACKED: tensors[WEIGHT], layouts.SCALE: scale}
        made[layouts.GLOBAL] = (1.0 / tensors[SCALE_2].float()).reshape(1)
        if INPUT_SCALE in tensors:
            made["input_global_scale"] = (1.0 / tensors[INPUT_SCALE].float()).reshape(1)
        return made
    if rule.strategy == "tensor":
        table = scale.float().reshape(1)
    else:
        table = scale.float().reshape(scale.shape[0], -1)
    made = {layouts.WEIGHT: tensors[WEIGHT], layouts.SCALE: table}
    if INPUT_SCALE in tensors:
        made["input_scale"] = tensors[INPUT_SCALE].float().reshape(1)
    return made


def decode(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The weight (N, K) of a Linear.

    Args:
        tensors: by the last part of their names.
        dtype: of the result.

    Raises:
        RuntimeError: the tensors do not fit together.
    """
    found = unpack(tensors)
    if found.codes.dtype == torch.uint8:
        levels = torch.tensor([*layouts.FP4, *(-value for value in layouts.FP4)], device=found.codes.device)
        codes = levels[found.codes.int()]
    else:
        codes = found.codes.float()
    rows, columns = codes.shape
    height, width = -(-rows // found.scale.shape[0]), -(-columns // found.scale.shape[1])
    scale = found.scale if height == 1 or len(found.scale) == 1 else found.scale.repeat_interleave(height, 0)
    tiled = codes.reshape(rows, -1, width) * scale[:, :, None]
    return tiled.reshape(rows, columns).to(dtype)


def unpack(tensors: Mapping[str, Tensor]) -> Coded:
    """The codes of stored tensors, and their scales (P, G) as an engine computes them.

    Raises:
        RuntimeError: the tensors do not fit together.
    """
    codes, scale = tensors[WEIGHT], tensors[SCALE].float()
    if codes.dtype != torch.uint8:
        return Coded(codes, scale.reshape(scale.shape[0] if scale.dim() else 1, -1))
    above = tensors[SCALE_2].float()
    unpacked = torch.stack((codes & 15, codes >> 4), -1).reshape(codes.shape[0], -1)
    return Coded(unpacked, scale.reshape(len(codes), -1) * above, global_scale=(1.0 / above).reshape(1))
