"""What a merge's card says of its parents' conflicts, read for drawing.

The rows are those of ``attar.merging.conflicts.summary``: ``layer``, ``part``, ``cosine`` and ``agreement``
by pair, ``norm`` and ``overruled`` by model. Anything that is not as it should be is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

LayerSlot = tuple[str, int]
"""A place along the depth: stack of layers ("" where there is one) and layer."""

ConflictValue = float | None
DRAWN_PARTS = 2  # kinds of layers that have a line: the largest
BY_PAIR, BY_MODEL = ("cosine", "agreement"), ("norm", "overruled")


@dataclass(frozen=True)
class ConflictTable:
    """The rows, by place.

    Attributes:
        labels: names of the models.
        slots: the layers, in order.
        parts: kinds of layers with the most parameters, largest first.
        outside: parts before and after the layers that are drawn: embedding, head.
        values: measure to (slot, or None outside; part) to one value a pair or a model.
    """

    labels: tuple[str, ...]
    slots: tuple[LayerSlot, ...]
    parts: tuple[str, ...]
    outside: tuple[str, ...]
    values: Mapping[str, Mapping[tuple[LayerSlot | None, str], Sequence[ConflictValue]]]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of models in the order of the values."""
        return list(combinations(range(len(self.labels)), 2))

    def value(self, measure: str, slot: LayerSlot | None, part: str, index: int) -> ConflictValue:
        """One number; None where it is not known."""
        found = self.values[measure].get((slot, part))
        return found[index] if found else None

    def whole(self, measure: str, index: int) -> ConflictValue:
        """The number of the whole model."""
        return self.value(measure, None, "all", index)

    def known(self, measure: str, parts: Sequence[str]) -> list[float]:
        """All numbers of a measure in these parts."""
        found = self.values[measure].items()
        return [v for (_, part), values in found if part in parts for v in values if v is not None]

    def slot_label(self, slot: LayerSlot) -> str:
        """What to write under a place: the layer's number, after the stack's initial where there are two."""
        several = len(dict.fromkeys(stack for stack, _ in self.slots)) > 1
        return f"{slot[0][:1]}{slot[1]}" if several else str(slot[1])


def read_conflicts(rows: Sequence[Any], labels: Sequence[Any] = ()) -> ConflictTable | None:
    """The rows as :class:`ConflictTable`; None where they hold nothing of two models or more in layers."""
    usable = [row for row in rows if isinstance(row, Mapping) and isinstance(row.get("part"), str)]
    models = max((len(row["norm"]) for row in usable if isinstance(row.get("norm"), list)), default=0)
    if models < 2:
        return None
    pairs = models * (models - 1) // 2
    values: dict[str, dict[tuple[LayerSlot | None, str], list[ConflictValue]]] = {
        measure: {} for measure in (*BY_PAIR, *BY_MODEL)
    }
    sizes: dict[str, float] = {}
    slots: dict[LayerSlot, None] = {}
    for row in usable:
        slot, part = _slot(row), row["part"]
        if slot is not None:
            slots[slot] = None
            sizes[part] = sizes.get(part, 0.0) + (_number(row.get("size")) or 0.0)
        for measure in values:
            values[measure][slot, part] = _values(row.get(measure), pairs if measure in BY_PAIR else models)
    if not slots:
        return None
    parts = sorted(sizes, key=lambda part: -sizes[part])[:DRAWN_PARTS]
    outside = [part for part in ("embedding", "head") if (None, part) in values["cosine"]]
    names = [str(label) for label in labels][:models]
    names += [f"model {number + 1}" for number in range(len(names), models)]
    return ConflictTable(tuple(names), tuple(slots), tuple(parts), tuple(outside), values)


def _slot(row: Mapping[str, Any]) -> LayerSlot | None:
    layer, stack = row.get("layer"), row.get("stack", "")
    return (str(stack), layer) if isinstance(layer, int) and not isinstance(layer, bool) else None


def _values(found: Any, count: int) -> list[ConflictValue]:
    """``count`` numbers or Nones; all None where something else was found."""
    if not isinstance(found, list) or len(found) != count:
        return [None] * count
    return [_number(value) for value in found]


def _number(value: Any) -> ConflictValue:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
