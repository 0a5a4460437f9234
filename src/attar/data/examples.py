"""Examples: rows of tokens, and what is to be predicted from each position.

    causal language model   targets[s] = tokens[s + 1], nothing at the end, in padding and in prompts
    masked language model   targets[s] = the hidden token at s, nothing elsewhere
    classification          one class for each row

Letters: N rows, S tokens a row, n predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from attar.data.packing import PADDING


@dataclass(frozen=True)
class Examples:
    """Rows to learn from or to measure on.

    Attributes:
        tokens: int64 (N, S), :data:`PADDING` on the right where there is no token.
        targets: int64, :data:`PADDING` where nothing is predicted: (N, S), or (N,) for classification.
    """

    tokens: Tensor
    targets: Tensor

    @classmethod
    def of_text(cls, rows: Tensor) -> Examples:
        """Each token of rows int64 (N, S) predicted from the one before it."""
        end = torch.full_like(rows[:, :1], PADDING)
        return cls(rows, torch.cat([rows[:, 1:], end], 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Tensor | slice) -> Self:
        return type(self)(*(tensor[index] for tensor in self._tensors()))

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return type(self)(*(tensor.to(device) for tensor in self._tensors()))

    def split(self, size: int) -> Iterator[Self]:
        """Parts of at most ``size`` rows."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    @property
    def inputs(self) -> Tensor:
        """What a model reads: token 0 in place of padding."""
        return self.tokens.clamp(min=0)

    @property
    def mask(self) -> Tensor:
        """bool (N, S), True where there is a token."""
        return self.tokens != PADDING

    @property
    def predicted(self) -> Tensor:
        """bool in the shape of ``targets``, True where something is predicted."""
        return self.targets != PADDING

    @property
    def labels(self) -> Tensor:
        """int64 (n,): the targets of all predictions, row after row."""
        return self.targets[self.predicted]

    def count(self) -> int:
        """n."""
        return int(self.predicted.sum())

    def _tensors(self) -> Iterator[Tensor]:
        """The fields; a subclass may have more."""
        return (getattr(self, field.name) for field in fields(self))


def predictions(batch: Tensor | Examples) -> int:
    """n of a batch: of rows int64 (B, S) all real tokens but the first ones."""
    return batch.count() if isinstance(batch, Examples) else int((batch[:, 1:] != PADDING).sum())
