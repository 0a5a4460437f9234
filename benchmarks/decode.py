"""Decoding and prompts: the compiled runner against llama.cpp, transformers and what the memory gives.

    python benchmarks/decode.py [--shapes S M] [--weights int4 int8 bf16] [--peers llama.cpp transformers]
        [--tasks "decode 1" ...] [--rounds 5] [--tokens 64] [--threads 2] [--kv float16 ...]
        [--activations 16] [--sparsity 2:4 50%] [--clock cpu] [--layers 8]

Models are of random weights: Llamas S of 88 M parameters and M of 1.1 B; mixtures of experts 1B-A0.3B (16
layers of 1024, 8 of 32 experts of 640 neurons: 1.1 B parameters, 0.35 B of them active) and 7B-A1B (the
shape of OLMoE-1B-7B: 16 layers of 2048, 8 of 64 experts of 1024). llama.cpp's are of Q4_0, Q8_0 and BF16,
transformers' always of bf16. A round goes through the tasks, and in each through the runners, every second
round in reverse; a ratio is the median over rounds of ours over the peer's in the same round.

    decode 1, 8    tokens/s in all, one token a step for 1 or 8 sequences, from position 128 on
    decode 4k      the same for one sequence from position 4000 on (llama.cpp and ours)
    prompt 512     tokens/s
    GB/s           bytes of packed weights, and of keys and values, times steps a second; of a mixture the
                   active experts, and for one sequence only
    --sparsity     the same model with two of each four weights zero (2:4), or half of them anywhere (50%),
                   head and embedding dense: tokens/s over those of the dense model, the goal at batch 1
    --kv           the format of keys and values; of several each but the first is a runner of its own, and
                   its tokens/s stand over those of the first
    memory         GB/s of reading 256 MB in huge pages by the same threads, four streams each, measured
                   right before and after; ``part`` is GB/s as a part of it
    --clock cpu    seconds are the processor's, of all threads of a runner, where others use the machine: with
                   one thread those of an idle machine, but for caches and memory that others use as well
    --layers       so many layers of each shape, where memory lacks; embedding and head stay

The machine's bandwidth changes by the minute, and other programs take theirs: compare what stands in one run.
llama.cpp runs in the environment of ``benchmarks/peers/environments.py``.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from decode_cases import (
    CLOCKS,
    CONTEXT,
    LLAMA_CPP,
    SHAPES,
    Attar,
    LlamaCpp,
    Runner,
    Transformers,
    llama_config,
    random_runner,
)
from torch import Tensor

from attar.kernels.memory import huge_pages
from attar.kernels.product import ThreadPool

PROBE = 1 << 28
TASKS = {"decode 1": (1, 128), "decode 8": (8, 128), "decode 4k": (1, 4000), "prompt 512": (512, 0)}
SPARSE = ("2:4", "50%")
GOALS = {"int4": 1.2, "bf16": 1.45}  # tokens/s of 2:4 weights over those of dense ones, batch 1
KV_BYTES = {"float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5, "float32": 4.0}


@dataclass
class Timed:
    """One runner in one task.

    Attributes:
        tokens: a second, of each round.
        part: of the memory's bandwidth, of each round; and GB/s.
    """

    tokens: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def main() -> None:
    arguments = parse()
    print(
        f"{platform.machine()}, torch {torch.__version__}, {arguments.threads} threads, KV {arguments.kv[0]}",
        f"activations of {arguments.activations} bits",
    )
    torch.set_num_threads(arguments.threads)
    for shape in arguments.shapes:
        if arguments.layers:
            SHAPES[shape]["num_hidden_layers"] = arguments.layers
        for kind in arguments.weights:
            runners = dict(built(shape, kind, arguments))
            with ThreadPool(arguments.threads) as pool:
                seen = measure(runners, shape, pool, arguments)
            for task in arguments.tasks:
                report(f"{shape} {kind:<4}", task, {name: seen[name, task] for name in runners})
            for runner in runners.values():
                runner.close()
            del runners
            gc.collect()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["S", "M"], choices=sorted(SHAPES))
    parser.add_argument("--weights", nargs="+", default=["int4", "int8", "bf16"])
    parser.add_argument(
        "--peers", nargs="*", default=["llama.cpp", "transformers"], choices=["llama.cpp", "transformers"]
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", nargs="+", default=["float16"], choices=sorted(KV_BYTES))
    parser.add_argument("--sparsity", nargs="*", default=[], choices=SPARSE)
    parser.add_argument("--activations", type=int, default=16, choices=[8, 16])
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS))
    parser.add_argument("--layers", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.clock == "cpu" and (arguments.threads > 1 or "transformers" in arguments.peers):
        parser.error(
            "--clock cpu compares one thread (--threads 1) of attar and llama.cpp (--peers llama.cpp)"
        )
    return arguments


def built(shape: str, kind: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Runner]]:
    """The runners, ours first."""
    config = llama_config(shape)
    settings = kind, arguments.kv[0], arguments.threads, arguments.activations
    yield "attar", random_runner(config, *settings, clock=arguments.clock)
    for kv in arguments.kv[1:]:
        yield kv, random_runner(config, kind, kv, *settings[2:], clock=arguments.clock)
    for sparsity in arguments.sparsity:
        yield sparsity, random_runner(config, *settings, sparsity, arguments.clock)
    if "llama.cpp" in arguments.peers:
        job = {"shape": SHAPES[shape], "type": LLAMA_CPP[kind], "context": CONTEXT}
        yield "llama.cpp", LlamaCpp(**job, threads=arguments.threads, clock=arguments.clock)
    if "transformers" in arguments.peers:
        yield "transformers", Transformers(config)


def measure(
    runners: dict[str, Runner], shape: str, pool: ThreadPool, arguments: argparse.Namespace
) -> dict[tuple[str, str], Timed]:
    """Every task once a round by every runner, after a round that does not count."""
    buffer = huge_pages(PROBE).fill_(1)
    seen = {(name, task): Timed() for name in runners for task in arguments.tasks}
    for number in range(arguments.rounds + 1):
        for task in arguments.tasks:
            for name in list(runners)[:: 1 if number % 2 else -1]:
                if name == "transformers" and task == "decode 4k":
                    continue  # its prompt takes minutes
                before = bandwidth(pool, buffer)
                tokens, steps = rates(runners[name], task, arguments.tokens)
                memory = (before + bandwidth(pool, buffer)) / 2
                if number:
                    times = seen[name, task]
                    times.tokens.append(tokens)
                    times.memory.append(memory)
                    known = "num_experts" not in SHAPES[shape] or TASKS[task][0] == 1
                    known = known and arguments.clock == "wall"
                    if isinstance(runner := runners[name], Attar) and known:
                        kv = name if name in KV_BYTES else arguments.kv[0]
                        cache = cache_bytes(shape, task, arguments.tokens, kv)
                        times.rate.append(steps * (runner.nbytes + cache) / 1e9)
    return seen


def rates(runner: Runner, task: str, tokens: int) -> tuple[float, float]:
    """Tokens and steps a second."""
    count, start = TASKS[task]
    if task.startswith("prompt"):
        seconds = runner.prompt(count)
        return count / seconds, 1 / seconds
    seconds = runner.steps(count, start, tokens)
    return count * tokens / seconds, tokens / seconds


def cache_bytes(shape: str, task: str, tokens: int, kv: str) -> float:
    """Keys and values that a step reads."""
    count, start = TASKS[task]
    if task.startswith("prompt"):
        return 0.0
    sizes = SHAPES[shape]
    width = 2 * sizes["num_key_value_heads"] * sizes["hidden_size"] // sizes["num_attention_heads"]
    limit = min(start + tokens // 2, CONTEXT)
    return count * limit * sizes["num_hidden_layers"] * width * KV_BYTES[kv]


def bandwidth(pool: ThreadPool, buffer: Tensor) -> float:
    """GB/s, the best of three readings."""
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        pool.read(buffer)
        best = max(best, PROBE / (time.perf_counter() - began) / 1e9)
    return best


def report(label: str, task: str, seen: dict[str, Timed]) -> None:
    """A line."""
    ours = seen["attar"]
    line = f"{label} {task:<10} {statistics.median(ours.tokens):8.1f} tokens/s"
    if task.startswith("decode") and ours.rate:
        rate, memory = statistics.median(ours.rate), statistics.median(ours.memory)
        part = statistics.median(a / b for a, b in zip(ours.rate, ours.memory, strict=True))
        line += f"  {rate:5.1f} of {memory:5.1f} GB/s ({part:4.0%})"
    for name, peer in seen.items():
        if name == "attar" or not peer.tokens:
            continue
        if peer.rate or name in (*SPARSE, *KV_BYTES):
            print(line, flush=True)
            line = variant_line(label, task, name, peer, ours)
            continue
        ratios = [a / b for a, b in zip(ours.tokens, peer.tokens, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        line += f"  {name} {statistics.median(peer.tokens):7.1f}: {statistics.median(ratios):.2f}x ({spread})"
    print(f"{line}  load {os.getloadavg()[0]:.1f}", flush=True)


def variant_line(label: str, task: str, name: str, variant: Timed, ours: Timed) -> str:
    """Of a sparse model or another format of keys and values, over the first runner."""
    ratios = [a / b for a, b in zip(variant.tokens, ours.tokens, strict=True)]
    other = "dense" if name in SPARSE else "the first"
    goal = GOALS.get(label.split()[1]) if name == "2:4" and task.startswith("decode") else None
    words = f"  goal {goal}x" if goal and TASKS[task][0] == 1 else ""
    return (
        f"{label} {task:<10} {statistics.median(variant.tokens):8.1f} tokens/s  {name} over {other}: "
        f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}){words}"
    )


if __name__ == "__main__":
    main()
