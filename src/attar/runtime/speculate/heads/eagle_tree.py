"""EAGLE with dynamic trees (EAGLE-2, ``dynamic_tree.py``) as a proposer.

    greedy     q is the head's distribution after the request's penalties, biases and grammar
    coupled    q with the noise that the target's token is drawn with: softmax(log q + Gumbel noise)
    exact      at a temperature above 0: a chain drawn from q (``chain.py``), because the nodes of this tree
               are chosen by their tokens

A tree's drafts are fixed. Each level is one run of the head, of all sequences together; a node attends to the
decided tokens, its ancestors and itself.

Letters: k branches, R rows, V vocabulary of the target, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attar.runtime.sampling.sample import uniforms
from attar.runtime.sampling.warp import SamplingRow, adjust, warp
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.draft_model import GREEDY
from attar.runtime.speculate.heads.chain import ChainProposer
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.heads.dynamic_tree import GrowingTree
from attar.runtime.speculate.heads.eagle_proposer import DraftEntries, DraftLevel, EagleChain, EagleDrafter
from attar.runtime.speculate.heads.times import measure_rounds
from attar.runtime.speculate.noise import DraftRules
from attar.runtime.speculate.proposer import DraftRequest, DraftTimes


@dataclass
class EagleTree:
    """The tree of a sequence.

    Attributes:
        depth: levels so far.
        outputs: (leaves, H), what the entries of the leaves made.
        rows: of each node that was run, its number among the sequence's drafts.
    """

    request: DraftRequest
    tree: GrowingTree
    entries: DraftEntries
    outputs: Tensor
    rows: dict[int, int]
    depth: int = 0

    def level(self, states: Tensor) -> DraftLevel:
        """The leaves, to be run after what the entries of their parents made."""
        first, leaves = len(self.rows), self.tree.leaves
        self.rows |= {leaf: first + row for row, leaf in enumerate(leaves)}
        seen = torch.zeros(len(leaves), len(self.rows), dtype=torch.bool)
        for row, leaf in enumerate(leaves):
            seen[row, [self.rows[node] for node in self.tree.path(leaf)]] = True
        tokens = [self.tree.tokens[leaf] for leaf in leaves]
        return DraftLevel(self.entries, tokens, states, self.depth - 1, seen.to(states.device))

    def log_q(self, logits: Tensor) -> Tensor:
        """(leaves, V) from the head's logits after each leaf; NaN where the rules have no continuation."""
        rules = self.request.rules
        if rules is None:
            return adjust(logits, [GREEDY] * len(logits)).log_softmax(-1)
        out = torch.full_like(logits, torch.nan)
        rows = list[tuple[int, SamplingRow]]()
        for index, leaf in enumerate(self.tree.leaves):
            try:
                rows.append((index, rules.row(self.tree.path_tokens(leaf))))
            except Exception:  # the grammar has no continuation
                continue
        if rows:
            part, warps = logits[[index for index, _ in rows]], [row for _, row in rows]
            if warps[0].params.greedy:
                log_q = adjust(part, warps).log_softmax(-1)
            else:
                log_q = coupled_log_q(warp(part, warps), rules.key(self.depth))
            out[[index for index, _ in rows]] = log_q
        return out


def coupled_log_q(q: Tensor, key: int) -> Tensor:
    """log softmax (R, V) of log q + g, with the Gumbel noise g of a stream: what the noise makes of q."""
    noise = -np.log(-np.log(uniforms(key, np.arange(q.shape[1]))))
    return (q.log() + torch.from_numpy(noise).to(q)).log_softmax(-1)


class EagleTreeProposer(ChainProposer):
    """A ``TimedProposer`` (see ``proposer.py``).

    Args:
        branches: k.
    """

    trees = True

    def __init__(
        self,
        drafter: EagleDrafter,
        context: ContextReader,
        *,
        name: str,
        ends: Sequence[int] = (),
        width: int,
    ) -> None:
        super().__init__(EagleChain(drafter), context, name=name, ends=ends)
        self.drafter, self.width = drafter, width
        self.most = self.head.drafts * width

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """A tree for each request, a chain where drafts are drawn."""
        chains = [request for request in requests if isinstance(request.rules, DraftRules)]
        trees = [request for request in requests if not isinstance(request.rules, DraftRules)]
        drawn = super().propose([replace(chain, most=min(chain.most, chain.depth)) for chain in chains])
        drafts = dict(zip(map(id, chains), drawn, strict=True))
        drafts |= dict(zip(map(id, trees), self._trees(trees), strict=True))
        return [drafts[id(request)] for request in requests]

    def times(self) -> DraftTimes:
        """Of rounds on states that are not there yet, with no end."""
        endless = EagleTreeProposer(self.drafter, self.context, name=self.name, width=self.width)
        return measure_rounds(endless, self.context, self.head.drafts)

    def _trees(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        trees = [self._tree(request) if request.most > 0 else None for request in requests]
        growing = [tree for tree in trees if tree is not None]
        while growing:
            logits = self.drafter.logits(torch.cat([tree.outputs for tree in growing]))
            sizes = [len(tree.outputs) for tree in growing]
            states = list[Tensor]()
            for tree, rows in zip(growing, logits.split(sizes), strict=True):
                before = {leaf: row for row, leaf in enumerate(tree.tree.leaves)}
                tree.tree.grow(tree.log_q(rows))
                tree.depth += 1
                states.append(tree.outputs[[before[tree.tree.parents[leaf]] for leaf in tree.tree.leaves]])
            pairs = [(tree, x) for tree, x in zip(growing, states, strict=True) if self._grows(tree)]
            growing = [tree for tree, _ in pairs]
            if growing:
                outputs = self.drafter.run([tree.level(x) for tree, x in pairs])
                for tree, rows in zip(growing, outputs.split([len(x) for _, x in pairs]), strict=True):
                    tree.outputs = rows
        return [None if tree is None else tree.tree.draft(tree.request.most) for tree in trees]

    def _tree(self, request: DraftRequest) -> EagleTree:
        self.read(request)
        entries = self.drafter.entries(request.sequence, request.tokens)
        tree, last = GrowingTree(self.width, self.ends), self.drafter.last(request.sequence)
        return EagleTree(request, tree, entries, last[None], {})

    def _grows(self, tree: EagleTree) -> bool:
        deepest = min(self.head.drafts, tree.request.depth, tree.request.most)
        return bool(tree.tree.leaves) and tree.depth < deepest
