"""The picture of the parents' conflicts: true to its rows, no words over each other, quiet about bad data."""

from __future__ import annotations

import itertools
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from attar.measure.report.conflicts import conflict_pictures, conflicts_svg, read_conflicts
from attar.measure.report.labels import LabelBox, text_width
from attar.measure.report.page import page
from attar.measure.run_folder import run_from_dict

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["asyncio", "email", "unittest", "tkinter", "json", "xml", "http", "test"]


def row(noise: random.Random, models: int, layer: int | None, part: str, size: int) -> dict[str, Any]:
    pairs = models * (models - 1) // 2
    return {
        "layer": layer,
        "part": part,
        "size": size,
        "cosine": [round(noise.uniform(-0.1, 0.6), 3) for _ in range(pairs)],
        "agreement": [round(noise.uniform(0.45, 0.8), 3) for _ in range(pairs)],
        "norm": [round(noise.uniform(0.01, 0.08), 4) for _ in range(models)],
        "overruled": [round(noise.uniform(0.1, 0.5), 3) for _ in range(models)],
    }


def rows_of(models: int, layers: int) -> list[dict[str, Any]]:
    noise = random.Random(models)
    results = [row(noise, models, None, "all", 1000)]
    for layer in range(layers):
        sizes = (("attention", 40), ("mlp", 80), ("norm", 1))
        results += [row(noise, models, layer, part, size) for part, size in sizes]
    return results + [row(noise, models, None, part, 60) for part in ("embedding", "head", "norm")]


def run_of(rows: Any, labels: Any) -> Any:
    stage = {"name": "merge", "stage": "merge", "details": {"conflicts": rows, "conflict_models": labels}}
    return run_from_dict({"stages": [{"name": "original"}, stage]})


def word_boxes(root: ElementTree.Element) -> list[tuple[str, LabelBox]]:
    """Every text with about the place it takes, moved as its group is."""
    actual: list[tuple[str, LabelBox]] = []

    def walk(element: ElementTree.Element, x: float, y: float) -> None:
        if moved := re.match(r"translate\(([\d.]+) ([\d.]+)\)", element.get("transform", "")):
            x, y = x + float(moved[1]), y + float(moved[2])
        if element.tag == f"{SVG}text":
            size = 11 if element.get("class") in ("tick", "note") else 12
            width = text_width(element.text or "", size)
            shift = {"end": 1.0, "middle": 0.5}.get(element.get("text-anchor", ""), 0.0)
            left, base = x + float(element.get("x", 0)) - shift * width, y + float(element.get("y", 0))
            actual.append(
                (element.text or "", LabelBox(left, base - 0.75 * size, left + width, base + 0.2 * size))
            )
        for child in element:
            walk(child, x, y)

    walk(root, 0.0, 0.0)
    return actual


@pytest.mark.few(4)
@pytest.mark.parametrize(("models", "layers"), [(2, 1), (2, 40), (3, 8), (4, 22), (6, 100), (8, 12)])
@pytest.mark.parametrize("length", [1, 8])
@pytest.mark.parametrize("width", [880.0, 380.0])
def test_no_words_over_each_other_and_none_outside(models, layers, length, width):
    labels = [name * length for name in NAMES[:models]]
    root = ElementTree.fromstring(conflicts_svg(rows_of(models, layers), labels, width))
    boxes = word_boxes(root)
    overlaps = [(a[0], b[0]) for a, b in itertools.combinations(boxes, 2) if a[1].overlap(b[1]) > 0]
    assert not overlaps
    page_box = LabelBox(0, 0, float(root.get("width", 0)), float(root.get("height", 0)))
    assert [words for words, box in boxes if not box.within(page_box)] == []


def points_of(drawn: str, what: str) -> list[tuple[int, float]]:
    actual = re.findall(rf'<circle cx="[\d.]+" cy="([\d.]+)"[^>]*><title>{what}, layer (\d+)', drawn)
    return [(int(layer), float(y)) for y, layer in actual]


def test_lines_stand_where_the_rows_say():
    rows = rows_of(2, 5)
    table = {(item["layer"], item["part"]): item for item in rows}
    drawn = conflicts_svg(rows, NAMES[:2])
    zero = float(re.findall(r'<line x1="40" y1="([\d.]+)"[^>]*class="zero"', drawn)[0])
    cosines = points_of(drawn, "mlp, cosine")
    assert [layer for layer, _ in cosines] == list(range(5))
    scale = [(zero - y) / table[layer, "mlp"]["cosine"][0] for layer, y in cosines]
    assert scale == pytest.approx([scale[0]] * 5, rel=0.01), "one linear scale through 0"
    signs = points_of(drawn, "mlp, signs agree")
    expected = [zero - scale[0] * (2 * table[layer, "mlp"]["agreement"][0] - 1) for layer, _ in signs]
    assert [y for _, y in signs] == pytest.approx(expected, abs=0.1), "the same scale: 50 % at 0"
    whole = table[None, "all"]
    assert f"cosine {whole['cosine'][0]:.2f}, signs agree in {100 * whole['agreement'][0]:.0f} %" in drawn


def test_unrelated_changes_look_unrelated():
    rows = rows_of(2, 6)
    for item in rows:
        item["cosine"], item["agreement"] = [-0.002], [0.501]
    drawn = conflicts_svg(rows, NAMES[:2])
    zero = float(re.findall(r'<line x1="40" y1="([\d.]+)"[^>]*class="zero"', drawn)[0])
    assert all(abs(y - zero) < 3 for _, y in points_of(drawn, "mlp, cosine"))
    assert "cosine 0.00, signs agree in 50 %" in drawn


def test_pairs_have_panels_and_long_names_have_letters():
    drawn = conflicts_svg(rows_of(3, 4), NAMES[:3])
    for title in ("asyncio × email", "asyncio × unittest", "email × unittest"):
        assert f">{title}</text>" in drawn
    long = conflicts_svg(rows_of(3, 4), [name * 6 for name in NAMES[:3]])
    assert ">A × C</text>" in long and ">B: " + "email" * 6 in long
    many = conflicts_svg(rows_of(8, 4), NAMES)
    assert many.count("signs agree in") == 15 and "15 of 28 pairs: those with the lowest cosine" in many
    assert "6 of 8 models: those overruled most" in many


def test_unknown_numbers_break_the_line():
    rows = rows_of(2, 6)
    for item in rows:
        if (item["layer"], item["part"]) == (2, "mlp"):
            item["cosine"] = [None]
    drawn = conflicts_svg(rows, NAMES[:2])
    assert [layer for layer, _ in points_of(drawn, "mlp, cosine")] == [0, 1, 3, 4, 5]
    lines = re.findall(r'<polyline points="([^"]+)" class="series"/>', drawn)
    assert {len(points.split()) for points in lines} == {2, 3, 6}


def test_two_stacks_stand_side_by_side():
    rows = [row(random.Random(1), 2, None, "all", 10)]
    for stack in ("decoder.block", "encoder.block"):
        rows += [{**row(random.Random(2), 2, n, "mlp", 9), "stack": stack} for n in range(3)]
    table = read_conflicts(rows, NAMES)
    assert table is not None and [table.slot_label(slot) for slot in table.slots] == (
        ["d0", "d1", "d2", "e0", "e1", "e2"]
    )
    lines = re.findall(r'<polyline points="([^"]+)"', conflicts_svg(rows, NAMES))
    assert {len(points.split()) for points in lines} == {3}, "no line runs from one stack into the other"


def test_report_has_the_section_and_hostile_names_stay_text():
    bad = "<script>x</script>"
    html = page(run_of(rows_of(2, 3), [bad, "b"]))
    assert "Where the parents disagree" in html and "&lt;script&gt;" in html and "<script" not in html
    assert "Where the parents disagree" not in page(run_of([], []))


@pytest.mark.parametrize(
    "rows",
    [
        None,
        "none",
        [3, None],
        [{"part": "mlp", "layer": 0}],
        [{"part": "mlp", "layer": 0, "norm": [1.0]}],
        [{"part": "mlp", "layer": 0, "norm": [1.0, "x"], "cosine": "y", "agreement": [1, 2, 3]}],
        [{"part": "mlp", "layer": 0, "norm": [1.0, 2.0], "cosine": [], "overruled": [0.5]}],
        [{"part": "mlp", "layer": True, "norm": [1.0, 2.0]}],
        [{"part": "mlp", "layer": 0, "norm": [0.0, float("inf")], "cosine": [float("nan")]}],
    ],
)
def test_bad_rows_are_left_out(rows):
    page(run_of(rows, 7))
    listed = rows if isinstance(rows, list) else []
    ElementTree.fromstring(conflicts_svg(listed, ()))


def test_same_rows_same_bytes_and_light_and_dark():
    rows = rows_of(4, 9)
    drawn = conflicts_svg(rows, NAMES[:4])
    assert drawn == conflicts_svg(json.loads(json.dumps(rows)), NAMES[:4])
    assert "prefers-color-scheme: dark" in drawn
    assert conflict_pictures(run_of(rows, NAMES[:4])) == conflict_pictures(run_of(rows, NAMES[:4]))
