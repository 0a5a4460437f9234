"""What the KV cache keeps: quality of its formats and evictions, bytes, and what a shared prefix saves.

    python benchmarks/kv.py [--parts formats eviction needle prefix scheduling] [--model attar:tiny]

Everything runs through the runtime's own scheduler, block tables and pool. Texts are held out from training
(``attar.data``). Keys and values of a chunk are read back from the pool, so that prompts in chunks of one
block see the same rounding as tokens that are generated one by one.

formats    perplexity of whole contexts, bits a value, bytes a token: of ``kv/layout.py`` and of the pool
eviction   perplexity of a continuation, token by token, after a prompt of which a share of places is kept
needle     ``self.<name>_<word>`` stands three times in foreign code; at the end ``self.<name>_`` is given,
           and the right word must be likelier than nine others (chance: 10 %). The last two tokens of the
           question come after the prompt, so that SnapKV's choice is made before the answer
prefix     seconds to the first token with 1,500 tokens in common, with and without the prefix cache, and
           from a prefix store with nothing in memory
scheduling what a step costs besides the model
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from needle import RIVALS, Case, hidden
from torch import Tensor

from attar.data.sources import documents
from attar.runtime.admission import Limits
from attar.runtime.execution import pack_due
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.evict import H2O, Eviction, Reread, SnapKV, Streaming
from attar.runtime.kv.memory import LayerShape, block_bytes
from attar.runtime.kv.store import STORES
from attar.runtime.llm import LLM
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.scheduler import Scheduler
from attar.runtime.sequence import Request

BLOCK = 32
SHARES = (1.0, 0.5, 0.2, 0.1)
LENGTHS = (256, 512, 1024)  # of the needle's prompts

METHODS: dict[str, Callable[[int], Eviction]] = {
    "streaming": lambda capacity: Streaming(sinks=4, window=capacity - 4),
    "h2o": lambda capacity: H2O(heavy=capacity - capacity // 2, recent=capacity // 2),
    "reread": lambda capacity: Reread(capacity=capacity, recent=capacity // 8, sinks=1),
    "snapkv": lambda capacity: SnapKV(capacity=capacity, window=min(16, capacity // 2)),
}


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description="Quality, bytes and prefix reuse of the KV cache.")
    parts = tuple(TABLES)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument("--texts", type=int, default=8, help="texts of a perplexity")
    parser.add_argument("--cases", type=int, default=32, help="needles of each length")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="of eviction")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens before a continuation")
    parser.add_argument("--given", type=int, default=128, help="tokens of a continuation")
    asked = parser.parse_args()
    stream = held_out(asked.model)
    for part in asked.parts:
        start = time.monotonic()
        print("\n".join(TABLES[part](asked, stream)))
        print(f"\n{time.monotonic() - start:.0f} s\n", flush=True)


def held_out(model: str) -> list[int]:
    """Token ids of the evaluation split, documents joined."""
    llm, tokens = small(model), []
    for document in documents("python-stdlib", "evaluation"):
        assert isinstance(document, str)
        tokens += llm.encode(document)
    return tokens


def small(model: str, **options: object) -> LLM:
    """A runtime of 16 sequences in blocks of 32, chunks of one block where nothing else is said."""
    usual = {"block_size": BLOCK, "kv_tokens": 16 * 2048, "dtype": "float32", "runner": "modules"}
    usual["limits"] = Limits(step_tokens=512, sequences=16)
    return LLM(model, **{**usual, **options})  # type: ignore[arg-type]


def formats(asked: argparse.Namespace, stream: Sequence[int]) -> Iterator[str]:
    """A row for each format."""
    rows = [list(stream[start : start + 2016]) for start in range(0, 2016 * asked.texts, 2016)]
    yield f"{asked.texts} texts of 2,016 held-out tokens, chunks of {BLOCK}\n"
    yield "| KV | perplexity | against float32 | bits a value | bytes a token | pool, bytes a token |"
    yield "|---|---|---|---|---|---|"
    first = None
    for name in STORES:
        limits = Limits(step_tokens=16 * BLOCK, sequences=16, chunk=BLOCK)
        llm = small(asked.model, kv_dtype=name, limits=limits)
        results = llm.generate(rows, SamplingParams(max_tokens=1, prompt_logprobs=0))
        logprobs = [entry.logprob for result in results for entry in result.prompt_logprobs or () if entry]
        perplexity = math.exp(-statistics.fmean(logprobs))
        first = first or perplexity
        runner = llm.engine.runner
        assert isinstance(runner, Modules)
        measures = runner.pool.geometry
        shapes = [LayerShape(measures.kv_heads, measures.head_dim)] * measures.layers
        counted = block_bytes(shapes, name, BLOCK) / BLOCK
        values = 2 * measures.layers * measures.kv_heads * measures.head_dim
        held = runner.pool.nbytes / (measures.blocks * BLOCK)
        change = f"{100 * (perplexity / first - 1):+.2f} %"
        sizes = f"{8 * counted / values:.2f} | {counted:,.0f} | {held:,.0f}"
        yield f"| {name} | {perplexity:.4f} | {change} | {sizes} |"


def eviction(asked: argparse.Namespace, stream: Sequence[int]) -> Iterator[str]:
    """A row for each method, a column for each share of places that are kept."""
    size = asked.prompt + asked.given
    cases = [
        Case(list(stream[start : start + asked.prompt]), list(stream[start + asked.prompt : start + size]))
        for start in range(0, size * asked.texts, size)
    ]
    yield f"{asked.texts} texts, {asked.prompt:,} tokens and {asked.given} more: perplexity of these\n"
    yield f"| places kept | {' | '.join(f'{share:.0%}' for share in SHARES)} |"
    yield f"|---|{'---|' * len(SHARES)}"
    for name, method in ((name, METHODS[name]) for name in asked.methods):
        cells = []
        for share in SHARES:
            capacity = size if share == 1 else round(asked.prompt * share)
            losses = [loss for case in driven(asked.model, method(capacity), cases) for loss in likely(*case)]
            cells.append(f"{math.exp(statistics.fmean(losses)):.3f}")
        yield f"| {name} | {' | '.join(cells)} |"
    losses = [loss for case in driven(asked.model, None, cases) for loss in likely(*case)]
    yield f"\nwithout eviction: {math.exp(statistics.fmean(losses)):.3f}"


def likely(case: Case, rows: Sequence[Tensor]) -> list[float]:
    """Losses of the given tokens but for the first, which the prompt's own pass predicts."""
    return [-float(row[token]) for row, token in zip(rows[1:], case.given[1:], strict=False)]


def driven(model: str, method: Eviction | None, cases: Sequence[Case]) -> Iterator[tuple[Case, list[Tensor]]]:
    """Runs the cases; each with the log-probabilities after its prompt and after each given token."""
    llm = small(model, eviction=method, prefix_cache=False)
    scheduler, runner = llm.engine.scheduler, llm.engine.runner
    rows: list[list[Tensor]] = [[] for _ in cases]
    for number, case in enumerate(cases):
        scheduler.add(Request(id=str(number), prompt=case.prompt, max_tokens=len(case.given) + 1))
    while step := scheduler.build(scheduler.plan()):
        logits = runner.run(step)
        for output in scheduler.commit(step):
            number, sequence = int(output.sequence.request.id), output.sequence
            if output.draws:
                done = len(rows[number])
                rows[number].append(logits[output.rows[-1]].log_softmax(-1))
                if done < len(cases[number].given):
                    scheduler.append(sequence, [cases[number].given[done]])
                else:
                    scheduler.finish(sequence, "stop")
        if method is not None:
            assert isinstance(runner, Modules)
            pack_due(scheduler, method, runner)
    scheduler.check()
    return zip(cases, rows, strict=True)


def needle(asked: argparse.Namespace, stream: Sequence[int]) -> Iterator[str]:
    """Accuracy in per cent: a row for each method and length, a column for each share."""
    llm = small(asked.model)
    words = llm.tokenizer.get_vocab()
    yield f"{asked.cases} cases of each length, chance {100 / RIVALS:.0f} %: right answers, per cent\n"
    yield f"| prompt | places kept | {' | '.join(f'{share:.0%}' for share in SHARES)} |"
    yield f"|---|---|{'---|' * len(SHARES)}"
    for length in LENGTHS:
        cases = [hidden(llm.encode, words, stream, length, seed) for seed in range(asked.cases)]
        full = right(asked.model, None, cases)
        for name, method in ((name, METHODS[name]) for name in asked.methods):
            rates = [right(asked.model, method(round(length * share)), cases) for share in SHARES[1:]]
            yield f"| {length:,} | {name} | {' | '.join(f'{100 * one:.0f}' for one in (full, *rates))} |"


def right(model: str, method: Eviction | None, cases: Sequence[Case]) -> float:
    """Share of the cases whose right word is the likeliest of its words."""
    best = [int(rows[-1][list(case.words)].argmax()) for case, rows in driven(model, method, cases)]
    return best.count(0) / len(best)


def prefix(asked: argparse.Namespace, stream: Sequence[int]) -> Iterator[str]:
    """Median seconds to the first token of 9 requests each, in turn."""
    shared = list(stream[:1500])
    with tempfile.TemporaryDirectory() as folder:
        kinds = {"without": {"prefix_cache": False}, "with": {}, "on disk": {"prefix_store": folder}}
        llms = {kind: small(asked.model, **options) for kind, options in kinds.items()}
        seconds = first_tokens(llms, shared, stream[2000:])
        llms["on disk"].engine.scheduler.manager.store.close()
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    yield "1,500 tokens in common and 32 of one's own, median of 9\n"
    yield "| prefix cache | first token, ms |\n|---|---|"
    yield from (f"| {kind} | {1000 * median:.1f} |" for kind, median in medians.items())
    shares = (
        f"{kind} {100 * (1 - medians[kind] / medians['without']):.1f} % less" for kind in ("with", "on disk")
    )
    yield "\n" + ", ".join(shares)


def first_tokens(llms: Mapping[str, LLM], shared: list[int], stream: Sequence[int]) -> dict[str, list[float]]:
    """Seconds to the first token of 9 requests each, in turn: the shared tokens and 32 of one's own."""
    seconds: dict[str, list[float]] = {kind: [] for kind in llms}
    for turn in range(10):
        own = list(stream[32 * turn : 32 * turn + 32])
        for kind, llm in llms.items():
            manager = llm.engine.scheduler.manager
            if manager.store is not None:  # as after a restart
                manager.store.close()
                manager.clear()
            usage = llm.generate([shared + own], SamplingParams(max_tokens=1))[0].usage
            assert usage.first_token_s is not None
            seconds[kind] += [usage.first_token_s] if turn else []  # the first fills the cache
    return seconds


def scheduling(asked: argparse.Namespace, stream: Sequence[int]) -> Iterator[str]:
    """Microseconds of Python for schedule, commit and append, without a model."""
    yield "| sequences | context | a step, us: median | mean |\n|---|---|---|---|"
    for count, context in ((1, 2_000), (1, 100_000), (8, 2_000), (64, 2_000)):
        manager = BlockManager(count * (context + 4000) // 16, 16)
        scheduler = Scheduler(manager, Limits(step_tokens=count * context, sequences=count))
        for number in range(count):
            prompt = [number, *range(context - 1)]
            scheduler.add(Request(id=str(number), prompt=prompt, max_tokens=3000))
        seconds = []  # the first step is the prompt's
        for _ in range(2001):
            start = time.perf_counter()
            step = scheduler.build(scheduler.plan())
            assert step is not None
            for output in scheduler.commit(step):
                scheduler.append(output.sequence, [7])
            seconds.append(time.perf_counter() - start)
        median, mean = (
            statistics.median(seconds[1:]),
            statistics.fmean(seconds[1:]),
        )
        yield f"| {count} | {context:,} | {1e6 * median:.1f} | {1e6 * mean:.1f} |"


TABLES = {
    "formats": formats,
    "eviction": eviction,
    "needle": needle,
    "prefix": prefix,
    "scheduling": scheduling,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    main()
