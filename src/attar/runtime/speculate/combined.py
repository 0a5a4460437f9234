"""A head, or a draft model, and suffix trees in one draft.

    alone     where the trees alone promise more speed, the head is not asked: the sequence repeats something
    merged    a head's fixed draft and that of the trees are one tree; the policy keeps the nodes that pay
    drawn     a head's draft with q stays alone: the nodes of a tree are fixed, and a draft has one rule

Which of the two drafts is decided from the sequence so far and the acceptance measured before, never from a
token that was drawn: exact verification keeps the target's distribution.

A node of both is the head's. Those of the trees alone have kinds of their own in a merged draft: next to a
head they are accepted where the head is wrong, which is rarer.

Source: SAM-Decoding (Hu et al. 2024, arXiv 2411.10666) takes the automaton's draft from a length of match on,
else the head's. Differs: by measured acceptance and times; merged where both are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.runtime.speculate.draft import LEVELS, Draft, kinds_of
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import (
    DraftFeedback,
    DraftRequest,
    DraftTimes,
    Proposer,
    TimedProposer,
)
from attar.runtime.speculate.suffix import SuffixProposer
from attar.runtime.speculate.suffix_tree import GROUP, GROUPS

MERGED = 2 * GROUPS * LEVELS  # added to the kinds of nodes next to a head's


class CombinedProposer:
    """The head as a proposer, and suffix trees that follow the same sequences.

    Args:
        head: any proposer that is not free.
        suffixes: trees that draft for the same requests, in microseconds.
    """

    is_free_of_compute, needs_full_tree = False, False

    def __init__(self, head: TimedProposer, suffixes: SuffixProposer) -> None:
        self.head, self.suffixes, self.name = head, suffixes, f"{head.name}+{suffixes.name}"
        self.samples_from_q, self.most, self.branches = head.samples_from_q, head.most, head.branches
        self.confident, self.trees = head.confident, head.trees

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """The head's drafts; ``suffixes`` are asked before, and for all sequences."""
        return self.head.propose(requests)

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        self.head.observe(feedback)
        self.suffixes.observe(feedback)

    def forget(self, sequence: int) -> None:
        """A sequence ended."""
        self.head.forget(sequence)
        self.suffixes.forget(sequence)

    def times(self) -> DraftTimes:
        """The head's."""
        return self.head.times()


def lookup_part(proposer: Proposer) -> Proposer | None:
    """What takes almost no time to ask: a free proposer, or the trees of a combined one."""
    return proposer if proposer.is_free_of_compute else getattr(proposer, "suffixes", None)


def proposers_of(proposer: Proposer, draft: Draft, path: Sequence[int]) -> tuple[str, ...]:
    """Names of the proposers of the drafts on a path: of a head or of the trees where both propose, which
    have kinds of their own."""
    if not isinstance(proposer, CombinedProposer):
        return (proposer.name,) * len(path)
    names, kinds = (proposer.head.name, proposer.suffixes.name), kinds_of(draft)
    return tuple(names[kinds[node - 1] >= GROUP * LEVELS] for node in path)


def drafts_alone(policy: DraftPolicy, sequence: int, limit: int, draft: Draft | None, width: int = 1) -> bool:
    """Whether the draft of the trees promises at least the speed of a head with ``limit`` drafts, whose steps
    are divided over the ``width`` sequences of the pass."""
    if draft is None or not policy.latency.known:
        return False
    return policy.speedup(sequence, draft, width) >= policy.speedup(sequence, limit, width)


def combined(
    policy: DraftPolicy,
    sequences: Sequence[int],
    limits: Sequence[int],
    drafts: Sequence[Draft | None],
    tree_drafts: Sequence[Draft | None],
    prompt_tokens: int = 0,
) -> list[Draft | None]:
    """The drafts that are run.

    Args:
        limits: drafts of each sequence at most.
        drafts: the head's.
        tree_drafts: of the trees.
    """
    pairs = list(zip(drafts, tree_drafts, strict=True))
    alone = policy.select(sequences, [None if head else tree for head, tree in pairs], prompt_tokens)
    both = [
        merged(head, tree).cut(limit) if head and tree and head.q is None else head
        for (head, tree), limit in zip(pairs, limits, strict=True)
    ]
    headed = policy.trim(sequences, both, prompt_tokens)
    return [head or tree for head, tree in zip(headed, alone, strict=True)]


def merged(first: Draft, second: Draft) -> Draft:
    """One tree of two fixed drafts: the nodes of the first, then those of the second that it lacks."""
    assert first.rule == second.rule == "fixed", "a drawn draft is not merged"
    tokens, parents, kinds = [*first.tokens], [*first.parents], [*kinds_of(first)]
    nodes: dict[tuple[int, int], int] = {}
    for node, child in enumerate(zip(parents, tokens, strict=True), 1):
        nodes.setdefault(child, node)
    index = [0]  # of the second's nodes in the tree
    for token, parent, kind in zip(second.tokens, second.parents, kinds_of(second), strict=True):
        child = index[parent], token
        if child not in nodes:
            tokens.append(token)
            parents.append(index[parent])
            kinds.append(kind + MERGED)
            nodes[child] = len(tokens)
        index.append(nodes[child])
    return Draft(tuple(tokens), tuple(parents), kinds=tuple(kinds))
