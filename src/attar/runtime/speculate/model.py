"""A smaller model that drafts: a runner and tables of its own, that follow the target's texts.

    propose    rejected drafts are taken back; what the model has not seen of each text is run, all texts in
               one pass; then a pass for every further draft, of the sequences that still want one
    rules      ``Drafting``: drawn with the round's own noise, q goes with the draft, for exact verification;
               the text itself: drawn with the noise of the target's tokens (Gumbel coupling), "fixed"

How a draft comes of rows is said in ``growth.py``: a chain x_1..x_K with siblings. x_K is not run, nor is any
sibling: if one becomes text, the next round runs it with the token behind it. A draft ends at an end token,
at the model's context, where the noise or the grammar leaves nothing to draw, and behind a doubtful row.

A pass has at most ``step_tokens`` tokens: a long prompt that is new is run in several, beside those that
draft already. What the model makes of it can only cost time: tokens are the target's in any vocabulary
(``vocabulary.py``), tables may go and come again (``tables.py``), and logits that are NaN end the draft.

Letters: K drafts of a chain, q_i the distribution of x_i, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.growth import GrowingDraft
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from attar.runtime.speculate.tables import DraftTables
from attar.runtime.speculate.vocabulary import SameVocabulary, TokenTranslator, VocabularyMapping
from attar.runtime.step import Runner, StepInput

BRANCHES = 4  # a fifth brings next to nothing (benchmarks/siblings.py)


class DraftModel:
    """Proposes what another model would say.

    Args:
        runner: the draft model, with a pool of its own; nothing evicts there.
        vocabulary: between its tokens and the target's; None: they are the same.
        name: for people and metrics.
        ends: the target's end tokens.
        doubt: where the likeliest token of a row has less probability, its draft is the last; 0: never.
        branches: drafts of a row at most: one of the chain, and its siblings; 1: chains alone.
        step_tokens: tokens of a pass at most.
        reuse: whether beginnings of texts are shared.
        nbytes: of memory that drafting takes beside the target, for people; 0: unknown.
    """

    free, draws, looks = False, True, False

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
        self._readers: dict[int, TokenTranslator] = {}

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft | None]:
        """A chain of at most ``most`` drafts for each wish; where it is wide, all siblings beside: which of
        these are run is said in ``siblings.py``.

        What the runner raises is raised; the tables of the round are gone then, and the next one may go on.
        """
        self.tables.begin([wish.sequence for wish in wishes if wish.most > 0])
        chains = [self._opened(wish) for wish in wishes]
        going = [chain for chain in chains if chain is not None]
        try:
            while going:
                self._pass(going)
                going = [chain for chain in going if chain.open]
        except Exception:
            for wish in wishes:
                if wish.sequence in self.tables:
                    self.tables.drop(wish.sequence)
            raise
        return [None if chain is None else chain.draft() for chain in chains]

    def observe(self, news: Sequence[DraftFeedback]) -> None:
        """Nothing to do: the next wish brings the tokens."""

    def fork(self, sequence: int, child: int) -> None:
        """``child`` begins with the tokens of ``sequence``, on the same blocks."""
        if sequence in self._readers:
            self._readers[child] = self._readers[sequence].copy()
        if sequence in self.tables:
            self.tables.fork(sequence, child)
            self.runner.fork(sequence, child)

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self._readers.pop(sequence, None)
        if sequence in self.tables:
            self.tables.drop(sequence)

    def check(self) -> None:
        """Raises AssertionError naming what is wrong, such as blocks that leaked."""
        self.tables.check()

    def _opened(self, wish: DraftRequest) -> GrowingDraft | None:
        """A draft for a wish begins; None where there is no room, or no context left."""
        if wish.most <= 0:
            return None
        if wish.sequence not in self._readers:
            self._readers[wish.sequence] = self.vocabulary.reader()
        text = self._readers[wish.sequence].read(wish.tokens)
        if not text:
            return None
        most, context = wish.most, self.runner.context
        if context is not None:
            most = min(most, context - len(text) + 1)
        if most <= 0:  # never again: texts only grow
            if wish.sequence in self.tables:
                self.tables.drop(wish.sequence)
            return None
        if not self.tables.open(wish.sequence, text, most - 1, wish.salt):
            return None
        branches = self.branches if wish.wide else 1
        return GrowingDraft(wish, text, len(text), most, self.ends, self.doubt, branches)

    def _pass(self, chains: Sequence[GrowingDraft]) -> None:
        """Runs what is left of each text, the shortest first; where nothing is left, a draft is chosen."""
        room, parts = self.step_tokens, []
        for chain in sorted(chains, key=self._left):
            count = min(self._left(chain), room)
            room -= count
            if count:
                parts.append((chain, count, count == self._left(chain)))
        tokens: list[int] = []
        for chain, count, _ in parts:
            start = self.tables.length(chain.wish.sequence)
            tokens += chain.text[start : start + count]
        spans = [self.tables.span(chain.wish.sequence, count, int(whole)) for chain, count, whole in parts]
        rows = self.runner.run(StepInput(tokens, tuple(spans), self.tables.manager.copies()))
        done = [chain for chain, _, whole in parts if whole]
        for chain, count, _ in parts:
            start = self.tables.length(chain.wish.sequence)
            certain = chain.text[: chain.certain] if start < chain.certain else ()
            self.tables.ran(chain.wish.sequence, chain.text[start : start + count], certain)
        for place, chain in enumerate(done):
            chain.extend(self.vocabulary.logits(rows[place : place + 1]))
            if chain.open:
                chain.text.append(self.vocabulary.own(chain.tokens[-1]))

    def _left(self, chain: GrowingDraft) -> int:
        return len(chain.text) - self.tables.length(chain.wish.sequence)
