"""Sentences and tables say what the numbers say."""

from __future__ import annotations

import io
from typing import Any

import pytest

from attar.measure import numbers
from attar.measure.run_folder import RunRecord, run_from_dict
from attar.measure.table import engine_note, notes, plain_table, print_table, table_rows
from attar.measure.verdict import findings, verdict
from tests.measure.fake_run import fake_run


def changed(**measurements: dict[str, Any]) -> RunRecord:
    """The fake run with other measurements for some stages."""
    data = fake_run()
    for entry in data["stages"]:
        entry["measurements"].update(measurements.get(entry["name"], {}))
    return run_from_dict(data)


def test_verdict(run: RunRecord) -> None:
    assert verdict(run) == "8.0x smaller, keeps 87 % of its next-token accuracy, KL 0.30 nats"


@pytest.mark.parametrize(
    ("kept", "stderr", "words"),
    [
        (1.003, 0.0104, "keeps 100 ± 2 %"),
        (0.9942, 0.004, "keeps 99.4 ± 0.8 %"),
        (0.9942, 0.0003, "keeps 99.42 ± 0.06 %"),
        (0.87, 0.06, "keeps 87 ± 12 %"),
        (1.0, None, "keeps 100 %"),
    ],
)
def test_a_verdict_has_the_95_percent_interval_of_what_is_kept(kept, stderr, words) -> None:
    run = changed(quantize={"quality_kept": kept, "quality_kept_stderr": stderr})
    assert f"{words} of its next-token accuracy" in verdict(run)


def test_the_table_has_the_interval_of_all_but_the_original() -> None:
    run = changed(
        original={"quality_kept": 1.0, "quality_kept_stderr": 0.01},
        quantize={"quality_kept": 0.9136, "quality_kept_stderr": 0.0104},
    )
    rows = table_rows(run)
    column = rows[0].index("quality kept %")
    assert rows[1][column] == "100.0" and rows[-1][column] == "91.4 ± 2.0"


def test_verdict_of_a_run_without_accuracy() -> None:
    data = fake_run()
    for entry in data["stages"]:
        entry["measurements"].pop("quality_kept", None)
    run = run_from_dict(data)
    assert verdict(run) == "8.0x smaller, keeps 75 % of top-1 choices, KL 0.30 nats"
    assert verdict(run, run.stages[1]) == "1.7x smaller, keeps 78 % of top-1 choices, KL 0.24 nats"


def test_verdict_without_reference_or_measurements() -> None:
    stages: list[dict[str, Any]] = [{"name": "a", "measurements": {"bytes": 800, "perplexity": 20.0}}]
    assert verdict(run_from_dict({"stages": stages})) == "1.0x smaller, perplexity 20.0"
    assert verdict(run_from_dict({"stages": [{"name": "a"}]})) == "nothing was measured"


def test_findings(run: RunRecord) -> None:
    recovered, rounded = findings(run)
    assert (
        recovered
        == "recover won back 89 % of what pruning lost: KL 0.24 before, 0.70 pruned, 0.29 recovered."
    )
    assert rounded == (
        "At the same bits, quantize costs 67 % less KL than rtn: 0.014 against 0.042 nats on top of recover."
    )


def test_findings_do_not_flatter() -> None:
    run = changed(recover={"kl_mean": 0.8}, rtn={"kl_mean": 0.9}, quantize={"kl_mean": 1.0})
    assert findings(run) == [
        "recover lost more: KL went from 0.70 to 0.80 nats.",
        "At the same bits, quantize costs 100 % more KL than rtn: 0.20 against 0.10 nats on top of recover.",
    ]


PAIRS = {"quantize": [0.010, 0.030, 0.020, 0.012], "rtn": [0.011, 0.0314, 0.0208, 0.0132]}


def measured(rows: list[float], floor: float = 0.0) -> dict[str, Any]:
    """What an evaluation records of these KLs of rows."""
    return {
        "kl_mean": sum(rows) / len(rows),
        "kl_rows": rows,
        "kl_mean_row_stderr": 0.0045,
        "kl_noise_floor": floor,
        "data": "python-docs",
    }


def test_rows_of_the_same_text_are_pairs() -> None:
    """The errors of both are four times their difference, which every row confirms."""
    run = changed(recover={"kl_mean": 0.001}, **{name: measured(rows) for name, rows in PAIRS.items()})
    assert findings(run)[1].startswith("At the same bits, quantize costs 6 % less KL than rtn")
    assert not any("tell apart" in note for note in notes(run))
    other = changed(
        recover={"kl_mean": 0.001},
        quantize=measured(PAIRS["quantize"]),
        rtn=measured(PAIRS["rtn"]) | {"data": "another"},
    )
    assert findings(other)[1] == (
        "At the same bits, the KL of quantize and of rtn cannot be told apart: 0.018 and 0.019 nats."
    )
    assert notes(other)[1] == "KL does not tell apart quantize and rtn."


def test_no_order_is_claimed_inside_the_noise() -> None:
    """Of rows that disagree, and of a difference that bf16 alone makes."""
    mixed = PAIRS | {"rtn": [0.009, 0.034, 0.018, 0.0154]}
    for run in (
        changed(**{name: measured(rows) for name, rows in mixed.items()}),
        changed(**{name: measured(rows, floor=0.002) for name, rows in PAIRS.items()}),
    ):
        assert "tell apart quantize and rtn" in notes(run)[1]


def test_recovery_inside_the_errors_is_none() -> None:
    run = changed(
        distill={"kl_mean": 0.001},
        heads={"kl_mean": 0.012},
        neurons={"kl_mean": 0.0180, "kl_mean_row_stderr": 0.001},
        recover={"kl_mean": 0.0165, "kl_mean_row_stderr": 0.001},
    )
    assert findings(run)[0] == "recover won back nothing that can be told: KL 0.018 and 0.017 nats."


def test_a_verdict_has_the_interval_of_its_kl_over_rows() -> None:
    run = changed(quantize={"kl_mean": 0.0137, "kl_mean_row_stderr": 0.0011})
    assert verdict(run).endswith("KL 0.014 ± 0.002 nats")


def test_findings_compare_equal_bits_only() -> None:
    data = fake_run()
    data["stages"][5]["settings"]["group_size"] = 32
    assert len(findings(run_from_dict(data))) == 1


def test_plain_table_is_aligned(run: RunRecord) -> None:
    lines = plain_table(run).splitlines()
    assert len(lines) == 9
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split("  ")[0] == "stage"
    assert lines[-1].split() == ["quantize", "1.83", "8.0x", "4.56", "12.80", "87.5", "0.301", "74.9", "215"]


def test_table_of_unmeasured_stages() -> None:
    assert plain_table(run_from_dict({"stages": [{"name": "a"}]})).splitlines()[-1].split() == ["a", *"–" * 8]


def test_what_computed_the_figures() -> None:
    mixed = changed(original={"activations": "bfloat16"}, distill={"activations": "bfloat16"})
    assert engine_note(mixed) == (
        "Measured: original, distill in attar's runtime, compiled runner (activations bfloat16, KV cache "
        "bfloat16); heads, neurons, recover, rtn, quantize in attar's runtime, compiled runner (activations "
        "int8, KV cache bfloat16)."
    )
    old = fake_run()
    for entry in old["stages"]:
        del entry["measurements"]["runner"]
    assert engine_note(run_from_dict(old)) == "", "a run of before says nothing"


class Terminal(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_pipe_gets_plain_text_and_a_terminal_gets_colours(
    run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, terminal = io.StringIO(), Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    print_table(run, pipe)
    print_table(run, terminal)
    formats = "Measured in attar's runtime, compiled runner (activations int8, KV cache bfloat16)."
    assert pipe.getvalue() == f"{plain_table(run)}\n\n{formats}\n"
    assert "\x1b[" in terminal.getvalue()
    for stage in run.stages:
        assert stage.name in terminal.getvalue()
    assert "…" not in terminal.getvalue(), "80 columns hold the table"


def test_transformers_has_columns_where_it_was_timed(run: RunRecord) -> None:
    assert not any("transformers" in title for title in table_rows(run)[0])
    timed = changed(original={"transformers_decode_tokens_per_s": 123.4})
    head, first, second, *_ = table_rows(timed)
    assert head[-1] == "decode tok/s (transformers)" and (first[-1], second[-1]) == ("123", "–")


def test_names_are_no_markup_in_a_terminal() -> None:
    terminal = Terminal()
    print_table(run_from_dict({"stages": [{"name": "[red]x[/red]"}]}), terminal)
    assert "[red]x[/red]" in terminal.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (0.30149, "0.301"), (16.666, "16.7"), (1234.5, "1,234"), (4.2e-6, "4.20e-06"),
     (float("inf"), "∞"), (0.00024, "0.000240"), (9.999, "10.00")],
)  # fmt: skip
def test_significant(value: float | None, text: str) -> None:
    assert numbers.significant(value) == text


def test_units() -> None:
    assert [numbers.size(value) for value in (999, 2048, 13_640_192, 2_150_000_000, None)] == [
        "999 B", "2.05 kB", "13.6 MB", "2.15 GB", "–",
    ]  # fmt: skip
    assert [numbers.times(value) for value in (8.06, 12.4, None)] == ["8.1x", "12x", "–"]
    assert [numbers.count(value) for value in (6_820_096, 1.1e9, 950)] == ["6.82 M", "1.10 B", "950"]
    assert [numbers.percent(value, 1) for value in (0.7491, 1.0, None)] == ["74.9", "100.0", "–"]
