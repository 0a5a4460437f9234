"""Plain decoding and methods of speculation over sets of prompts, in turn.

Each prompt is answered by every method in each round, one after the other (A B C, then B C A), with the same
weights and the same pool, so that a machine that slows down slows all of them. Every method answers a round
under a salt of its own: neither cached prefixes nor a shared n-gram table know a text from another round;
inside a round a table may learn from prompt to prompt, as in a server.

What is timed is decoding: from the moment when all texts of the batch have their first token. Seconds a token
of a prompt are the median of its rounds; the speedup is the geometric mean over the prompts (``passes.py``).
With temperature 0, or a seed, the texts must be those of plain decoding; how many are is in ``same``. A
runner that rounds differently for several tokens at once may differ where two tokens are nearly as likely.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attar.progress import SILENT, Progress
from attar.runtime.bench import decoded, run_timed
from attar.runtime.engine import Engine
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy, LossBudget
from attar.runtime.speculate.profile.metrics import AcceptanceCounts, Profile, ProfileRow, speedup
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, Proposer
from attar.runtime.speculate.speculator import Speculator


class FixedPolicy(DraftPolicy):
    """K drafts wherever there is room; of a tree the first K, of a tree that is learnt from all or none.

    Args:
        most: K.
        latency: learns what each size takes.
    """

    def __init__(self, most: int, latency: Latency | None = None) -> None:
        super().__init__(latency or Latency(), most, LossBudget(math.inf))

    @property
    def open(self) -> bool:
        return True

    def passes_to_skip(self, batch: int, proposing: float) -> int:
        return 0

    def choose(
        self,
        sequences: Sequence[int],
        limits: Sequence[int],
        prompt_tokens: int = 0,
        branches: int = 1,
        room: float = math.inf,
    ) -> list[set[int]]:
        return [{kind_of(0, depth) for depth in range(1, min(limit, self.most) + 1)} for limit in limits]

    def select(
        self,
        sequences: Sequence[int],
        drafts: Sequence[Draft | None],
        prompt_tokens: int = 0,
        whole: bool = False,
    ) -> list[Draft | None]:
        return [draft if whole else draft and draft.cut(self.most) for draft in drafts]

    def note(
        self, feedback: Sequence[DraftFeedback], seconds: float, drafting: float = 0.0, prompt_tokens: int = 0
    ) -> None:
        if feedback and not prompt_tokens:
            drafts = sum(len(one.draft) for one in feedback if one.draft is not None)
            self.latency.note_target(len(feedback), len(feedback) + drafts, seconds)

    def forget(self, sequence: int) -> None:
        pass


class MeteredProposer:
    """Counts.

    Args:
        proposer: who is watched.

    Attributes:
        passes: of all sequences, from their second token on: the first is the prompt's.
        seconds: of proposing and observing.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.passes, self.seconds = AcceptanceCounts(), 0.0
        self._begun: dict[int, None] = {}

    @property
    def name(self) -> str:
        return self.proposer.name

    @property
    def free(self) -> bool:
        return self.proposer.free

    @property
    def draws(self) -> bool:
        return self.proposer.draws

    @property
    def learns_tree(self) -> bool:
        return self.proposer.learns_tree

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        began = time.perf_counter()
        drafts = self.proposer.propose(requests)
        self._spent(began)
        return drafts

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        began = time.perf_counter()
        self.proposer.observe(feedback)
        self._spent(began)
        for one in feedback:
            if one.sequence in self._begun:
                draft = one.draft
                depth = 0 if draft is None else len(draft.counts)
                self.passes.note(0 if draft is None else len(draft), depth, len(one.path))
            self._begun[one.sequence] = None

    def forget(self, sequence: int) -> None:
        self._begun.pop(sequence, None)
        self.proposer.forget(sequence)

    def _spent(self, began: float) -> None:
        self.seconds += time.perf_counter() - began


PLAIN = "plain"
LEAST = 8  # tokens of a text: end tokens before are passed over
PromptBatch = tuple[tuple[int, ...], ...]


@dataclass
class _MethodRuns:
    """One method on one set: seconds and tokens of each batch of prompts by round, and what it wrote."""

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
        batches: texts that run together.
        tokens: of each text at most.

    Raises:
        DataError: a text fails.
        SettingsError: a prompt and its tokens do not fit into the context.
        Exception: what broke a proposer.
    """
    params = SamplingParams(temperature=temperature, max_tokens=tokens, min_tokens=min(LEAST, tokens), seed=0)
    engines = {PLAIN: second_engine(engine)} | {
        method: second_engine(engine, one) for method, one in methods.items()
    }
    rows = []
    for batch in batches:
        work = {kind: _batches(prompts, batch) for kind, prompts in sets.items()}
        seen = _runs(engines, work, params, rounds, progress)
        for (kind, method), one in seen.items():
            rows.append(_row(kind, method, batch, seen[kind, PLAIN], one, rounds))
    runner = type(engine.runner).__name__.lower()
    return Profile(name, runner, tokens, rounds, temperature, tuple(rows))


def second_engine(engine: Engine, speculator: Speculator | None = None) -> Engine:
    """Another engine on the same model and memory; one of them runs at a time."""
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
    seen = {(kind, method): _MethodRuns() for kind in work for method in order}
    first = next(batch for batches in work.values() for batch in batches)
    for method in order:
        _answer(engines[method], first, params, f"{method} first", _MethodRuns())
    with progress.task("bench", total=rounds * len(order) * sum(map(len, work.values()))) as task:
        for turn in range(rounds):
            for kind, batches in work.items():
                for index, batch in enumerate(batches):
                    start = (turn + index) % len(order)
                    for method in order[start:] + order[:start]:
                        salt = f"{method} {turn}"
                        _answer(engines[method], batch, params, salt, seen[kind, method], index)
                        task.advance()
    return seen


def _answer(
    engine: Engine,
    batch: PromptBatch,
    params: SamplingParams,
    salt: str,
    seen: _MethodRuns,
    index: int = 0,
) -> None:
    """One batch of prompts once; what it took and wrote is noted."""
    speculator, meter = engine.speculator, None
    if speculator is not None:
        meter = speculator.proposer = MeteredProposer(speculator.proposer)
    requests = run_timed(engine, [engine.add(prompt, params, salt=salt) for prompt in batch])
    if speculator is not None and meter is not None:
        speculator.proposer = meter.proposer
        if speculator.failure is not None:
            raise speculator.failure
    later, seconds = decoded(requests)
    while len(seen.seconds) <= index:
        seen.seconds.append([])
        seen.tokens.append([])
    seen.seconds[index].append(seconds)
    seen.tokens[index].append(later)
    seen.texts += [one.tokens for one in requests]
    if meter is not None:
        seen.passes.counts += meter.passes.counts
        seen.drafting += meter.seconds
    counted = 0 if meter is None else meter.passes.total + meter.passes.accepted
    written = sum(len(one.tokens) - 1 for one in requests)
    seen.passes.counts[0, 0, 0] += max(written - counted, 0)  # passes that were not metered: a token each


def _row(
    kind: str, method: str, batch: int, plain: _MethodRuns, seen: _MethodRuns, rounds: int
) -> ProfileRow:
    indices = range(len(seen.seconds))
    gain = None if seen is plain else speedup(plain.pace(indices), seen.pace(indices))
    seconds = sum(map(sum, seen.seconds))
    return ProfileRow(
        kind,
        method,
        batch,
        len(seen.texts) // rounds,
        sum(a == b for a, b in zip(_by_round(plain, rounds), _by_round(seen, rounds), strict=True)),
        sum(map(sum, seen.tokens)) / seconds,
        None if gain is None else gain.value,
        None if gain is None else gain.low,
        None if gain is None else gain.high,
        seen.passes.rate,
        seen.passes.chance,
        seen.passes.tokens_per_pass,
        seen.passes.theory,
        seen.drafting / seconds,
        seen.passes.histogram,
    )


def _batches(prompts: Sequence[Sequence[int]], size: int) -> list[PromptBatch]:
    starts = range(0, len(prompts), size)
    return [tuple(tuple(prompt) for prompt in prompts[start : start + size]) for start in starts]


def _by_round(seen: _MethodRuns, rounds: int) -> list[list[list[int]]]:
    """Of every prompt its texts, round by round."""
    count = len(seen.texts) // rounds
    return [seen.texts[index::count] for index in range(count)]
