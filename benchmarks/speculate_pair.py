"""attar's speculation and transformers', each over its own plain decoding, in turn on the same prompts."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attar.measure.speculation.metrics import speedup
from attar.measure.speculation.profile import second_engine
from attar.measure.speculation.prompts import prompt_sets
from attar.models.loading.load import load_model, load_tokenizer
from attar.runtime.engine import Engine
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.build import make_speculator
from attar.runtime.speculate.settings import SpeculationSettings

Way = Callable[[list[int]], list[int]]


def print_pair(prompts: int, tokens: int, rounds: int, draft: str | None) -> None:
    """attar:tiny in float32 on code: n-grams with prompt lookup, and a draft model with assisted
    generation."""
    tokenizer = load_tokenizer("attar:tiny")
    ids = [tokenizer(text)["input_ids"] for text in prompt_sets(("code",), prompts)["code"]]
    ways = _ours(tokens, draft) | _theirs(tokens, draft)
    _race(ways, ids, rounds)


def generated(engine: Engine, prompt: Sequence[int], tokens: int, salt: str = "") -> list[int]:
    """The greedy completion; a salt of its own keeps a call from the prefix cache of others."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=min(8, tokens))
    engine.add(prompt, params, salt=salt)
    tokens_out: list[int] = []
    while not engine.idle:
        for event in engine.step():
            tokens_out += event.token_ids
    return tokens_out


def _ours(tokens: int, draft: str | None) -> dict[str, Way]:
    loaded = load("attar:tiny", dtype="float32")
    plain, calls = LLM.of(loaded).engine, itertools.count()

    def way(**wanted: Any) -> Way:
        engine = second_engine(plain, make_speculator(SpeculationSettings(**wanted), loaded, "attar:tiny"))
        return lambda ids: generated(engine, ids, tokens, f"{next(calls)}")

    ways = {"attar": way(), "attar, ngram": way(speculate="ngram")}
    return ways if draft is None else ways | {"attar, draft": way(draft=draft, speculate="draft")}


def _theirs(tokens: int, draft: str | None) -> dict[str, Way]:
    model = load_model("attar:tiny")

    def way(**options: Any) -> Way:
        def run(ids: list[int]) -> list[int]:
            given = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": min(8, tokens)}
            with torch.inference_mode():
                output = model.generate(torch.tensor([ids]), **given, pad_token_id=0, **options)
            return list(output[0, len(ids) :].tolist())

        return run

    ways = {"transformers": way(), "transformers, prompt lookup": way(prompt_lookup_num_tokens=10)}
    if draft is None:
        return ways
    return ways | {"transformers, assisted": way(assistant_model=load_model(draft))}


def _race(ways: dict[str, Way], prompts: list[list[int]], rounds: int) -> None:
    """Whole calls, prompts included, are timed; a first round is not counted."""
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in ways}
    texts: dict[str, list[list[int]]] = {name: [[] for _ in prompts] for name in ways}
    for turn in range(rounds + 1):
        for index, prompt in enumerate(prompts):
            for name, run in ways.items():
                began = time.perf_counter()
                texts[name][index] = run(prompt)
                if turn:
                    seconds[name][index].append(time.perf_counter() - began)
    print(f"{'':30}{'tok/s':>8}{'speedup':>9}{'95 %':>16}{'same text':>11}")
    for name in ways:
        took, base = ([statistics.median(s) for s in seconds[n]] for n in (name, name.split(",")[0]))
        gain = speedup(base, took)
        speed = sum(map(len, texts[name])) / sum(took)
        same = sum(a == b for a, b in zip(texts[name], texts["attar"], strict=True))
        reach = f"{gain.low:.2f} to {gain.high:.2f}" if took != base else "-"
        print(f"{name:30}{speed:8.1f}{gain.value:9.2f}{reach:>16}{f'{same}/{len(prompts)}':>11}")
