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


@pytest.mark.parametrize(("batch", "steps"), [("", 16), ("batch_size=2", 64)])
def test_steps_follow_the_batch_that_a_method_asks_for(batch, steps):
    asked = distill_real.options_of(";".join(filter(None, ("keep_layers=0.5", batch))))
    training = distill_real.training_of(asked, tokens=32768, length=256)
    assert training["steps"] == steps and "keep_layers" not in training


def test_points_of_an_older_cache_have_a_row():
    found = {"parameters": 10, "perplexity": 8.0, "kl": 0.5, "accuracy": 0.4, "kept": 0.9, "seconds": 3.0}
    checkpoint = Namespace(name="teacher", tensors={"a": Namespace(shape=(20,))})
    teacher = distill_real.RealTeacher(Namespace(), checkpoint, {})
    points = [distill_real.Point(512, "", found), distill_real.Point(512, "scheme=W8A16", found)]
    text = distill_real.student_table(teacher, "keep_layers=0.5", points)
    assert "| 512 | - | 8.00" in text and "| 512, then scheme=W8A16 | - |" in text


def test_options_of_a_student():
    assert distill_real.typed({"layers": "15", "keep_layers": "0.5", "layer_map": "0,1"}) == {
        "layers": 15,
        "keep_layers": 0.5,
        "layer_map": "0,1",
    }
