"""Speculative decoding: speedups, compared with the cost model and with transformers.

    python benchmarks/speculate.py --parts ngram            n-grams over code, text only (seconds)
    python benchmarks/speculate.py --parts suffix           suffix trees over code, text only (seconds)
    python benchmarks/speculate.py --parts asking           what asking costs where nothing is drafted
    python benchmarks/speculate.py --parts tiny             attar:tiny, each method and K, and as chosen
    python benchmarks/speculate.py --parts oracle           a 1.1 B-shaped target, acceptance as given
    python benchmarks/speculate.py --parts random           where drafts fail, or are always wrong
    python benchmarks/speculate.py --parts transformers     against assisted generation and prompt lookup

``oracle``: Llamas of random weights. The target (shape M) generates its greedy completion once; then
drafts are right with probability a for each token, K of them in every pass, free or, with ``--draft-shape
S``, at the time of a draft model that is really run; and as many as the policy chooses. ``predicted`` is

    theory t(1) / (t(K+1) + K d),    theory = (1 - a^(K+1)) / (1 - a) of the measured a

from times measured before. All timings are interleaved with plain decoding; the interval is 95 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import processor_time  # before attar
import torch
from decode_cases import llama_config, random_tensor, tensor_shapes
from speculate_asking import print_asking_figures
from speculate_cases import Oracle, print_ngram_figures, print_policy_figures, print_suffix_figures
from speculate_pair import generated, print_pair

from attar.cli.bench import profile_text
from attar.measure.speculation.profile import FixedPolicy, profile
from attar.measure.speculation.run import run_profile
from attar.runtime.engine import Engine
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded, load
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.compiled_weights import model_weights
from attar.runtime.settings import BenchSettings, EngineSettings
from attar.runtime.speculate.build import SETTLE
from attar.runtime.speculate.latency import Latency, by_tokens, measure
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.settings import ProfileSettings
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.step import StepInput, TokenSpan


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads")
    for part in arguments.parts:
        PARTS[part](arguments)
        print(flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=["ngram"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--chances", nargs="+", type=float, default=[0.6, 0.8, 0.9])
    parser.add_argument("--shape", choices=["S", "M"], default="M")
    parser.add_argument("--weights", choices=["bf16", "int8", "int4"], default="int4")
    parser.add_argument("--draft-shape", choices=["S", "M"])
    parser.add_argument("--draft-weights", choices=["bf16", "int8", "int4"], default="int4")
    parser.add_argument("--draft", help="a draft model, for tiny and transformers")
    parser.add_argument("--threads", type=int, default=2)
    processor_time.add_flag(parser)
    arguments = parser.parse_args()
    processor_time.check(parser, arguments)
    return arguments


def ngram(arguments: argparse.Namespace) -> None:
    """No model."""
    print_ngram_figures(count=arguments.prompts * 2, length=1500, most=40)


def suffix(arguments: argparse.Namespace) -> None:
    """No model."""
    for most in (4, 8, 16):
        print_suffix_figures(count=arguments.prompts * 2, length=1500, most=most)
    print_policy_figures(count=arguments.prompts, length=1000)


def asking(arguments: argparse.Namespace) -> None:
    """Of attar:tiny."""
    print_asking_figures(runs=4 * arguments.rounds)


def tiny(arguments: argparse.Namespace) -> None:
    """With K fixed, then as the policy chooses."""
    methods: dict[str, Any] = {"speculate": ("ngram", "suffix", "lookahead")}
    if arguments.draft:
        methods["draft"] = (arguments.draft,)
    for more in ({"drafts": tuple(arguments.drafts), "fixed": True}, {}):
        chosen = ProfileSettings(**methods, **more, sets=("code",), prompts=arguments.prompts)
        print(profile_text(_profiled(arguments, chosen)), end="\n\n")


def noise(arguments: argparse.Namespace) -> None:
    """Sampled at a high temperature, so that nothing repeats; and an oracle that is never right."""
    chosen = ProfileSettings(
        speculate=("ngram", "lookahead"), sets=("random",), prompts=arguments.prompts, temperature=2.0
    )
    print(profile_text(_profiled(arguments, chosen)), end="\n\n")
    shaped = _random(arguments.shape, arguments.weights, arguments.threads)
    for loaded in (load("attar:tiny"), Loaded(shaped)):
        llm, prompts, texts = _written(loaded, arguments)
        wrong = Oracle(texts, 0.0, vocabulary=llm.engine.vocabulary)
        speculator = Speculator(wrong, _policy(by_tokens(measure(llm.engine.runner)), {}), most=16)
        print(profile_text(_raced(llm.engine, {"always wrong": speculator}, prompts, arguments)))


def oracle(arguments: argparse.Namespace) -> None:
    """Speedup by K and a, and with K as the policy chooses."""
    runner, step = _random(arguments.shape, arguments.weights, arguments.threads), None
    counts = sorted({1, *(most + 1 for most in arguments.drafts)})
    times = measure(runner, {1: tuple(counts)}, budget=10)[1]
    price = 0.0
    if arguments.draft_shape:
        step = _stepper(_random(arguments.draft_shape, arguments.draft_weights, arguments.threads))
        price = _seconds(step)
    shown = {size: round(1e3 * seconds, 2) for size, seconds in times.items()}
    print(f"{arguments.shape} {arguments.weights}, t(T), ms: {shown}")
    if price:
        print(f"a draft ({arguments.draft_shape} {arguments.draft_weights}): {1e3 * price:.2f} ms")
    llm, prompts, texts = _written(Loaded(runner), arguments)
    methods, took = {}, {}
    for chance in arguments.chances:
        for most in arguments.drafts:
            name = f"a {chance}, K {most}"
            proposer = Oracle(texts, chance, step, runner.vocabulary, seed=most)
            methods[name] = Speculator(proposer, FixedPolicy(most), most=most)
            took[name] = (times[most + 1] + most * price) / times[1]
        name, most = f"a {chance}, chosen", max(arguments.drafts)
        drafting = {1: price} if price else {}
        methods[name] = Speculator(
            Oracle(texts, chance, step, runner.vocabulary), _policy(times, drafting), most=most
        )
    print(f"{'':16}{'speedup':>9}{'95 %':>16}{'predicted':>11}{'tok/pass':>10}{'theory':>8}{'same':>6}")
    for row in _raced(llm.engine, methods, prompts, arguments).rows:
        if row.speedup is not None:
            reach = f"{row.low:.2f} to {row.high:.2f}"
            known = row.method in took
            gain = f"{row.theory / took[row.method]:11.2f}" if known else f"{'':11}"
            print(f"{row.method:16}{row.speedup:9.2f}{reach:>16}{gain}{row.tokens_per_pass:10.2f}", end="")
            print(f"{row.theory:8.2f}{f'{row.same}/{row.texts}':>6}")


def _policy(times: dict[int, float], drafting: dict[int, float]) -> DraftPolicy:
    """As a speculator has it."""
    return DraftPolicy(Latency(times, drafting, SETTLE))


def _profiled(arguments: argparse.Namespace, chosen: ProfileSettings) -> Any:
    bench = BenchSettings(tokens=arguments.tokens, rounds=arguments.rounds)
    return run_profile("attar:tiny", chosen, bench, EngineSettings())


def _raced(engine: Engine, methods: dict[str, Speculator], prompts: Any, arguments: Any) -> Any:
    return profile(
        engine, "target", methods, {"all": prompts}, tokens=arguments.tokens, rounds=arguments.rounds
    )


def _written(loaded: Loaded, arguments: Any) -> tuple[LLM, list[list[int]], list[list[int]]]:
    """Prompts of random tokens, and their completions by plain decoding."""
    llm = LLM.of(loaded)
    draws = torch.Generator().manual_seed(0)
    shape = (arguments.prompts, 32)
    prompts: list[list[int]] = torch.randint(1, llm.engine.vocabulary, shape, generator=draws).tolist()
    texts = [prompt + generated(llm.engine, prompt, arguments.tokens) for prompt in prompts]
    return llm, prompts, texts


def _random(shape: str, kind: Any, threads: int) -> Compiled:
    config = llama_config(shape)
    weights = model_weights(config, tensor_shapes(config), random_tensor(config), weights=kind)
    return Compiled(weights, blocks=256, threads=threads)


def _stepper(runner: Compiled) -> Callable[[int], None]:
    """One step of a draft model at a position."""
    table = tuple(range(64))

    def step(position: int) -> None:
        runner.run(StepInput([position % 1000], (TokenSpan(0, position, position + 1, table, 1),))).argmax(1)

    return step


def _seconds(step: Callable[[int], None]) -> float:
    seen = []
    for position in range(64, 76):
        began = time.perf_counter()
        step(position)
        seen.append(time.perf_counter() - began)
    return statistics.median(seen)


def transformers(arguments: argparse.Namespace) -> None:
    """Each tool's speculation over its own plain decoding, float32, the same prompts."""
    print_pair(arguments.prompts, arguments.tokens, arguments.rounds, arguments.draft)


PARTS = {
    "ngram": ngram,
    "suffix": suffix,
    "asking": asking,
    "tiny": tiny,
    "oracle": oracle,
    "random": noise,
    "transformers": transformers,
}

if __name__ == "__main__":
    main()
