"""What small files keep of SmolLM2-135M-Instruct: weights in few bits, GGUF files, a pipeline of stages.

    python benchmarks/real.py --parts quality gguf pipeline
        [--data DIR] [--work DIR] [--schemes W4:64 ...] [--methods gptq ...] [--peers auto-round ...]
        [--types Q4_K_M ...] [--samples 128] [--length 256] [--tokens 8192] [--seeds 0 1 2] [--questions 400]
        [--dithered]

DIR of ``--data`` holds wikitext-2 and choices. Everybody calibrates on the same rows of WikiText-2's valid
text and is measured on its test text, in float32, against the model as it is stored. Finished cells go to the
work folder at once, and a run that was killed goes on from there.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import export as gguf_files
import quality as packed
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import attar
from attar.checkpoint import open_checkpoint
from attar.deployment.gguf import dense_view
from attar.formats.gguf.quant_types import bits, mix
from attar.formats.gguf.tensor_map import architecture, placements, sizes
from attar.measure.table import table_rows

MODEL = "attar:smollm2"
WORK = Path("~/.cache/attar/real").expanduser()
DATA = Path(__file__).parents[2] / "shared" / "data"
SCHEMES = ("W8:64", "W4:64", "W3:64", "W2:64", "W4:32:asym")
METHODS = ("rtn", "gptq", "gptaq", "qronos", "yaqa", "awq", "autoround", "qat,start=qronos", packed.PLAIN)
PEERS = ("auto-round", "llmcompressor", "gptqmodel")
SKIPPED = (  # rounding to nearest is one row, ours; of the orders of columns the tools' defaults stay
    "llmcompressor/rtn",
    "gptqmodel/rtn",
    "llmcompressor/gptq,act_order=none",
    "gptqmodel/gptq,act_order=none",
    "gptqmodel/gptq,act_order=group",
    "auto-round/rtn",
)
TYPES = ("Q4_K_M", "Q3_K_M", "Q2_K")
PIPELINE = """
model: {model}
data: {train}
evaluate: {{data: {test}, tokens: {tokens}, runner: transformers, speed: false, sample: ""}}
stages:
  - {{stage: prune, method: neurons, ratio: {ratio}, samples: {samples}, sequence_length: {length}}}
  - {{stage: recover, teacher: original, steps: {steps}, sequence_length: {length}, batch_size: 8,
      checkpoint_every: 10}}
  - {{stage: quantize, scheme: W4A16, group_size: 64, embedding_bits: 8, samples: {samples},
      sequence_length: {length}, check_tokens: 0}}
  - {{stage: export, from: recover, format: gguf, type: Q4_K_M, imatrix: compute, samples: {samples},
      sequence_length: {length}}}
"""


def options(rest: list[str]) -> argparse.Namespace:
    """What these parts take; other parts' options are passed over."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--peers", nargs="*", default=PEERS)
    parser.add_argument("--skip", nargs="*", default=SKIPPED, metavar="PEER/METHOD")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--roundings", nargs="*", default=["gptq", "qronos"])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--domains", nargs="*", default=["python-stdlib"], help="of quality: further texts")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the calibration rows")
    parser.add_argument("--iterations", type=int, default=200, help="of auto-round and of our autoround")
    parser.add_argument("--questions", type=int, default=400, help="of each set of questions; 0: all")
    parser.add_argument("--ratio", type=float, default=0.2, help="of neurons that the pipeline prunes")
    parser.add_argument("--steps", type=int, default=60, help="of the pipeline's trainings")
    parser.add_argument("--dithered", action="store_true", help="weights moved off the grid of their file")
    parser.add_argument("--cached", action="store_true", help="of quality: print what is there, run nothing")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds that a cell may take")
    args, _ = parser.parse_known_args(rest)
    args.work.mkdir(parents=True, exist_ok=True)
    args.valid = str(args.data / "wikitext-2" / "valid.txt")
    args.test = str(args.data / "wikitext-2" / "test.txt")
    return args


def dense(args: argparse.Namespace) -> Path:
    """The model's folder in bf16, which every tool can read: its Q4_1 file decoded."""
    folder: Path = args.work / "smollm2-dense"
    if not folder.exists():
        attar.export(MODEL, folder, format="dense")
    if not args.dithered:
        return folder
    moved: Path = args.work / "smollm2-dithered"
    if not moved.exists():
        shutil.copytree(folder, moved)
        file = moved / "model.safetensors"
        save_file(dithered(load_file(file)), file, {"format": "pt"})
        (moved / "attar.json").unlink(missing_ok=True)  # its hashes are of the other
    return moved


def dithered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of the blocks, each weight w -> w + u (max - min) / 15 of its 32 neighbours, u uniform in
    (-1/2, 1/2): w is anywhere where Q4_1 rounds to the level that it had."""
    generator = torch.Generator().manual_seed(0)
    result = dict(tensors)
    for name, weight in sorted(tensors.items()):
        if ".layers." in name and weight.dim() == 2:
            cells = weight.float().unflatten(1, (-1, 32))
            step = (cells.amax(2, True) - cells.amin(2, True)) / 15
            moved = cells + (torch.rand(cells.shape, generator=generator) - 0.5) * step
            result[name] = moved.flatten(1).to(weight.dtype)
    return result


def common(args: argparse.Namespace) -> list[str]:
    """What both tables are asked for."""
    given: dict[str, Any] = {"models": dense(args), "data": args.valid}
    given |= {"samples": args.samples, "length": args.length, "tokens": args.tokens}
    texts = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return [*texts, "--seeds", *map(str, args.seeds)]


def quality_options(args: argparse.Namespace) -> argparse.Namespace:
    """The options of ``benchmarks/quality.py`` for this model."""
    command = [*common(args), "--test", args.test, *args.domains, "--dtype", "auto"]
    command += ["--cache", str(args.work / "quality.jsonl")]
    command += ["--limit", str(args.limit), "--schemes", *args.schemes, "--skip", *args.skip]
    command += ["--iterations", str(args.iterations), *(["--cached"] if args.cached else [])]
    return packed.arguments().parse_args([*command, "--methods", *args.methods, "--peers", *args.peers])


def gguf_options(args: argparse.Namespace) -> argparse.Namespace:
    """The options of ``benchmarks/export.py`` for this model."""
    command = [*common(args), "--test", args.test, "--cache", str(args.work / "gguf.jsonl"), "--mixes"]
    command += ["--types", *args.types]
    return gguf_files.arguments().parse_args([*command, "--roundings", *args.roundings])


def quality(rest: list[str]) -> str:
    """Integers in groups, against auto-round, GPTQModel and llm-compressor."""
    args = options(rest)
    asked = quality_options(args)
    work = args.work / "cells"
    work.mkdir(exist_ok=True)
    return packed.run_model(str(dense(args)), asked, packed.read_cache(asked.cache), work)


def gguf(rest: list[str]) -> str:
    """llama.cpp's types, against llama.cpp with and without an importance matrix."""
    args = options(rest)
    asked = gguf_options(args)
    work = args.work / "gguf"
    work.mkdir(exist_ok=True)
    table = gguf_files.quality(str(dense(args)), asked, gguf_files.read_cache(asked.cache), work)
    return f"{types(dense(args), args.types)}\n\n{table}"


def types(model: Path, names: list[str]) -> str:
    """What the mixes really are on a model: 256 does not divide a width of 576, so llama.cpp's rules give
    most of its weights wider types in blocks of 32."""
    view = dense_view(open_checkpoint(model))
    shapes = {one.gguf: one.shape for one in placements(view.config, view.tensors)}
    family = architecture(view.config)
    measured = sizes(view.config, family)
    lines = ["| mix | bits a weight in the blocks | types, share of the blocks' weights |", "|---|---:|---|"]
    for name in names:
        mixture = mix(
            name,
            shapes,
            layers=measured.layers,
            heads=measured.heads,
            kv_heads=measured.kv_heads,
            architecture=family.arch,
            imatrix=True,
        )
        inner = {one: kind for one, kind in mixture.kinds.items() if one.startswith("blk.") and kind != "F32"}
        counts: Counter[str] = Counter()
        for one, kind in inner.items():
            counts[kind] += math.prod(shapes[one])
        shares = ", ".join(f"{kind} {100 * n / counts.total():.0f} %" for kind, n in counts.most_common())
        lines.append(f"| {name} | {bits(inner, shapes)[0]:.2f} | {shares} |")
    return "\n".join(lines)


def pipeline(rest: list[str]) -> str:
    """The seeds' pipeline: prune, learn from the original again, quantize or export; each stage measured."""
    args = options(rest)
    recipe = args.work / "pipeline.yaml"
    fields = {"model": dense(args), "train": args.valid, "test": args.test, "tokens": args.tokens}
    fields |= {"ratio": args.ratio, "steps": args.steps, "length": args.length, "samples": args.samples}
    recipe.write_text(PIPELINE.format(**fields))
    run = attar.run(recipe, args.work / "pipeline").run
    head, *body = table_rows(run)
    lines = [f"| {' | '.join(head)} | s |", "|---|" + "---:|" * len(head)]
    for row, stage in zip(body, run.stages, strict=True):
        lines.append(f"| {' | '.join(row)} | {stage.seconds or 0:.0f} |")
    return "\n".join(lines)
