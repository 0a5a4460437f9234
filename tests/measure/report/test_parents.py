"""The table of a merge's parents: its numbers, names that are paths, nothing where nothing was measured."""

from attar.measure.report.page import page
from attar.measure.report.sections import parent_tables
from attar.measure.run_folder import run_from_dict

ROWS = [
    {"name": "out/code", "loss": 1.5, "perplexity": 4.4817, "nats_per_byte": 0.5},
    {"name": "org/<chat>", "loss": None, "perplexity": 7.389, "nats_per_byte": 0.7},
    {"name": "merge", "loss": 1.25, "perplexity": 3.4903, "nats_per_byte": 0.42},
]


def run(details):
    stages = [
        {"name": "original", "stage": "original"},
        {"name": "merge", "stage": "merge", "details": details},
    ]
    return run_from_dict({"stages": stages, "recipe": {}, "finished": True})


def test_the_table():
    drawn = parent_tables(run({"quality": ROWS}))
    assert "4.482" in drawn and "3.490" in drawn and ">code<" in drawn and "out/code" not in drawn
    assert "<chat>" not in drawn and "&lt;chat&gt;" in drawn
    assert "Parents and merge" in page(run({"quality": ROWS}))


def test_nothing_where_nothing_was_measured():
    assert parent_tables(run({})) is None
    assert "Parents and merge" not in page(run({"quality": [{"loss": 1.0}]}))
