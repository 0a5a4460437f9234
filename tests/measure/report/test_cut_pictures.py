"""The pictures of a pruning scan."""

import re
from xml.etree import ElementTree

from attar.measure.report.cuts import scan_pictures
from attar.measure.report.page import page
from attar.measure.run_folder import RunRecord, StageRecord

SVG = "{http://www.w3.org/2000/svg}"
EVEN = [
    {"structure": name, "layer": None, "kept": kept, "of": 4, "kl": kl, "loss": 2.0, "share": share}
    for name, kept, kl, share in (
        ("heads", 3, 0.2, 0.05),
        ("heads", 2, 0.9, 0.1),
        ("neurons", 3, 0.003, 0.1),
        ("layers", 3, 0.3, 0.2),
        ("layers", 2, None, 0.4),
    )
]
ALONE = [
    {"structure": "layers", "layer": layer, "kept": 0, "of": 1, "kl": kl, "loss": 2.0, "share": None}
    for layer, kl in enumerate((4.0, 0.1, 0.0))
] + [{"structure": "heads", "layer": 1, "kept": 2, "of": 4, "kl": 0.02, "loss": 2.0, "share": None}]
PLAN = {"plan": "3 of 4 layers", "kl": 0.3, "share": 0.2}
OTHER = {"plan": "2 of 4 head groups", "kl": 0.9, "share": 0.1}


def run_of(**details):
    return RunRecord((StageRecord("original"), StageRecord("mixed", "prune", details=details)))


def svgs(run):
    markup = scan_pictures(run)
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", markup, re.DOTALL)]


def titled(svg, tag, attribute):
    """A number of every element of a kind, by its tooltip."""
    nodes = [node for node in svg.iter(f"{SVG}{tag}") if len(node)]
    return {node.find(f"{SVG}title").text: float(node.get(attribute)) for node in nodes}


def test_every_measurement_is_a_point_and_every_layer_a_cell():
    amounts, layers = svgs(run_of(scan=EVEN + ALONE, plans=[PLAN, OTHER], plan=PLAN))
    points = titled(amounts, "circle", "r")
    assert "3 of 4 head groups, 5 % removed: KL 0.200" in points
    assert "2 of 4 head groups: KL 0.900" in points and points["3 of 4 layers"] == 7  # a plan; the ring
    assert len(points) == 4 + 2 + 1
    cells = titled(layers, "rect", "x")
    assert len(cells) == len(ALONE)
    assert "layer 0, left out: KL 4.00" in cells and "layer 1, head groups 2/4: KL 0.0200" in cells


def test_the_darker_the_costlier():
    _, layers = svgs(run_of(scan=EVEN + ALONE))
    space = "{http://www.w3.org/2000/svg}"
    shade = {
        node.find(f"{space}title").text: float(node.get("fill-opacity"))
        for node in layers.iter(f"{space}rect")
    }
    ordered = [
        shade[f"layer {layer}, left out: KL {kl}"] for layer, kl in ((2, "0"), (1, "0.100"), (0, "4.00"))
    ]
    assert ordered == sorted(ordered) and ordered[0] < ordered[1] < ordered[2]


def test_larger_divergences_are_higher():
    amounts, _ = svgs(run_of(scan=EVEN + ALONE))
    space = "{http://www.w3.org/2000/svg}"
    height = {
        node.find(f"{space}title").text: float(node.get("cy")) for node in amounts.iter(f"{space}circle")
    }
    assert (
        height["2 of 4 head groups, 10 % removed: KL 0.900"]
        < height["3 of 4 head groups, 5 % removed: KL 0.200"]
    )


def test_a_run_without_a_scan_has_no_picture_and_wrong_rows_are_left_out():
    assert scan_pictures(run_of()) is None
    assert scan_pictures(run_of(scan=[{"structure": "tails", "kl": 1.0}, {"structure": "heads"}, 3])) is None
    only = scan_pictures(run_of(scan=[*EVEN, {"structure": "heads", "layer": None, "kl": 1.0}]))
    assert only is not None


def test_the_report_shows_them():
    assert "What pruning costs" in page(run_of(scan=EVEN + ALONE, plans=[PLAN], plan=PLAN))
    assert "What pruning costs" not in page(run_of())
