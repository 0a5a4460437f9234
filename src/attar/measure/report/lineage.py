"""The lineage: which stage was made from which, as a tree, with the settings of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attar.measure.numbers import duration, size
from attar.measure.report.markup import Markup, el
from attar.measure.report.svg import verb_class
from attar.measure.run_folder import RunRecord, StageRecord


def lineage_tree(run: RunRecord) -> Markup:
    """Nested lists, one item per stage; stages whose parent is not in the run begin a tree of their own."""
    roots = [stage for stage in run.stages if run.parent(stage) is None]
    return el("ul", [_node(run, stage, ()) for stage in roots], class_="tree")


def _node(run: RunRecord, stage: StageRecord, above: tuple[str, ...]) -> Markup:
    children = [child for child in run.children(stage) if child.name not in (*above, stage.name)]
    below = el("ul", [_node(run, child, (*above, stage.name)) for child in children]) if children else None
    return el(
        "li",
        el(
            "div",
            _line(stage),
            _more("settings", stage.settings),
            _more("found", stage_details(stage)),
            class_="node",
        ),
        below,
    )


def _line(stage: StageRecord) -> Markup:
    facts = [size(stage.number("bytes"))] if stage.number("bytes") is not None else []
    if stage.seconds is not None:
        facts.append(f"took {duration(stage.seconds)}")
    if stage.peak_rss_bytes is not None:
        facts.append(f"peak memory {size(stage.peak_rss_bytes)}")
    if len(stage.parents) > 1:
        facts.append(f"signal from {', '.join(stage.parents[1:])}")
    name = el("b", stage.name)
    return el(
        "p",
        el("i", class_=f"dot {verb_class(stage.verb)}"),
        name,
        " ",
        stage.title,
        el("small", " · ".join(facts)),
    )


def stage_details(stage: StageRecord) -> dict[str, Any]:
    """What the stage reported beside tables and curves: the layers kept, the tokens seen ..."""
    return {
        name: value
        for name, value in stage.details.items()
        if not (isinstance(value, list) and any(isinstance(row, Mapping) for row in value))
    }


def _more(title: str, values: Mapping[str, Any]) -> Markup | None:
    return el("details", el("summary", title), definitions(values)) if values else None


def definitions(values: Mapping[str, Any]) -> Markup:
    """Names and values, one under the other; nested mappings inside."""
    items = []
    for name, value in values.items():
        shown = (
            definitions(value)
            if isinstance(value, Mapping) and value
            else el("code", _value(str(name), value))
        )
        items.append(el("div", el("dt", str(name).removesuffix("_bytes")), el("dd", shown)))
    return el("dl", items)


def _value(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return size(value)
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
