"""Decoding and prompts: the compiled runner beside transformers and beside what the memory gives.

    python benchmarks/decode.py [--shapes S M] [--weights bf16 int8 int4] [--rounds 5] [--tokens 64]
        [--peers transformers] [--threads 2]

Models are Llamas of random weights: S of 88 M parameters, M of 1.1 B. Everything is measured in one process,
case after case, a round of all before the next round, every second round in reverse; medians of the rounds:

    decode 1, 8    tokens/s in all, one token a step for 1 or 8 sequences, from position 128 on
    decode 4k      the same for one sequence from position 4000 on
    prompt 512     tokens/s
    GB/s           bytes of packed weights times steps a second
    memory         GB/s of reading 256 MB in huge pages by the same threads, four streams each, measured
                   right before and after every case; ``part`` is GB/s as a part of it

The machine's bandwidth changes by the minute: compare what stands in one run. ``--peers transformers`` runs
its own modules in bf16 with a static cache beside. llama.cpp is measured by ``benchmarks/peers``, when its
environment is there (to come).
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from attar.kernels.memory import huge
from attar.kernels.product import Team
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.compiled_weights import model_weights
from attar.runtime.step import Span, Step

SHAPES: dict[str, dict[str, int]] = {
    "S": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 8192,
    },
    "M": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
    },
}
CONTEXT = 4352
PROBE = 1 << 28
CASES = {"decode 1": (1, 128), "decode 8": (8, 128), "decode 4k": (1, 4000)}  # sequences, first position
PROMPT = 512


@dataclass
class Case:
    """Something timed in every round.

    Attributes:
        name: what is printed.
        run: does it once; returns tokens per second and steps per second.
        nbytes: weights that a step reads; 0: not told.
        seen: (tokens/s, part of the memory's bandwidth) of each round.
    """

    name: str
    run: Callable[[], tuple[float, float]]
    nbytes: int = 0
    seen: list[tuple[float, float, float]] = field(default_factory=list)


def main() -> None:
    arguments = parse()
    print(f"{platform.machine()}, torch {torch.__version__}, {arguments.threads} threads")
    torch.set_num_threads(arguments.threads)
    with Team(arguments.threads) as team:
        for shape in arguments.shapes:
            config = LlamaConfig(**SHAPES[shape], max_position_embeddings=CONTEXT, tie_word_embeddings=False)
            cases = list(our_cases(config, arguments))
            if "transformers" in arguments.peers:
                cases += transformers_cases(config, arguments)
            measure(cases, team, arguments.rounds)
            for case in cases:
                report(shape, case)
            del cases
            gc.collect()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["S", "M"], choices=sorted(SHAPES))
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--peers", nargs="*", default=[], choices=["transformers"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


# ---- ours


def our_cases(config: Any, arguments: argparse.Namespace) -> Iterator[Case]:
    """The compiled runner with each kind of weights."""
    for kind in arguments.weights:
        weights = model_weights(config, tensor_shapes(config), random_tensor(config), weights=kind)
        blocks = CONTEXT // 16 + 8 * 16
        runner = Compiled(weights, blocks=blocks, threads=arguments.threads)
        for name, (count, start) in CASES.items():
            decode = our_decode(runner, count, start, arguments.tokens)
            yield Case(f"attar {kind:<5} {name}", decode, weights.nbytes)
        yield Case(f"attar {kind:<5} prompt {PROMPT}", our_prompt(runner))


def our_decode(runner: Compiled, count: int, start: int, tokens: int) -> Callable[[], tuple[float, float]]:
    """`count` sequences from position `start` on; each has blocks of its own."""
    each = min(CONTEXT, start + tokens + 16) // 16
    tables = [tuple(range(n * each, (n + 1) * each)) for n in range(count)]

    def run() -> tuple[float, float]:
        began = time.perf_counter()
        for at in range(start, start + tokens):
            spans = tuple(Span(n, at, at + 1, table, 1) for n, table in enumerate(tables))
            runner.run(Step([at % 1000] * count, spans)).argmax(1)
        steps = tokens / (time.perf_counter() - began)
        return count * steps, steps

    return run


def our_prompt(runner: Compiled) -> Callable[[], tuple[float, float]]:
    """A prompt of PROMPT tokens in one step."""
    step = Step(list(range(PROMPT)), (Span(0, 0, PROMPT, tuple(range(PROMPT // 16)), 1),))

    def run() -> tuple[float, float]:
        began = time.perf_counter()
        runner.run(step)
        steps = 1 / (time.perf_counter() - began)
        return PROMPT * steps, steps

    return run


def tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Of a Llama."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def random_tensor(config: Any) -> Callable[[str], Tensor]:
    """Norms of ones and weights N(0, 0.02^2)."""
    shapes = tensor_shapes(config)

    def load(name: str) -> Tensor:
        shape = shapes[name]
        return torch.ones(shape) if len(shape) == 1 else (torch.randn(shape) * 0.02).bfloat16()

    return load


# ---- peers


def transformers_cases(config: Any, arguments: argparse.Namespace) -> list[Case]:
    """Its own modules in bf16, a static cache."""
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    cases = []
    for name, (count, start) in CASES.items():
        if start > PROMPT:
            continue  # its prompt takes minutes
        cases.append(Case(f"transformers {name}", peer_decode(model, count, start, arguments.tokens)))
    ids = torch.arange(PROMPT)[None]

    def prompt() -> tuple[float, float]:
        with torch.inference_mode():
            began = time.perf_counter()
            model(ids, logits_to_keep=1)
            steps = 1 / (time.perf_counter() - began)
        return PROMPT * steps, steps

    return [*cases, Case(f"transformers prompt {PROMPT}", prompt)]


def peer_decode(model: Any, count: int, start: int, tokens: int) -> Callable[[], tuple[float, float]]:
    """One token a step for `count` rows, behind a prompt that is not timed."""

    def run() -> tuple[float, float]:
        with torch.inference_mode():
            cache = StaticCache(config=model.config, max_cache_len=start + tokens + 1)
            ids = torch.zeros(count, start, dtype=torch.int64)
            model(ids, past_key_values=cache, logits_to_keep=1)
            began = time.perf_counter()
            for _ in range(tokens):
                model(ids[:, :1], past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            steps = tokens / (time.perf_counter() - began)
        return count * steps, steps

    return run


# ---- measuring


def measure(cases: list[Case], team: Team, rounds: int) -> None:
    """Every case once a round, after one that does not count; the memory's bandwidth around each."""
    room = huge(PROBE).fill_(1)
    for number in range(rounds + 1):
        for case in cases if number % 2 else cases[::-1]:
            before = bandwidth(team, room)
            tokens, steps = case.run()
            after = bandwidth(team, room)
            if number:
                case.seen.append((tokens, steps * case.nbytes / 1e9, (before + after) / 2))


def bandwidth(team: Team, room: Tensor) -> float:
    """GB/s, the better of two readings."""
    best = 0.0
    for _ in range(2):
        began = time.perf_counter()
        team.read(room)
        best = max(best, PROBE / (time.perf_counter() - began) / 1e9)
    return best


def report(shape: str, case: Case) -> None:
    """A line."""
    tokens = statistics.median(tokens for tokens, _, _ in case.seen)
    line = f"{shape}  {case.name:<24} {tokens:9.1f} tokens/s"
    if case.nbytes:
        rate = statistics.median(rate for _, rate, _ in case.seen)
        memory = statistics.median(memory for _, _, memory in case.seen)
        part = statistics.median(rate / memory for _, rate, memory in case.seen)
        line += f"   {rate:5.1f} GB/s   memory {memory:5.1f}   part {part:4.0%}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
