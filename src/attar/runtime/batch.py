"""From sequences to a step, and from a step's logits back to sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.sequence import Sequence
from attar.runtime.step import StepInput, TokenSpan

Planned = list[tuple[Sequence, int]]
"""Sequences of a step, each with its tokens, for which places are reserved."""
PlanDrafts = Callable[[Planned], Planned]
"""Gives drafts to sequences of a planned step, in what they leave of it."""


@dataclass(frozen=True)
class StepOutput:
    """A sequence's logits in a step.

    Args:
        sequence: whose.
        rows: of the logits that the runner returned.
        position: of the token whose logits the first row is; row i predicts the token at position + i + 1.
        draws: new tokens are drawn from so many last rows: 1, or 1 + drafts; 0 while a prompt is computed.
    """

    sequence: Sequence
    rows: range
    position: int
    draws: int


def divide(running: Iterable[Sequence], budget: int, chunk: int | None = None) -> dict[int, int]:
    """Tokens of a step for each running sequence, by id: those that decode come first.

    Args:
        running: in their order.
        budget: tokens of the step.
        chunk: tokens of one prompt at most.
    """
    shares = {}
    for sequence in sorted(running, key=lambda sequence: not sequence.decodes):
        share = min(sequence.wanted, budget)
        shares[sequence.id] = share if sequence.decodes else min(share, chunk or share)
        budget -= shares[sequence.id]
    return shares


def make_step(planned: Iterable[tuple[Sequence, int]], manager: BlockManager) -> StepInput:
    """The step that runs the next so many tokens of each sequence; drafts beyond them are dropped.

    Args:
        planned: sequences, each with its tokens of this step, for which places are reserved.
        manager: has their tables and the copies that are due.
    """
    tokens: list[int] = []
    spans: list[TokenSpan] = []
    trees: list[tuple[int, ...] | None] = []
    for sequence, count in planned:
        start, stop = sequence.computed, sequence.computed + count
        sequence.cut_drafts(stop - len(sequence.tokens))
        table = manager.table(sequence.id)
        kept = table.length if table.packed else None
        spans.append(TokenSpan(sequence.id, start, stop, table.row, sequence.wants(stop), kept))
        tokens += sequence.tokens[start:stop] + sequence.drafts
        tree = sequence.parents if sequence.drafts else None
        trees.append(None if tree is None else (-1, *tree))
    return StepInput(tokens, tuple(spans), manager.copies(), tuple(trees) if any(trees) else None)
