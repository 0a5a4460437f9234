"""How fast a student writes with its current weights: a runner of the model in memory, against transformers'
``generate`` and against a checkpoint that is written and loaded again.

    python benchmarks/rollouts.py [attar:tiny MODEL ...] [--rows 64] [--length 128] [--prompt 32]

Refresh: seconds from changed weights to a runner. Rows are drawn at temperature 1 without end tokens, so that
all write the same number of tokens. The teacher's part: the same with a mixture of both (MiniLLM).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import attar
from attar.checkpoint import open_checkpoint
from attar.checkpoint.companions import copy_companions
from attar.data.packing import evaluation_rows
from attar.distillation.rollouts.sampling import sample_rows
from attar.models.loading.load import load_model, load_tokenizer, save_model
from attar.runtime.runner.blended import BlendedRunner
from attar.runtime.runner.from_model import runner_of

ROW = "{:<34}{:>10}{:>12}{:>12}"


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["attar:tiny"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=32)
    arguments = parser.parse_args()
    for name in arguments.models:
        table(name, arguments)


def table(name: str, arguments: argparse.Namespace) -> None:
    """A line for each way: refresh, tokens/s of writing, tokens/s with the refresh."""
    source = open_checkpoint(name)
    model, tokenizer = load_model(source, dtype=torch.float32), load_tokenizer(source)
    rows, length, first = arguments.rows, arguments.length, arguments.prompt
    text = evaluation_rows(tokenizer, "python-stdlib", tokens=rows * length, sequence_length=length, seed=0)
    prompts = text.rows[:rows, :first].tolist()
    count = len(prompts) * (length - first)
    print(
        f"{name}: {len(prompts)} rows of {length} tokens, {first} of them prompt; threads",
        torch.get_num_threads(),
    )
    print(ROW.format("", "refresh s", "tokens/s", "with refresh"))
    for way, measure in WAYS.items():
        refresh, seconds = measure(model, source, prompts, length, len(tokenizer))
        shown = (f"{refresh:.2f}", f"{count / seconds:,.0f}", f"{count / (refresh + seconds):,.0f}")
        print(ROW.format(way, *shown), flush=True)


def _runner(model: Any, prompts: list[list[int]], length: int, exact: bool = False) -> Any:
    return runner_of(model, sequences=len(prompts), length=length, exact=exact)


def in_memory(
    model: Any, source: Any, prompts: list[list[int]], length: int, vocabulary: int
) -> tuple[float, float]:
    """The compiled step, packed from the model."""
    began = time.perf_counter()
    runner = _runner(model, prompts, length)
    ready = time.perf_counter()
    sample_rows(runner, prompts, length, vocabulary=vocabulary, ends=(), seed=0)
    return ready - began, time.perf_counter() - ready


def mixed(
    model: Any, source: Any, prompts: list[list[int]], length: int, vocabulary: int
) -> tuple[float, float]:
    """Two compiled steps in lock step; the teacher's runner is made once and not counted."""
    teacher = _runner(model, prompts, length)
    began = time.perf_counter()
    runner = BlendedRunner([_runner(model, prompts, length), teacher], [0.8, 0.2], vocabulary=vocabulary)
    ready = time.perf_counter()
    sample_rows(runner, prompts, length, vocabulary=vocabulary, ends=(), seed=0)
    return ready - began, time.perf_counter() - ready


def reloaded(
    model: Any, source: Any, prompts: list[list[int]], length: int, vocabulary: int
) -> tuple[float, float]:
    """A checkpoint is written and loaded by the runtime."""
    most = length - len(prompts[0])
    params = [attar.SamplingParams(max_tokens=most, seed=row, ignore_eos=True) for row in range(len(prompts))]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        save_model(model, Path(folder), dtype=torch.bfloat16)
        copy_companions(source.path, Path(folder))
        llm = attar.LLM(folder)
        ready = time.perf_counter()
        llm.generate(prompts, params)
        return ready - began, time.perf_counter() - ready


@torch.inference_mode()  # type: ignore[untyped-decorator]
def generated(
    model: Any, source: Any, prompts: list[list[int]], length: int, vocabulary: int
) -> tuple[float, float]:
    """``generate`` of transformers on the model itself."""
    tokens = torch.tensor(prompts)
    most = length - tokens.shape[1]
    began = time.perf_counter()
    model.generate(tokens, do_sample=True, top_k=0, max_new_tokens=most, min_new_tokens=most, pad_token_id=0)
    return 0.0, time.perf_counter() - began


WAYS: dict[str, Callable[..., tuple[float, float]]] = {
    "runner of the model in memory": in_memory,
    "the same, a teacher mixed in": mixed,
    "checkpoint written and loaded": reloaded,
    "transformers' generate": generated,
}


if __name__ == "__main__":
    main()
