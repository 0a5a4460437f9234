"""Speed for llama.cpp, with a stand-in for llama-batched-bench: weights of a type take what a table says."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import attar
from attar.checkpoint import open_checkpoint
from attar.errors import UsageError
from attar.formats.gguf.types import TYPES
from attar.models.anatomy.discover import discover
from attar.models.loading.empty import empty_model
from attar.planner import llama_cpp_speed
from attar.planner.gguf_costs import GGUFCosts, gguf_costs
from attar.planner.llama_cpp_speed import llama_cpp_times, spread, weights_read
from attar.progress import SILENT
from tests import tiny_models
from tests.formats.gguf import variants

NARROW = {"Q4_0": 1.5, "IQ4_NL": 7.0, "Q5_0": 6.0, "Q8_0": 2.5}
WIDE = {"Q2_K": 1.0, "Q3_K": 4.0, "Q4_K": 2.0, "Q5_K": 5.0, "Q6_K": 3.0, "Q8_0": 2.5}
SECONDS = {**NARROW, **WIDE, "F32": 0.0, "F16": 0.0}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Options of each run of the program, whose first try is the slowest."""
    runs: list[dict[str, str]] = []

    def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        if words == ("--version",):
            return subprocess.CompletedProcess(words, 0, "", "version: 1")
        options = dict(zip(words[::2], words[1::2], strict=True))
        runs.append(options)
        step = 0.0
        for info in open_checkpoint(options["-m"]).tensors.values():
            kind = TYPES[info.block or "F32"]
            step += 1e-9 * math.prod(info.shape) * kind.block / kind.size * SECONDS[kind.name]
        tries = [json.dumps({"t_tg": int(options["-ntg"]) * slow * step}) for slow in (3, 1, 2)]
        return subprocess.CompletedProcess(words, 0, "\n".join(tries), "")

    monkeypatch.setattr(llama_cpp_speed, "llama_program", lambda: "")
    monkeypatch.setattr(llama_cpp_speed, "_run", run)
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    return runs


def build(kind: str, folder: Path) -> Path:
    widths = {"hidden_size": 256, "intermediate_size": 288, "tie_word_embeddings": kind == "tied"}
    built = variants.build(kind) if kind == "qwen3_moe" else tiny_models.build("llama3", **widths)
    return tiny_models.save(built, folder, dtype=torch.bfloat16)


def expected(costs: GGUFCosts, choice: dict[str, str]) -> float:
    kinds = costs.layout.spread(choice)
    sizes = {name: math.prod(shape) for name, shape in costs.layout.shapes.items()}
    return math.fsum(1e-9 * sizes[name] * SECONDS[kind] for name, kind in kinds.items())


def test_steps_of_a_mix_take_what_its_weights_take(tmp_path: Path, runs: list[dict[str, str]]) -> None:
    """In a model with inputs for the wide and for the narrow types; nothing is timed twice."""
    folder = build("tied", tmp_path / "m")
    checkpoint, costs = open_checkpoint(folder), gguf_costs(open_checkpoint(folder), "rtn")
    times = llama_cpp_times(checkpoint, costs, 3, SILENT)
    for turn in range(6):
        choice = {
            group: names[(5 * n + turn) % len(names)]
            for n, (group, names) in enumerate((g, list(options)) for g, options in costs.table.items())
        }
        assert times.seconds(choice) == pytest.approx(expected(costs, choice), rel=1e-9)
    assert len(runs) == len({kind for options in costs.table.values() for kind in options})
    assert {run["-npl"] for run in runs} == {",".join("3" * llama_cpp_speed.TRIES)}
    assert {run["-c"] for run in runs} == {str(3 * (128 + 32))}
    del runs[:]
    assert llama_cpp_times(checkpoint, costs, 3, SILENT) == times and not runs
    assert not [*(tmp_path / "cache" / "llama-cpp").glob("*/")], "files of the model stay"


def test_a_stopped_calibration_goes_on(
    tmp_path: Path, runs: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build("tied", tmp_path / "m")
    checkpoint, costs = open_checkpoint(folder), gguf_costs(open_checkpoint(folder), "rtn")
    step, left = llama_cpp_speed.step_seconds, [2]

    def stopped(*words: Any) -> float:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return step(*words)

    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp_speed, "step_seconds", stopped)
        with pytest.raises(KeyboardInterrupt):
            llama_cpp_times(checkpoint, costs, 1, SILENT)
    assert len(runs) == 2
    times = llama_cpp_times(checkpoint, costs, 1, SILENT)
    assert len(runs) == len({**WIDE, **NARROW})
    (file,) = (tmp_path / "cache" / "llama-cpp").glob("*.json")
    file.write_text('{"Q8_0": "soon"}')  # a damaged file is made anew
    assert llama_cpp_times(checkpoint, costs, 1, SILENT) == times


def test_weights_that_a_step_reads(tmp_path: Path) -> None:
    """Of experts those that some token chose; of an embedding that is no head none."""
    for kind in ("apart", "qwen3_moe"):
        checkpoint = open_checkpoint(build(kind, tmp_path / kind))
        costs, anatomy = (
            gguf_costs(checkpoint, "rtn"),
            discover(empty_model(checkpoint.config, unstacked=True)),
        )
        reads = {batch: weights_read(costs, anatomy, batch) for batch in (1, 4)}
        sizes = {
            group: sum(math.prod(costs.layout.shapes[name]) for name in costs.layout.of(group))
            for group in costs.groups
        }
        tables = [group for group in sizes if "embed" in group]
        assert [reads[1][group] for group in tables] == [0.0 for _ in tables]
        for group in sizes.keys() - {*tables}:
            share = {1: 1.0, 4: 1.0}
            if "experts" in group:
                k, count = checkpoint.config["num_experts_per_tok"], checkpoint.config["num_local_experts"]
                share = {batch: 1 - (1 - k / count) ** batch for batch in (1, 4)}
            assert {b: reads[b][group] / sizes[group] for b in reads} == pytest.approx(share)
    assert any("experts" in group for group in sizes)


def test_a_type_that_no_read_group_can_have_costs_nothing() -> None:
    times = spread({"Q8_0": 2.0, "Q4_K": 1.5}, {"a": ("Q8_0",), "b": ("Q8_0", "Q4_K")}, {"a": 4.0, "b": 0.0})
    assert times == {"a": {"Q8_0": 2.0}, "b": {"Q8_0": 0.0, "Q4_K": 0.0}}


def test_a_plan_of_a_speed(tmp_path: Path, runs: list[dict[str, str]]) -> None:
    """The recipe predicts what the program will print of its file; what is too fast is refused."""
    folder = build("tied", tmp_path / "m")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    few: dict[str, Any] = {
        "samples": 2,
        "sequence_length": 16,
        "batch_size": 2,
        "check": 0,
        "progress": False,
    }
    options = {**few, "engine": "llama.cpp", "method": "rtn", "data": str(tmp_path / "text.txt")}
    costs = gguf_costs(open_checkpoint(folder), "rtn")
    fastest = {group: min(names, key=SECONDS.__getitem__) for group, names in costs.table.items()}
    best = 1 / expected(costs, fastest)
    plan = attar.plan(folder, speed=f"decode>={0.8 * best:.0f}", **options)
    assert plan.point.decode_tokens_per_s is not None
    assert 0.8 * best - 1 <= plan.point.decode_tokens_per_s <= best
    with pytest.raises(UsageError, match=r"but the fastest recipe decodes \d+") as refused:
        attar.plan(folder, speed=f"decode>={1.5 * best:.0f}", **options)
    assert "decode>=" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("echo 'no such \x1bmodel' >&2; exit 1", r"printed no times: no such .u001bmodel"),
        ("echo '{\"t_tg\": 0}'", "printed no times: exit 0"),
        ("echo '{\"t_pp\": 1}'", "printed no times: exit 0"),
        ("echo '{'", "printed no times: exit 0"),
    ],
)
def test_a_program_that_fails_is_a_line(words: str, message: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{words}\n")
    program.chmod(0o755)
    with pytest.raises(UsageError, match=message):
        llama_cpp_speed.step_seconds(str(program), tmp_path / "model.gguf", 1)


def test_what_is_no_program_is_a_line(tmp_path: Path) -> None:
    program = tmp_path / llama_cpp_speed.PROGRAM
    program.write_bytes(b"\x7fELF of another machine")
    program.chmod(0o755)
    with pytest.raises(UsageError, match="does not run: Exec format error"):
        llama_cpp_speed.step_seconds(str(program), tmp_path / "model.gguf", 1)


def test_without_the_program_a_speed_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    options: dict[str, Any] = {"engine": "llama.cpp", "method": "rtn", "data": "python-stdlib"}
    with pytest.raises(UsageError, match="llama-batched-bench, which is not on PATH"):
        attar.plan(build("tied", tmp_path / "m"), speed="decode>=1", progress=False, **options)
    assert not [*(tmp_path / "cache").glob("**/*.json")]
