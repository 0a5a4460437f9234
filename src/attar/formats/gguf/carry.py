"""Codes of an integer or MXFP4 layout as blocks of llama.cpp's, none of them changed.

    w = s (q - z)        Q4_0  d (q' - 8)      Q5_0  d (q' - 16)     Q8_0  d q'       z = 0,  d = s
                         Q4_1  d q' + m        Q5_1  d q' + m                         d = s,  m = -s z
                         MXFP4 2^e t(q)                                               e of s

Letters: q signed code, q' as stored, s scale, z zero of a group; d, m float16, of 32 inputs; a group of more
inputs repeats its scale. Exact where s (and s z) are float16 numbers and groups are multiples of 32
neighbouring inputs; anything else would be a second rounding, and is refused with the reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.formats.coded import Coded
from attar.formats.rules import WeightRule

BLOCK = 32
ZERO = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}
"""The stored code of zero."""


def exact_type(coded: Coded, rule: WeightRule) -> tuple[str | None, str]:
    """The smallest type that holds a weight's codes exactly.

    Returns:
        the type and "", or None and why there is none.
    """
    if why := _misfit(coded, rule):
        return None, why
    if rule.kind == "float":
        return "MXFP4", ""
    if not _half(coded.scale):
        return None, "its scales are no float16 numbers"
    if rule.symmetric:
        return next(kind for kind, bits in (("Q4_0", 4), ("Q5_0", 5), ("Q8_0", 8)) if rule.bits <= bits), ""
    if rule.bits > 5:
        return None, f"llama.cpp has no type for {rule.bits} bits with a zero point"
    if not _half(_minimum(coded, rule)):
        return None, "scale times zero point is no float16 number"
    return ("Q4_1" if rule.bits <= 4 else "Q5_1"), ""


def _misfit(coded: Coded, rule: WeightRule) -> str:
    """Why the groups are not those of any type; "" where they are."""
    columns = coded.codes.shape[1]
    if columns % BLOCK:
        return f"its {columns} inputs are no multiple of {BLOCK}"
    if coded.order is not None:
        return "its groups are not neighbouring inputs (act-order group)"
    if rule.kind == "float":
        fp4 = rule.bits == 4 and rule.strategy == "group" and rule.group_size == BLOCK
        return "" if fp4 and coded.global_scale is None else "llama.cpp has no type for this float format"
    if rule.kind != "int" or rule.block:
        return f"llama.cpp has no type for {rule.kind} codes of this layout"
    if rule.strategy == "group" and rule.group_size % BLOCK:
        return f"its groups of {rule.group_size} are no multiple of {BLOCK}"
    return ""


def to_blocks(kind: str, coded: Coded, rule: WeightRule) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes (N, K) and what is stored beside them, as blocks.py packs them, of the type that
    :func:`exact_type` gave."""
    if kind == "MXFP4":
        exponent = torch.frexp(coded.scale).exponent.to(torch.int16) - 1 + 127
        return coded.codes.to(torch.uint8), {"exponent": exponent.to(torch.uint8)}
    stored = {"d": _spread(coded.scale, coded).half()}
    if kind in ZERO:
        codes = coded.codes.to(torch.int16) + ZERO[kind]
        return codes.to(torch.int8 if kind == "Q8_0" else torch.uint8), stored
    low = -(2 ** (rule.bits - 1))
    stored["m"] = _spread(_minimum(coded, rule), coded).half()
    return (coded.codes.to(torch.int16) - low).to(torch.uint8), stored


def _minimum(coded: Coded, rule: WeightRule) -> Tensor:
    """m of each group: what code 0 of the unsigned codes stands for."""
    zero = torch.zeros_like(coded.scale) if coded.zero is None else coded.zero
    return coded.scale * (-(2.0 ** (rule.bits - 1)) - zero)


def _spread(table: Tensor, coded: Coded) -> Tensor:
    """A (P, G) table as (N, K / 32)."""
    rows, blocks = coded.codes.shape[0], coded.codes.shape[1] // BLOCK
    table = table.reshape(1, 1) if table.dim() < 2 else table
    return table.repeat_interleave(blocks // table.shape[1], 1).expand(rows, blocks)


def _half(values: Tensor) -> bool:
    """Whether all values are float16 numbers."""
    return bool((values.half().float() == values.float()).all())
