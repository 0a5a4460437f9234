"""Markup escapes, axes are round, labels do not overlap, differences are found."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.measure.report.charts import (
    held_out_key,
    series_of,
    smooth,
    split_name,
    thin,
    uneven_zeros,
    zeros_pictures,
)
from attar.measure.report.labels import LabelBox, place_labels, text_width
from attar.measure.report.markup import Markup, el, join
from attar.measure.report.sections import differences, same_start
from attar.measure.report.svg import Axis, arrow, fit, from_zero, tick_text
from attar.measure.run_folder import RunRecord, StageRecord


def test_text_and_attributes_are_escaped() -> None:
    result = el("p", "<script>&", el("b", "x"), [" a", None, 3], class_='a"b', data_x=1.005, hidden=None)
    assert result == '<p class="a&quot;b" data-x="1">&lt;script&gt;&amp;<b>x</b> a3</p>'
    assert join("<", Markup("<br>")) == "&lt;<br>"


def test_elements_close() -> None:
    assert el("br") == "<br>"
    assert el("circle", r=2.5) == '<circle r="2.5"/>'
    assert el("circle", el("title", "t")) == "<circle><title>t</title></circle>"
    assert el("td") == "<td></td>"


def test_axis_maps_ends_and_middle() -> None:
    axis = Axis(1.0, 100.0, 300.0, 0.0, log=True)
    assert [axis(value) for value in (1, 10, 100)] == pytest.approx([300, 150, 0])
    assert Axis(0.0, 10.0, 0.0, 200.0)(2.5) == 50.0


@settings(max_examples=200, deadline=None)
@given(low=st.floats(1e-7, 1e4), factor=st.floats(1.0, 1e8), log=st.booleans(), most=st.integers(2, 9))
def test_ticks_are_few_and_inside(low: float, factor: float, log: bool, most: int) -> None:
    axis = fit([low, low * factor], 0.0, 500.0, log=log)
    ticks = axis.ticks(most)
    assert len(ticks) <= most
    assert ticks == sorted(set(ticks))
    assert all(axis.low * (1 - 1e-6) <= tick <= axis.high * (1 + 1e-6) for tick in ticks)
    assert all(0.0 <= axis(value) <= 500.0 for value in (low, low * factor))
    assert len(ticks) > 1 or most < 4


def test_ticks_are_round() -> None:
    assert from_zero([0.92], 0, 100).ticks(6) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert Axis(0.9, 21.0, 0, 1, log=True).ticks(5) == pytest.approx([1, 2, 5, 10, 20])
    assert Axis(0.49, 0.66, 0, 1, log=True).ticks(6) == pytest.approx([0.5, 0.55, 0.6, 0.65])
    assert [tick_text(value) for value in (0.5, 1, 20, 1500, 1e-6)] == ["0.5", "1", "20", "1,500", "1e-6"]


def test_equal_values_sit_in_the_middle() -> None:
    for log in (False, True):
        assert fit([5.0, 5.0], 0.0, 100.0, log=log)(5.0) == pytest.approx(50.0)
    assert fit([0.0], 0.0, 100.0)(0.0) == pytest.approx(50.0)


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [2, 5, 8, 12])
def test_labels_cover_neither_each_other_nor_points(count: int) -> None:
    noise = random.Random(count)
    bounds = LabelBox(60.0, 40.0, 860.0, 420.0)
    for _ in range(4):
        points = [(noise.uniform(80, 840), noise.uniform(60, 400)) for _ in range(count)]
        boxes = place_labels(points, [(110.0, 29.0)] * count, bounds, list(itertools.pairwise(points)), 9.0)
        assert all(box.within(bounds) for box in boxes)
        assert sum(a.overlap(b) for a, b in itertools.combinations(boxes, 2)) == 0.0
        marks = [LabelBox(x - 6, y - 6, x + 6, y + 6) for x, y in points]
        assert sum(box.overlap(mark) for box in boxes for mark in marks) == 0.0


def test_labels_of_points_on_one_spot() -> None:
    boxes = place_labels([(200.0, 200.0)] * 4, [(90.0, 29.0)] * 4, LabelBox(0, 0, 400, 400), (), 9.0)
    assert sum(a.overlap(b) for a, b in itertools.combinations(boxes, 2)) == 0.0


def test_labels_avoid_lines_where_they_can() -> None:
    (box,) = place_labels(
        [(200.0, 200.0)], [(90.0, 29.0)], LabelBox(0, 0, 400, 400), [[(200.0, 200.0), (400.0, 200.0)]], 9.0
    )
    assert box.right < 200, "the line leaves to the right, so the label goes to the left"


def test_text_width_grows() -> None:
    assert text_width("illi", 12) < text_width("mmmm", 12)
    assert text_width("abc", 24) == pytest.approx(2 * text_width("abc", 12))


def test_arrow_ends_before_the_marks() -> None:
    drawn, path = arrow((0.0, 0.0), (100.0, 0.0), 6.0)
    assert path == [(9.0, 0.0), (91.0, 0.0)]
    assert drawn.startswith("<line")
    assert arrow((0.0, 0.0), (15.0, 0.0), 6.0) == ("", [])


def test_differences_rebuild_the_text() -> None:
    base, text = "def f(a):\n    return a", "def f(b):\n    return b + 1"
    pieces = list(differences(base, text))
    assert "".join(piece for piece, _ in pieces) == text
    assert [piece for piece, kind in pieces if kind == "new"] == ["b", "b + 1"]
    assert list(differences(text, text)) == [(text, "same")]


def test_what_is_missing_is_a_difference() -> None:
    pieces = list(differences("a quick brown fox", "a fox"))
    assert [piece for piece, kind in pieces if kind == "gone"] == ["quick brown "]
    assert "".join(piece for piece, kind in pieces if kind != "gone") == "a fox"


def test_same_start() -> None:
    assert same_start("abcd", "abxx") == 0.5
    assert same_start("abcd", "ab") == 0.5
    assert same_start("", "") == 1.0 == same_start("ab", "ab")


def test_layer_names() -> None:
    assert split_name("model.layers.3.mlp.up_proj") == (3, "mlp.up_proj")
    assert split_name("transformer.h.11.attn.c_attn") == (11, "attn.c_attn")
    assert split_name("lm_head") == (None, "lm_head")


def test_series_of_one_parent(run: RunRecord) -> None:
    series = series_of(list(run.stages[5:]))
    assert [sery.label for sery in series] == ["round to nearest", "quantize"], "the larger errors first"
    assert len(series[0].values) == 28
    alone = series_of([run.stages[5]])
    assert [sery.label for sery in alone] == ["rtn (error of the weights)"]
    assert (
        series_of([StageRecord("prune", details={"layers": [{"name": "model.layers.0.mlp", "kept": 3}]})])
        == []
    )


def test_zeros_are_drawn_where_layers_differ() -> None:
    def stage(name: str, *fractions: float) -> StageRecord:
        layers = [
            {"name": f"model.layers.{number}.mlp.up_proj", "sparsity": fraction}
            for number, fraction in enumerate(fractions)
        ]
        return StageRecord(name, parents=("original",), details={"layers": layers})

    stages = (stage("equal", 0.5, 0.5002), stage("owl", 0.4, 0.6), StageRecord("quantize"))
    (series,) = uneven_zeros(list(stages))
    assert series.label == "owl" and list(series.values.values()) == [0.4, 0.6]
    drawn = zeros_pictures(RunRecord(stages))
    assert drawn is not None and "fraction of zeros of mlp.up_proj" in drawn and "equal" not in drawn
    assert zeros_pictures(RunRecord(stages[:1])) is None


def test_curves_are_thinned_and_smoothed() -> None:
    points = [(float(step), math.sin(step) + 5) for step in range(1000)]
    thinned = thin(points, 300)
    assert len(thinned) == 250
    assert sum(y for _, y in thinned) / 250 == pytest.approx(sum(y for _, y in points) / 1000)
    flat = [(float(step), 2.0) for step in range(7)]
    assert smooth(flat) == flat
    assert thin(flat) == flat
    assert held_out_key([{"step": 1, "loss": 2}, {"step": 1, "held_out": 2}]) == "held_out"
    assert held_out_key([{"step": 1, "loss": 2, "learning_rate": 1}]) is None
