"""Speculative decoding: what it brings, beside what the cost model says, and beside transformers.

    python benchmarks/speculate.py --parts ngram            n-grams over code, text only (seconds)
    python benchmarks/speculate.py --parts tiny             attar:tiny, each method and K, and as chosen
    python benchmarks/speculate.py --parts oracle           a 1.1 B-shaped target, acceptance as given
    python benchmarks/speculate.py --parts random           text where drafts fail, and drafts that always do
    python benchmarks/speculate.py --parts transformers     beside assisted generation and prompt lookup

``oracle``: Llamas of random weights. The target (shape M, int4) writes its greedy text once; then drafts are
right with chance a for each token, K of them in every pass, free or, with ``--draft-shape S``, at the time of
a draft model that is really run (int8). ``predicted`` is (1 - a^(K+1)) / (1 - a) t(1) / (t(K+1) + K d) from
times measured before. All timings are interleaved with plain decoding; the interval is 95 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from decode_cases import llama_config, random_tensor, tensor_shapes
from speculate_cases import Oracle, print_ngram_figures

from attar.cli.bench_speculate import profile_text
from attar.models.load import load_model, load_tokenizer
from attar.runtime.engine import Engine
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded, load
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.compiled_weights import model_weights
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.settings import BenchSettings, EngineSettings
from attar.runtime.speculate.build import speculator
from attar.runtime.speculate.choose import Chooser
from attar.runtime.speculate.cost import Cost
from attar.runtime.speculate.profile.fixed import Fixed
from attar.runtime.speculate.profile.passes import expected_tokens, speedup
from attar.runtime.speculate.profile.profile import profile
from attar.runtime.speculate.profile.prompts import prompt_sets
from attar.runtime.speculate.profile.run import run_profile
from attar.runtime.speculate.profile.settings import ProfileSettings
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.speculate.times import measure
from attar.runtime.speculate.wanted import Wanted
from attar.runtime.step import Span, Step


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
    parser.add_argument("--draft-shape", choices=["S", "M"])
    parser.add_argument("--draft", help="a draft model, for tiny and transformers")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def ngram(arguments: argparse.Namespace) -> None:
    """No model."""
    print_ngram_figures(count=arguments.prompts * 2, length=1500, most=40)


def tiny(arguments: argparse.Namespace) -> None:
    """With K fixed, then as the chooser likes."""
    methods: dict[str, Any] = {"speculate": ("ngram", "lookahead")}
    if arguments.draft:
        methods["draft"] = (arguments.draft,)
    for more in ({"drafts": tuple(arguments.drafts), "fixed": True}, {}):
        chosen = ProfileSettings(**methods, **more, sets=("code",), prompts=arguments.prompts)
        print(profile_text(_profiled(arguments, chosen)), end="\n\n")


def noise(arguments: argparse.Namespace) -> None:
    """The text is sampled hot, so that it does not repeat itself."""
    chosen = ProfileSettings(
        speculate=("ngram", "lookahead"), sets=("random",), prompts=arguments.prompts, temperature=2.0
    )
    print(profile_text(_profiled(arguments, chosen)), end="\n\n")
    llm, prompts, texts = _written(load("attar:tiny"), arguments)
    wrong = Oracle(texts, 0.0, vocabulary=llm.engine.vocabulary)
    made = Speculator(wrong, Chooser(Cost(measure(llm.engine.runner))), most=16)
    print(profile_text(_raced(llm.engine, {"always wrong": made}, prompts, arguments)))


def oracle(arguments: argparse.Namespace) -> None:
    """Speedup by K and a."""
    runner, step = _random(arguments.shape, "int4", arguments.threads), None
    times = measure(runner, {1: tuple(sorted({1, *(most + 1 for most in arguments.drafts)}))}, budget=10)[1]
    price = 0.0
    if arguments.draft_shape:
        step = _stepper(_random(arguments.draft_shape, "int8", arguments.threads))
        price = _seconds(step)
    print("t(T), ms:", {size: round(1e3 * seconds, 2) for size, seconds in times.items()}, end="; ")
    print(f"a draft: {1e3 * price:.2f} ms")
    llm, prompts, texts = _written(Loaded(runner), arguments)
    methods, predicted = {}, {}
    for chance in arguments.chances:
        for most in arguments.drafts:
            name = f"a {chance}, K {most}"
            proposer = Oracle(texts, chance, step, runner.vocabulary, seed=most)
            methods[name] = Speculator(proposer, Fixed(most), most=most)
            gain = expected_tokens(chance, most) * times[1] / (times[most + 1] + most * price)
            predicted[name] = gain
    print(f"{'':14}{'speedup':>9}{'95 %':>16}{'predicted':>11}{'tok/pass':>10}{'theory':>8}{'same':>6}")
    for row in _raced(llm.engine, methods, prompts, arguments).rows:
        if row.speedup is not None:
            reach, theory = f"{row.low:.2f} to {row.high:.2f}", expected_tokens(*_of(row.method))
            print(f"{row.method:14}{row.speedup:9.2f}{reach:>16}{predicted[row.method]:11.2f}", end="")
            print(f"{row.tokens_per_pass:10.2f}{theory:8.2f}{f'{row.same}/{row.texts}':>6}")


def transformers(arguments: argparse.Namespace) -> None:
    """Each tool's speculation over its own plain decoding, float32, the same prompts."""
    model, tokenizer = load_model("attar:tiny"), load_tokenizer("attar:tiny")
    helper = None if arguments.draft is None else load_model(arguments.draft)
    prompts = [tokenizer(text)["input_ids"] for text in prompt_sets(("code",), arguments.prompts)["code"]]
    loaded = load("attar:tiny", dtype="float32")
    plain = LLM.of(loaded)

    def ours(**wanted: Any) -> Callable[[list[int]], list[int]]:
        made = Engine(plain.engine.runner, plain.engine.scheduler, ends=loaded.ends,
                      vocabulary=plain.engine.vocabulary,
                      speculator=speculator(Wanted(**wanted), loaded, "attar:tiny"))  # fmt: skip
        return lambda ids: _generated(made, ids, arguments.tokens)

    def theirs(**options: Any) -> Callable[[list[int]], list[int]]:
        def run(ids: list[int]) -> list[int]:
            given = {"do_sample": False, "max_new_tokens": arguments.tokens, "pad_token_id": 0, **options}
            with torch.inference_mode():
                return list(model.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist())

        return run

    ways = {"attar": ours(), "attar, ngram": ours(speculate="ngram")}
    ways |= {"transformers": theirs(), "transformers, prompt lookup": theirs(prompt_lookup_num_tokens=10)}
    if helper is not None:
        ways["attar, draft"] = ours(draft=arguments.draft)
        ways["transformers, assisted"] = theirs(assistant_model=helper)
    _race(ways, prompts, arguments.rounds)


def _race(ways: dict[str, Callable[[list[int]], list[int]]], prompts: list[list[int]], rounds: int) -> None:
    """In turn; whole calls, prompts included, are timed."""
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in ways}
    texts: dict[str, list[list[int]]] = {name: [[] for _ in prompts] for name in ways}
    for turn in range(rounds + 1):
        for place, prompt in enumerate(prompts):
            for name, run in ways.items():
                began = time.perf_counter()
                texts[name][place] = run(prompt)
                if turn:
                    seconds[name][place].append(time.perf_counter() - began)
    for name in ways:
        took, base = ([statistics.median(s) for s in seconds[n]] for n in (name, name.split(",")[0]))
        gain = speedup(base, took)
        tokens = sum(map(len, texts[name])) / sum(took)
        same = sum(a == b for a, b in zip(texts[name], texts["attar"], strict=True))
        print(f"{name:30}{tokens:8.1f} tok/s{gain.value:7.2f} ({gain.low:.2f} to {gain.high:.2f})", end="")
        print(f"  same as attar {same}/{len(prompts)}")


def _profiled(arguments: argparse.Namespace, chosen: ProfileSettings) -> Any:
    bench = BenchSettings(tokens=arguments.tokens, rounds=arguments.rounds)
    return run_profile("attar:tiny", chosen, bench, EngineSettings())


def _raced(engine: Engine, methods: dict[str, Speculator], prompts: Any, arguments: Any) -> Any:
    return profile(
        engine, "target", methods, {"all": prompts}, tokens=arguments.tokens, rounds=arguments.rounds
    )


def _written(loaded: Loaded, arguments: Any) -> tuple[LLM, list[list[int]], list[list[int]]]:
    """Prompts of random tokens, and what plain decoding makes of them."""
    llm = LLM.of(loaded)
    draws = torch.Generator().manual_seed(0)
    shape = (arguments.prompts, 32)
    prompts: list[list[int]] = torch.randint(1, llm.engine.vocabulary, shape, generator=draws).tolist()
    texts = [prompt + _generated(llm.engine, prompt, arguments.tokens) for prompt in prompts]
    return llm, prompts, texts


def _generated(engine: Engine, prompt: Sequence[int], tokens: int) -> list[int]:
    engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=min(8, tokens)))
    found: list[int] = []
    while not engine.idle:
        for event in engine.step():
            found += event.token_ids
    return found


def _random(shape: str, kind: Any, threads: int) -> Compiled:
    config = llama_config(shape)
    weights = model_weights(config, tensor_shapes(config), random_tensor(config), weights=kind)
    return Compiled(weights, blocks=256, threads=threads)


def _stepper(runner: Compiled) -> Callable[[int], None]:
    """One step of a draft model at a place."""
    table = tuple(range(64))

    def step(place: int) -> None:
        runner.run(Step([place % 1000], (Span(0, place, place + 1, table, 1),))).argmax(1)

    return step


def _seconds(step: Callable[[int], None]) -> float:
    seen = []
    for place in range(64, 76):
        began = time.perf_counter()
        step(place)
        seen.append(time.perf_counter() - began)
    return statistics.median(seen)


def _of(name: str) -> tuple[float, int]:
    chance, most = name.removeprefix("a ").split(", K ")
    return float(chance), int(most)


PARTS = {"ngram": ngram, "tiny": tiny, "oracle": oracle, "random": noise, "transformers": transformers}

if __name__ == "__main__":
    main()
