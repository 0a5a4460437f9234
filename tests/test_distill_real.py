"""The arithmetic of ``benchmarks/distill.py --parts real``: the curve, the table, the text."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import distill_real  # noqa: E402


@pytest.mark.parametrize(("a", "b", "c"), [(0.95, -12.0, 0.4), (0.8, -3.0, 0.25)])
def test_a_power_curve_is_recovered(a, b, c):
    seen = [2**doubling for doubling in range(14, 20)]
    fitted = distill_real.power_curve(seen, [a + b * n**-c for n in seen])
    assert fitted == pytest.approx((a, b, c), rel=1e-6)


def test_no_curve_leads_above_the_teacher():
    seen = [2**doubling for doubling in range(14, 20)]
    a, b, c = distill_real.power_curve(seen, [1.2 - 20 * n**-0.4 for n in seen])
    assert a <= 1.0 and a + b * 10**12**-c <= 1.0


def test_wikitext_is_read_an_article_a_line(tmp_path):
    text = " \n = One = \n \n words \n = = Section = = \n more \n = Two = \n last \n"
    (tmp_path / "valid.txt").write_text(text)
    teacher = distill_real.RealTeacher(Namespace(data=str(tmp_path / "valid.txt"), work=tmp_path), None, {})
    rows = [json.loads(line)["text"] for line in Path(teacher.data).read_text().splitlines()]
    assert [row.split()[1] for row in rows] == ["One", "Two"] and "Section" in rows[0]
    assert "".join(rows) == text[2:]


def test_options_of_a_student():
    assert distill_real.typed({"layers": "15", "keep_layers": "0.5", "layer_map": "0,1"}) == {
        "layers": 15,
        "keep_layers": 0.5,
        "layer_map": "0,1",
    }
