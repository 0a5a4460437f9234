"""A smaller model that drafts, with a runner and block tables of its own.

    propose    rejected drafts are truncated; what the model has not seen of each sequence is run, all
               sequences in one pass; then a pass for every further draft
    x_i        the chain: the likeliest token where the request is greedy; else the first of a race over q_i
    siblings   the next ones of the same row: the next likeliest; else the next of the race (Gumbel top-k)
    rules      ``DraftRules``: drawn with the round's noise, q goes with the draft, for exact verification;
               the completion itself: drawn with the noise of the target's tokens (Gumbel coupling), "fixed"

A row of logits costs a pass of the draft model; siblings are read from rows that exist anyway. With the
target's own noise (coupled) the race is the target's, run over q_i: its leaders are what the target most
likely draws. With the round's own noise (exact) they are draws from q_i without replacement, in order.
Neither x_K nor a sibling is run: if one is accepted, the next round runs it.

A draft ends at an end token, at the model's context, where the noise or the grammar leaves nothing to draw,
and after a row whose likeliest token has less probability than ``doubt``. The row is made before its token is
drawn, so which tokens are kept never depends on what was drawn.

A pass has at most ``step_tokens`` tokens: a long new prompt is run in several, together with the drafts of
others. An error of the draft model only costs time: tokens are translated to the target's vocabulary
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
from attar.runtime.speculate.noise import DraftRules
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from attar.runtime.speculate.vocabulary import SameVocabulary, TokenTranslator, VocabularyMapping
from attar.runtime.step import Runner, StepInput

BRANCHES = 4  # a fifth brings next to nothing (benchmarks/siblings.py)
GREEDY = SamplingRow(SamplingParams(temperature=0.0))


@dataclass
class GrowingDraft:
    """A draft while it grows.

    Args:
        ids: the sequence in tokens of the draft model, then x_1..x_(i-1).
        certain: how many of ``ids`` are not drafts.
        most: K.
        ends: nothing is drafted after one.
        doubt, branches: see :class:`DraftModel`.
    """

    request: DraftRequest
    ids: list[int]
    certain: int
    most: int
    ends: frozenset[int]
    doubt: float
    branches: int
    tokens: list[int] = field(default_factory=list)
    siblings: list[list[int]] = field(default_factory=list)
    q: list[Floats] = field(default_factory=list)
    open: bool = True

    def extend(self, logits: Tensor) -> None:
        """One more draft, and its siblings, from the logits (1, V) after the last; or none."""
        try:
            (token, *others), largest = self._chosen(logits)
        except Exception:  # NaN, no token of both vocabularies may follow, a grammar that cannot go on
            self.open = False
            del self.q[len(self.tokens) :]
            return
        self.tokens.append(token)
        self.siblings.append(others)
        sure = largest is None or largest >= self.doubt
        self.open = sure and len(self.tokens) < self.most and token not in self.ends

    def draft(self) -> Draft | None:
        """The chain, then the siblings from the top down, counted under rank and depth; None if empty."""
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
        """The tokens, best first, and the probability of the likeliest; None where it is not needed."""
        rules = self.request.rules
        row = GREEDY if rules is None else rules.row(self.tokens)
        if rules is None or row.params.greedy:
            x = adjust(logits, [row])
            return _likeliest(x, self.branches), float(x.softmax(-1).amax()) if self.doubt else None
        p = warp(logits, [row])
        if isinstance(rules, DraftRules):
            self.q.append(p[0].cpu().numpy())
        return draw_distinct(p[0], rules.key(len(self.tokens)), self.branches), float(p.amax())


class DraftModel:
    """Proposes what another model would generate.

    Args:
        runner: the draft model, with a pool of its own, without eviction.
        vocabulary: between its tokens and the target's; None: they are the same.
        name: for people and metrics.
        doubt: where the likeliest token of a row has less probability, its draft is the last; 0: never.
        branches: drafts of a row at most: one of the chain, and its siblings; 1: chains alone.
        step_tokens: tokens of a pass at most.
        reuse: whether sequences share prefixes.
        nbytes: memory that drafting takes in addition to the target, for people; 0: unknown.
    """

    free, draws, learns_tree = False, True, False

    def __init__(
        self,
        runner: Runner,
        vocabulary: VocabularyMapping | None = None,
        *,
        name: str = "draft",
        ends: Sequence[int] = (),
        doubt: float = 0.0,
        branches: int = BRANCHES,
        step_tokens: int = 2048,
        reuse: bool = True,
        nbytes: int = 0,
    ) -> None:
        assert 0 <= doubt < 1 and step_tokens >= 1, f"doubt {doubt}, step_tokens {step_tokens}"
        assert branches >= 1, f"branches {branches}"
        self.runner, self.name, self.nbytes = runner, name, nbytes
        self.vocabulary = vocabulary or SameVocabulary(runner.vocabulary, runner.vocabulary)
        self.ends, self.doubt = frozenset(ends), doubt
        self.branches, self.step_tokens = branches, step_tokens
        manager = BlockManager(runner.capacity, runner.block_size, reuse=reuse)
        self.tables = DraftTables(manager, runner.forget)
        self._translators: dict[int, TokenTranslator] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """A chain of at most ``most`` drafts for each request, with siblings where it asks for them.

        An error of the runner is raised; the tables of the round are dropped then, and the next may go on.
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
        """Nothing to do: the next request brings the tokens."""

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._translators.pop(sequence, None)
        self._drop(sequence)

    def check(self) -> None:
        """Raises AssertionError naming what is wrong, such as blocks that leaked."""
        self.tables.check()

    def _drop(self, sequence: int) -> None:
        if sequence in self.tables:
            self.tables.drop(sequence)

    def _begin(self, request: DraftRequest) -> GrowingDraft | None:
        """A draft for a request; None where there is no room, or no context left."""
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
        return GrowingDraft(request, ids, len(ids), most, self.ends, self.doubt, branches)

    def _run(self, drafts: Sequence[GrowingDraft]) -> None:
        """Runs what is left of each sequence, the shortest first; those that are complete get a draft."""
        room, parts = self.step_tokens, []
        for draft in sorted(drafts, key=self._left):
            count = min(self._left(draft), room)
            room -= count
            if count:
                parts.append((draft, count, count == self._left(draft)))
        tokens: list[int] = []
        for draft, count, _ in parts:
            start = self.tables.length(draft.request.sequence)
            tokens += draft.ids[start : start + count]
        spans = [self.tables.span(draft.request.sequence, count, int(whole)) for draft, count, whole in parts]
        rows = self.runner.run(StepInput(tokens, tuple(spans), self.tables.manager.copies()))
        complete = [draft for draft, _, whole in parts if whole]
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
    """The largest of (1, V), in order; after the first only those that are not banned.

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
