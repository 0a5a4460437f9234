"""The decoding speed that plans predict, against that of their results.

    OMP_NUM_THREADS=1 python benchmarks/plan_speed.py --threads 1 --processor-time
    python benchmarks/plan_speed.py --model DIR --sizes 60MB 80MB --batch 1 4
    python benchmarks/plan_speed.py --engine llama.cpp --threads 1

For each size a plan is made with times of this machine's products, or of llama.cpp, run (rounded to nearest),
and its model decodes behind 128 tokens of context, the fastest of ``--tries``, as the plan's own step is
timed; for llama.cpp in its own llama-batched-bench, which is built where PATH has none.
Prints tokens a second of all sequences, predicted and measured. Beside other work give ``--processor-time``.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))

import environments
import processor_time

import attar
from attar.checkpoint.units import table
from attar.kernels.build import cache_folder
from attar.planner.llama_cpp_speed import PROGRAM, TRIES, step_seconds
from attar.planner.speed import CONTEXT
from attar.runtime.bench import measure
from attar.runtime.llm import LLM

TOKENS = 33


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument("--engine", default="attar", choices=("attar", "llama.cpp"))
    parser.add_argument("--data", default="auto", help="text of calibration")
    parser.add_argument("--sizes", nargs="+", default=["3.2MB", "4MB", "6MB"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS") or 0))
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/plan-speed"))
    processor_time.add_flag(parser)
    options = parser.parse_args()
    processor_time.check(parser, options)
    cache = (options.out / "cache").absolute()
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "kernels").exists():
        (cache / "kernels").symlink_to(cache_folder())
    os.environ["ATTAR_CACHE"] = str(cache)
    if options.engine == "llama.cpp":
        if options.threads:
            os.environ["LLAMA_ARG_THREADS"] = str(options.threads)
        if shutil.which(PROGRAM) is None:
            os.environ["PATH"] += f"{os.pathsep}{environments.program(PROGRAM).parent}"
    rows = [row(size, batch, options) for size in options.sizes for batch in options.batch]
    load = os.getloadavg()[0]
    print(f"{options.model} for {options.engine}, {options.threads or 'all'} threads, load {load:.1f}\n")
    print(table(("size", "batch", "layers", "predicted", "measured", "measured / predicted"), rows, left=1))


def row(size: str, batch: int, options: argparse.Namespace) -> tuple[str, ...]:
    """A plan, and how fast its model decodes."""
    path = options.out / f"{size}-{batch}.yaml"
    plan = attar.plan(
        options.model, path, size=size, speed="decode>=0.001", batch=batch, method="rtn", data=options.data,
        engine=options.engine, progress=False,
    )  # fmt: skip
    few = ("evaluate.tokens=64", "evaluate.speed=false", "evaluate.answers=0")
    run = attar.run(path, path.with_suffix(""), overrides=list(few), progress=False)
    measured = decoding(run.path / run.content["stages"][-1]["path"], batch, options)
    predicted = plan.point.decode_tokens_per_s
    assert predicted is not None, "a plan with a speed has one"
    return (
        size,
        str(batch),
        plan.point.name,
        f"{predicted:.1f}",
        f"{measured:.1f}",
        f"{measured / predicted:.2f}",
    )


def decoding(model: Path, batch: int, options: argparse.Namespace) -> float:
    """Tokens a second of all sequences."""
    if options.engine == "llama.cpp":
        program = shutil.which(PROGRAM)
        file = max(model.glob("*.gguf"), key=lambda file: file.stat().st_size)  # not the importance matrix
        assert program is not None, "put on PATH before any row"
        runs = max(options.tries // TRIES, 1)
        return batch / min(step_seconds(program, file, batch) for _ in range(runs))
    llm = LLM(model)
    tries = [measure(llm, batch, CONTEXT, TOKENS, random.Random(0)) for _ in range(options.tries)]
    return max(case.decode_tokens_per_s for case in tries)


if __name__ == "__main__":
    main()
