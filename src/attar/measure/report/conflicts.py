"""The picture of where the parents of a merge disagree, by layer.

A panel for each pair of parents shows, by layer, the cosine of their task vectors (solid, left scale) and the
fraction of common changes whose signs agree (dashed, right scale; 2 agreement - 1 shares the scale of the
cosine). Unrelated changes are at 0 and 50 %, opposite ones below. Embedding and head are single points. All
panels have one scale.

Then, by model: the length of its change relative to the base, and the fraction that a vote on the signs
overrules. The rows are those of ``attar.merging.conflicts.summary``; invalid ones are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from attar.measure.numbers import significant
from attar.measure.report.labels import LegendEntry, cut, html_legend, svg_legend, text_width
from attar.measure.report.markup import Markup, el, join
from attar.measure.report.svg import (
    Axis,
    PixelPoint,
    fit,
    from_zero,
    left_axis,
    line,
    picture,
    point,
    polyline,
    svg_file,
    text,
    tick_text,
)
from attar.measure.run_folder import RunRecord, StageRecord

WIDTH, HEIGHT = 252.0, 184.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, WIDTH - 42.0, 42.0, HEIGHT - 26.0
MOST_PAIRS, MOST_MODELS = 15, 6
MOST_LAYERS = 16  # above, lines have no points
NOISE = 0.1  # a range of cosines that is not magnified: unrelated changes shall look like it
OUTSIDE = 2  # colour of embedding and head
LayerSlot = tuple[str, int]
"""A layer: its stack ("" for a single stack) and its number."""
ConflictValue = float | None
DRAWN_PARTS = 2  # kinds of layers that have a line: the largest
BY_PAIR, BY_MODEL = ("cosine", "agreement"), ("norm", "overruled")


@dataclass(frozen=True)
class ConflictTable:
    """The rows, by layer.

    Attributes:
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
        """One number; None where it is unknown."""
        values = self.values[measure].get((slot, part))
        return values[index] if values else None

    def overall(self, measure: str, index: int) -> ConflictValue:
        """The number of the whole model."""
        return self.value(measure, None, "all", index)

    def known(self, measure: str, parts: Sequence[str]) -> list[float]:
        """All numbers of a measure in these parts."""
        rows = self.values[measure].items()
        return [v for (_, part), values in rows if part in parts for v in values if v is not None]

    def slot_label(self, slot: LayerSlot) -> str:
        """The label of a layer: its number, after the initial of its stack where there are several."""
        several = len(dict.fromkeys(stack for stack, _ in self.slots)) > 1
        return f"{slot[0][:1]}{slot[1]}" if several else str(slot[1])


def read_conflicts(rows: Sequence[Any], labels: Sequence[Any] = ()) -> ConflictTable | None:
    """The rows as :class:`ConflictTable`; None without layers of at least two models."""
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


def _values(values: Any, count: int) -> list[ConflictValue]:
    """``count`` numbers or Nones; all None for anything else."""
    if not isinstance(values, list) or len(values) != count:
        return [None] * count
    return [_number(value) for value in values]


def _number(value: Any) -> ConflictValue:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


class Panel(NamedTuple):
    """A small picture, with its description."""

    what: str
    drawn: Markup


def conflict_pictures(run: RunRecord) -> Markup | None:
    """Panels of every stage with conflicts in its card; None without any."""
    known = [(stage, table) for stage in run.stages if (table := _table(stage))]
    drawn = [join(el("h3", stage.name) if len(known) > 1 else None, _html(table)) for stage, table in known]
    return join(drawn) if drawn else None


def conflicts_svg(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], width: float = 880.0) -> str:
    """The picture as an SVG file with its style sheet.

    Args:
        rows: of ``attar.merging.conflicts.summary``.
        labels: names of the models, in order.
    """
    table = read_conflicts(rows, labels)
    y, parts = 18.0, []
    for keys, panels in _groups(table) if table else ():
        legend, y = svg_legend(keys, width, y + 10)
        parts.append(legend)
        columns = min(max(int((width - 32 + 28) // (WIDTH + 28)), 1), 2 if len(panels) == 4 else len(panels))
        for number, panel in enumerate(panels):
            row, column = divmod(number, columns)
            offset = f"translate({16 + column * (WIDTH + 28):.0f} {y + row * (HEIGHT + 20):.0f})"
            parts.append(el("g", el("title", panel.what), panel.drawn, transform=offset))
        y += -(-len(panels) // columns) * (HEIGHT + 20)
    if not table:
        parts, y = [text(16, 34, "no task vectors of two models to compare")], 60.0
    return svg_file(width, y, "where the parents of a merge disagree, layer by layer", parts)


def _table(stage: StageRecord) -> ConflictTable | None:
    labels = stage.details.get("conflict_models")
    return read_conflicts(stage.rows("conflicts"), labels if isinstance(labels, list) else ())


def _html(table: ConflictTable) -> Markup:
    parts = []
    for keys, panels in _groups(table):
        drawn = [picture(WIDTH, HEIGHT, p.what, p.drawn, class_="picture panel") for p in panels]
        parts.append(join(html_legend(keys), el("div", drawn, class_="panels")))
    return join(parts)


def _groups(table: ConflictTable) -> list[tuple[list[LegendEntry], list[Panel]]]:
    """Two groups of panels with their legends: by pair, and by model."""
    pairs, models = _shown_pairs(table), _shown_models(table)
    titles = {index: " × ".join(table.labels[model] for model in table.pairs[index]) for index in pairs}
    names = dict(enumerate(table.labels))
    letters: list[LegendEntry] = []
    if any(text_width(title, 12) > WIDTH for title in titles.values()):
        short = {model: _letter(model) for model in names}
        letters = [LegendEntry("", f"{short[model]}: {cut(name)}") for model, name in names.items()]
        titles = {index: " × ".join(short[model] for model in table.pairs[index]) for index in pairs}
        names = short
    keys = [LegendEntry(f"s{number}", part) for number, part in enumerate(table.parts)]
    keys += (
        [LegendEntry(f"s{OUTSIDE} spot", " and ".join(table.outside) + " (ring: signs)")]
        if table.outside
        else []
    )
    keys += [LegendEntry("plain", "cosine (left)"), LegendEntry("plain dashed", "signs agree (right)")]
    if len(pairs) < len(table.pairs):
        keys.append(
            LegendEntry("", f"{len(pairs)} of {len(table.pairs)} pairs: those with the lowest cosine")
        )
    by_pair = [_pair_panel(table, index, titles[index]) for index in pairs]
    model_keys = [LegendEntry(f"s{number}", cut(names[model])) for number, model in enumerate(models)]
    if len(models) < len(table.labels):
        words = f"{len(models)} of {len(table.labels)} models: those overruled most"
        model_keys.append(LegendEntry("", words))
    by_model = [
        _model_panel(table, measure, title, part, models)
        for measure, title in (
            ("norm", "length of the change / base"),
            ("overruled", "share overruled by a vote"),
        )
        for part in table.parts
    ]
    return [(letters + keys, by_pair), (model_keys, by_model)]


def _shown_pairs(table: ConflictTable) -> list[int]:
    """All pairs, or the ones with the lowest cosine where there are too many, in their order."""
    ranked = sorted(range(len(table.pairs)), key=lambda index: _or(table.overall("cosine", index), 2.0))
    return sorted(ranked[:MOST_PAIRS])


def _shown_models(table: ConflictTable) -> list[int]:
    ranked = sorted(range(len(table.labels)), key=lambda model: -_or(table.overall("overruled", model), -1.0))
    return sorted(ranked[:MOST_MODELS])


def _letter(number: int) -> str:
    """A, B, ... Z, A1, ..."""
    turn, letter = divmod(number, 26)
    return chr(ord("A") + letter) + (str(turn) if turn else "")


def _pair_panel(table: ConflictTable, index: int, title: str) -> Panel:
    y = _shared_scale(table)
    x = _depth(table, RIGHT, table.outside)
    dots = len(table.slots) <= MOST_LAYERS
    drawn = []
    for number, part in enumerate(table.parts):
        cosine = _line(table, x, "cosine", part, index, y)
        signs = _line(table, x, "agreement", part, index, lambda value: y(2 * value - 1))
        shown = [*_series(signs, f"{part}, signs agree", "series dashed", dots)]
        shown += _series(cosine, f"{part}, cosine", "series", dots)
        drawn.append(el("g", shown, class_=f"s{number}"))
    right = [
        text(RIGHT + 6, y(tick) + 4, f"{tick_text(50 + 50 * tick)} %", class_="tick") for tick in y.ticks(4)
    ]
    parts = [
        _heading(title, _whole_words(table, index)),
        left_axis(y, LEFT, RIGHT, 4),
        right,
        line(LEFT, y(0.0), RIGHT, y(0.0), class_="zero"),
        _layer_numbers(table, x),
        drawn,
        el("g", _outside(table, index, y), class_=f"s{OUTSIDE}"),
    ]
    return Panel(f"{title}: cosine and sign agreement of their changes, layer by layer", join(parts))


def _heading(title: str, note: str) -> Markup:
    return join(text(0, 12, title, class_="panel-title"), text(0, 27, note, class_="tick"))


def _whole_words(table: ConflictTable, index: int) -> str:
    cosine, signs = table.overall("cosine", index), table.overall("agreement", index)
    words = [f"cosine {round(cosine, 2) + 0.0:.2f}" if cosine is not None else "cosine unknown"]
    words += [f"signs agree in {100 * signs:.0f} %"] if signs is not None else []
    return ", ".join(words)


def _shared_scale(table: ConflictTable) -> Axis:
    """One scale for all pairs: cosines, and 2 agreement - 1; 0 is always on it."""
    parts = (*table.parts, *table.outside)
    values = table.known("cosine", parts) + [2 * value - 1 for value in table.known("agreement", parts)]
    low, high = min([0.0, *values]), max([0.0, *values])
    return fit([low, high] if high - low > NOISE else [-NOISE, NOISE], BOTTOM, TOP, margin=0.05)


def _depth(table: ConflictTable, right: float, outside: Sequence[str] = ()) -> Callable[[float], float]:
    """From the index of a layer to its pixel, with room for embedding and head at the ends."""
    last = len(table.slots) - 1
    first = LEFT + (24.0 if "embedding" in outside else 10.0)
    end = right - (24.0 if "head" in outside else 10.0)
    return lambda index: first + (end - first) * (index / last if last else 0.5)


def _line(
    table: ConflictTable,
    x: Callable[[float], float],
    measure: str,
    part: str,
    index: int,
    y: Callable[[float], float],
) -> list[list[tuple[PixelPoint, str]]]:
    """Points with their descriptions, in pieces: a line breaks at unknown values and between stacks."""
    pieces: list[list[tuple[PixelPoint, str]]] = [[]]
    before: LayerSlot | None = None
    for layer_index, slot in enumerate(table.slots):
        value = table.value(measure, slot, part, index)
        if value is None or (before is not None and before[0] != slot[0]):
            pieces.append([])
        if value is not None:
            words = f"layer {table.slot_label(slot)}: {significant(value)}"
            pieces[-1].append(((x(layer_index), y(value)), words))
        before = slot
    return [piece for piece in pieces if piece]


def _series(pieces: list[list[tuple[PixelPoint, str]]], what: str, class_: str, dots: bool) -> list[Markup]:
    """Lines, and points where there are few or where a line would have a single one."""
    drawn = [polyline([pixel for pixel, _ in piece], class_=class_) for piece in pieces if len(piece) > 1]
    radius = 2.0 if "dashed" in class_ else 2.6
    for piece in pieces:
        for (px, py), words in piece if dots or len(piece) == 1 else ():
            drawn.append(point(f"{what}, {words}", px, py, radius))
    return drawn


def _outside(table: ConflictTable, index: int, y: Axis) -> list[Markup]:
    """Embedding and head: a disc at the cosine, a ring at the agreement of signs."""
    drawn = []
    for part, x in (("embedding", LEFT + 10.0), ("head", RIGHT - 10.0)):
        for measure, class_ in (("agreement", "hollow"), ("cosine", "point")):
            value = table.value(measure, None, part, index) if part in table.outside else None
            if value is not None:
                row = y(value if measure == "cosine" else 2 * value - 1)
                drawn.append(point(f"{part}, {measure}: {significant(value)}", x, row, class_=class_))
    return drawn


def _layer_numbers(table: ConflictTable, x: Callable[[float], float], most: int = 7) -> list[Markup]:
    step = -(-len(table.slots) // most)
    return [
        text(x(index), BOTTOM + 17, table.slot_label(slot), anchor="middle", class_="tick")
        for index, slot in enumerate(table.slots)
        if index % step == 0
    ]


def _model_panel(table: ConflictTable, measure: str, title: str, part: str, models: list[int]) -> Panel:
    y = from_zero(table.known(measure, table.parts), BOTTOM, TOP)
    right = WIDTH - 8.0
    x = _depth(table, right)
    dots = len(table.slots) <= MOST_LAYERS
    drawn = [
        el(
            "g",
            _series(_line(table, x, measure, part, model, y), table.labels[model], "series", dots),
            class_=f"s{n}",
        )
        for n, model in enumerate(models)
    ]
    parts = [_heading(part, title), left_axis(y, LEFT, right, 4), _layer_numbers(table, x), drawn]
    return Panel(f"{part}: {title}, layer by layer", join(parts))


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
