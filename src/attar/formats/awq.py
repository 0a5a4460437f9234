"""AWQ in the layout GEMM: the checkpoints that AutoAWQ wrote and transformers and vLLM load
(``quant_method: awq``).

For a Linear with weight (N, K), 4 bits, groups of g inputs, G = K / g of them:

    qweight  int32 (K, N / 8)   codes of the transposed weight, 8 outputs in a word
    qzeros   int32 (G, N / 8)   zero points, likewise
    scales   float16 (G, N)     in natural order
    bias     float16 (N,)       an ordinary tensor, where the Linear has one

Nibble i of word c, from the lowest, holds output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]. Codes and zero points are
stored as signed + 8. ``group_size: -1`` is one group, K. Inputs are not reordered; factors on activations are
folded into the layers before, so nothing else is stored. Symmetric weights are written with zero points of 8
and ``zero_point: true``: the layout always has zero points, and vLLM refuses the other label.

A file has one group size. Read as well: ``quant_config.json`` alone, with ``w_bit`` and ``q_group_size``. The
layouts GEMV, Marlin and llm-awq's own are refused by name.

Sources: AutoAWQ, awq/modules/linear/gemm.py and utils/packing_utils.py; GPTQModel 7.6,
quantization/awq/utils/packing_utils.py; transformers 5, AwqConfig; vLLM, quantization/auto_awq.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.formats.coded import Coded, WeightLayout
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.qweight import (
    HEAD,
    QWEIGHT,
    QZEROS,
    SCALES,
    QweightReader,
    code_bytes,
    half_scales,
    kernel_weight,
    pattern,
    signed,
)
from attar.formats.rules import WeightRule

METHOD = "awq"
GEMM = "gemm"
BITS = 4
OUTPUTS = 8  # in a word
NIBBLE_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # output in each nibble
OUTPUT_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each output


def encode(weight: Coded, rule: WeightRule) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names. Does not modify its inputs.

    Args:
        weight: the codes of a 4-bit weight (N, K) whose groups are neighbours; 8 divides N.
    """
    assert rule.bits == BITS and weight.g_idx is None, "convert.misfit refuses what AWQ cannot hold"
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    return {
        QWEIGHT: dense_pack(_permuted(code_bytes(weight.codes, BITS).T, NIBBLE_OUTPUTS), BITS),
        QZEROS: dense_pack(_permuted(code_bytes(zero, BITS).T, NIBBLE_OUTPUTS), BITS),
        SCALES: weight.scale.T.half().contiguous(),
    }


def layout(shape: tuple[int, int], rule: WeightRule) -> WeightLayout:
    """Type and shape of the tensors that :func:`encode` returns for a weight of ``shape`` (N, K)."""
    (rows, columns), groups = shape, rule.tiles(shape)[1]
    return {
        QWEIGHT: ("I32", (columns, rows // OUTPUTS)),
        QZEROS: ("I32", (groups, rows // OUTPUTS)),
        SCALES: ("F16", (groups, rows)),
    }


def unpack(tensors: Mapping[str, Tensor]) -> Coded:
    """The unchanged codes of a Linear. Zero points that all are the middle of the codes are returned as
    None."""
    scales = half_scales(tensors[SCALES])
    rows = scales.shape[1]
    codes, zero = (
        signed(_permuted(dense_unpack(tensors[leaf], BITS, rows), OUTPUT_NIBBLES), BITS).T.contiguous()
        for leaf in (QWEIGHT, QZEROS)
    )
    return Coded(codes, scales.float().T.contiguous(), zero.float() if zero.any() else None)


def _permuted(table: Tensor, order: Sequence[int]) -> Tensor:
    """A table (A, N) with every 8 columns in another order."""
    return table.reshape(table.shape[0], -1, OUTPUTS)[..., list(order)].reshape(table.shape)


def decode(tensors: Mapping[str, Tensor], rule: WeightRule) -> Tensor:
    """The weight (N, K) of a Linear: half(s (q - z)), in the type of its scales (float16 for float32)."""
    return kernel_weight(unpack(tensors), rule, tensors[SCALES])


def quantization_config(
    rules: Mapping[str, WeightRule], *, ignore: Sequence[str] = (), head: str = HEAD
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Dense Linears are listed twice: ``modules_to_not_convert`` is for transformers and vLLM; GPTQModel ignores
    it (and would leave random weights) and follows ``dynamic``.

    Args:
        rules: of the quantized Linears, by module name; all of one group size.
        head: name of the output head, dense for readers unless ``lm_head`` is true.

    Raises:
        ModelError: the group sizes differ.
    """
    sizes: dict[int, str] = {}
    for name, rule in rules.items():
        sizes.setdefault(rule.group_size or -1, name)
    if len(sizes) != 1:
        named = ", ".join(f"{name} {size}" for size, name in sizes.items())
        raise ModelError(
            f"AWQ has one group size for all Linears, but they differ: {named}",
            hint="export to gptq or compressed-tensors",
        )
    config: dict[str, Any] = {
        "quant_method": METHOD,
        "bits": BITS,
        "group_size": next(iter(sizes)),
        "zero_point": True,
        "version": GEMM,
        "modules_to_not_convert": list(ignore) or None,
    }
    dense: dict[str, Any] = {f"-:{pattern(name)}": {} for name in ignore if name != head}
    if dense:
        config["dynamic"] = dense
    return {**config, HEAD: True} if head in rules else config


class AWQReader(QweightReader):
    """Reads an AWQ checkpoint tensor by tensor."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        version = str(self.config.get("version") or self.config.get("format") or GEMM).lower()
        if version != GEMM:
            raise ModelError(
                f"{checkpoint.path}: AWQ in the layout {version!r}, which attar cannot read",
                hint="attar reads gemm",
            )

    def rule(self, module: str) -> WeightRule:
        return self.read_group_rule(self.config, (BITS,), None, False)

    def shape(self, qweight: tuple[int, int], module: str, rule: WeightRule) -> tuple[int, int]:
        return qweight[1] * OUTPUTS, qweight[0]

    def layout(self, shape: tuple[int, int], rule: WeightRule) -> WeightLayout:
        return layout(shape, rule)

    def unpack(self, tensors: Mapping[str, Tensor], rule: WeightRule) -> Coded:
        return unpack(tensors)
