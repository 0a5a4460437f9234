"""A smaller model that drafts, with a runner and block tables of its own.

    propose    rejected drafts are truncated; the new tokens of all sequences are run in one pass, then every
               further draft takes one more pass
    x_i        the chain: the likeliest token of a greedy request, else the Gumbel argmax over q_i
    siblings   further tokens of the same row: the next likeliest, else the next of the Gumbel top-k
    rules      ``DraftRules``: drawn with the round's noise, with their q, for exact verification;
               the completion: drawn with the noise of the target's tokens (Gumbel coupling), "fixed"

A row of logits costs a pass of the draft model; siblings come from the rows of the chain at no further pass.
With the target's noise (coupled) the Gumbel top-k over q_i has the tokens that the target most likely draws.
With the round's noise (exact) it is a sample from q_i without replacement, in order. Neither x_K nor a
sibling is run: if accepted, it is run in the next round.

A draft ends at an end token, at the model's context, where grammar or numerics leave no token to draw, and
after a row whose likeliest token has a probability below ``min_confidence``. That is decided on the row
before its token is drawn, so which tokens are kept never depends on the draw.

A pass has at most ``step_tokens`` tokens: a long prompt is prefilled in chunks, together with the drafts of
other sequences. Errors of the draft model only cost time: tokens are translated to the target's vocabulary
(``vocabulary.py``), dropped tables are computed again (``draft_tables.py``), and NaN logits end the draft.

Letters: K drafts of a chain, q_i the distribution of x_i, V the target's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.sample import draw_distinct
from attar.runtime.sampling.warp import SamplingRow, adjust, check_finite, largest_indices, likeliest, warp
from attar.runtime.speculate.draft import LEVELS, Draft, Floats, kind_of
from attar.runtime.speculate.draft_tables import DraftTables
from attar.runtime.speculate.latency import measure
from attar.runtime.speculate.noise import DraftRules
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, DraftTimes
from attar.runtime.speculate.vocabulary import SameVocabulary, TokenTranslator, VocabularyMapping
from attar.runtime.step import Runner, StepInput

BRANCHES = 4  # a fifth adds almost no tokens (benchmarks/siblings.py)
PREFILL = 64  # prompt tokens, for the time of a prefill
GREEDY = SamplingRow(SamplingParams(temperature=0.0))


@dataclass
class GrowingDraft:
    """A draft under construction.

    Args:
        ids: the sequence in the draft model's tokens, then x_1..x_(i-1).
        certain: how many of ``ids`` are not drafts.
        most: K.
        ends: nothing is drafted after one.
        min_confidence, branches: see :class:`DraftModel`.
        chances: of each token to be accepted if those before it are, where the proposer says so.
        survival: the product of the chances, each times its factor.
        factors: by which the chance of each depth is corrected; 1 where there is none.
    """

    request: DraftRequest
    ids: list[int]
    certain: int
    most: int
    ends: frozenset[int]
    min_confidence: float
    branches: int
    tokens: list[int] = field(default_factory=list)
    siblings: list[list[int]] = field(default_factory=list)
    q: list[Floats] = field(default_factory=list)
    open: bool = True
    chances: list[float] = field(default_factory=list)
    survival: float = 1.0
    factors: Sequence[float] = ()

    def ends_before(self, chance: float) -> bool:
        """Close the draft if it does not pay that its next token is accepted with this chance: before that
        token is drawn. Says whether it is closed."""
        depth = len(self.chances)
        self.chances.append(chance)
        self.survival *= chance * (self.factors[depth] if depth < len(self.factors) else 1.0)
        self.open = self.survival >= self.request.min_chance
        return not self.open

    def extend(self, logits: Tensor) -> None:
        """Add a draft and its siblings from the logits (1, V) after the last one; or close the draft."""
        try:
            (token, *others), largest = self._chosen(logits)
        except Exception:  # NaN, no shared token is allowed, or the grammar has no continuation
            self.open = False
            del self.q[len(self.tokens) :]
            return
        self.tokens.append(token)
        self.siblings.append(others)
        sure = largest is None or largest >= self.min_confidence
        self.open = sure and len(self.tokens) < self.most and token not in self.ends

    def draft(self) -> Draft | None:
        """The chain, then the siblings by depth, with rank and depth as kind; None if empty."""
        if not self.tokens:
            return None
        if self.branches == 1:
            return Draft.chain(self.tokens, self.q or None)
        K = len(self.tokens)
        tokens, parents = [*self.tokens], [*range(K)]
        kinds = [kind_of(0, depth) for depth in range(1, K + 1)]
        for depth, others in enumerate(self.siblings[: LEVELS - 1], 1):
            tokens += others
            parents += [depth - 1] * len(others)
            kinds += [kind_of(rank, depth) for rank in range(1, len(others) + 1)]
        q = [self.q[parent] for parent in parents] if self.q else None
        return Draft(tuple(tokens), tuple(parents), q, "distinct" if q else "fixed", tuple(kinds))

    def _chosen(self, logits: Tensor) -> tuple[list[int], float | None]:
        """The tokens in order, and the probability of the likeliest; None if ``min_confidence`` is 0."""
        rules = self.request.rules
        row = GREEDY if rules is None else rules.row(self.tokens)
        if rules is None or row.params.greedy:
            x = adjust(logits, [row])
            return _likeliest(x, self.branches), float(x.softmax(-1).amax()) if self.min_confidence else None
        p = warp(logits, [row])
        if isinstance(rules, DraftRules):
            self.q.append(p[0].cpu().numpy())
        return draw_distinct(p[0], rules.key(len(self.tokens)), self.branches), float(p.amax())


class DraftModel:
    """Proposes the continuations of a draft model.

    Args:
        runner: the draft model, with a KV pool of its own, without eviction.
        vocabulary: mapping between its tokens and the target's; None: they are equal.
        name: for logs and metrics.
        min_confidence: a draft ends after a row whose likeliest token has a lower probability; 0: never.
        branches: drafts of a row at most: one of the chain, and its siblings; 1: chains only.
        step_tokens: tokens of a pass at most.
        reuse: whether sequences share prefixes.
        nbytes: memory in addition to the target, for logs; 0: unknown.
    """

    is_free_of_compute, samples_from_q, needs_full_tree, confident, trees = False, True, False, False, False
    most = 8

    def __init__(
        self,
        runner: Runner,
        vocabulary: VocabularyMapping | None = None,
        *,
        name: str = "draft",
        ends: Sequence[int] = (),
        min_confidence: float = 0.0,
        branches: int = BRANCHES,
        step_tokens: int = 2048,
        reuse: bool = True,
        nbytes: int = 0,
    ) -> None:
        assert 0 <= min_confidence < 1 and step_tokens >= 1, (
            f"min_confidence {min_confidence}, step_tokens {step_tokens}"
        )
        assert branches >= 1, f"branches {branches}"
        self.runner, self.name, self.nbytes = runner, name, nbytes
        self.vocabulary = vocabulary or SameVocabulary(runner.vocabulary, runner.vocabulary)
        self.ends, self.min_confidence = frozenset(ends), min_confidence
        self.branches, self.step_tokens = branches, step_tokens
        reuse = reuse and "states" not in getattr(runner, "features", ())
        manager = BlockManager(runner.capacity, runner.block_size, reuse=reuse)
        self.tables = DraftTables(manager, runner.forget)
        self._translators: dict[int, TokenTranslator] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """A chain of at most ``most`` drafts for each request, with siblings where it asks for them.

        An error of the runner is raised after the tables of the round are dropped, so later rounds can run.
        """
        self.tables.begin([request.sequence for request in requests if request.most > 0])
        drafts = [self._begin(request) for request in requests]
        growing = [draft for draft in drafts if draft is not None]
        try:
            while growing:
                self._run(growing)
                growing = [draft for draft in growing if draft.open]
        except Exception:
            for request in requests:
                self._drop(request.sequence)
            raise
        return [None if draft is None else draft.draft() for draft in drafts]

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        """Nothing: the next request has the tokens."""

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._translators.pop(sequence, None)
        self._drop(sequence)

    def times(self) -> DraftTimes:
        """Of its runner."""
        passes = measure(self.runner, {1: (1, PREFILL), 8: (8,)})
        reading = passes[1].get(PREFILL, PREFILL * passes[1][1]) / PREFILL
        return DraftTimes({batch: points[batch] for batch, points in passes.items()}, reading=reading)

    def check(self) -> None:
        """Raises AssertionError naming what is wrong, such as blocks that leaked."""
        self.tables.check()

    def _drop(self, sequence: int) -> None:
        if sequence in self.tables:
            self.tables.drop(sequence)

    def _begin(self, request: DraftRequest) -> GrowingDraft | None:
        """An empty draft for a request; None where slots or context are exhausted."""
        if request.most <= 0:
            return None
        if request.sequence not in self._translators:
            self._translators[request.sequence] = self.vocabulary.translator()
        ids = self._translators[request.sequence].translate(request.tokens)
        if not ids:
            return None
        most, context = request.most, self.runner.context
        if context is not None:
            most = min(most, context - len(ids) + 1)
        if most <= 0:  # never again: sequences only grow
            self._drop(request.sequence)
            return None
        if not self.tables.open(request.sequence, ids, most - 1, request.salt):
            return None
        branches = self.branches if request.siblings else 1
        return GrowingDraft(request, ids, len(ids), most, self.ends, self.min_confidence, branches)

    def _run(self, drafts: Sequence[GrowingDraft]) -> None:
        """Run the tokens that are not in the tables, fewest first; completed sequences get a draft."""
        free, parts = self.step_tokens, []
        for draft in sorted(drafts, key=self._left):
            count = min(self._left(draft), free)
            free -= count
            if count:
                parts.append((draft, count, count == self._left(draft)))
        tokens: list[int] = []
        for draft, count, _ in parts:
            start = self.tables.length(draft.request.sequence)
            tokens += draft.ids[start : start + count]
        spans = [
            self.tables.span(draft.request.sequence, count, int(is_complete), draft.certain - 1)
            for draft, count, is_complete in parts
        ]
        rows = self.runner.run(StepInput(tokens, tuple(spans), self.tables.manager.copies()))
        complete = [draft for draft, _, is_complete in parts if is_complete]
        for draft, count, _ in parts:
            start = self.tables.length(draft.request.sequence)
            certain = draft.ids[: draft.certain] if start < draft.certain else ()
            self.tables.ran(draft.request.sequence, draft.ids[start : start + count], certain)
        for row, draft in enumerate(complete):
            draft.extend(self.vocabulary.target_logits(rows[row : row + 1]))
            if draft.open:
                draft.ids.append(self.vocabulary.draft_id(draft.tokens[-1]))

    def _left(self, draft: GrowingDraft) -> int:
        return len(draft.ids) - self.tables.length(draft.request.sequence)


def _likeliest(x: Tensor, count: int) -> list[int]:
    """The ``count`` largest of (1, V), in order, without banned tokens (-inf) after the first.

    Raises:
        NumericsError: as :func:`attar.runtime.sampling.warp.likeliest`.
    """
    if count == 1:
        return likeliest(x)
    count = min(count, x.shape[1])
    if x.device.type == "cpu":
        row = x[0].numpy()
        indices = largest_indices(row, count)
        values = row[indices]
    else:
        top = x[0].topk(count)
        values, indices = top.values.cpu().numpy(), top.indices.cpu().numpy()
    check_finite(math.isfinite(values[0]))
    allowed: list[int] = indices[values > -np.inf].tolist()
    return allowed
