"""Drafts from suffix trees: one of each sequence, and one of each tenant's finished requests.

    propose    the new tokens of a sequence enter its tree; the better draft of the two trees
    (``suffix_tree.py``) forget     the sequence's tokens enter the tenant's tree, its own tree is dropped
    bounds     MOST_NODES nodes and MOST_REQUESTS requests in all; the oldest request of the tenant that was
               used least recently is removed

A preempted sequence is forgotten, too: when it is back, its text is taken out of the tenant's tree until it
ends, so no request is counted twice. Tenants (salts) share no tree. Drafts are fixed: no q.

Source: SuffixDecoding (arXiv 2411.04975). Differs: prompts enter the tenant's tree, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from attar.runtime.speculate.suffix_tree import FACTOR, Nodes, SuffixTree, suffix_tree

MOST_NODES, MOST_REQUESTS = 1 << 20, 10_000  # about 40 bytes a node
NEAR = 4  # drafts that are proposed in any case


class FinishedRequests:
    """The suffix trees of finished requests, one for each salt.

    Args:
        ends: end tokens: nothing is drafted after one.
        nodes, requests: at most, of all salts.
        factor: drafts for each token of a match at most.
    """

    def __init__(
        self,
        ends: Sequence[int] = (),
        nodes: int = MOST_NODES,
        requests: int = MOST_REQUESTS,
        factor: float = FACTOR,
    ) -> None:
        self.ends, self.most_nodes, self.most_requests, self.factor = ends, nodes, requests, factor
        self._trees: OrderedDict[str, SuffixTree] = OrderedDict()  # the most recently used last
        self._texts: dict[str, dict[int, int]] = {}  # by salt: text by sequence, the oldest first
        self._salts: dict[int, str] = {}  # by sequence
        self.nodes = 0

    def __len__(self) -> int:
        """Requests."""
        return len(self._salts)

    @property
    def salts(self) -> tuple[str, ...]:
        """The least recently used first."""
        return tuple(self._trees)

    def tree(self, salt: str) -> SuffixTree | None:
        """The tree of a salt; None where nothing of it is kept."""
        if salt not in self._trees:
            return None
        self._trees.move_to_end(salt)
        return self._trees[salt]

    def add(self, sequence: int, salt: str, tokens: Sequence[int]) -> None:
        """Add a finished request as the latest of its salt."""
        self.remove(sequence)
        if salt not in self._trees:
            self._trees[salt], self._texts[salt] = suffix_tree(self.ends, factor=self.factor), {}
        tree = self._trees[salt]
        self._trees.move_to_end(salt)
        text, before = tree.begin(), len(tree)
        self._texts[salt][sequence], self._salts[sequence] = text, salt
        tree.extend(text, tokens)
        self.nodes += len(tree) - before
        while self._salts and (len(self) > self.most_requests or self.nodes > self.most_nodes):
            least = next(iter(self._trees))
            self.remove(next(iter(self._texts[least])))

    def remove(self, sequence: int) -> None:
        """Remove a request; unknown ones are ignored."""
        salt = self._salts.pop(sequence, None)
        if salt is None:
            return
        tree = self._trees[salt]
        before = len(tree)
        tree.remove(self._texts[salt].pop(sequence))
        self.nodes += len(tree) - before
        if not self._texts[salt]:
            del self._trees[salt], self._texts[salt]


@dataclass
class RunningText:
    """A sequence that decodes.

    Attributes:
        tokens: those in the tree.
        reach: drafts of the next proposal at most, adapted to what was run.
    """

    tree: SuffixTree
    text: int
    salt: str
    tokens: list[int]
    reach: int = 1 << 30


class SuffixProposer:
    """Proposes from suffix trees.

    Args:
        ends: end tokens: nothing is proposed after one.
        finished: of the finished requests; None: new ones, with the usual bounds.
        factor: drafts for each token of a match at most.
        name: "ngram" is the same: a match is an n-gram that occurred before.
    """

    is_free_of_compute, samples_from_q, needs_full_tree = True, False, False

    def __init__(
        self,
        *,
        ends: Sequence[int] = (),
        finished: FinishedRequests | None = None,
        factor: float = FACTOR,
        name: str = "suffix",
    ) -> None:
        self.ends, self.factor, self.name = tuple(ends), factor, name
        self.finished = FinishedRequests(self.ends, factor=factor) if finished is None else finished
        self._running: dict[int, RunningText] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """A tree of at most ``most`` drafts for each request."""
        return [self._proposed(request) for request in requests]

    def has_draft(self, sequence: int, tokens: Sequence[int], most: int) -> bool:
        """Whether something would be proposed for a sequence; True for one that was not asked for yet."""
        running = self._running.get(sequence)
        return running is None or bool(self._nodes(running, tokens, most)[0])

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        """Adapt the size of the next drafts to what was run."""
        for verified in feedback:
            running = self._running.get(verified.sequence)
            if running is not None:
                running.reach = NEAR + 2 * len(verified.draft or ())

    def forget(self, sequence: int) -> None:
        """A sequence ended, or was preempted."""
        running = self._running.pop(sequence, None)
        if running is not None:
            self.finished.add(sequence, running.salt, running.tokens)

    def _proposed(self, request: DraftRequest) -> Draft | None:
        if request.most <= 0:
            return None
        running = self._running.get(request.sequence) or self._begin(request)
        tokens, parents, kinds = self._nodes(running, request.tokens, request.most)
        return Draft(tuple(tokens), tuple(parents), kinds=tuple(kinds)) if tokens else None

    def _nodes(self, running: RunningText, tokens: Sequence[int], most: int) -> Nodes:
        """At most ``most`` drafts, after the tokens that are new have entered the tree."""
        new = tokens[len(running.tokens) :]
        running.tokens += new
        others = self.finished.tree(running.salt)
        return running.tree.draft(running.text, new, others, min(most, running.reach))

    def _begin(self, request: DraftRequest) -> RunningText:
        """The empty tree of a sequence; a preempted one is no finished request any more."""
        self.finished.remove(request.sequence)
        tree = suffix_tree(self.ends, factor=self.factor)
        running = RunningText(tree, tree.begin(), request.salt, [])
        self._running[request.sequence] = running
        return running
