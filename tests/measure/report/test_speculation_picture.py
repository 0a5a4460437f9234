"""The picture of ``attar bench --speculate``: nothing leaves it, every method is named, scales are right."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from attar.measure.report.labels import text_width
from attar.measure.report.speculation import WIDTH, speculation_picture

SVG = "{http://www.w3.org/2000/svg}"
LONG = "/somewhere/models/checkpoints/a-small-sibling-distilled-for-drafting/final"
METHODS = ("ngram, 2", "ngram, 8", "lookahead, 2", "lookahead, 8", "self, 2", "self, 8", LONG, "draft, 8")


def row(kind: str, method: str, speedup: float | None, reach: float = 1.2, **others: Any) -> dict[str, Any]:
    low, high = (None, None) if speedup is None else (speedup / reach, speedup * reach)
    base = {"set": kind, "method": method, "batch": 1, "speedup": speedup, "low": low, "high": high}
    return {**base, "histogram": (6, 3, 0, 1), **others}


def drawn(*rows: dict[str, Any], model: str = "m", temperature: float = 0.0) -> ElementTree.Element:
    actual = {"model": model, "temperature": temperature, "rows": [row("code", "plain", None), *rows]}
    return ElementTree.fromstring(speculation_picture(actual))


def texts(root: ElementTree.Element) -> list[str]:
    return [item.text or "" for item in root.iter(f"{SVG}text")]


def bars(root: ElementTree.Element) -> dict[str, dict[str, float]]:
    """Of each bar by its title: where it begins and ends, and its whisker."""
    actual = {}
    for group in root.iter(f"{SVG}g"):
        title = group.find(f"{SVG}title")
        if title is not None:
            rect, line = group.find(f"{SVG}rect"), group.find(f"{SVG}line")
            assert rect is not None
            start = float(rect.get("x", ""))
            actual[title.text or ""] = {"start": start, "end": start + float(rect.get("width", ""))}
            if line is not None:
                actual[title.text or ""] |= {end: float(line.get(end, "")) for end in ("x1", "x2")}
    return actual


def test_nothing_leaves_the_picture() -> None:
    """Long names, wide intervals, many methods; no text stands on another of its line."""
    rows = [
        row(kind, method, 0.4 + index, reach=50.0 if index == 3 else 1.3, batch=batch)
        for batch in (1, 8)
        for kind in ("code", "a-category-with-quite-a-long-name-of-its-own")
        for index, method in enumerate(METHODS)
    ]
    root = drawn(*rows, model=LONG, temperature=0.7)
    height = float(root.get("height", ""))
    lines: dict[float, list[tuple[float, float]]] = {}
    for item in root.iter(f"{SVG}text"):
        small = {"tick": 11.0, "label": 13.0}.get(item.get("class", ""), 12.0)
        wide, x, y = text_width(item.text or "", small), float(item.get("x", "")), float(item.get("y", ""))
        left = x - wide * {"end": 1.0, "middle": 0.5}.get(item.get("text-anchor", ""), 0.0)
        assert left >= 0 and left + wide <= WIDTH and 0 < y < height, item.text
        lines.setdefault(y, []).append((left, left + wide))
    for spans in lines.values():
        spans.sort()
        assert all(one[1] < two[0] for one, two in pairwise(spans)), spans
    for bar in bars(root).values():
        assert all(0 < index < WIDTH for index in bar.values())


def test_every_bar_is_named_and_every_method_has_a_histogram() -> None:
    """More methods than colours: names tell them apart."""
    message = texts(drawn(*(row(kind, method, 1.5) for kind in ("code", "prose") for method in METHODS)))
    for method in METHODS:
        short = [
            item for item in message if item == method or (item[:1] == "…" and method.endswith(item[1:]))
        ]
        assert len(short) == 2 + 1, method
    assert {"code", "prose"} <= set(message)


def test_twice_and_half_as_fast_are_equally_far_from_one() -> None:
    root = drawn(row("code", "fast", 2.0), row("code", "slow", 0.5), row("code", "same", 1.0))
    fast, slow, same = bars(root).values()
    assert fast["start"] == pytest.approx(same["start"]) == pytest.approx(slow["end"])
    assert fast["end"] - fast["start"] == pytest.approx(slow["end"] - slow["start"], abs=0.05)
    assert fast["x2"] - fast["end"] == pytest.approx(fast["end"] - fast["x1"], abs=0.05), "of logarithms"
    (one,) = [item for item in root.iter(f"{SVG}text") if item.text == "1" and item.get("class") == "tick"][
        :1
    ]
    assert float(one.get("x", "")) == pytest.approx(fast["start"], abs=0.05)
    assert "2.00 (1.67 to 2.40)" in texts(root)


def test_one_prompt_has_no_interval_and_nothing_drafted_says_so() -> None:
    root = drawn(row("code", "ngram", 1.25, reach=1.0, histogram=()))
    (bar,) = bars(root).values()
    assert "x1" not in bar and "1.25" in texts(root) and "nothing was drafted" in texts(root)


def test_a_wide_interval_does_not_hide_the_bars() -> None:
    narrow, wide = (bars(drawn(row("code", "m", 1.5, reach=reach))) for reach in (2.0, 4000.0))
    (one,), (two,) = narrow.values(), wide.values()
    assert two["end"] - two["start"] > 0.4 * (one["end"] - one["start"])
    assert two["x1"] < two["start"] < two["end"] < two["x2"]
