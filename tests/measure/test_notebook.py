"""Results in a notebook: one line, a table with its picture, a data frame."""

import base64
import re

from attar.measure.notebook import html_table, run_frame, run_html
from attar.measure.run_folder import RunRecord
from attar.recipe.run import RunResult
from tests.measure.fake_run import fake_run


def test_the_table_has_every_stage_and_the_picture_loads_nothing(run: RunRecord) -> None:
    html = run_html(run)
    assert all(f"<td>{stage.name}</td>" in html for stage in run.stages)
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    svg = base64.b64decode(data).decode()
    assert svg.startswith("<svg") and "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_names_are_text() -> None:
    assert "<td>&lt;b&gt;</td>" in html_table([["stage"], ["<b>"]])


def test_a_frame_has_a_row_for_each_stage(run: RunRecord) -> None:
    frame = run_frame(run)
    assert list(frame.index) == [stage.name for stage in run.stages]
    assert frame.loc[run.last.name, "kl_mean"] == run.last.number("kl_mean")


def test_a_result_is_one_short_line(tmp_path) -> None:
    line = repr(RunResult(tmp_path, fake_run()))
    assert "smaller" in line and "\n" not in line and len(line) < 200
