"""Plain decoding and methods of speculation over sets of prompts, interleaved.

Every method completes each prompt in each round, in rotating order (A B C, then B C A), with the same weights
and the same pool, so that a slower machine slows down all of them. Every method has its own salt in each
round: neither the prefix cache nor a shared n-gram table has a completion of another round; within a round a
table may learn from prompt to prompt, as in a server.

Only decoding is timed, after all sequences of the batch have their first token. Seconds a token of a prompt
are the median of its rounds; the speedup is the geometric mean over the prompts (``metrics.py``). With
temperature 0, or a seed, the completions must equal plain decoding's; ``same`` counts the equal ones.
They may differ for a runner that rounds passes over several tokens differently, where two tokens are nearly
as likely.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attar.measure.speculation.metrics import AcceptanceCounts, Profile, ProfileRow, speedup
from attar.progress import SILENT, Progress
from attar.runtime.bench import decoded, run_timed
from attar.runtime.engine import Engine
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.loss_budget import LossBudget
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, Proposer
from attar.runtime.speculate.speculator import Speculator


class FixedPolicy(DraftPolicy):
    """Always K drafts (``most``): the first K of a tree; all of a tree that the proposer learns from."""

    def __init__(self, most: int, latency: Latency | None = None) -> None:
        super().__init__(latency or Latency(), most, LossBudget(math.inf), share=math.inf)

    @property
    def open(self) -> bool:
        return True

    def choose(
        self,
        sequences: Sequence[int],
        limits: Sequence[int],
        prompt_tokens: int = 0,
        branches: int = 1,
    ) -> list[set[int]]:
        return [{kind_of(0, depth) for depth in range(1, min(limit, self.most) + 1)} for limit in limits]

    def select(
        self,
        sequences: Sequence[int],
        drafts: Sequence[Draft | None],
        prompt_tokens: int = 0,
        complete: bool = False,
    ) -> list[Draft | None]:
        return [draft if complete else draft and draft.cut(self.most) for draft in drafts]

    def trim(
        self, sequences: Sequence[int], drafts: Sequence[Draft | None], prompt_tokens: int = 0
    ) -> list[Draft | None]:
        return [draft and draft.cut(self.most) for draft in drafts]

    def note(
        self,
        feedback: Sequence[DraftFeedback],
        seconds: float,
        drafting: float = 0.0,
        prompt_tokens: int = 0,
        steps: int = 0,
        prefilled: bool = False,
    ) -> None:
        if feedback and not prompt_tokens:
            drafts = sum(len(verified.draft) for verified in feedback if verified.draft is not None)
            self.latency.note_target(len(feedback), len(feedback) + drafts, seconds)
        for verified in feedback:
            self._learn(verified)  # which of two drafters a sequence is left to


class MeteredProposer:
    """Counts the passes of a proposer.

    Attributes:
        passes: of all sequences, from their second token on; the first comes from the prefill.
        seconds: of proposing and observing.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.passes, self.seconds = AcceptanceCounts(), 0.0

    @property
    def name(self) -> str:
        return self.proposer.name

    @property
    def is_free_of_compute(self) -> bool:
        return self.proposer.is_free_of_compute

    @property
    def samples_from_q(self) -> bool:
        return self.proposer.samples_from_q

    @property
    def needs_full_tree(self) -> bool:
        return self.proposer.needs_full_tree

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proposer, name)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        began = time.perf_counter()
        drafts = self.proposer.propose(requests)
        self._spent(began)
        return drafts

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        began = time.perf_counter()
        self.proposer.observe(feedback)
        self._spent(began)
        for verified in feedback:
            draft = verified.draft
            depth = 0 if draft is None else len(draft.counts)
            self.passes.note(0 if draft is None else len(draft), depth, len(verified.path))

    def forget(self, sequence: int) -> None:
        self.proposer.forget(sequence)

    def _spent(self, began: float) -> None:
        self.seconds += time.perf_counter() - began


PLAIN = "plain"
LEAST = 8  # tokens of a completion: earlier end tokens are ignored
PromptBatch = tuple[tuple[int, ...], ...]


@dataclass
class _MethodRuns:
    """One method on one set: seconds and tokens of each batch of prompts by round, and the completions."""

    seconds: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    passes: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    drafting: float = 0.0

    def pace(self, indices: Sequence[int]) -> list[float]:
        """Seconds a token of the batches at these indices: medians of the rounds."""
        return [
            statistics.median(s / t for s, t in zip(self.seconds[index], self.tokens[index], strict=True))
            for index in indices
        ]


def profile(
    engine: Engine,
    name: str,
    methods: Mapping[str, Speculator],
    sets: Mapping[str, Sequence[Sequence[int]]],
    *,
    batches: Sequence[int] = (1,),
    tokens: int = 64,
    rounds: int = 3,
    temperature: float = 0.0,
    progress: Progress = SILENT,
) -> Profile:
    """Measure; nothing else may use the engine meanwhile.

    Args:
        methods: speculators made for this engine's runner, by the names that the rows have.
        sets: prompts as token ids.
        batches: sequences that run together.
        tokens: of each completion at most.

    Raises:
        DataError: a request fails.
        SettingsError: a prompt and its tokens do not fit into the context.
        Exception: of a proposer.
    """
    params = SamplingParams(temperature=temperature, max_tokens=tokens, min_tokens=min(LEAST, tokens), seed=0)
    engines = {PLAIN: second_engine(engine)} | {
        method: second_engine(engine, proposer) for method, proposer in methods.items()
    }
    rows = []
    for batch in batches:
        work = {kind: _batches(prompts, batch) for kind, prompts in sets.items()}
        runs = _runs(engines, work, params, rounds, progress)
        for (kind, method), method_runs in runs.items():
            rows.append(_row(kind, method, batch, runs[kind, PLAIN], method_runs, rounds))
    runner = type(engine.runner).__name__.lower()
    return Profile(name, runner, tokens, rounds, temperature, tuple(rows))


def second_engine(engine: Engine, speculator: Speculator | None = None) -> Engine:
    """Another engine on the same model and KV pool; one of them runs at a time."""
    return Engine(
        engine.runner,
        engine.scheduler,
        ends=engine.ends,
        vocabulary=engine.vocabulary,
        eviction=engine.eviction,
        speculator=speculator,
    )


def _runs(
    engines: Mapping[str, Engine],
    work: Mapping[str, Sequence[PromptBatch]],
    params: SamplingParams,
    rounds: int,
    progress: Progress,
) -> dict[tuple[str, str], _MethodRuns]:
    """All methods on all batches of prompts, in turn; a first round of one batch is not counted."""
    order = list(engines)
    runs = {(kind, method): _MethodRuns() for kind in work for method in order}
    first = next(batch for batches in work.values() for batch in batches)
    for method in order:
        _complete(engines[method], first, params, f"{method} first", _MethodRuns())
    with progress.task("bench", total=rounds * len(order) * sum(map(len, work.values()))) as task:
        for turn in range(rounds):
            for kind, batches in work.items():
                for index, batch in enumerate(batches):
                    start = (turn + index) % len(order)
                    for method in order[start:] + order[:start]:
                        salt = f"{method} {turn}"
                        _complete(engines[method], batch, params, salt, runs[kind, method], index)
                        task.advance()
    return runs


def _complete(
    engine: Engine,
    batch: PromptBatch,
    params: SamplingParams,
    salt: str,
    runs: _MethodRuns,
    index: int = 0,
) -> None:
    """Complete one batch of prompts, and add times and completions to ``runs``."""
    speculator, meter = engine.speculator, None
    if speculator is not None:
        meter = speculator.proposer = MeteredProposer(speculator.proposer)
    requests = run_timed(engine, [engine.add(prompt, params, salt=salt) for prompt in batch])
    if speculator is not None and meter is not None:
        speculator.proposer = meter.proposer
        if speculator.failure is not None:
            raise speculator.failure
    later, seconds = decoded(requests)
    while len(runs.seconds) <= index:
        runs.seconds.append([])
        runs.tokens.append([])
    runs.seconds[index].append(seconds)
    runs.tokens[index].append(later)
    runs.texts += [request.tokens for request in requests]
    if meter is not None:
        runs.passes.counts += meter.passes.counts
        runs.drafting += meter.seconds
    counted = 0 if meter is None else meter.passes.total + meter.passes.accepted
    written = sum(len(request.tokens) - 1 for request in requests)
    runs.passes.counts[0, 0, 0] += max(written - counted, 0)  # passes that were not metered: a token each


def _row(
    kind: str, method: str, batch: int, plain: _MethodRuns, runs: _MethodRuns, rounds: int
) -> ProfileRow:
    indices = range(len(runs.seconds))
    gain = None if runs is plain else speedup(plain.pace(indices), runs.pace(indices))
    seconds = sum(map(sum, runs.seconds))
    return ProfileRow(
        kind,
        method,
        batch,
        len(runs.texts) // rounds,
        sum(a == b for a, b in zip(_by_round(plain, rounds), _by_round(runs, rounds), strict=True)),
        sum(map(sum, runs.tokens)) / seconds,
        None if gain is None else gain.value,
        None if gain is None else gain.low,
        None if gain is None else gain.high,
        runs.passes.rate,
        runs.passes.chance,
        runs.passes.tokens_per_pass,
        runs.passes.theory,
        runs.drafting / seconds,
        runs.passes.histogram,
    )


def _batches(prompts: Sequence[Sequence[int]], size: int) -> list[PromptBatch]:
    starts = range(0, len(prompts), size)
    return [tuple(tuple(prompt) for prompt in prompts[start : start + size]) for start in starts]


def _by_round(runs: _MethodRuns, rounds: int) -> list[list[list[int]]]:
    """The completions of every prompt, by round."""
    count = len(runs.texts) // rounds
    return [runs.texts[index::count] for index in range(count)]
