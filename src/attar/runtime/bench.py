"""How fast a model answers: prompts of random tokens, all at once, through the engine as it serves.

prompt     prompt tokens a second, until every text has its first token
decode     tokens a second in all, from then on
first      seconds until a text's first token
between    seconds between two tokens of a text
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from attar.errors import DataError
from attar.progress import SILENT, Progress
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.settings import BenchSettings
from attar.runtime.timing import decoded, run_timed


@dataclass(frozen=True)
class Case:
    """One row: medians over the rounds; seconds.

    Attributes:
        batch: texts at a time.
        context: tokens of each prompt.
        prompt_tokens_per_s, decode_tokens_per_s: of all texts together.
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
    """All rows, and the memory of the process at its highest."""

    model: str
    runner: str
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
    seen: dict[tuple[int, int], list[Case]] = {case: [] for case in cases}
    draws = random.Random(settings.seed)
    measure(llm, 1, 8, 4, draws)  # what is made at first use is made
    with progress.task("bench", total=settings.rounds * len(cases)) as task:
        for _ in range(settings.rounds):
            for case in cases:
                seen[case].append(measure(llm, *case, settings.tokens, draws))
                task.advance()
    rows = tuple(_median(rounds) for rounds in seen.values())
    runner = type(llm.engine.runner).__name__.lower()
    return Bench(llm.name, runner, settings.tokens, settings.rounds, rows, peak_rss())


def peak_rss() -> int:
    """Bytes of memory that the process held at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure(llm: LLM, batch: int, context: int, tokens: int, draws: random.Random) -> Case:
    """One case once, with tokens a text. Prompts are random, so that no prefix is shared."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    names = [
        engine.add([draws.randrange(engine.vocabulary) for _ in range(context)], params) for _ in range(batch)
    ]
    requests = run_timed(engine, names)
    first = [each.times[0] - began for each in requests]
    between = [b - a for each in requests for a, b in pairwise(each.times)]
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


def quantile(values: list[float], part: float) -> float:
    """The smallest value that at least this part of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def _median(rounds: list[Case]) -> Case:
    columns = zip(*(tuple(asdict(case).values()) for case in rounds), strict=True)
    batch, context, *others = (statistics.median(column) for column in columns)
    return Case(int(batch), int(context), *others)
