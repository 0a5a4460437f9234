"""How many weights of a matrix are zero, and where: a fraction of them, or N:M.

    0.5, 50%    half of the weights, wherever the scores are lowest
    2:4         of every 4 consecutive inputs of a row, the 2 of the highest scores stay (N of M)

N:M is the pattern of Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks", arXiv 2104.08378. Free
of torch, for the settings; ``mask`` uses the methods of the tensor that it is given.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attar.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

_PATTERN = re.compile(r"(\d+):(\d+)")
FEW = 16  # members of a group that are compared with each other
PATTERN_PAYS = (
    "attar's own runtime reads fewer bytes of a 2:4 pattern (see docs/prune.md); no other engine gains"
)
NOTHING_PAYS = "no engine gains from zeros in this layout, attar's own runtime only from 2:4"
STORED = "as ordinary weights: the files are as large as before"
STORED_AS_CODES = "as codes like all others: zeros make the files no smaller"
ALLOWED = "a fraction such as 0.5 or 50%, above 0 and below 1, or N:M such as 2:4 (N of M stay)"


@dataclass(frozen=True)
class Sparsity:
    """An amount of zeros.

    Attributes:
        zeros: fraction of the weights that become zero.
        kept: N of N:M; 0: no pattern.
        of: M of N:M.
    """

    zeros: float
    kept: int = 0
    of: int = 0

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}" if self.of else f"{self.zeros:g}"

    @property
    def two_of_four(self) -> bool:
        """Whether every four consecutive inputs keep at most two weights: what the runtime packs."""
        return bool(self.of) and self.kept <= 2 and (self.of % 4 == 0 or (self.kept, self.of) == (1, 2))

    def fits(self, columns: int) -> bool:
        """Whether a matrix of this many inputs can have the pattern."""
        return not self.of or columns % self.of == 0

    def check(self, columns: int, name: str) -> None:
        """Raise unless a matrix of this many inputs can have the pattern.

        Raises:
            SettingsError: it cannot; names the matrix.
        """
        if not self.fits(columns):
            allowed = f"a fraction, or N:M whose M divides the inputs of every layer: {name} has {columns}"
            raise SettingsError("sparsity", str(self), allowed)

    def mask(self, scores: Tensor, *, by_row: bool = False) -> Tensor:
        """Where weights stay, bool (N, K); of equal scores the first ones stay.

        A fraction is exact to the matrix's number of weights, also where it is taken by row: rows whose share
        is no whole number get one zero more or less, in turn.

        Args:
            scores: (N, K), the larger the more important; K is a multiple of M.
            by_row: a fraction is taken of each row, not of the whole matrix. N:M always goes by row.
        """
        if self.of:
            groups = scores.unflatten(1, (-1, self.of))
            select = _largest_of_few if self.of <= FEW else _largest
            return select(groups, self.kept).flatten(1)
        rows = scores if by_row else scores.reshape(1, -1)
        count, columns = rows.shape
        zeros = round(count * columns * self.zeros)
        mask = _largest(rows, columns - zeros // count)
        more = [
            row for row in range(count) if zeros * (row + 1) // count - zeros * row // count > zeros // count
        ]
        if more:
            mask[more] = _largest(rows[more], columns - zeros // count - 1)
        return mask.reshape(scores.shape)


def parse_sparsity(amount: float | str, name: str = "sparsity") -> Sparsity:
    """The amount that ``0.5``, ``50%`` or ``2:4`` stands for.

    Raises:
        SettingsError: it is none; names the setting ``name``.
    """
    text = str(amount).strip()
    if pattern := _PATTERN.fullmatch(text):
        kept, of = int(pattern[1]), int(pattern[2])
        if not 0 < kept < of <= 256:
            raise SettingsError(name, text, ALLOWED)
        return Sparsity(1.0 - kept / of, kept, of)
    try:
        zeros = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        raise SettingsError(name, text, ALLOWED) from None
    if not 0.0 < zeros < 1.0:
        raise SettingsError(name, text, ALLOWED)
    return Sparsity(zeros)


def _largest(scores: Tensor, count: int) -> Tensor:
    """True at the ``count`` largest of the last axis, by selection: faster than sorting."""
    import torch  # the settings know no torch

    if not count:
        return scores.new_zeros(scores.shape).bool()
    least = _least_of_largest(scores, count)
    above, equal = scores > least, scores == least
    missing = count - above.count_nonzero(-1)[..., None]
    if bool((equal.count_nonzero(-1)[..., None] != missing).any()):  # equal scores: the first ones
        equal &= equal.cumsum(-1, dtype=torch.int32) <= missing
    return above.logical_or_(equal)


def _least_of_largest(scores: Tensor, count: int) -> Tensor:
    """The least of the ``count`` largest of the last axis, which stays with length 1. numpy's selection takes
    a fifth of torch's time, and no memory for the numbers of the columns."""
    import numpy as np
    import torch

    at = scores.shape[-1] - count
    if scores.device.type != "cpu" or scores.dtype != torch.float32:
        return scores.kthvalue(at + 1, dim=-1, keepdim=True).values
    selected = np.partition(scores.detach().numpy(), at, axis=-1)
    return torch.from_numpy(selected[..., at : at + 1].copy())


def _largest_of_few(groups: Tensor, count: int) -> Tensor:
    """The same for a short last axis: entries that fewer than ``count`` others precede."""
    members = groups.movedim(-1, 0).contiguous()
    ahead = members.new_zeros(members.shape).short()
    for i, member in enumerate(members):
        for j, other in enumerate(members):
            if i != j:
                ahead[i] += other >= member if j < i else other > member
    return (ahead < count).movedim(0, -1).contiguous()


def zeros_statement(
    method: str, sparsity: Sparsity, zeros: int, of: int, stored: str = STORED
) -> dict[str, int | float | str]:
    """What a card says of all zeros together.

    Args:
        zeros: number of weights that are zero, of ``of``.
        stored: how, in words.
    """
    return {
        "method": method,
        "asked": str(sparsity),
        "fraction": zeros / of,
        "zeros": zeros,
        "of": of,
        "pattern": str(sparsity) if sparsity.of else "none",
        "stored": stored,
        "speed": PATTERN_PAYS if sparsity.two_of_four else NOTHING_PAYS,
    }
