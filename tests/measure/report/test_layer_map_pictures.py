"""The picture of a learned layer map."""

import re
from xml.etree import ElementTree

import pytest

from attar.measure.report.layer_maps import layer_map_pictures
from attar.measure.report.page import page
from attar.measure.run_folder import RunRecord, StageRecord

SVG = "{http://www.w3.org/2000/svg}"
WEIGHTS = [[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]]


def run_of(*maps):
    stages = [StageRecord(f"student-{number}", "distill", details=one) for number, one in enumerate(maps)]
    return RunRecord((StageRecord("original"), *stages))


def cells(markup):
    """The opacity and the classes of each cell, by its tooltip."""
    svg = ElementTree.fromstring(re.search(r"<svg.*?</svg>", markup, re.DOTALL)[0])
    rects = [rect for rect in svg.iter(f"{SVG}rect") if len(rect)]
    return {rect.find(f"{SVG}title").text: (rect.get("fill-opacity"), rect.get("class")) for rect in rects}


def test_every_weight_is_a_cell_and_the_heaviest_of_a_row_is_framed():
    drawn = cells(layer_map_pictures(run_of({"feature_map": {"weights": WEIGHTS, "hard": "0:0,1:2"}})))
    assert len(drawn) == 6
    assert drawn["student layer 0, teacher layer 0: 90 %"] == ("0.9", "point ring")
    assert drawn["student layer 1, teacher layer 2: 50 %"] == ("0.5", "point ring")
    assert drawn["student layer 0, teacher layer 2: 0 %"] == ("0.04", "point")
    assert sum(classes == "point ring" for _, classes in drawn.values()) == 2


def test_a_stage_without_a_map_has_no_picture():
    assert layer_map_pictures(run_of({})) is None
    both = layer_map_pictures(run_of({}, {"feature_map": {"weights": [[1.0]]}}))
    assert both.count("<figure") == 1 and "student-1" in both


NO_MATRIX = [3, {}, *({"weights": weights} for weights in (1, [], [3], [[]], [["a"]], [[2.0]]))]
NO_MATRIX += [{"weights": [[0.5], [0.5, 0.5]]}, {"weights": [[float("nan")]]}]


@pytest.mark.parametrize("record", NO_MATRIX)
def test_what_is_no_matrix_is_left_out(record):
    assert layer_map_pictures(run_of({"feature_map": record})) is None


def test_it_is_a_section_of_the_page():
    text = page(run_of({"feature_map": {"weights": WEIGHTS}}))
    assert "<h2>Learned layer maps</h2>" in text
    assert "<h2>Learned layer maps</h2>" not in page(run_of({}))
