"""What a step costs besides the model: scheduling, sampling, detokenizing.

    python benchmarks/engine.py [--batches 1 8 32] [--tokens 200] [--vocabulary 32000] [--compiled]

A runner that returns the same logits at once is decoded with; milliseconds a step, the median of the steps,
for each way of choosing tokens. ``text`` turns the tokens into text with attar:tiny's tokenizer. With
``--compiled`` the same with the compiled runner (88 M parameters, int8 weights) instead: its own time for a
step alone, called directly, stands before the engine's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from decode_cases import SHAPES
from torch import Tensor

from attar.models.loading.load import load_tokenizer
from attar.runtime.admission import Limits
from attar.runtime.engine import Engine
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.scheduler import Scheduler
from attar.runtime.step import Runner, StepInput, TokenSpan

PROMPT = 32
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, no text": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(seed=1),
    "top-p 0.9, T 0.8": SamplingParams(seed=1, temperature=0.8, top_p=0.9),
    "top-k 40, T 0.8": SamplingParams(seed=1, temperature=0.8, top_k=40),
    "penalties, T 0.8": SamplingParams(seed=1, temperature=0.8, frequency_penalty=0.5),
    "logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}


class Still:
    """A runner that computes nothing.

    Args:
        vocabulary: columns of its logits.
    """

    block_size, capacity, context = 16, 8192, None

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._logits = 3.0 * torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(0))

    def run(self, step: StepInput) -> Tensor:
        return self._logits[: step.wants]

    def fork(self, sequence: int, child: int) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    runner: Any = compiled(arguments) if arguments.compiled else Still(arguments.vocabulary)
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, vocabulary {runner.vocabulary:,}; ms a step"
    )
    print(f"{'':18}" + "".join(f"{f'batch {batch}':>10}" for batch in arguments.batches))
    if arguments.compiled:
        times = [alone(runner, batch, arguments.tokens) for batch in arguments.batches]
        print(f"{'the model alone':18}" + "".join(f"{each:10.3f}" for each in times))
    for name, params in WAYS.items():
        text = None if name.endswith("no text") else words()
        times = [steps(runner, params, batch, arguments.tokens, text) for batch in arguments.batches]
        print(f"{name:18}" + "".join(f"{each:10.3f}" for each in times))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    return parser.parse_args()


def steps(runner: Runner, params: SamplingParams, batch: int, tokens: int, text: Any) -> float:
    """Milliseconds of a decoding step: the median."""
    params = replace(params, max_tokens=tokens + 1)
    manager = BlockManager(runner.capacity, runner.block_size)
    scheduler = Scheduler(manager, Limits(step_tokens=max(512, batch * PROMPT), sequences=64), memory=runner)
    engine = Engine(runner, scheduler, decode=text)
    for number in range(batch):
        engine.add([number + 1] * PROMPT, params)
    engine.step()
    seen = []
    while not engine.idle:
        began = time.perf_counter()
        engine.step()
        seen.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seen[: tokens - 1])


def words() -> Callable[[Sequence[int], bool], str]:
    """attar:tiny's tokenizer; ids beyond its vocabulary begin again from 0."""
    tokenizer = load_tokenizer("attar:tiny")
    count = len(tokenizer)

    def decode(ids: Sequence[int], skip: bool) -> str:
        folded = [id % count for id in ids]
        return str(tokenizer.decode(folded, skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    return decode


def compiled(arguments: argparse.Namespace) -> Any:
    """The compiled runner of random weights: a Llama of 88 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from attar.runtime.runner.compiled import Compiled
    from attar.runtime.runner.compiled_weights import model_weights

    config = LlamaConfig(**SHAPES["S"], max_position_embeddings=4096, tie_word_embeddings=False)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}

    def load(name: str) -> Tensor:
        return 0.02 * torch.randn(shapes[name])

    return Compiled(
        model_weights(config, shapes, load, weights="int8"), blocks=2048, threads=arguments.threads
    )


def alone(runner: Runner, batch: int, tokens: int) -> float:
    """Milliseconds of a step that is handed to the runner directly: the median."""
    size = (PROMPT + tokens) // runner.block_size + 1
    tables = [tuple(range(n * size, (n + 1) * size)) for n in range(batch)]
    seen = []
    for place in range(PROMPT, PROMPT + tokens):
        spans = tuple(TokenSpan(n, place, place + 1, table, 1) for n, table in enumerate(tables))
        began = time.perf_counter()
        runner.run(StepInput([1] * batch, spans))
        seen.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seen)


if __name__ == "__main__":
    main()
