"""The most that drafting with few pages of the cache can gain: the model drafts, its full cache verifies.

    python benchmarks/sparse_drafts.py [--shape M] [--weights int4] [--kv float16 int4] [--contexts 8192]
        [--pages 1024] [--drafts 2 4 6] [--rounds 5] [--tokens 4] [--threads 1] [--clock cpu]

Every draft is accepted, and choosing pages costs nothing: with t(n, c) the time of a step of n tokens over c
keys, k drafts and their verification make k + 1 tokens, so that

    gain = (k + 1) t(1, c) / (k t(1, pages) + t(k + 1, c))

Weights are random, since time does not depend on them; medians over rounds, all steps of a round in turn.
"""

from __future__ import annotations

import argparse
import statistics

import decode_cases
from decode_cases import CLOCKS, SHAPES, Attar, llama_config, random_runner

from attar.runtime.step import StepInput, TokenSpan


def main() -> None:
    """Print a row for each format of the cache and each context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="M", choices=sorted(SHAPES))
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--kv", nargs="+", default=["float16", "int4"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument("--pages", type=int, default=1024, help="keys that drafts read")
    parser.add_argument("--drafts", nargs="+", type=int, default=[2, 4, 6])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4, help="steps that are timed together")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", default="cpu", choices=sorted(CLOCKS))
    asked = parser.parse_args()
    decode_cases.CONTEXT = max(asked.contexts) + 256
    gains = " | ".join(f"{k} drafts" for k in asked.drafts)
    print(f"{asked.shape}, {asked.weights}; drafts read {asked.pages:,} keys; ms of a step, most gain\n")
    print(f"| KV | keys | one token | over {asked.pages:,} keys | {gains} |")
    print(f"|---|---|---|---|{'---|' * len(asked.drafts)}")
    for kv_dtype in asked.kv:
        runner = random_runner(
            llama_config(asked.shape), asked.weights, kv_dtype, asked.threads, clock=asked.clock
        )
        times = measured(runner, asked)
        for context in asked.contexts:
            full, few = times[1, context], times[1, asked.pages]
            cells = [f"{1000 * full:.1f}", f"{1000 * few:.1f}"]
            for k in asked.drafts:
                cells.append(f"{(k + 1) * full / (k * few + times[k + 1, context]):.2f}")
            print(f"| {kv_dtype} | {context:,} | {' | '.join(cells)} |", flush=True)
        runner.close()


def measured(runner: Attar, asked: argparse.Namespace) -> dict[tuple[int, int], float]:
    """Median seconds of a step of some tokens behind some keys."""
    counts = [1, *(k + 1 for k in asked.drafts)]
    cases = [(1, asked.pages), *((count, context) for count in counts for context in asked.contexts)]
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(asked.rounds + 1):
        for count, keys in cases:
            seconds[count, keys].append(steps(runner, count, keys, asked.tokens) / asked.tokens)
    return {case: statistics.median(some[1:]) for case, some in seconds.items()}  # the first warms up


def steps(runner: Attar, count: int, keys: int, tokens: int) -> float:
    """Seconds of steps of ``count`` tokens of one sequence, behind its first ``keys``."""
    blocks = tuple(range((keys + count + 15) // 16))
    step = StepInput(list(range(count)), (TokenSpan(0, keys, keys + count, blocks, count),))
    began = runner.clock()
    for _ in range(tokens):
        runner.runner.run(step).argmax(1)
    return runner.clock() - began


if __name__ == "__main__":
    main()
