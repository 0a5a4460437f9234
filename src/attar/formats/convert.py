"""Conversion of codes between the integer layouts; no code changes.

    w = s (q - z)        q signed code, s scale, z signed zero point of a group

compressed-tensors, GPTQ and AWQ all store these three; how they pack them is left to each format's module.
What differs between the targets:

    bits      a target without this width takes the next wider one; codes and zero points stay
    tile      one scale for the whole weight becomes one for each output, where the target has none such;
              groups, and the whole row (``group_size: -1``), are the same everywhere
    zero      symmetric weights get zero points of the middle where the target always has zero points
    g_idx     the group of each input (act-order ``group``, ``desc_act``) is g_idx in GPTQ, weight_g_idx in
              compressed-tensors; AWQ has none. act-order ``static`` leaves groups of neighbours
    scale     GPTQ and AWQ have float16. A bfloat16 number is exact there from 2^-17 to 65504 (it has 8 bits
              of precision, float16 11 down to 2^-14, and one less for each power of two below); a float32
              number is rounded, and :class:`ConvertedCodes` has the largest change

All but the last follow from rule and shape: :func:`misfit`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.errors import NumericsError
from attar.formats.coded import Coded
from attar.formats.rules import WeightRule

WIDTHS = {"gptq": (2, 3, 4, 8), "awq": (4,), "compressed-tensors": (1, 2, 3, 4, 5, 6, 7, 8)}
"""Bits of a code in each target."""
TILES = {
    "gptq": ("channel", "group"),
    "awq": ("channel", "group"),
    "compressed-tensors": ("tensor", "channel", "group"),
}
"""Strategies of each target."""
NAMES = {"gptq": "GPTQ", "awq": "AWQ", "compressed-tensors": "compressed-tensors"}
OUTPUTS = 8  # of AWQ in a word


@dataclass(frozen=True)
class ConvertedCodes:
    """A weight as the target stores it.

    Attributes:
        weight: the same codes; scales are numbers of the target's type.
        change: the largest relative change of a scale.
    """

    weight: Coded
    rule: WeightRule
    dtype: torch.dtype
    change: float

    @property
    def note(self) -> str | None:
        """A sentence where scales changed, else None."""
        if not self.change:
            return None
        dtype = str(self.dtype).removeprefix("torch.")
        return f"its scales are rounded to {dtype}, by {self.change:.1e} of themselves at most"


def misfit(rule: WeightRule, shape: tuple[int, int], target: str) -> str | None:
    """Why a target (``gptq``, ``awq`` or ``compressed-tensors``) cannot hold unchanged codes of a rule and
    shape (N, K), in one sentence; None where it can."""
    name = NAMES[target]
    if rule.kind != "int":
        return f"{name} has no {rule.kind} codes"
    if rule.block:
        return f"{name} has no scales for blocks of {rule.block[0]} x {rule.block[1]} weights"
    if rule.bits > max(WIDTHS[target]):
        return f"{name} has codes of {max(WIDTHS[target])} bits at most, not {rule.bits}"
    if target != "awq":
        return None
    if rule.ordered:
        return "its groups are not neighbouring inputs (act-order), and AWQ has no g_idx"
    if shape[0] % OUTPUTS:
        return f"AWQ packs {OUTPUTS} outputs in a word, and it has {shape[0]}"
    if rule.group_size and shape[1] % rule.group_size:
        return f"AWQ has only whole groups, and its {shape[1]} inputs are no multiple of {rule.group_size}"
    return None


def converted_rule(rule: WeightRule, target: str) -> WeightRule:
    """The rule of fitting codes in a target, with a width and a strategy that it has."""
    bits = next(width for width in WIDTHS[target] if width >= rule.bits)
    strategy = rule.strategy if rule.strategy in TILES[target] else "channel"
    return replace(rule, bits=bits, strategy=strategy)


def convert(
    weight: Coded,
    rule: WeightRule,
    target: str,
    *,
    dtype: torch.dtype = torch.float16,
    zeros: bool = False,
    name: str = "a weight",
) -> ConvertedCodes:
    """The codes of a weight in a target. Does not modify its inputs.

    Args:
        rule: of the weight; :func:`misfit` returns None for it.
        target: ``gptq``, ``awq`` or ``compressed-tensors``.
        dtype: of the scales there; float16 for GPTQ and AWQ.
        zeros: give a symmetric weight zero points of the middle, for a file that also has asymmetric ones.

    Raises:
        NumericsError: a scale is too large or too small for its type.
    """
    shape = (weight.codes.shape[0], weight.codes.shape[1])
    why = misfit(rule, shape, target)
    assert why is None, why
    target_rule = converted_rule(rule, target)
    scale, zero = _expanded(weight.scale, target_rule, shape), weight.zero
    if zero is None and zeros:
        zero = torch.zeros_like(weight.scale)
    cast = _cast(scale, dtype, name)
    change = float(((cast - scale) / scale).abs().max()) if scale.numel() else 0.0
    zero = None if zero is None else _expanded(zero, target_rule, shape)
    converted = Coded(weight.codes, cast, zero, None, weight.g_idx)
    return ConvertedCodes(converted, replace(target_rule, symmetric=zero is None), dtype, change)


def _expanded(values: Tensor, rule: WeightRule, shape: tuple[int, int]) -> Tensor:
    """A table of tiles (P, G) in the target's shape: a single value is repeated for each output."""
    return values.float().expand(rule.tiles(shape)).contiguous()


def _cast(scale: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Scales as numbers of a type, float32."""
    cast = scale.to(dtype).float()
    if not (torch.isfinite(cast).all() and (cast != 0).all()):
        kind = str(dtype).removeprefix("torch.")
        raise NumericsError(
            f"{name}: its scales, from {float(scale.abs().min()):.3g} to {float(scale.abs().max()):.3g}, do "
            f"not fit {kind}",
            hint="export to compressed-tensors, which keeps them as they are",
        )
    return cast
