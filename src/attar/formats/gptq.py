"""GPTQ: the checkpoints that GPTQModel, transformers and vLLM load (``quant_method: gptq``).

For a Linear with weight (N, K), b bits (2, 3, 4 or 8), groups of g inputs, G = ceil(K / g) of them:

    qweight  int32 (ceil(K b / 32), N)   codes of the transposed weight, dense_pack along K
    qzeros   int32 (G, ceil(N b / 32))   zero points, dense_pack along N
    scales   float16 (G, N)
    g_idx    int32 (K,)                  group of each input; i // g where groups are neighbours
    bias     float16 (N,)                an ordinary tensor, where the Linear has one

Codes and zero points are stored as signed + 2^(b-1). With act-order (``desc_act``) the codes stay in the
order of the inputs, and only g_idx has the groups. ``group_size: -1`` is one group, K.

Two versions differ in the zero points: the first (``checkpoint_format: gptq``) stores one less, which the
kernel adds; the second (``gptq_v2``) stores them unchanged. Symmetric weights, whose zero point is 2^(b-1),
fit both and are read everywhere in the first. An asymmetric zero point of 0 does not exist in the first: the
second is written where any Linear of a file is asymmetric.

As GPTQModel does, the first version is read by adding 1 to every field: for 2, 4 and 8 bits with one addition
to the word (which undoes a borrow that a writer left between neighbours), for 3 bits, which straddle words,
field by field. Readers disagree on files of the first version with zero points of 0.

Read as well: files without ``checkpoint_format`` (older than the second version, so of the first);
``quantize_config.json`` alone; ``dynamic`` overrides (``+:`` or no prefix) and skips (``-:``), regular
expressions on module names, skips first; files without g_idx; symmetric files with zero points of the second
version and the label of the first (kernels for symmetric weights ignore zero points); biases of zeros that
AutoGPTQ gave to every Linear, which are left out where the file is that old.

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
from attar.formats.coded import Coded, WeightLayout
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.qweight import (
    G_IDX,
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
from attar.formats.rules import WeightRule, mapping, one_of
from attar.patterns import check, matches_start

METHOD = "gptq"
V1, V2 = "gptq", "gptq_v2"
BITS = (2, 3, 4, 8)


def version_for(rules: Mapping[str, WeightRule]) -> str:
    """The version in which a file with Linears of these rules is written."""
    return V1 if all(rule.symmetric for rule in rules.values()) else V2


def encode(weight: Coded, rule: WeightRule, version: str | None = None) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names. Does not modify its inputs.

    Args:
        version: ``gptq`` or ``gptq_v2``; None: as :func:`version_for` chooses.

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
    g_idx = weight.g_idx
    if g_idx is None:
        g_idx = torch.arange(columns) // rule.tile((rows, columns))[1]
    return {
        QWEIGHT: dense_pack(code_bytes(weight.codes, rule.bits), rule.bits).T.contiguous(),
        QZEROS: dense_pack(zeros, rule.bits),
        SCALES: weight.scale.T.half().contiguous(),
        G_IDX: g_idx.to(torch.int32),
    }


def layout(shape: tuple[int, int], rule: WeightRule) -> WeightLayout:
    """Type and shape of the tensors that :func:`encode` returns for a weight of ``shape`` (N, K)."""
    (rows, columns), groups = shape, rule.tiles(shape)[1]
    return {
        QWEIGHT: ("I32", (-(-columns * rule.bits // 32), rows)),
        QZEROS: ("I32", (groups, -(-rows * rule.bits // 32))),
        SCALES: ("F16", (groups, rows)),
        G_IDX: ("I32", (columns,)),
    }


def unpack(tensors: Mapping[str, Tensor], rule: WeightRule, version: str) -> Coded:
    """The unchanged codes of a Linear. Zero points that all are the middle of the codes are returned as None,
    and so is a g_idx of neighbouring groups."""
    bits, scales = rule.bits, half_scales(tensors[SCALES])
    columns = tensors[G_IDX].shape[0] if G_IDX in tensors else tensors[QWEIGHT].shape[0] * 32 // bits
    codes = dense_unpack(tensors[QWEIGHT].T.contiguous(), bits, columns)
    zero = _zeros(tensors[QZEROS], bits, scales.shape[1], version).float() - 2 ** (bits - 1)
    if rule.symmetric and version == V1 and bool((zero == 1).all()):
        zero = torch.zeros_like(zero)
    g_idx = tensors.get(G_IDX)
    if g_idx is not None and torch.equal(g_idx.long(), torch.arange(columns) // (rule.group_size or columns)):
        g_idx = None
    middle = not zero.any()
    return Coded(
        codes=signed(codes, bits),
        scale=scales.float().T.contiguous(),
        zero=None if middle else zero.T.contiguous(),
        g_idx=g_idx,
    )


def _zeros(packed: Tensor, bits: int, rows: int, version: str) -> Tensor:
    """Zero points as a kernel sees them, (G, N), 0 to 2^b - 1."""
    if version == V1 and 32 % bits == 0:
        ones = sum(1 << offset for offset in range(0, 32, bits))
        words = (packed.to(torch.int64) + ones) & 0xFFFFFFFF
        return dense_unpack(torch.where(words >= 2**31, words - 2**32, words).to(torch.int32), bits, rows)
    fields = dense_unpack(packed, bits, rows)
    return (fields + 1) & (2**bits - 1) if version == V1 else fields


def decode(tensors: Mapping[str, Tensor], rule: WeightRule, version: str | None = None) -> Tensor:
    """The weight (N, K) of a Linear: half(s (q - z)), in the type of its scales (float16 for float32)."""
    weight = unpack(tensors, rule, version or version_for({"": rule}))
    return kernel_weight(weight, rule, tensors[SCALES])


def quantization_config(
    rules: Mapping[str, WeightRule], *, ignore: Sequence[str] = (), head: str = HEAD
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Linears that differ from most get ``dynamic`` entries, which GPTQModel and vLLM follow and transformers
    does not. Dense Linears of the blocks are named by ``dynamic`` for those two, and left out of
    ``modules_in_block_to_quantize`` for transformers.
    """
    assert rules, "something is quantized"
    entries = {
        name: {"bits": rule.bits, "group_size": rule.group_size or -1, "sym": rule.symmetric}
        for name, rule in rules.items()
    }
    base = dict(Counter(tuple(entry.items()) for entry in entries.values()).most_common(1)[0][0])
    dense = [name for name in ignore if name != head]
    dynamic: dict[str, dict[str, Any]] = {f"-:{pattern(name)}": {} for name in dense}
    for name, entry in entries.items():
        differs = {key: value for key, value in entry.items() if value != base[key]}
        if differs:
            dynamic[f"+:{pattern(name)}"] = differs
    config: dict[str, Any] = {
        "quant_method": METHOD,
        **base,
        "desc_act": any(rule.ordered for rule in rules.values()),
        "checkpoint_format": version_for(rules),
        "pack_dtype": "int32",
        HEAD: head in rules,
    }
    if dynamic:
        config["dynamic"] = dynamic
    if dense:
        config["modules_in_block_to_quantize"] = [[name for name in rules if name != head]]
    return config


class GPTQReader(QweightReader):
    """Reads a GPTQ checkpoint tensor by tensor.

    Attributes:
        version: ``gptq`` or ``gptq_v2``.
        old: written before versions had names.
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        version = self.config.get("checkpoint_format") or self.config.get("format")
        self.old = version is None
        self.version = str(version or V1).lower()
        if self.version not in (V1, V2) or self.config.get("is_marlin_format"):
            raise ModelError(
                f"{checkpoint.path}: GPTQ in the format {version or 'marlin'!r}, which attar cannot read",
                hint="attar reads gptq and gptq_v2",
            )
        one_of(self.config, "pack_dtype", ("int32", "torch.int32"), None)
        overrides = mapping(self.config.get("dynamic") or {}, "dynamic")
        self._dynamic = [  # skips first, as GPTQModel does
            (
                key[2:] if key[:2] in ("-:", "+:") else key,
                None if key.startswith("-:") else dict(mapping(entry or {}, f"dynamic of {key!r}")),
            )
            for key, entry in sorted(overrides.items(), key=lambda item: not item[0].startswith("-:"))
        ]
        for expression, _ in self._dynamic:
            check(expression, "config.json")

    def covers(self, module: str) -> bool:
        """Whether engines make quantized parameters for a Linear: GPTQModel's rule, which SGLang follows."""
        if module == HEAD:
            return bool(self.config.get(HEAD))
        skips = (expression for expression, changes in self._dynamic if changes is None)
        return not any(matches_start(expression, module, "config.json") for expression in skips)

    def rule(self, module: str) -> WeightRule:
        entry = dict(self.config)
        for expression, changes in self._dynamic:
            if matches_start(expression, module, "config.json"):
                if changes is None:
                    raise CheckpointError(
                        f"{self.checkpoint.path}: the config's dynamic skips {module}, which has codes",
                        hint="weights and config are of different versions",
                    )
                entry |= changes
                break
        return self.read_group_rule(entry, BITS, -1, entry.get("sym", True) is not False)

    def shape(self, qweight: tuple[int, int], module: str, rule: WeightRule) -> tuple[int, int]:
        info = self.checkpoint.tensors.get(f"{module}.{G_IDX}")
        return qweight[1], info.shape[0] if info and len(info.shape) == 1 else qweight[0] * 32 // rule.bits

    def layout(self, shape: tuple[int, int], rule: WeightRule) -> WeightLayout:
        return layout(shape, rule)

    def unpack(self, tensors: Mapping[str, Tensor], rule: WeightRule) -> Coded:
        return unpack(tensors, rule, self.version)

    def is_auxiliary(self, name: str) -> bool:
        """Whether a tensor belongs to a weight, or is a bias that the model does not have."""
        if super().is_auxiliary(name):
            return True
        base, _, leaf = name.rpartition(".")
        if not self.old or leaf != "bias" or f"{base}.{QWEIGHT}" not in self.checkpoint.tensors:
            return False
        return not self.checkpoint.load(name).any()
