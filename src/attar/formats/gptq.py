"""GPTQ: the checkpoints that GPTQModel, transformers and vLLM load (``quant_method: gptq``).

For a Linear with weight (N, K), b bits (2, 3, 4 or 8), groups of g inputs, G = ceil(K / g) of them:

    qweight  int32 (ceil(K b / 32), N)   codes of the transposed weight, dense_pack along K
    qzeros   int32 (G, ceil(N b / 32))   zero points, dense_pack along N
    scales   float16 (G, N)
    g_idx    int32 (K,)                  group of each input; i // g where groups are neighbours
    bias     float16 (N,)                an ordinary tensor, where the Linear has one

A code is stored as signed code + 2^(b-1), and so is a zero point; with act-order (``desc_act``) the codes
stay in the order of the inputs and g_idx alone tells the groups. ``group_size: -1`` is one group, K.

Two versions differ in the zero points. In the first (``checkpoint_format: gptq``) one less is stored and the
kernel adds it, in the second (``gptq_v2``) they are as they are. Symmetric weights, whose zero point is
2^(b-1), can be written in both and are read everywhere in the first. An asymmetric zero point of 0 does not
exist in the first: the second is written, where any Linear of a file is asymmetric.

What GPTQModel does is done here: the first version is read by adding 1 to every field, for 2, 4 and 8 bits by
one addition to the word (a borrow that a writer left between neighbours is undone so), for 3 bits, which
straddle words, field by field. Readers disagree on files of the first version with zero points of 0.

Read as well: files without ``checkpoint_format`` (older than the second version, so of the first);
``quantize_config.json`` alone; ``dynamic`` overrides (``+:`` or no prefix) and skips (``-:``), regular
expressions on module names, skips first; files without g_idx; symmetric files whose zero points are of the
second version and whose label is not (kernels for symmetric weights do not look at them); biases of zeros
that AutoGPTQ gave to every Linear, which are left out where the file is that old.

Sources: GPTQModel 7.6, nn_modules/qlinear/__init__.py (pack_original, dequantize_weight), utils/model.py
(convert_gptq_v1_to_v2_format_module), quantization/config.py (dynamic); transformers 5, GPTQConfig; vLLM,
quantization/auto_gptq.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.errors import CheckpointError, ModelError, NumericsError
from attar.formats.coded import Coded
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.patterns import begins
from attar.formats.qweight import (
    G_IDX,
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

METHOD = "gptq"
V1, V2 = "gptq", "gptq_v2"
BITS = (2, 3, 4, 8)


def version_for(rules: Mapping[str, WeightRule]) -> str:
    """The version that a file with Linears of these rules has."""
    return V1 if all(rule.symmetric for rule in rules.values()) else V2


def encode(weight: Coded, rule: WeightRule, version: str | None = None) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names.

    Args:
        weight: the codes; not changed.
        rule: what they are.
        version: ``gptq`` or ``gptq_v2``; None: what the rule asks for.

    Raises:
        NumericsError: an asymmetric zero point of 0 in the first version.
    """
    version = version or version_for({"": rule})
    rows, columns = weight.codes.shape
    zeros = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    less = 1 if version == V1 else 0
    zeros = (zeros.to(torch.int16) + 2 ** (rule.bits - 1) - less).T
    if (zeros < 0).any():
        raise NumericsError(
            "a zero point of 0 cannot be written in GPTQ's first version", hint="write gptq_v2 instead"
        )
    order = weight.order
    if order is None:
        order = torch.arange(columns) // rule.tile((rows, columns))[1]
    return {
        QWEIGHT: dense_pack(code_bytes(weight.codes, rule.bits), rule.bits).T.contiguous(),
        QZEROS: dense_pack(zeros, rule.bits),
        SCALES: weight.scale.T.half().contiguous(),
        G_IDX: order.to(torch.int32),
    }


def layout(shape: tuple[int, int], rule: WeightRule) -> TensorSpecs:
    """Type and shape of the tensors that :func:`encode` makes, known before any weight is.

    Args:
        shape: (N, K).
    """
    (rows, columns), groups = shape, rule.tiles(shape)[1]
    return {
        QWEIGHT: ("I32", (-(-columns * rule.bits // 32), rows)),
        QZEROS: ("I32", (groups, -(-rows * rule.bits // 32))),
        SCALES: ("F16", (groups, rows)),
        G_IDX: ("I32", (columns,)),
    }


def coded(tensors: Mapping[str, Tensor], rule: WeightRule, version: str) -> Coded:
    """The codes of a Linear as they are.

    Zero points that all are the middle of the codes come back as None, and so do groups that are neighbours.

    Args:
        tensors: by the last part of their names.
        version: ``gptq`` or ``gptq_v2``.
    """
    bits, scales = rule.bits, half_scales(tensors[SCALES])
    columns = tensors[G_IDX].shape[0] if G_IDX in tensors else tensors[QWEIGHT].shape[0] * 32 // bits
    codes = dense_unpack(tensors[QWEIGHT].T.contiguous(), bits, columns)
    zero = _zeros(tensors[QZEROS], bits, scales.shape[1], version).float() - 2 ** (bits - 1)
    if rule.symmetric and version == V1 and bool((zero == 1).all()):
        zero = torch.zeros_like(zero)
    order = tensors.get(G_IDX)
    if order is None or torch.equal(order, _neighbours(columns, rule, order.dtype)):
        order = None
    middle = not zero.any()
    return Coded(
        codes=signed(codes, bits),
        scale=scales.float().T.contiguous(),
        zero=None if middle else zero.T.contiguous(),
        order=order,
    )


def _neighbours(columns: int, rule: WeightRule, dtype: torch.dtype) -> Tensor:
    """g_idx of groups that are neighbours."""
    return (torch.arange(columns) // (rule.group_size or columns)).to(dtype)


def _zeros(packed: Tensor, bits: int, rows: int, version: str) -> Tensor:
    """Zero points as a kernel sees them, (G, N), 0 to 2^b - 1."""
    if version == V1 and 32 % bits == 0:
        ones = sum(1 << place for place in range(0, 32, bits))
        words = (packed.to(torch.int64) + ones) & 0xFFFFFFFF
        return dense_unpack(torch.where(words >= 2**31, words - 2**32, words).to(torch.int32), bits, rows)
    fields = dense_unpack(packed, bits, rows)
    return (fields + 1) & (2**bits - 1) if version == V1 else fields


def decode(tensors: Mapping[str, Tensor], rule: WeightRule, version: str | None = None) -> Tensor:
    """The weight (N, K) of a Linear: half(s (q - z)), in the type of its scales (float16 for float32)."""
    weight = coded(tensors, rule, version or version_for({"": rule}))
    return decoded(weight, rule, half_scales(tensors[SCALES]).dtype)


def quantization_config(
    rules: Mapping[str, WeightRule], *, ignore: Sequence[str] = (), head: str = HEAD
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Linears that differ from most get ``dynamic`` entries, which GPTQModel and vLLM follow and transformers
    does not. Where Linears of the blocks stay dense, ``dynamic`` says so to those two, and
    ``modules_in_block_to_quantize`` to transformers.

    Args:
        rules: of the quantized Linears, by module name.
        ignore: Linears that keep their dense weight.
        head: name of the output head.
    """
    assert rules, "something is quantized"
    plain = {name: _stated(rule) for name, rule in rules.items()}
    base = dict(Counter(tuple(said.items()) for said in plain.values()).most_common(1)[0][0])
    dense = [name for name in ignore if name != head]
    dynamic: dict[str, dict[str, Any]] = {f"-:{pattern(name)}": {} for name in dense}
    for name, said in plain.items():
        differs = {key: value for key, value in said.items() if value != base[key]}
        if differs:
            dynamic[f"+:{pattern(name)}"] = differs
    made: dict[str, Any] = {
        "quant_method": METHOD,
        **base,
        "desc_act": any(rule.ordered for rule in rules.values()),
        "checkpoint_format": version_for(rules),
        "pack_dtype": "int32",
        HEAD: head in rules,
    }
    if dynamic:
        made["dynamic"] = dynamic
    if dense:
        made["modules_in_block_to_quantize"] = [[name for name in rules if name != head]]
    return made


def _stated(rule: WeightRule) -> dict[str, Any]:
    """What a config says of a rule."""
    return {"bits": rule.bits, "group_size": rule.group_size or -1, "sym": rule.symmetric}


class GPTQReader(QweightReader):
    """Reads a GPTQ checkpoint tensor by tensor.

    Attributes:
        checkpoint: what is read.
        config: its ``quantization_config``, wherever it stands.
        version: ``gptq`` or ``gptq_v2``.
        old: written before versions had names.
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        self.config = dict(stated(checkpoint) or {})
        said = self.config.get("checkpoint_format") or self.config.get("format")
        self.old = said is None
        self.version = str(said or V1).lower()
        if self.version not in (V1, V2) or self.config.get("is_marlin_format"):
            raise ModelError(
                f"{checkpoint.path}: GPTQ in the format {said or 'marlin'!r}, which attar cannot read",
                hint="attar reads gptq and gptq_v2",
            )
        overrides = self.config.get("dynamic") or {}
        self._dynamic = [  # skips first, as GPTQModel has it
            (key[2:] if key[:2] in ("-:", "+:") else key, None if key.startswith("-:") else dict(said or {}))
            for key, said in sorted(overrides.items(), key=lambda item: not item[0].startswith("-:"))
        ]
        for expression, _ in self._dynamic:
            begins(expression, "")  # a broken one is refused at once

    def rule(self, module: str) -> WeightRule:
        """What the config says of a Linear.

        Raises:
            CheckpointError: it says that the Linear is dense, or nothing that GPTQ knows.
        """
        said = dict(self.config)
        for expression, changes in self._dynamic:
            if begins(expression, module):
                if changes is None:
                    raise CheckpointError(
                        f"{self.checkpoint.path}: the config's dynamic skips {module}, which has codes",
                        hint="weights and config are of different versions",
                    )
                said |= changes
                break
        return self._rule(said)

    def _rule(self, said: Mapping[str, Any]) -> WeightRule:
        bits, size = said.get("bits"), said.get("group_size", -1)
        if bits not in BITS or not isinstance(size, int) or size == 0 or size < -1:
            raise CheckpointError(
                f"{self.checkpoint.path}: GPTQ with bits {bits!r} in groups of {size!r}",
                hint=f"attar reads {', '.join(map(str, BITS))} bits, in groups of 1 or more, or -1",
            )
        strategy = "group" if size > 0 else "channel"
        return WeightRule("int", bits, strategy, max(size, 0), said.get("sym", True) is not False)

    def shape(self, module: str, rule: WeightRule) -> tuple[int, int]:
        """(N, K) of a Linear, from the shapes of its tensors."""
        rows = self.checkpoint.tensors[f"{module}.{QWEIGHT}"].shape
        info = self.checkpoint.tensors.get(f"{module}.{G_IDX}")
        if len(rows) != 2:
            raise CheckpointError(f"{self.checkpoint.path}: {module}.{QWEIGHT} has {len(rows)} axes, not 2")
        return rows[1], info.shape[0] if info and len(info.shape) == 1 else rows[0] * 32 // rule.bits

    def layout(self, shape: tuple[int, int], rule: WeightRule) -> TensorSpecs:
        """Types and shapes that its tensors must have."""
        return layout(shape, rule)

    def unpack(self, tensors: Mapping[str, Tensor], rule: WeightRule) -> Coded:
        """Its codes."""
        return coded(tensors, rule, self.version)

    def aside(self, name: str) -> bool:
        """Whether a tensor belongs to a weight and is none itself, or is a bias that the model has not."""
        if super().aside(name):
            return True
        base, _, leaf = name.rpartition(".")
        if not self.old or leaf != "bias" or f"{base}.{QWEIGHT}" not in self.checkpoint.tensors:
            return False
        return not self.checkpoint.load(name).any()


def dequantize_state(checkpoint: Any) -> dict[str, Tensor]:
    """Every tensor of a GPTQ checkpoint, decoded, under the names of the unquantized model.

    Raises:
        CheckpointError: a tensor is missing, or the config is another one's.
    """
    return read_state(GPTQReader(checkpoint))


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that its weights are in this layout."""
    return (config.get("quantization_config") or {}).get("quant_method") == METHOD
