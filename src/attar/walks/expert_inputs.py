"""What the experts of a mixture get: the tokens of all batches, held once, and given out expert by expert.

    n       tokens that the router gave to the expert
    m       floor * K tokens, K the wider of the expert's inputs
    H_e  =  2 / max(n, m) * (sum over the n tokens of x x^T  +  sum over (m - n)+ others of x x^T)

Several processes hold a part of the batches each (every R-th); the numbers of tokens are those of all of
them, and the tokens of others that fill an expert up are the ones that a single process would take.

An expert that saw few tokens would get a Hessian of their number's rank. It is filled up with tokens that the
router gave to other experts, evenly spaced over the calibration: so H_e shrinks towards the Hessian of all
tokens, with weight (m - n) / m, and any other statistic of a solver with it. With ``everything`` all tokens
count for all experts. Only statistics see them: what leaves the mixture is what the router chose.

Experts do not see each other's outputs. So each is solved on its own from the mixture's input, whatever their
number: one pass of the block for all of them, and one expert's statistics in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.models.loading.device import bf16_products
from attar.models.loading.experts import Expert, Experts
from attar.walks.offloaded_model import HiddenStates


@dataclass(frozen=True)
class ExpertTokens:
    """Which tokens count for an expert's statistics; see the file's text.

    Attributes:
        floor: m as a multiple of K; 0: only the expert's own tokens.
        everything: every token for every expert.
    """

    floor: float = 1.0
    everything: bool = False


class ExpertInputs:
    """The arguments of a mixture's experts in every batch: hidden states (T, H) and chosen experts (T, k).

    Args:
        experts: the module that is called with them.
        folder: for hidden states beyond ``limit`` bytes.
        fast: products in bfloat16.
        processes: the processes that hold the other batches.
    """

    def __init__(
        self,
        experts: Experts,
        counted: ExpertTokens,
        folder: Path,
        limit: int,
        device: Any,
        fast: bool,
        processes: Processes = SINGLE_PROCESS,
    ) -> None:
        self.experts, self.counted, self.processes = experts, counted, processes
        self.device, self.fast = device, fast
        self.hidden = HiddenStates(folder, limit)
        self.index: list[Tensor | None] = []

    def add(self, hidden: Tensor, index: Tensor | None = None, *_: Any) -> None:
        """The arguments of one more batch."""
        self.hidden[len(self.index)] = hidden
        self.index.append(index)

    def rows(self, number: int, floor: int) -> tuple[list[Tensor], int]:
        """Rows of each batch that count for an expert, int64, and how many tokens of all processes are its
        own.

        Args:
            floor: m, tokens.
        """
        routed = []
        for batch, index in enumerate(self.index):
            hidden = self.hidden[batch] if index is None else torch.empty(0)
            routed.append(self.experts.tokens(number, hidden, index)[0])
        counts = self._of_all([len(rows) for rows in routed])
        seen = sum(counts)
        if self.index[0] is None:  # scored inputs hold no tokens of other experts
            return routed, seen
        sizes = self._of_all([len(index) for index in self.index if index is not None])
        wanted = sum(sizes) if self.counted.everything else max(floor - seen, 0)
        if not wanted:
            return routed, seen
        others = []
        for rows, index in zip(routed, self.index, strict=True):
            assert index is not None
            free = torch.ones(len(index), dtype=torch.bool, device=rows.device)
            free[rows] = False
            others.append(free.nonzero().flatten())
        left = [size - count for size, count in zip(sizes, counts, strict=True)]
        wanted = min(wanted, sum(left))
        chosen = torch.arange(wanted) * sum(left) // max(wanted, 1)
        starts = list(accumulate(left, initial=0))[self.processes.rank :: self.processes.count]
        counted = []
        for rows, free, start in zip(routed, others, starts, strict=False):
            inside = chosen[(chosen >= start) & (chosen < start + len(free))] - start
            counted.append(torch.cat([rows, free[inside.to(free.device)]]))
        return counted, seen

    def _of_all(self, counts: list[int]) -> list[int]:
        """A number for each batch of all processes, in the order of the calibration."""
        parts = self.processes.of_all(counts)
        return [parts[number % len(parts)][number // len(parts)] for number in range(sum(map(len, parts)))]

    def inputs(self, rows: list[Tensor], expert: Expert | None = None) -> Iterator[Tensor]:
        """An expert's inputs (T, H) batch by batch; with ``expert`` what its down gets, (T, I)."""
        for batch, chosen in enumerate(rows):
            x = self.hidden[batch][chosen.to("cpu")].to(self.device)
            if expert is not None:
                with bf16_products(self.device, self.fast):  # ends before the solver sees x
                    x = expert.inner(x)
            yield x

    def clear(self) -> None:
        """Delete everything, on disk too."""
        self.hidden.clear()
        self.index.clear()


@dataclass(frozen=True)
class SolvedTogether:
    """Groups of Linears that are solved from what one module is called with.

    Attributes:
        holder: path of a mixture's experts in the block, whose groups these are; None: one group of Linears.
    """

    holder: str | None
    groups: list[list[str]]


def stages(block: Any, groups: Sequence[list[str]]) -> list[SolvedTogether]:
    """A block's groups in forward order, those of a mixture's experts together."""
    inside = f"{block.mixture.holder}." if block.mixture is not None else None
    together: list[SolvedTogether] = []
    for group in groups:
        if inside is None or not group[0].startswith(inside):
            together.append(SolvedTogether(None, [group]))
        elif together and together[-1].holder is not None:
            together[-1].groups.append(group)
        else:
            together.append(SolvedTogether(inside.removeprefix(f"{block.name}.").rstrip("."), [group]))
    return together
