"""bitsandbytes' INT8: one scale for each output (``quant_method: bitsandbytes``, ``load_in_8bit``).

Dettmers, Lewis, Belkada, Zettlemoyer 2022, "LLM.int8()", arXiv 2208.07339, section 3. For a Linear with
weight (N, K):

    weight          int8 (N, K): codes
    SCB             float32 (N,): 127 times the scale, which is a row's largest magnitude where bitsandbytes
                    itself rounded to nearest
    weight_format   uint8 (): 0, rows as they are

A decoded weight is code * (SCB / 127), in float32, rounded once to the model's type: for a scale of at most
17 significant bits (bfloat16, float16) exactly code * scale. An engine multiplies by a rounded 1 / 127, so
that its numbers differ in the last bit of a float32. It also rounds the inputs of each token to int8, but for
those columns that hold a magnitude of ``llm_int8_threshold`` or more.
A Conv1D's weight is stored as (N, K), as transformers expects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.formats.coded import Coded
from attar.formats.rules import WeightRule

WEIGHT, SCB, WEIGHT_FORMAT = "weight", "SCB", "weight_format"
LARGEST = 127.0
THRESHOLD = 6.0  # of the paper, section 3.2, and of transformers
INT8_RULE = WeightRule("int", 8, "channel")


def refuse_int8(rule: WeightRule) -> None:
    """Raise where codes of a rule cannot stand in this layout.

    Raises:
        ModelError: they are no whole numbers, have zeros, or a row has several scales.
    """
    whole = rule.kind == "int" and rule.symmetric and rule.strategy in ("channel", "tensor")
    if not whole or rule.ordered or rule.block:
        raise ModelError(
            f"bitsandbytes' INT8 has one scale for each output and no zeros; these codes are {rule.kind}"
            f"{rule.bits} by {rule.strategy}{'' if rule.symmetric else ' with zeros'}",
            hint="quantize with --scheme W8A8, or export another format",
        )


def encode_int8(weight: Coded) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names. No code is changed.

    Args:
        weight: signed codes (N, K) and scales (N, 1) or (1, 1).

    Raises:
        ModelError: it has zeros or several scales in a row.
    """
    rows = weight.codes.shape[0]
    more = weight.zero is not None or weight.order is not None or weight.scale.shape[1] != 1
    if more or weight.codes.is_floating_point():
        raise ModelError(
            "bitsandbytes' INT8 has whole codes, one scale for each output and no zeros",
            hint="quantize with --scheme W8A8, or export another format",
        )
    scale = (weight.scale.float() * LARGEST).reshape(-1).expand(rows)
    return {
        WEIGHT: weight.codes.to(torch.int8).contiguous(),
        SCB: scale.contiguous(),
        WEIGHT_FORMAT: torch.tensor(0, dtype=torch.uint8),
    }


def layout_int8(shape: tuple[int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of the tensors that :func:`encode_int8` makes, known before any weight is."""
    return {WEIGHT: ("I8", shape), SCB: ("F32", (shape[0],)), WEIGHT_FORMAT: ("U8", ())}


def unpack_int8(tensors: Mapping[str, Tensor]) -> Coded:
    """The codes of stored tensors and their scales (N, 1).

    Raises:
        ValueError: the rows are laid out for an engine.
        RuntimeError: the tensors do not fit together.
    """
    if WEIGHT_FORMAT in tensors and int(tensors[WEIGHT_FORMAT]) != 0:
        raise ValueError("weight_format is not 0, rows as they are")
    codes = tensors[WEIGHT]
    return Coded(codes, (tensors[SCB].float() / LARGEST).reshape(codes.shape[0], 1))


def decode_int8(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The weight (N, K) of a Linear.

    Args:
        tensors: by the last part of their names.
        dtype: of the result.

    Raises:
        ValueError: the rows are laid out for an engine.
        RuntimeError: the tensors do not fit together.
    """
    found = unpack_int8(tensors)
    return (found.codes.float() * found.scale).to(dtype)


def int8_config(ignore: list[str], threshold: float = THRESHOLD) -> dict[str, Any]:
    """The ``int8_config`` of config.json.

    Args:
        ignore: Linears that keep their dense weight.
        threshold: magnitude of an input from which on its column is not rounded; 0: all are rounded.
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": False,
        "load_in_8bit": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(ignore),
        "llm_int8_threshold": threshold,
    }
