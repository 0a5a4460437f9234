"""The report: one file, well-formed, escaped, without a network, and true to the run."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from attar.errors import DataError
from attar.measure.report.page import page, write_report
from attar.measure.report.quality import quality_picture, write_quality_svg
from attar.measure.run_folder import RunRecord, read_run, run_from_dict
from tests.measure.fake_run import fake_run, write_fake_run

VOID = ("meta", "br", "hr", "img", "link")


class Checker(HTMLParser):
    """Collects tags, attributes and text, and checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def test_on_a_phone_every_figure_of_a_stage_has_its_name() -> None:
    html = page(run_from_dict(fake_run()))
    cells = [attributes for tag, attributes in checked(html).seen if tag == "td"]
    assert cells and all(attributes.get("data-label") for attributes in cells)
    assert {"MB", "KL", "decode tok/s"} <= {attributes["data-label"] for attributes in cells}
    assert "content: attr(data-label)" in html


def test_report_is_one_file_that_loads_nothing(run_folder: Path) -> None:
    before = sorted(path.name for path in run_folder.iterdir())
    path = write_report(run_folder)
    assert path == run_folder / "report.html"
    assert sorted(p.name for p in run_folder.iterdir()) == sorted([*before, "report.html"])
    html = path.read_text(encoding="utf-8")
    checker = checked(html)
    tags = {tag for tag, _ in checker.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert not [attributes for _, attributes in checker.seen if {"src", "href"} & set(attributes)]
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html) == []
    assert "url(" not in html and "@import" not in html
    assert "prefers-color-scheme: dark" in html
    assert path.stat().st_size < 200_000


def test_report_says_what_was_measured(run: RunRecord) -> None:
    text = " ".join(checked(page(run, "model: attar:tiny\n")).text)
    assert "8.0x smaller, keeps 87 % of its next-token accuracy, KL 0.30 nats" in text
    assert "recover won back 89 %" in text
    for stage in run.stages:
        assert stage.name in text
        assert stage.title in text
    headings = ("Size against quality", "Error of every layer", "Training", "Lineage")
    for words in (
        *headings,
        "transformers",
        "held-out",
        "mlp.up_proj",
        "model: attar:tiny",
        "round to nearest",
    ):
        assert words in text


def test_the_recipe_is_folded_and_shows_what_was_written() -> None:
    data = {**fake_run(), "written": "model: attar:tiny\n", "date": "2026-11-27"}
    html = page(run_from_dict(data), "model: attar:tiny\nall: defaults\n")
    assert "all: defaults" not in html and "2026-11-27" in html
    folded = re.search(r"<details>(?:(?!</details>).)*model: attar:tiny\n</pre></details>", html, re.S)
    assert folded is not None
    assert "all: defaults" in page(run_from_dict(fake_run()), "model: attar:tiny\nall: defaults\n"), (
        "of before"
    )


def test_a_figure_and_its_interval_stay_together() -> None:
    data = fake_run()
    data["stages"][-1]["measurements"].update(quality_kept=0.91, quality_kept_stderr=0.02)
    assert "keeps 91\u00a0±\u00a04\u00a0% of" in page(run_from_dict(data))


def test_speed_notes_say_what_was_timed() -> None:
    """One round has no spread, and only transformers' speed is marked as such."""
    data = fake_run()
    assert "Rounds of one measurement differ by up to 11 %." in words_of(data)
    for entry in data["stages"]:
        entry["measurements"]["decode_spread"] = None
    text = words_of(data)
    assert "Rounds of one measurement" not in text and "that of transformers" not in text
    assert "compiled runner (activations int8, KV cache bfloat16)" in text
    for entry in data["stages"]:  # a run of before
        entry["measurements"].update(decode_spread=0.0)
        del entry["measurements"]["runner"]
    text = words_of(data)
    assert "Rounds of one measurement" not in text and "that of transformers" in text


def words_of(data: dict[str, Any]) -> str:
    return " ".join(checked(page(run_from_dict(data))).text)


def test_hostile_text_stays_text() -> None:
    bad = "<script>alert(1)</script>"
    data: dict[str, Any] = fake_run()
    data["recipe"]["model"] = bad
    data["machine"]["cpu"] = bad
    data["stages"][1].update(name=bad, title=bad, settings={bad: bad})
    data["stages"][2]["parents"] = [bad]
    data["stages"][1]["measurements"].update(sample=bad, prompt=bad)
    data["stages"][6]["details"]["layers"][0]["name"] = f"model.layers.0.{bad}"
    data["stages"][1]["details"]["curve"][0][bad] = 1.0
    html = page(run_from_dict(data), bad)
    assert "<script" not in html
    assert not [tag for tag, _ in checked(html).seen if tag == "script"]
    assert html.count("&lt;script&gt;") > 8


@pytest.mark.parametrize(
    "data",
    [
        {"stages": [{"name": "a"}]},
        {
            "stages": [{"name": "a", "bytes": 100}, {"name": "b", "stage": "prune", "parents": ["a"]}],
            "finished": False,
        },
        {"stages": [{"name": "a", "parents": ["b"]}, {"name": "b", "parents": ["a"]}, {"name": "c"}]},
        {
            "stages": [
                {"name": "a", "details": {"layers": [{"name": "x"}], "curve": [{"step": 1, "loss": None}, 3]}}
            ]
        },
        {
            "stages": [
                {"name": "a", "details": {"layers": [{"name": "lm_head", "error": 0.0}], "curve": "none"}}
            ]
        },
    ],
)
def test_report_of_little(data: dict[str, Any]) -> None:
    checked(page(run_from_dict(data)))


def test_unfinished_run_says_so() -> None:
    data = fake_run()
    data["finished"] = False
    assert "The run is not finished: 7 checkpoints so far." in page(run_from_dict(data))
    assert "not finished" not in page(run_from_dict(fake_run()))


def test_same_run_same_bytes(run: RunRecord) -> None:
    assert page(run) == page(run_from_dict(fake_run()))


def test_no_run_no_report(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run\.json does not exist"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_quality_svg_stands_alone(run_folder: Path, tmp_path: Path) -> None:
    run = read_run(run_folder)
    path = write_quality_svg(run, tmp_path / "quality.svg")
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {stage.name for stage in run.stages} <= set(words)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polygon"))) == 6, "an arrow for every child"
    style = root.find("{http://www.w3.org/2000/svg}style")
    assert style is not None and "prefers-color-scheme" in (style.text or "")


def test_quality_places_smaller_to_the_left_and_closer_below(run: RunRecord) -> None:
    drawn = quality_picture(run, 900.0, 470.0)
    assert drawn is not None
    marks = re.findall(r'<title>(\w+):[^<]*</title>.*?cx="([\d.]+)" cy="([\d.]+)" r="6"', drawn)
    index = {name: (float(x), float(y)) for name, x, y in marks}
    assert index["quantize"][0] < index["recover"][0] < index["distill"][0] < index["original"][0]
    assert (
        index["neurons"][1]
        < index["heads"][1]
        < index["recover"][1]
        < index["distill"][1]
        < index["original"][1]
    )


def test_long_names_stay_inside_the_narrow_picture() -> None:
    data = fake_run()
    data["stages"][-1]["name"] = "a-very-long-name-of-a-stage-that-is-hard-to-type--"
    drawn = quality_picture(run_from_dict(data), 370.0, 430.0)
    assert drawn is not None and "a-very-long-name-of…</text>" in drawn


def test_quality_falls_back_to_perplexity() -> None:
    data = fake_run()
    for entry in data["stages"]:
        entry["measurements"]["kl_mean"] = None
    drawn = quality_picture(run_from_dict(data), 900.0, 470.0)
    assert drawn is not None and "perplexity on held-out text" in drawn


def test_quality_needs_two_stages(tmp_path: Path) -> None:
    run = run_from_dict({"stages": fake_run()["stages"][:1]})
    assert quality_picture(run, 900.0, 470.0) is None
    ElementTree.parse(write_quality_svg(run, tmp_path / "empty.svg"))


def test_report_needs_no_torch(tmp_path: Path) -> None:
    folder = write_fake_run(tmp_path / "run")
    code = (
        "import sys, attar.measure.table; from attar.measure.report.page import write_report;"
        f"write_report({str(folder)!r});"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
