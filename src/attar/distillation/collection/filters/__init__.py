"""The filters of collected text, one file each: reasons against rows, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attar.distillation.collection.filters.contamination import contamination
from attar.distillation.collection.filters.language import language
from attar.distillation.collection.filters.length import length
from attar.distillation.collection.filters.near_duplicates import near_duplicates
from attar.distillation.collection.filters.refusal import refusal
from attar.distillation.collection.filters.row import CollectedRow
from attar.distillation.collection.filters.self_consistency import self_consistency
from attar.distillation.collection.filters.settings import NAMES, FilterSettings

RowFilter = Callable[[Sequence[CollectedRow], FilterSettings], list[str]]
"""Rows to a reason against each of them; "" keeps one."""

FILTERS: dict[str, RowFilter] = {
    "length": length,
    "refusal": refusal,
    "language": language,
    "contamination": contamination,
    "self_consistency": self_consistency,
    "near_duplicates": near_duplicates,
}
assert tuple(FILTERS) == NAMES
