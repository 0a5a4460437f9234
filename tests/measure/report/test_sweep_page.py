"""The report of a sweep: labels, one table, no winner, failures, its model and date."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attar.measure.report.quality import quality_picture
from attar.measure.report.sweep_page import sweep_page, sweep_table, write_sweep_report
from attar.measure.run_folder import run_from_dict
from attar.measure.sweep import SweepRecord, sweep_run
from tests.measure.fake_run import fake_run
from tests.measure.report.test_report_page import checked

SIZES = {"W8A16": (4e6, 0.0002), "W4A16": (2.2e6, 0.05), "W3A16": (1.8e6, 0.31)}


def record(**kls: float) -> SweepRecord:
    """A run for each scheme, and one that failed."""
    data = fake_run()
    runs = []
    for scheme, (size, kl) in SIZES.items():
        first, last = (dict(data["stages"][index]) for index in (0, -1))
        first["measurements"] = {**first["measurements"], "kl_mean": kls.get("original", 9.5e-8)}
        last["measurements"] = {**last["measurements"], "bytes": int(size), "kl_mean": kls.get(scheme, kl)}
        name = f"quantize.scheme={scheme}"
        run = run_from_dict({"stages": [first, last], "date": "2026-11-27"})
        runs.append(sweep_run(name, f"runs/{name}", run, ""))
    name = "quantize.scheme=W2A16"
    message = f"{name}/01-quantize: group_size is <100>"
    return SweepRecord("recipes/sizes.yaml", (*runs, sweep_run(name, "", None, message)))


def test_labels_are_short_and_no_run_is_marked_as_the_result() -> None:
    html = sweep_page(record())
    drawn = re.findall(r'class="label">([^<]*)<', html)
    assert set(drawn) == {"original", *SIZES}
    assert re.findall(r"<b>([^<]*)</b>", html) == ["original", *SIZES]
    assert 'class="last"' not in html and html.count("quantize.scheme=") == 0


def test_it_says_what_when_and_of_which_model_once() -> None:
    checker = checked(sweep_page(record()))
    text = " ".join(checker.text)
    assert "attar:tiny: 4 runs, 1 failed" in text and "sizes.yaml" in text and "2026-11-27" in text
    assert "differ in quantize.scheme" in text
    assert text.count("Measured in") + text.count("Measured:") == 1
    assert ("meta", {"name": "color-scheme", "content": "light dark"}) in checker.seen


def test_a_failed_run_has_its_label_and_its_reason() -> None:
    html = sweep_page(record())
    assert "<dt>W2A16</dt><dd>01-quantize: group_size is &lt;100&gt;</dd>" in html
    failed = [one for one in record().runs if one.last is None]
    html = sweep_page(replace(record(), runs=tuple(failed)))
    assert "sizes.yaml: 1 run, 1 failed" in html and "Every run" not in html


def test_the_table_of_a_terminal_has_the_labels() -> None:
    text = sweep_table(record())
    assert "quantize.scheme=W4A16" not in text and "The runs differ in quantize.scheme" in text
    assert text.splitlines()[-1] == "failed: W2A16: 01-quantize: group_size is <100>"


@pytest.mark.parametrize(
    ("kls", "ticks"),
    [
        ({}, ["0.0001", "0.001", "0.01", "0.1"]),  # the original is below the axis
        ({"W8A16": 0.02}, ["0.02", "0.05", "0.1", "0.2"]),
        ({"W8A16": 2e-6}, ["0.05", "0.1", "0.2", "0.3"]),
        ({"original": 0.0, "W8A16": 0.02}, ["0.02", "0.05", "0.1", "0.2"]),
    ],
)
def test_noise_does_not_stretch_the_axis(kls: dict[str, float], ticks: list[str]) -> None:
    run = record(**kls).as_run()
    assert run is not None
    drawn = quality_picture(run, 900.0, 470.0)
    assert drawn is not None
    left = re.findall(r'x="56" y="[\d.]+" text-anchor="end" class="tick">([^<]*)<', drawn)
    assert left[-1] == "&lt;0.0001" and set(ticks) <= set(left[:-1]) and len(left) < 8
    assert "KL 9.5e-08" not in drawn


def test_what_differs_by_nothing_but_noise_is_drawn() -> None:
    run = record(original=0.0, W8A16=3e-8, W4A16=2e-7, W3A16=1e-7).as_run()
    assert run is not None
    drawn = quality_picture(run, 900.0, 470.0)
    assert drawn is not None and "W4A16" in drawn and 'class="tick">0<' in drawn


def test_the_files(tmp_path) -> None:
    path = write_sweep_report(record(), tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["pareto.svg", "report.html"]
    assert path.read_text() == sweep_page(record())
