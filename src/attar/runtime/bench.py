"""How fast a model runs: a batch of prompts of random tokens, through the engine as in serving.

prompt     prompt tokens a second, until every completion has its first token
decode     tokens a second of all completions, from then on
first      seconds until a completion's first token
between    seconds between two tokens of a completion
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from attar.errors import DataError
from attar.memory import peak_rss_bytes
from attar.progress import SILENT, Progress
from attar.runtime.engine import Engine
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.settings import BenchSettings


@dataclass(frozen=True)
class Case:
    """One row: medians over the rounds; times in seconds.

    Attributes:
        batch: completions at a time.
        prompt_tokens_per_s, decode_tokens_per_s: of all completions together.
        first_p50_s, first_p99_s: until the first token.
        between_p50_s, between_p99_s: between two tokens.
    """

    batch: int
    context: int
    prompt_tokens_per_s: float
    decode_tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    between_p50_s: float
    between_p99_s: float


@dataclass(frozen=True)
class Bench:
    """All rows, and the peak memory of the process.

    Attributes:
        weights: form in which the products read them, as :class:`attar.runtime.describe.Description` says it.
    """

    model: str
    runner: str
    weights: str
    tokens: int
    rounds: int
    cases: tuple[Case, ...]
    peak_rss_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def bench(llm: LLM, settings: BenchSettings, *, progress: Progress = SILENT) -> Bench:
    """Measure; nothing else may use the model.

    Raises:
        DataError: a prompt and its tokens are longer than the model's context.
        SettingsError: a batch does not fit into the limits or the pool.
    """
    context = llm.engine.runner.context
    longest = max(settings.context) + settings.tokens
    if context is not None and longest > context:
        raise DataError(
            f"{max(settings.context):,} and {settings.tokens} tokens pass the model's context of {context:,}",
            hint="give a smaller --context",
        )
    cases = [(batch, tokens) for tokens in settings.context for batch in settings.batch]
    results: dict[tuple[int, int], list[Case]] = {case: [] for case in cases}
    draws = random.Random(settings.seed)
    measure(llm, 1, 8, 4, draws)  # warm-up
    with progress.task("bench", total=settings.rounds * len(cases)) as task:
        for _ in range(settings.rounds):
            for case in cases:
                results[case].append(measure(llm, *case, settings.tokens, draws))
                task.advance()
    rows = tuple(_median(rounds) for rounds in results.values())
    runner = type(llm.engine.runner).__name__.lower()
    weights = llm.describe().weights
    return Bench(llm.name, runner, weights, settings.tokens, settings.rounds, rows, peak_rss_bytes())


def measure(llm: LLM, batch: int, context: int, tokens: int, draws: random.Random) -> Case:
    """One case once, with ``tokens`` for each completion. Prompts are random, so that no prefix is shared."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    ids = [
        engine.add([draws.randrange(engine.vocabulary) for _ in range(context)], params) for _ in range(batch)
    ]
    requests = run_timed(engine, ids)
    first = [request.times[0] - began for request in requests]
    between = [b - a for request in requests for a, b in pairwise(request.times)]
    later, seconds = decoded(requests)
    return Case(
        batch,
        context,
        batch * context / max(first),
        later / seconds,
        quantile(first, 0.5),
        quantile(first, 0.99),
        quantile(between, 0.5),
        quantile(between, 0.99),
    )


@dataclass(frozen=True)
class Timed:
    """The tokens of one request.

    Attributes:
        times: seconds of ``time.perf_counter``, one for each.
    """

    tokens: list[int]
    times: list[float]


def run_timed(engine: Engine, ids: Sequence[str]) -> list[Timed]:
    """Run the engine until it is idle; the tokens of each request.

    Raises:
        DataError, or what the runner raised: a request failed.
    """
    requests = {id: Timed([], []) for id in ids}
    while not engine.idle:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.error is not None:
                raise event.failure or DataError(event.error)
            requests[event.request].tokens.extend(event.token_ids)
            requests[event.request].times.extend([now] * len(event.token_ids))
    return list(requests.values())


def decoded(requests: Sequence[Timed]) -> tuple[int, float]:
    """Tokens generated after every request had its first, and the seconds they took."""
    start = max(request.times[0] for request in requests)
    end = max(request.times[-1] for request in requests)
    return sum(stamp > start for request in requests for stamp in request.times), end - start


def quantile(values: list[float], part: float) -> float:
    """The smallest value that at least this part of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def _median(rounds: list[Case]) -> Case:
    columns = zip(*(tuple(asdict(case).values()) for case in rounds), strict=True)
    batch, context, *others = (statistics.median(column) for column in columns)
    return Case(int(batch), int(context), *others)
