"""AWQ in the layout GEMM: the checkpoints that AutoAWQ wrote and transformers and vLLM load
(``quant_method: awq``).

For a Linear with weight (N, K), 4 bits, groups of g inputs, G = K / g of them:

    qweight  int32 (K, N / 8)   codes of the transposed weight, 8 outputs in a word
    qzeros   int32 (G, N / 8)   zero points, likewise
    scales   float16 (G, N)     in natural order
    bias     float16 (N,)       an ordinary tensor, where the Linear has one

Nibble i of word c, from the lowest, holds output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]. Codes and zero points are
stored as signed + 8, nothing less. ``group_size: -1`` is one group, K. There is no order of inputs; factors
on activations are folded into the layers before, so nothing else is stored. Symmetric weights are written
with zero points of 8 and ``zero_point: true``: the layout always has them, and vLLM refuses the other label.

One group size holds for a whole file. Read as well: ``quant_config.json`` alone, with ``w_bit`` and
``q_group_size``. The layouts GEMV, Marlin and llm-awq's own are refused by name.

Sources: AutoAWQ, awq/modules/linear/gemm.py and utils/packing_utils.py; GPTQModel 7.6,
quantization/awq/utils/packing_utils.py; transformers 5, AwqConfig; vLLM, quantization/auto_awq.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats.coded import Coded
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.qweight import (
    HEAD,
    QWEIGHT,
    QZEROS,
    SCALES,
    QweightReader,
    TensorSpecs,
    code_bytes,
    decoded,
    half_scales,
    pattern,
    read_state,
    signed,
)
from attar.formats.rules import WeightRule
from attar.formats.stated import stated

METHOD = "awq"
GEMM = "gemm"
BITS = 4
OUTPUTS = 8  # in a word
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output in each nibble
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each output


def encode(weight: Coded, rule: WeightRule) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names.

    Args:
        weight: the codes of a 4-bit weight (N, K) whose groups are neighbours, 8 divides N; not changed.
        rule: what they are.
    """
    assert rule.bits == BITS and weight.order is None, "convert.fits says what AWQ can hold"
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    return {
        QWEIGHT: dense_pack(_permuted(code_bytes(weight.codes, BITS).T, ORDER), BITS),
        QZEROS: dense_pack(_permuted(code_bytes(zero, BITS).T, ORDER), BITS),
        SCALES: weight.scale.T.half().contiguous(),
    }


def layout(shape: tuple[int, int], rule: WeightRule) -> TensorSpecs:
    """Type and shape of the tensors that :func:`encode` makes, known before any weight is.

    Args:
        shape: (N, K).
    """
    (rows, columns), groups = shape, rule.tiles(shape)[1]
    return {
        QWEIGHT: ("I32", (columns, rows // OUTPUTS)),
        QZEROS: ("I32", (groups, rows // OUTPUTS)),
        SCALES: ("F16", (groups, rows)),
    }


def coded(tensors: Mapping[str, Tensor]) -> Coded:
    """The codes of a Linear as they are. Zero points that all are the middle of the codes come back as None.

    Args:
        tensors: by the last part of their names.
    """
    scales = half_scales(tensors[SCALES])
    rows = scales.shape[1]
    codes, zero = (
        signed(_permuted(dense_unpack(tensors[leaf], BITS, rows), PLACE), BITS).T.contiguous()
        for leaf in (QWEIGHT, QZEROS)
    )
    return Coded(codes, scales.float().T.contiguous(), zero.float() if zero.any() else None)


def _permuted(table: Tensor, order: Sequence[int]) -> Tensor:
    """Each 8 columns of a table (A, N) in another order."""
    return table.reshape(table.shape[0], -1, OUTPUTS)[..., list(order)].reshape(table.shape)


def decode(tensors: Mapping[str, Tensor], rule: WeightRule) -> Tensor:
    """The weight (N, K) of a Linear: half(s (q - z)), in the type of its scales (float16 for float32)."""
    return decoded(coded(tensors), rule, half_scales(tensors[SCALES]).dtype)


def quantization_config(
    rules: Mapping[str, WeightRule], *, ignore: Sequence[str] = (), head: str = HEAD
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Linears that stay dense are told twice: ``modules_to_not_convert`` is for transformers and vLLM, and
    GPTQModel, which passes it by and would leave random weights, follows ``dynamic``.

    Args:
        rules: of the quantized Linears, by module name; all of one group size.
        ignore: Linears that keep their dense weight.
        head: name of the output head, dense for readers unless ``lm_head`` is true.

    Raises:
        ModelError: the group sizes differ.
    """
    sizes: dict[int, str] = {}
    for name, rule in rules.items():
        sizes.setdefault(rule.group_size or -1, name)
    if len(sizes) != 1:
        found = ", ".join(f"{name} {size}" for size, name in sizes.items())
        raise ModelError(
            f"AWQ has one group size for all Linears, but they differ: {found}",
            hint="export to gptq or compressed-tensors",
        )
    made: dict[str, Any] = {
        "quant_method": METHOD,
        "bits": BITS,
        "group_size": next(iter(sizes)),
        "zero_point": True,
        "version": GEMM,
        "modules_to_not_convert": list(ignore) or None,
    }
    dense: dict[str, Any] = {f"-:{pattern(name)}": {} for name in ignore if name != head}
    if dense:
        made["dynamic"] = dense
    return {**made, HEAD: True} if head in rules else made


class AWQReader(QweightReader):
    """Reads an AWQ checkpoint tensor by tensor.

    Attributes:
        checkpoint: what is read.
        config: its ``quantization_config``, wherever it stands.
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        self.config = dict(stated(checkpoint) or {})
        version = str(self.config.get("version") or self.config.get("format") or GEMM).lower()
        bits = self.config.get("bits", self.config.get("w_bit", BITS))
        if version != GEMM or bits != BITS:
            raise ModelError(
                f"{checkpoint.path}: AWQ in the layout {version!r} with {bits} bits, which attar cannot read",
                hint="attar reads gemm with 4 bits",
            )

    def rule(self, module: str) -> WeightRule:
        """What the config says of a Linear.

        Raises:
            CheckpointError: it names no group size.
        """
        size = self.config.get("group_size", self.config.get("q_group_size"))
        if not isinstance(size, int) or size == 0 or size < -1:
            raise CheckpointError(
                f"{self.checkpoint.path}: AWQ in groups of {size!r}", hint="groups are of 1 or more, or -1"
            )
        return WeightRule("int", BITS, "group" if size > 0 else "channel", max(size, 0), symmetric=False)

    def shape(self, module: str, rule: WeightRule) -> tuple[int, int]:
        """(N, K) of a Linear, from the shapes of its tensors."""
        stored = self.checkpoint.tensors[f"{module}.{QWEIGHT}"].shape
        if len(stored) != 2:
            raise CheckpointError(f"{self.checkpoint.path}: {module}.{QWEIGHT} has {len(stored)} axes, not 2")
        return stored[1] * OUTPUTS, stored[0]

    def layout(self, shape: tuple[int, int], rule: WeightRule) -> TensorSpecs:
        """Types and shapes that its tensors must have."""
        return layout(shape, rule)

    def unpack(self, tensors: Mapping[str, Tensor], rule: WeightRule) -> Coded:
        """Its codes."""
        return coded(tensors)


def dequantize_state(checkpoint: Any) -> dict[str, Tensor]:
    """Every tensor of an AWQ checkpoint, decoded, under the names of the unquantized model.

    Raises:
        CheckpointError: a tensor is missing, or the config is another one's.
    """
    return read_state(AWQReader(checkpoint))


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that its weights are in this layout."""
    return (config.get("quantization_config") or {}).get("quant_method") == METHOD
