"""The benchmark of pruning: its runners, its cells and tables. No peer is needed."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import decode  # noqa: E402
import prune  # noqa: E402
import prune_cells  # noqa: E402
import prune_gains  # noqa: E402
import prune_units  # noqa: E402
import prune_zeros  # noqa: E402
import quality  # noqa: E402
from peers import job, launch  # noqa: E402

from attar.checkpoint import open_checkpoint  # noqa: E402
from attar.errors import AttarError  # noqa: E402
from attar.recipe.schema import load_recipe  # noqa: E402


@pytest.fixture
def bench(tmp_path):
    args = prune.arguments().parse_args(["--work", str(tmp_path), "--again", "attar/alps"])
    return prune_cells.Bench(args, open_checkpoint("attar:tiny"))


@pytest.mark.parametrize("name", prune.PARTS)
def test_every_part_is_a_function(name):
    assert callable(prune.part(name))


@pytest.mark.parametrize("tool", ["attar", "llmcompressor"])
def test_a_pruning_has_runners_of_its_own(tool):
    script = launch.script(tool, "prune")
    assert script.is_file() and script != launch.script(tool, "")


def test_a_runner_of_attar_takes_options_and_others_do_not(monkeypatch):
    text = job.Job(model="m", tokens="t", out="o", method="wanda", options={"scope": "row"}).text()
    monkeypatch.setattr(job.os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["/x/attar_prune_run.py", text])
    assert job.read().options == {"scope": "row"}
    monkeypatch.setattr(sys, "argv", ["/x/llmcompressor_prune_run.py", text])
    with pytest.raises(SystemExit, match="takes no scope"):
        job.read()


def test_peers_prune_by_the_plain_methods_that_they_have_beside_ours(bench):
    pairs = [(method.tool, method.label) for method in prune_zeros.methods(bench)]
    assert pairs[:5] == [
        ("attar", "magnitude"),
        ("attar", "wanda"),
        ("llmcompressor", "wanda"),
        ("attar", "sparsegpt"),
        ("llmcompressor", "sparsegpt"),
    ]
    assert sum(tool == "llmcompressor" for tool, _ in pairs) == 2
    bench.args.methods = []
    assert [method.label for method in prune_zeros.methods(bench)] == ["wanda", "sparsegpt"]


def test_a_cell_is_measured_once_and_failures_are_kept(bench):
    runs = []

    def work():
        runs.append(1)
        if len(runs) == 2:
            raise AttarError("no such layer")
        return {"kl": float(len(runs))}

    plain, alps = ({"part": "zeros", "tool": "attar", "method": name} for name in ("wanda", "alps"))
    assert bench.cell(plain, work) == bench.cell(plain, work) == {"kl": 1.0}
    assert bench.cell(alps, work) == {"failed": "no such layer"}
    assert bench.cell(alps, work) == {"kl": 3.0}  # --again attar/alps
    kept = quality.read_cache(bench.args.work / "prune.jsonl")
    assert list(kept.values()) == [{"kl": 1.0}, {"kl": 3.0}]
    bench.args.cached = True
    assert bench.cell({**plain, "method": "magnitude"}, work) is None and len(runs) == 3


def test_the_table_is_sorted_by_kl_and_divides_by_the_peer_s_perplexity():
    methods = [
        launch.parse_method("attar", "sparsegpt"),
        launch.parse_method("attar", "wanda,reconstruct=block"),
        launch.Method("llmcompressor", "sparsegpt"),
        launch.parse_method("attar", "alps"),
    ]
    row = {"kept": 0.5, "seconds": 2.0}
    done = [
        (methods[0], {"perplexity": 20.0, "kl": 0.2, **row}),
        (methods[1], {"perplexity": 19.0, "kl": 0.1, **row}),
        (methods[2], {"perplexity": 25.0, "kl": 0.3, **row}),
        (methods[3], {"failed": "no memory"}),
    ]
    lines = prune_zeros.zeros_table("2:4", done).splitlines()
    assert lines[2].startswith("| wanda, then block | attar | 19.00 | 0.1000 | 50.0% | – |")
    assert lines[3].startswith("| sparsegpt | attar | 20.00 | 0.2000 | 50.0% | 0.8000 |")
    assert lines[4].startswith("| sparsegpt | llmcompressor | 25.00 |")
    assert "failed: no memory" in lines[5]


def test_times_take_the_smallest_and_memory_the_largest_of_the_rounds():
    names = ("seconds", "cpu", "peak_rss_mb", "start_rss_mb")
    rows = [
        dict(zip(names, values, strict=True)) for values in ((2.0, 5.0, 100.0, 60.0), (3.0, 4.0, 90.0, 70.0))
    ]
    assert list(prune_zeros.best(rows).values()) == [2.0, 4.0, 100.0, 70.0]
    assert prune_zeros.best([rows[0], {"failed": "x"}]) == {"failed": "x"}


def test_a_shape_of_many_layers_lies_on_the_line_through_two_of_few():
    rows = {2: {"seconds": 10.0}, 4: {"seconds": 16.0}}
    assert prune_zeros.at_layers(rows, "seconds", 22) == pytest.approx(70.0)


def test_ratios_of_structures_that_remove_the_same_share_of_parameters():
    tiny = open_checkpoint("attar:tiny")
    counted = prune_units.elements(tiny)
    sizes = prune_units.parameters(tiny.config)
    assert 0 <= counted - sizes["all"] < 0.001 * counted  # the norms
    assert prune_units.amount(tiny.config, "mixed", 0.25) == (1.0, 0.25)
    most, ratio = prune_units.amount(tiny.config, "heads", 0.25)
    assert ratio is None and most == pytest.approx(0.75 * sizes["heads"] / sizes["all"])
    assert prune_units.amount(tiny.config, "layers", 0.25)[1] == 2 / 8
    _, ratio = prune_units.amount(tiny.config, "neurons", 0.25)
    assert ratio * sizes["neurons"] == pytest.approx(0.25 * sizes["all"])


def test_units_are_sorted_by_what_recovery_leaves():
    row = {"perplexity": 9.0, "kept": 0.9, "removed": 0.25, "seconds": 3.0}
    row |= {"perplexity_after": 8.0, "kept_after": 0.95}
    done = [
        (launch.Method("attar", "layers"), {**row, "kl": 0.1, "kl_after": 0.09}),
        (launch.Method("attar", "neurons"), {**row, "kl": 0.2, "kl_after": 0.03}),
        (launch.Method("attar", "heads"), {"failed": "no room"}),
    ]
    names = [line.split(" | ")[0] for line in prune_units.units_table(0.25, done).splitlines()[2:]]
    assert names == ["| neurons", "| layers", "| heads"]


def test_every_case_of_speed_is_a_command_of_the_decode_benchmark(monkeypatch):
    for shape, weights, threads in prune_gains.CASES:
        monkeypatch.setattr(sys, "argv", prune_gains.decode_command(shape, weights, threads, 3)[1:])
        taken = decode.parse()
        assert (taken.shapes, taken.weights, taken.threads) == ([shape], [weights], threads)
        assert (taken.sparsity, taken.tasks, taken.peers) == (["2:4", "50%"], ["decode 1"], [])
        assert taken.rounds == 3


def test_what_a_command_prints_and_why_it_failed():
    lines = [sys.executable, "-c", "print('head'); print('S int4'); print('S bf16')"]
    assert prune_gains.output_lines(lines, 60.0) == ["S int4", "S bf16"]
    with pytest.raises(prune_gains.RunnerError, match="no such shape"):
        prune_gains.output_lines([sys.executable, "-c", "raise SystemExit('no such shape')"], 60.0)
    with pytest.raises(prune_gains.RunnerError, match="no end within"):
        prune_gains.output_lines([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)


def test_speed_prints_the_lines_of_all_cases_and_keeps_a_failure(bench, monkeypatch):
    def run(command, limit):
        if "M" in command:
            raise prune_gains.RunnerError("no memory")
        return [f"S {command[command.index('--weights') + 1]}"]

    monkeypatch.setattr(prune_gains, "output_lines", run)
    lines = prune_gains.speed(bench).splitlines()
    assert len(lines) == len(prune_gains.CASES) and lines[0] == "    1 threads: S int4"
    assert lines[-1] == "    2 threads: failed: no memory"


def test_the_recipe_runs_on_the_model_and_texts_of_the_command_line(bench):
    bench.args.test, bench.args.tokens = "test.txt", 2048
    recipe = load_recipe(prune_gains.RECIPE, prune_gains.changes(bench))
    assert recipe.model == str(bench.checkpoint.path) and recipe.data == "python-stdlib"
    assert (recipe.evaluate.data, recipe.evaluate.tokens) == ("test.txt", 2048)


def test_sizes_of_the_recipe_are_over_the_original_in_float32():
    measured = {"perplexity": 8.0, "kl_mean": 0.1, "quality_kept": 0.95, "parameters": 1_000_000}
    stages = [
        {"name": "original", "bytes": 2_000_000, "measurements": measured},
        {"name": "quantize", "bytes": 1_000_000, "measurements": {**measured, "kl_mean": 0.2}},
    ]
    rows = prune_gains.stages_table(stages).splitlines()[2:]
    assert rows[0] == "| original | 2.0 | 2.00x | 8.00 | 0.1000 | 95.0% |"
    assert rows[1] == "| quantize | 1.0 | 4.00x | 8.00 | 0.2000 | 95.0% |"
