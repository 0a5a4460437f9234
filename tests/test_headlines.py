"""The benchmark of the articles' claims: verdicts, intervals, the table and its cache; slow: each row run."""

import json
import sys
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import headlines  # noqa: E402
import headlines_cells as cells  # noqa: E402
import quality  # noqa: E402

from attar.errors import DataError  # noqa: E402

SMALL = ["--questions", "4", "--tokens", "512", "--samples", "4", "--minutes", "0.02", "--rows", "8"]
SMALL += ["--prompts", "1", "--completion", "12", "--rounds", "1", "--requests", "24", "--length", "320"]
SMALL += ["--texts", "2", "--threads", "1", "--model", "attar:tiny"]


def bench(work, *more):
    args = headlines.arguments().parse_args([*SMALL, "--work", str(work), *more])
    found = cells.Bench(args, quality.read_cache(work / "headlines.jsonl"))
    found.digest = "tiny"
    return found


def claim(name, measure, claimed="96 to 99 %"):
    return headlines.Claim(name, "GPTQ", "article", claimed, ("questions",), "quantize", measure)


@pytest.mark.parametrize(
    ("low", "high", "claimed", "expected"),
    [
        (96.0, 99.0, 96.0, "holds"),
        (101.0, 103.0, 96.0, "holds"),
        (95.9, 99.0, 96.0, "in part"),
        (90.0, 96.0, 96.0, "in part"),
        (90.0, 95.9, 96.0, "does not"),
        (100.0, 100.0, 100.0, "holds"),
        (99.9, 99.9, 100.0, "does not"),
    ],
)
def test_the_verdict_compares_the_interval_with_the_low_end(low, high, claimed, expected):
    assert headlines.verdict(low, high, claimed) == expected


def test_claims_have_names_of_their_own_options_of_the_command_line_and_a_low_end():
    taken = vars(headlines.arguments().parse_args([]))
    assert len({each.name for each in headlines.CLAIMS}) == len(headlines.CLAIMS)
    assert all(option in taken for each in headlines.CLAIMS for option in each.options)
    low = {each.name: each.low for each in headlines.CLAIMS}
    assert (low["int8"], low["lookahead"], low["h2o"], low["paged-throughput"]) == (99.0, 1.5, 95.0, 2.0)


def test_the_share_of_hits_has_the_error_of_its_pairs():
    ours, theirs = torch.tensor([1, 1, 0, 0, 1]), torch.tensor([1, 1, 1, 0, 0])
    result = cells.share(ours, theirs, "n")
    # R = 1: residuals 0, 0, -1, 0, 1; variance 2 * 5 / 4 + 1
    assert result["value"] == 100.0 and result["high"] - 100.0 == pytest.approx(196 * 3.5**0.5 / 3)
    assert result["low"] + result["high"] == pytest.approx(200.0)
    alike = cells.share(theirs, theirs, "n")
    assert alike["high"] - 100.0 == pytest.approx(196 / 3)  # agreeing on five questions proves little
    assert cells.share(2 * theirs, theirs, "n", spare=0.0)["low"] == 200.0
    with pytest.raises(DataError, match="wins nothing"):
        cells.share(ours, torch.zeros(5), "n")


def test_the_table_is_measured_once_and_goes_on_where_it_was_killed(tmp_path):
    runs = []

    def measure(_):
        runs.append(1)
        return cells.interval(97.0, 0.5, "top-1 kept 90 %")

    def fail(_):
        runs.append(2)
        raise DataError("too\n| short")

    claims = (claim("gptq", measure), claim("awq", fail), claim("eagle", measure, "3 to 4x"))
    table, short = (text.splitlines() for text in headlines.tables(bench(tmp_path), claims))
    assert table[0] == "<!-- table:headlines -->" and table[-1] == "<!-- end -->"
    assert table[3:6] == [
        "| GPTQ | 96 to 99 % | article | 97.0 % (96.5 to 97.5); top-1 kept 90 % | holds | quantize |",
        "| GPTQ | 96 to 99 % | article | failed: too / short | – | quantize |",
        "| GPTQ | 3 to 4x | article | 97.00x (96.50 to 97.50); top-1 kept 90 % | holds | quantize |",
    ]
    assert short[3:5] == [
        "| GPTQ | 96 to 99 % | 97.0 % (96.5 to 97.5) | holds |",
        "| GPTQ | 96 to 99 % | failed | – |",
    ]
    file = tmp_path / "headlines.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[0]["key"] == {"cell": "gptq", "model": "tiny", "questions": 4}
    file.write_text(file.read_text()[:-40])  # a kill within the last line
    assert headlines.tables(bench(tmp_path, "--cached"), claims)[0].splitlines()[3:5] == table[3:5]
    assert "not measured" in headlines.tables(bench(tmp_path, "--cached"), claims[2:])[0]
    assert len(runs) == 3
    assert headlines.tables(bench(tmp_path), claims)[0].splitlines()[3:6] == table[3:6] and len(runs) == 4
    headlines.tables(bench(tmp_path, "--again", "gptq"), claims)
    headlines.tables(bench(tmp_path, "--questions", "9"), claims[:1])
    assert len(runs) == 6


def test_a_row_whose_part_failed_says_which(tmp_path):
    def fail():
        raise DataError("24 requests fit")

    with pytest.raises(DataError, match="load: 24 requests fit"):
        bench(tmp_path).needed("load", (), fail)
    with pytest.raises(DataError, match="load: not measured"):
        bench(tmp_path / "other", "--cached").needed("load", (), fail)


def test_the_paged_cache_s_rows_by_hand():
    done = {"filled": [90.0, 94.0], "pool": [80.0, 90.0], "paged": [1.0, 2.0], "static": [2.0, 4.0]}
    fake = Namespace(needed=lambda *_: done)
    usage = cells.paged_usage(fake)
    assert usage["value"] == 92.0 and usage["note"].startswith("85 % of 4,096")
    assert usage["high"] - 92.0 == pytest.approx(12.706 * 2.0)  # Student's t of two rounds
    assert cells.paged_throughput(fake)["low"] == pytest.approx(2.0)


@cache
def data(folder):
    """Questions, a text and prompts as the real ones lie."""
    for name in ("choices", "wikitext-2", "spec-bench"):
        (folder / name).mkdir()
    question = {"q": "x = 1\ny =", "choices": ["2", "import os"], "label": 0}
    for name in cells.SETS:
        lines = [json.dumps({**question, "q": f"{number} + {number} ="}) for number in range(4)]
        (folder / "choices" / f"{name}.test.jsonl").write_text("\n".join(lines))
    for name, start in (("valid", 0), ("test", 9000)):
        text = "\n".join(f"The year {start + number} had {number % 7} moons ." for number in range(6000))
        (folder / "wikitext-2" / f"{name}.txt").write_text(text)
    lines = [
        json.dumps({"question_id": number, "category": name, "turns": [f"def {name}(a, b):\n    return"]})
        for number, name in enumerate(("writing", "qa", "rag"))
    ]
    (folder / "spec-bench" / "question.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """attar:tiny, with cells and models that all rows share."""
    work = tmp_path_factory.mktemp("headlines")
    args = ["--work", str(work), "--data", str(data(tmp_path_factory.mktemp("data")))]
    return cells.Bench(headlines.arguments().parse_args([*SMALL, *args]), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in headlines.CLAIMS])
def test_every_row_runs_on_the_embedded_model(tiny, name):
    (chosen,) = (each for each in headlines.CLAIMS if each.name == name)
    found = tiny.cell(chosen.name, chosen.options, lambda: chosen.measure(tiny))
    assert "failed" not in found, found
    assert found["low"] <= found["value"] <= found["high"] and found["note"]
    if "minutes" in chosen.options:
        assert "saw " in found["note"]
    if name in ("greedy", "seeded"):
        assert found["value"] == 100.0
