"""Drafts from another process, over a proxy that delays: speedups over plain decoding, and against one
process.

    python benchmarks/services.py --shape M --draft-shape S --chances 0 0.8 --delays 0 5 20
    python benchmarks/services.py --asleep 18 2 1.6 --chances 0 0.3 0.8 --delays 0 5 20

Llamas of random weights (S: 88 M parameters, M: 1.1 B). The target generates its greedy completions once;
then a drafter that runs the draft model for every token drafts each token right with probability a, by its
position: in this process, or in one of its own behind gRPC, with a proxy between that holds every byte for
some milliseconds in both directions. Target and draft service have a thread each; with ``--elsewhere`` the
service sleeps for the time of its draft model, as if it ran on a machine of its own. With ``--asleep`` the
target sleeps for the time of its passes, too, so that other work on the machine hardly counts: PASS ms for
one token, MORE for each further one, STEP for a token of the drafter.

All ways take turns with plain decoding, and each completion is compared with the plain one of its turn: the
speed over plain is the geometric mean of prompts times rounds such pairs, with Student's interval of 95 %.
``loss`` says whether it is slower than plain by more than 3 %: "no" and "yes" where the whole interval is on
one side, else "open". What speculation may lose is some passes and a share of the time (``loss_budget.py``),
so short texts may lose more. ``same`` counts completions that equal those of plain decoding.

On paper, per pass with K drafts, t(K+1) and K steps of d seconds:

    in one process    E / (t(K+1) + K d)          E = (1 - a^(K+1)) / (1 - a)
    as services       E / (t(K+1) + (1 - a^(K+1)) (R + K d))

with R the round trip: a draft that is accepted whole costs nothing, for the next one is there already.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from decode_cases import llama_config, random_tensor, tensor_shapes

from attar.measure.speculation.profile import profile
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.compiled_weights import model_weights
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.latency import Latency, measure
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftRequest, DraftTimes
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.step import Runner, StepInput, TokenSpan
from attar.serving.services.build import hello_of
from attar.serving.services.channel import DRAFT, Network, Security, listen
from attar.serving.services.draft_service import DraftService
from attar.serving.services.draft_stream import serve_drafts
from attar.serving.services.offer_proposer import OfferPolicy, OfferProposer
from attar.serving.services.replicas import Replicas

PROMPT, MOST = 32, 16
BLOCKS = 256  # of the pool
CONTEXT = 16 * BLOCKS  # tokens
LEAST = 0.97  # of the plain speed
PROXY = Path(__file__).with_name("delay_proxy.py")


class Asleep:
    """A target without a model: each pass takes its time and no processor, and every prompt is continued
    alike.

    Args:
        first, more: seconds of a pass over one token, and of each further one.
    """

    repeats, capacity, block_size, context, vocabulary = True, BLOCKS, 16, CONTEXT, 1000

    def __init__(self, first: float, more: float) -> None:
        self.first, self.more = first, more
        draws = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, self.vocabulary, (CONTEXT + 1,), generator=draws)

    def run(self, step: StepInput) -> torch.Tensor:
        time.sleep(self.first + self.more * (step.count - 1))
        logits = torch.zeros(step.wants, self.vocabulary)
        next_tokens = self.tokens[torch.from_numpy(step.positions[step.rows] + 1)]
        return logits.scatter_(1, next_tokens[:, None], 1.0)

    def move(self, pairs: Any) -> None:
        pass

    def fork(self, sequence: int, child: int) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass


class Steady:
    """Knows the completions, and drafts the token at each position right or not, always the same.

    Args:
        step: run for each draft, as a draft model would be.
    """

    is_free_of_compute, samples_from_q, needs_full_tree, confident, trees = False, False, False, False, False
    name, most, branches = "oracle", MOST, 1

    def __init__(
        self, texts: Sequence[Sequence[int]], chance: float, step: Callable[[int], None], vocabulary: int
    ) -> None:
        self.texts = {tuple(text[:PROMPT]): list(text) for text in texts}
        self.chance, self.step, self.seconds = chance, step, 0.0
        self.vocabulary = vocabulary

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._draft(request) for request in requests]

    def observe(self, feedback: Any) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass

    def times(self) -> DraftTimes:
        return DraftTimes({1: self.seconds})

    def _draft(self, request: DraftRequest) -> Draft | None:
        text = self.texts.get(tuple(request.tokens[:PROMPT]), [])
        start = len(request.tokens)
        tokens = []
        for position in range(start, min(start + request.most, len(text))):
            self.step(position)
            right = random.Random(position).random() < self.chance
            tokens.append(text[position] if right else (text[position] + 1) % self.vocabulary)
        return Draft.chain(tokens) if tokens else None


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    if arguments.drafts_of:
        serve(arguments)
    else:
        compare(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=["S", "M"], default="M")
    parser.add_argument("--draft-shape", choices=["S", "M"], default="S")
    parser.add_argument("--weights", choices=["bf16", "int8", "int4"], default="int4")
    parser.add_argument("--chances", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument(
        "--delays", nargs="+", type=float, default=[0, 5, 20], help="ms of the proxy, one way"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="times each prompt is completed")
    parser.add_argument(
        "--elsewhere", action="store_true", help="the service takes no processor of this machine"
    )
    parser.add_argument(
        "--asleep", nargs=3, type=float, metavar=("PASS", "MORE", "STEP"), help="ms; nothing takes processors"
    )
    parser.add_argument("--drafts-of", help=argparse.SUPPRESS)  # a file of texts: run the draft service
    arguments = parser.parse_args()
    if PROMPT + arguments.tokens > CONTEXT:
        parser.error(f"--tokens is at most {CONTEXT - PROMPT}")
    return arguments


def compare(arguments: argparse.Namespace) -> None:
    """The table."""
    if arguments.asleep:
        first, more, _ = (one / 1e3 for one in arguments.asleep)
        loaded = Loaded(cast(Runner, Asleep(first, more)))
    else:
        loaded = Loaded(make_runner(arguments.shape, arguments.weights))
    step, seconds = drafting_step(arguments)
    passes = measure(loaded.runner, {1: (1, 2, 3, 5, 9, 17)}, budget=6)[1]
    shown = {size: round(1e3 * one, 1) for size, one in passes.items()}
    name = "asleep" if arguments.asleep else f"{arguments.shape} {arguments.weights}"
    print(
        f"{name}, t(n), ms: {shown}; a draft: {1e3 * seconds:.1f} ms",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        file, network = Path(folder) / "texts.json", Network()
        stack.callback(network.close)
        prompts, texts = write_texts(loaded, arguments)
        file.write_text(json.dumps(texts))
        methods, papers = {}, {}
        for chance in arguments.chances:
            proposer = Steady(texts, chance, step, loaded.runner.vocabulary)
            proposer.seconds = seconds
            policy = DraftPolicy(Latency(passes, {1: seconds}), MOST)
            methods[f"a {chance:g}, one process"] = Speculator(proposer, policy, most=MOST)
            papers[f"a {chance:g}, one process"] = best_on_paper(passes, chance, seconds, None)
            options = ("--drafts-of", str(file), "--chances", str(chance))
            shapes = ["--draft-shape", arguments.draft_shape, "--weights", arguments.weights]
            shapes += ["--elsewhere"] if arguments.elsewhere else []
            shapes += ["--asleep", *map(str, arguments.asleep)] if arguments.asleep else []
            port = stack.enter_context(child(__file__, *shapes, *options))
            for delay in arguments.delays:
                own = stack.enter_context(child(PROXY, str(port), str(delay)))
                name = f"a {chance:g}, services, {delay:g} ms"
                methods[name] = services_speculator(loaded, own, network, passes)
                papers[name] = best_on_paper(passes, chance, seconds, 2 * delay / 1e3)
        report = profile(
            LLM.of(loaded).engine,
            "target",
            methods,
            {"all": prompts * arguments.rounds},
            tokens=arguments.tokens,
            rounds=1,
        )
        heads = f"{'mean':>8}{'95 %':>18}{'loss':>6}{'paper':>8}{'tok/pass':>10}{'same':>8}"
        print(f"{'speed over plain':26}{heads}")
        for row in report.rows:
            if row.speedup is not None and row.low is not None and row.high is not None:
                reach, same = f"{row.low:.3f} to {row.high:.3f}", f"{row.same}/{row.texts}"
                loss = lost(row.low, row.high) if row.texts > 1 else "open"
                print(f"{row.method:26}{row.speedup:8.3f}{reach:>18}{loss:>6}", end="")
                print(f"{papers[row.method]:8.2f}{row.tokens_per_pass:10.2f}{same:>8}")


def lost(low: float, high: float) -> str:
    """Whether an interval of the speed over plain says that more is lost than may be."""
    return "no" if low >= LEAST else "yes" if high < LEAST else "open"


def best_on_paper(passes: dict[int, float], a: float, step: float, round_trip: float | None) -> float:
    """The speedup of the best K; at least 1, for nothing need be drafted."""
    best = 1.0
    for size, seconds in passes.items():
        K = size - 1
        tokens = size if a == 1 else (1 - a**size) / (1 - a)
        drafting = K * step if round_trip is None else (1 - a**size) * (round_trip + K * step)
        best = max(best, tokens * passes[1] / (seconds + drafting))
    return best


def services_speculator(loaded: Loaded, port: int, network: Network, passes: dict[int, float]) -> Speculator:
    """Drafts from the service behind a port, once it is ready."""
    policy = OfferPolicy(Latency(passes), MOST)
    proposer = OfferProposer(policy, loaded.runner.vocabulary, most=MOST)
    own = hello_of("target", "target", None, loaded.runner.vocabulary)
    proposer.pool = replicas = Replicas([f"127.0.0.1:{port}"], own, network, proposer.offer)
    until = time.monotonic() + 60
    while not replicas.clients[0].ready:
        assert time.monotonic() < until, replicas.clients[0].reason
        time.sleep(0.05)
    return Speculator(proposer, policy, most=MOST, verification="coupled", prefilling=proposer.prefilling)


def serve(arguments: argparse.Namespace) -> None:
    """The draft service; prints its port and serves until it is killed."""
    step, seconds = drafting_step(arguments)
    if arguments.elsewhere:
        step = lambda _: time.sleep(seconds)  # noqa: E731
    texts = json.loads(Path(arguments.drafts_of).read_text())
    vocabulary = Asleep.vocabulary if arguments.asleep else 32000
    proposer = Steady(texts, arguments.chances[0], step, vocabulary)
    service, network = DraftService(proposer, vocabulary=vocabulary), Network()
    own = hello_of("draft", "oracle", None, vocabulary)
    methods = {DRAFT: lambda stream: serve_drafts(stream, service, own)}
    _, port = network.run(listen(methods, "127.0.0.1", 0, Security()))
    print(port, flush=True)
    time.sleep(3600)


@contextmanager
def child(file: str | Path, *options: str) -> Iterator[int]:
    """Another process; the port that it prints."""
    process = subprocess.Popen([sys.executable, str(file), *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it has a pipe"
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def write_texts(loaded: Loaded, arguments: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of random tokens, and their completions by plain decoding."""
    llm, draws = LLM.of(loaded), torch.Generator().manual_seed(0)
    shape = (arguments.prompts, PROMPT)
    prompts: list[list[int]] = torch.randint(1, llm.engine.vocabulary, shape, generator=draws).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    results = llm.generate(prompts, params)
    return prompts, [prompt + list(one.token_ids) for prompt, one in zip(prompts, results, strict=True)]


def make_runner(shape: str, kind: Any) -> Compiled:
    """A Llama of random weights, with one thread."""
    config = llama_config(shape)
    weights = model_weights(config, tensor_shapes(config), random_tensor(config), weights=kind)
    return Compiled(weights, blocks=BLOCKS, threads=1)


def drafting_step(arguments: argparse.Namespace) -> tuple[Callable[[int], None], float]:
    """What the draft model does for one token, and its seconds."""
    if arguments.asleep:
        seconds = arguments.asleep[2] / 1e3
        return lambda _: time.sleep(seconds), seconds
    return stepper(make_runner(arguments.draft_shape, arguments.weights))


def stepper(runner: Compiled) -> tuple[Callable[[int], None], float]:
    """A step of a draft model at a position, and its seconds."""
    table = tuple(range(BLOCKS))

    def step(position: int) -> None:
        runner.run(StepInput([position % 1000], (TokenSpan(0, position, position + 1, table, 1),))).argmax(1)

    seconds = []
    for position in range(8):
        began = time.perf_counter()
        step(position)
        seconds.append(time.perf_counter() - began)
    return step, min(seconds)


if __name__ == "__main__":
    main()
