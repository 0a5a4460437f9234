"""Sizes that kernels and formats can use: a multiple near the number asked for."""

from __future__ import annotations

from typing import Any

from attar.errors import SettingsError


def snapped(total: int, options: Any, noun: str) -> int:
    """How many of ``total`` stay: about the fraction asked for, as a multiple that quantization groups can
    use.

    Raises:
        SettingsError: the multiple is larger than the total.
    """
    wanted = total * (1.0 - options.ratio)
    if options.multiple_of > total:
        raise SettingsError("multiple_of", options.multiple_of, f"at most the {total} {noun}")
    if options.multiple_of:
        return nearest_multiple(total, wanted, options.multiple_of)
    return next(
        nearest_multiple(total, wanted, m)
        for m in (64, 32, 16, 8, 4, 2, 1)
        if m == 1 or (total % m == 0 and wanted >= 8 * m and _hits(total, wanted, m))
    )


def nearest_multiple(total: int, wanted: float, multiple: int) -> int:
    """The multiple nearest to the number wanted; at least one, at most all."""
    return min(max(round(wanted / multiple), 1) * multiple, total)


def _hits(total: int, wanted: float, multiple: int) -> bool:
    """Whether the multiple is off by at most a quarter of what is to be removed."""
    return abs(nearest_multiple(total, wanted, multiple) - wanted) <= 0.25 * (total - wanted)
