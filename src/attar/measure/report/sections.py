"""Sections of the report in HTML: the table of stages, parents of a merge, samples, lineage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from attar.checkpoint.units import seconds_text
from attar.measure.numbers import percent, significant, size
from attar.measure.report.markup import Child, Markup, el, join
from attar.measure.report.svg import verb_class
from attar.measure.run_folder import RunRecord, StageRecord
from attar.measure.table import KEPT, MB, REPORT, TOP1, Column, columns, engine_note, kl_note

PARENT_COLUMNS = (("loss, nats/token", "loss"), ("perplexity", "perplexity"), ("nats/byte", "nats_per_byte"))


def stage_table(run: RunRecord, result: StageRecord | None = None) -> Markup:
    """All stages with their measurements; on a narrow screen each stage is a card.

    Args:
        result: the stage that is marked as the run's result; None: none is.
    """
    head = [el("th", "stage", scope="col")]
    head += [el("th", column.title, scope="col", title=column.meaning) for column in columns(run, REPORT)]
    rows = [_row(run, stage, result) for stage in run.stages]
    table = el("table", el("thead", el("tr", head)), el("tbody", rows), class_="stages")
    return join(el("div", table, class_="scroll", tabindex=0), _footnote(run))


def _row(run: RunRecord, stage: StageRecord, result: StageRecord | None) -> Markup:
    title = el("small", stage.title) if stage.title else None
    name = el("th", el("i", class_=f"dot {verb_class(stage.verb)}"), el("b", stage.name), title, scope="row")
    return el(
        "tr",
        name,
        [_cell(run, stage, column) for column in columns(run, REPORT)],
        class_="last" if stage is result else None,
    )


def _cell(run: RunRecord, stage: StageRecord, column: Column) -> Markup:
    share = _share(run, stage, column)
    bar = el("i", class_="bar", style=f"width:{share * 100:.1f}%") if share is not None else None
    track = el("span", bar, class_="track") if bar else None
    return el("td", column.cell(run, stage), track, data_label=column.title)


def _share(run: RunRecord, stage: StageRecord, column: Column) -> float | None:
    """The length of the bar under a number, 0 to 1: bytes relative to the largest stage, quality and
    agreement as they are."""
    if column is TOP1:
        return stage.number("top1_agreement")
    if column is KEPT:
        kept = stage.number("quality_kept")
        return None if kept is None else min(kept, 1.0)
    if column is MB:
        largest = max((other.number("bytes") or 0.0 for other in run.stages), default=0.0)
        size = stage.number("bytes")
        return size / largest if size is not None and largest else None
    return None


def _footnote(run: RunRecord) -> Markup:
    measured = run.last
    parts = []
    if (tokens := measured.number("tokens")) is not None:
        which = "tokens" if run.not_held_out() else "held-out tokens that no stage has read"
        parts.append(f"Quality on {tokens:,.0f} {which}.")
    if sentence := engine_note(run):
        parts.append(f"{sentence} The reference is computed by transformers.")
    if sentence := kl_note(run):
        parts.append(sentence)
    parts += _speed_notes(run, measured)
    return el("p", " ".join(parts), class_="foot") if parts else Markup()


def _speed_notes(run: RunRecord, measured: StageRecord) -> list[str]:
    """How the tokens per second were measured."""
    device, threads = measured.text("device"), measured.number("threads")
    if measured.number("decode_tokens_per_s") is None or not device:
        return []
    where = (
        f"{device}, {threads:.0f} thread{'s' if threads > 1 else ''}"
        if threads and device == "cpu"
        else device
    )
    notes = [f"Speed is that of one sequence on {where}, the median of its rounds."]
    if (measured.text("runner") or "transformers") == "transformers":
        notes.append("It is that of transformers: packed weights show their size here, not their speed.")
    spread = max((stage.number("decode_spread") or 0.0 for stage in run.stages), default=0.0)
    if spread >= 0.005:
        notes.append(f"Rounds of one measurement differ by up to {spread * 100:.0f} %.")
    return notes


def parent_tables(run: RunRecord) -> Markup | None:
    """How well each merge and its parents predict held-out text; None without such records."""
    known = [(stage, rows) for stage in run.stages if (rows := _rows(stage))]
    drawn = [join(el("h3", stage.name) if len(known) > 1 else None, _table(rows)) for stage, rows in known]
    return join(drawn) if drawn else None


def _rows(stage: StageRecord) -> list[Mapping[str, Any]]:
    return [row for row in stage.rows("quality") if isinstance(row.get("name"), str)]


def _table(rows: list[Mapping[str, Any]]) -> Markup:
    head = [el("th", "model", scope="col"), *(el("th", title, scope="col") for title, _ in PARENT_COLUMNS)]
    body = [
        el(
            "tr",
            el("th", Path(str(row["name"])).name, scope="row"),
            [_number_cell(row.get(key)) for _, key in PARENT_COLUMNS],
        )
        for row in rows
    ]
    table = el("table", el("thead", el("tr", head)), el("tbody", body), class_="stages")
    return el("div", table, class_="scroll", tabindex=0)


def _number_cell(value: Any) -> Markup:
    return el("td", significant(float(value), 4) if isinstance(value, int | float) else significant(None))


def sample_cards(run: RunRecord) -> Markup | None:
    """The greedy samples, a card per stage, with differences from the original marked; None without any."""
    stages = [stage for stage in run.stages if stage.text("sample") is not None]
    if not stages:
        return None
    base = run.original.text("sample")
    return el(
        "div", [_card(stage, None if stage is run.original else base) for stage in stages], class_="samples"
    )


def differences(base: str, text: str) -> Iterator[tuple[str, str]]:
    """Pieces of ``text`` in order, compared with ``base`` word by word: ``same``, ``new`` (added or changed),
    or ``gone`` (of ``base``, removed)."""
    ours, theirs = _words(text), _words(base)
    for kind, first, last, start, end in SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if kind == "delete":
            yield "".join(theirs[first:last]), "gone"
        else:
            yield "".join(ours[start:end]), "same" if kind == "equal" else "new"


def same_start(base: str, text: str) -> float:
    """The fraction of the longer text before the first difference, 0 to 1; 1 only where both are equal."""
    equal = next(
        (i for i, (a, b) in enumerate(zip(base, text, strict=False)) if a != b), min(len(base), len(text))
    )
    return equal / max(len(base), len(text)) if base or text else 1.0


def _note(same: float) -> str:
    if same == 1.0:
        return "word for word"
    return f"the same for its first {percent(same)} %" if same >= 0.005 else "differs from the start"


def _words(text: str) -> list[str]:
    return re.findall(r"\s+|\w+|[^\w\s]", text)


def _marked(piece: str, kind: str) -> Child:
    return piece if kind == "same" else el("del" if kind == "gone" else "mark", piece)


def _card(stage: StageRecord, base: str | None) -> Markup:
    sample = stage.text("sample") or ""
    if base is None:
        note = ""
        body: list[Child] = [sample]
    else:
        body = [_marked(piece, kind) for piece, kind in differences(base, sample)]
        note = _note(same_start(base, sample))
    head = el(
        "figcaption", el("i", class_=f"dot {verb_class(stage.verb)}"), el("b", stage.name), el("small", note)
    )
    prompt = el("span", stage.text("prompt"), class_="prompt") if stage.text("prompt") else None
    return el("figure", head, el("pre", prompt, body), class_="sample")


def lineage_tree(run: RunRecord) -> Markup:
    """Nested lists, an item per stage; a stage whose parent is not in the run begins a tree."""
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
            _more("details", stage_details(stage)),
            class_="node",
        ),
        below,
    )


def _line(stage: StageRecord) -> Markup:
    facts = [size(stage.number("bytes"))] if stage.number("bytes") is not None else []
    if stage.seconds is not None:
        facts.append(f"took {seconds_text(stage.seconds)}")
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
    """The details of a stage that are not tables or curves: layers kept, tokens read, ..."""
    return {
        name: value
        for name, value in stage.details.items()
        if not (isinstance(value, list) and any(isinstance(row, Mapping) for row in value))
    }


def _more(title: str, values: Mapping[str, Any]) -> Markup | None:
    return el("details", el("summary", title), definitions(values)) if values else None


def definitions(values: Mapping[str, Any]) -> Markup:
    """A list of names and values; mappings are nested."""
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
