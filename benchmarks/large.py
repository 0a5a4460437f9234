"""Checkpoints larger than memory: peak memory, time and disk of each verb, beside what the plan says.

    python benchmarks/large.py --work DIR --shapes 7b:2 7b:4 30b:1 30b:2       # some layers of the shape
    python benchmarks/large.py --work DIR --shapes 7b --verbs rtn magnitude merge gguf
    python benchmarks/large.py --work DIR --table                              # what is measured so far
    python benchmarks/large.py --work DIR --plan 7b 30b 70b 405b               # the plan alone, no weights
    python benchmarks/large.py --work DIR --clean                              # delete the checkpoints

A checkpoint has the true shape of Llama 2 7B, LLaMA 30B, Llama 3.1 70B or 405B with all its layers, or
(NAME:N) with N of them, or a small one with a wide MLP, and random bfloat16 weights N(0, 0.02^2), one shard a
layer. Each verb is a process of its own under ``--limit`` bytes of data (RLIMIT_DATA: what is allocated;
attar takes it for the memory of the machine), run as a recipe of one stage whose plan was made before. Peak
is the largest resident set of the process, pages of mapped files included. The second parent of ``merge`` is
the first one under another name. Finished cells are in DIR/cells.jsonl and are not run again, so the same
command goes on.

``--table`` also extends the time of computing by layers, where a shape was run with two numbers of them:
t(L) = a + b L. The largest peak is kept: what a verb holds is a block, whatever their number.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.units import bytes_text, seconds_text, table
from attar.measure.settings import EvaluateSettings
from attar.recipe.estimate import estimate, evaluation_seconds
from attar.recipe.machine import Rates, measure_rates
from attar.recipe.memory_needs import evaluation_memory
from attar.recipe.schema import parse_recipe
from attar.recipe.shapes import after, shape_of

SHAPES: dict[str, dict[str, Any]] = {
    "small": {"layers": 2, "hidden": 1024, "inner": 8192, "heads": 16, "kv_heads": 16, "vocabulary": 32000},
    "7b": {"layers": 32, "hidden": 4096, "inner": 11008, "heads": 32, "kv_heads": 32, "vocabulary": 32000},
    "30b": {"layers": 60, "hidden": 6656, "inner": 17920, "heads": 52, "kv_heads": 52, "vocabulary": 32000},
    "70b": {"layers": 80, "hidden": 8192, "inner": 28672, "heads": 64, "kv_heads": 8, "vocabulary": 128256},
    "405b": {
        "layers": 126,
        "hidden": 16384,
        "inner": 53248,
        "heads": 128,
        "kv_heads": 8,
        "vocabulary": 128256,
    },
}
TEXT = "data: python-docs, samples: {samples}, sequence_length: 256, batch_size: 4"
CHECK = "check_tokens: 512"
VERBS = {
    "rtn": "stage: quantize, method: rtn, check_tokens: 0",  # the gate refuses random weights so rounded
    "gptq": f"stage: quantize, method: gptq, refine: 0, {TEXT}, {CHECK}",
    "magnitude": "stage: prune, method: magnitude, sparsity: 0.5",
    "wanda": f"stage: prune, method: wanda, sparsity: 0.5, reconstruct: none, {TEXT}",
    "wanda-linear": f"stage: prune, method: wanda, sparsity: 0.5, reconstruct: linear, {TEXT}",
    "merge": "stage: merge, config: {{merge_method: linear, dtype: bfloat16, models: [{{model: original, "
    "parameters: {{weight: 0.5}}}}, {{model: {other}, parameters: {{weight: 0.5}}}}]}}",
    "gguf": "stage: export, format: gguf, type: Q8_0",
}
MEASURE, TOKENS = "measure", 2048  # attar evaluate: no stage
ALL = (*VERBS, MEASURE)
STD = 0.02


@dataclass(frozen=True)
class Cell:
    """One verb on one checkpoint.

    Attributes:
        planned: seconds, bytes of memory and of disk that the plan said.
        seconds: from start to end; processor: of computing, which a busy machine stretches less.
        peak: largest resident set in bytes; disk: bytes of the result.
        error: its last line, where it failed.
    """

    verb: str
    shape: str
    layers: int
    planned: tuple[float, float, float]
    seconds: float
    processor: float
    peak: int
    disk: int
    limit: float
    error: str = ""


# ---- checkpoints


def tensors(shape: dict[str, Any], layers: int) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """(file, shapes by name) of each shard of a Llama: the outer tensors, then a shard a layer."""
    h, f = shape["hidden"], shape["inner"]
    kv = h // shape["heads"] * shape["kv_heads"]
    rows = shape["vocabulary"]
    yield (
        "model-outer.safetensors",
        {"model.embed_tokens.weight": (rows, h), "model.norm.weight": (h,), "lm_head.weight": (rows, h)},
    )
    for number in range(layers):
        prefix = f"model.layers.{number}."
        inside = {
            "input_layernorm": (h,),
            "self_attn.q_proj": (h, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, h),
            "post_attention_layernorm": (h,),
            "mlp.gate_proj": (f, h),
            "mlp.up_proj": (f, h),
            "mlp.down_proj": (h, f),
        }
        shard = {f"{prefix}{name}.weight": size for name, size in inside.items()}
        yield f"model-{number:05d}.safetensors", shard


def make_checkpoint(folder: Path, shape: dict[str, Any], layers: int, *, random: bool) -> None:
    """Write a checkpoint; without ``random`` its files have headers and a length, and take no disk."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for seed, (file, shapes) in enumerate(tensors(shape, layers)):
        _write_shard(folder / file, shapes, seed if random else None)
        index |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    tiny = open_checkpoint("attar:tiny").path
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder / name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["inner"],
        "num_hidden_layers": layers,
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "vocab_size": shape["vocabulary"],
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))  # last: a killed copy is made again


def _write_shard(file: Path, shapes: dict[str, tuple[int, ...]], seed: int | None) -> None:
    """A safetensors file of bfloat16 tensors; with a seed its numbers, else zeros that take no disk."""
    header: dict[str, Any] = {}
    offset = 0
    for name, size in shapes.items():
        end = offset + 2 * _product(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        if seed is None:
            opened.truncate(8 + len(text) + offset)
            return
        import torch

        generator = torch.Generator().manual_seed(seed)
        for size in shapes.values():
            value = torch.ones(size, dtype=torch.bfloat16)
            if len(size) > 1:
                value.normal_(0, STD, generator=generator)
            opened.write(value.view(torch.int16).numpy().tobytes())


def _product(size: Sequence[int]) -> int:
    total = 1
    for one in size:
        total *= one
    return total


def other_name(folder: Path) -> Path:
    """The same checkpoint once more: hard links to its files."""
    other = folder.with_name(f"{folder.name}-other")
    if not other.exists():
        shutil.copytree(folder, other, copy_function=os.link)
    return other


# ---- cells


def recipe_text(verb: str, model: Path, samples: int) -> str:
    """A recipe of the verb's stage alone."""
    stage = VERBS[verb].replace("{samples}", str(samples))
    if verb == "merge":
        stage = stage.format(other=model.with_name(f"{model.name}-other"))
    return f"model: {model}\nevaluate: false\nstages:\n  - {{{stage}}}\n"


def planned(verb: str, model: Path, samples: int, limit: float, rates: Rates) -> tuple[float, float, float]:
    """Seconds, bytes of memory and of disk that the plan says on a machine of ``limit`` bytes: the figures of
    ``attar run --dry-run``, without the hashes of the weights that it compares with finished stages."""
    shape = shape_of(open_checkpoint(model))
    if verb == MEASURE:
        settings = EvaluateSettings(tokens=TOKENS, speed=False)
        memory = evaluation_memory(settings, shape, limit)
        return evaluation_seconds(settings, shape, rates), memory, 0.0
    entry = parse_recipe(recipe_text(verb, model, samples)).stages[0]
    need = estimate(entry, shape, None, after(entry, shape), rates)
    return need.time.seconds, need.memory_bytes, need.disk_bytes + need.scratch_bytes


def run_cell(
    verb: str, name: str, layers: int, work: Path, samples: int, limit: float, patience: float
) -> Cell:
    """Run a verb in a process of its own."""
    model, out = work / f"{name}-{layers}", work / "out"
    make_checkpoint(model, SHAPES[name], layers, random=True)
    if verb == "merge":
        other_name(model)
    before = planned(verb, model, samples, limit, measure_rates())
    if verb == MEASURE:
        words = ["evaluate", str(model), "--data", "python-docs", "--tokens", str(TOKENS), "--no-speed"]
    else:
        recipe = work / "recipe.yaml"
        recipe.write_text(recipe_text(verb, model, samples))
        words = ["run", str(recipe), "-o", str(out)]
    log = work / "log"
    start = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "attar", *words],
            stdout=file,
            stderr=file,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit))),
        )
        _, status, usage = _wait(child, start + patience)
    seconds = time.monotonic() - start
    error = "" if os.waitstatus_to_exitcode(status) == 0 else log.read_text(errors="replace").strip()[-300:]
    disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) if out.exists() else 0
    shutil.rmtree(out, ignore_errors=True)
    processor = usage.ru_utime + usage.ru_stime
    return Cell(verb, name, layers, before, seconds, processor, usage.ru_maxrss * 1024, disk, limit, error)


def _wait(child: subprocess.Popen[bytes], until: float) -> tuple[int, int, resource.struct_rusage]:
    """As os.wait4, with an end."""
    while True:
        ended = os.wait4(child.pid, os.WNOHANG)
        if ended[0]:
            return ended
        if time.monotonic() > until:
            child.kill()
        time.sleep(0.2)


# ---- tables


def cells_table(cells: Sequence[Cell]) -> str:
    """Measured and planned, and time by layers to the whole model."""
    rows = []
    for cell in cells:
        seconds, memory, disk = cell.planned
        rows.append(
            (
                cell.shape,
                f"{cell.layers} of {SHAPES[cell.shape]['layers']}",
                cell.verb,
                bytes_text(cell.peak),
                bytes_text(memory),
                seconds_text(cell.seconds),
                seconds_text(cell.processor),
                seconds_text(seconds),
                bytes_text(cell.disk) if cell.disk else "-",
                bytes_text(disk) if disk else "-",
                cell.error.splitlines()[-1][:60] if cell.error else "",
            )
        )
    heads = ("shape", "layers", "verb", "peak", "plan", "time", "computing", "plan", "disk", "plan", "")
    return table(heads, rows, left=3)


def extended_table(cells: Sequence[Cell]) -> str:
    """Time of all layers, from the least and the most that were run."""
    rows = []
    for name in dict.fromkeys(cell.shape for cell in cells):
        for verb in ALL:
            runs = sorted(
                (c for c in cells if (c.shape, c.verb) == (name, verb) and not c.error),
                key=lambda c: c.layers,
            )
            total = SHAPES[name]["layers"]
            if len(runs) < 2 or runs[-1].layers == total:
                continue
            first, last = runs[0], runs[-1]
            slope = (last.processor - first.processor) / (last.layers - first.layers)
            peak = max(run.peak for run in runs)
            whole = last.processor + slope * (total - last.layers)
            rows.append((name, verb, seconds_text(whole), f"{slope:.1f} s", bytes_text(peak)))
    return table(("shape", "verb", "all layers", "a layer", "peak"), rows, left=2) if rows else ""


def plan_table(names: Sequence[str], work: Path, samples: int, limit: float, rates: Rates) -> str:
    """What the plan says of whole models, from headers without weights."""
    rows = []
    for name in names:
        layers = SHAPES[name]["layers"]
        model = work / f"{name}-headers"
        make_checkpoint(model, SHAPES[name], layers, random=False)
        other_name(model)
        for verb in ALL:
            seconds, memory, disk = planned(verb, model, samples, limit, rates)
            rows.append(
                (name, verb, seconds_text(seconds), bytes_text(memory), bytes_text(disk) if disk else "-")
            )
    return table(("shape", "verb", "time", "memory", "disk"), rows, left=2)


def rates_line(rates: Rates) -> str:
    """The rates that turn work into seconds here."""
    return (
        f"rates: {rates.products / 1e9:.0f} G products/s, {rates.elements / 1e9:.1f} G elements/s, "
        f"{rates.calls / 1e6:.1f} M calls/s"
    )


def main() -> None:
    """Run cells, print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=[], metavar="NAME[:LAYERS]")
    parser.add_argument("--verbs", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--samples", type=int, default=16, help="calibration rows of 256 tokens")
    parser.add_argument("--limit", type=float, default=8e9, help="bytes of data of each process")
    parser.add_argument("--patience", type=float, default=3600, help="seconds after which a cell is ended")
    parser.add_argument("--plan", nargs="+", choices=SHAPES, default=[])
    parser.add_argument("--rates", nargs=3, type=float, help="of --plan: products, elements, calls a second")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--clean", action="store_true")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    file = work / "cells.jsonl"
    cells = [Cell(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    for wanted in arguments.shapes:
        name, _, layers = wanted.partition(":")
        count = int(layers or SHAPES[name]["layers"])
        for verb in arguments.verbs:
            if any((c.verb, c.shape, c.layers) == (verb, name, count) for c in cells):
                continue
            cells.append(
                run_cell(verb, name, count, work, arguments.samples, arguments.limit, arguments.patience)
            )
            with file.open("a") as opened:
                opened.write(json.dumps(asdict(cells[-1])) + "\n")
            print(cells_table(cells[-1:]), flush=True)
    if arguments.plan:
        rates = Rates(*arguments.rates) if arguments.rates else measure_rates()
        print(rates_line(rates))
        print(plan_table(arguments.plan, work, arguments.samples, arguments.limit, rates))
    if arguments.table:
        print(cells_table(cells))
        print(extended_table(cells))
    if arguments.clean:
        for folder in work.iterdir():
            if folder.is_dir():
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
