"""Examples: rows of tokens, and what is to be predicted from each position.

    causal language model   targets[s] = tokens[s + 1], nothing at the end, in padding and in prompts
    masked language model   targets[s] = the hidden token at s, nothing elsewhere
    classification          one class for each row

Letters: N rows, S tokens a row, n predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
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
        segments: int64 (N, S) of pairs of texts, 1 in the second (BERT's token types); None: no pairs.
    """

    tokens: Tensor
    targets: Tensor
    segments: Tensor | None = None

    @classmethod
    def of_text(cls, rows: Tensor) -> Examples:
        """Each token of rows int64 (N, S) predicted from the one before it."""
        end = torch.full_like(rows[:, :1], PADDING)
        return cls(rows, torch.cat([rows[:, 1:], end], 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Tensor | slice) -> Self:
        return self._changed(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> Self:
        """The same on a device. What a step asks of it is found here, where the rows are: there the host
        would wait for it."""
        moved = self._changed(lambda tensor: tensor.to(device))
        known = {
            "width": self.width,
            "full": self.full,
            "seed": self.seed,
            "prediction_indices": self.prediction_indices.to(device),
        }
        if self.width < self.tokens.shape[1]:
            known["narrow"] = self.narrow.to(device)
        moved.__dict__.update(known)
        return moved

    def trimmed(self) -> Self:
        """The same without the columns at the end that hold no token."""
        return self if self.width == self.tokens.shape[1] else self.narrow

    @cached_property
    def width(self) -> int:
        """Columns that hold tokens."""
        return int(self.mask.any(0).sum())

    @cached_property
    def narrow(self) -> Self:
        """The columns that hold tokens."""
        return self._changed(lambda tensor: tensor if tensor.dim() == 1 else tensor[:, : self.width])

    @cached_property
    def full(self) -> bool:
        """Whether there is no padding."""
        return bool(self.mask.all())

    @cached_property
    def seed(self) -> int:
        """Of draws among the tokens; depends on them alone."""
        return int(self.inputs.sum())

    @cached_property
    def prediction_indices(self) -> Tensor:
        """int64 (n,): where something is predicted, in ``targets`` as one row."""
        return self.predicted.flatten().nonzero()[:, 0]

    def at_predictions(self, values: Tensor) -> Tensor:
        """(n, ...) of values in the shape of ``targets`` and further dimensions."""
        return values.flatten(0, self.targets.dim() - 1).index_select(0, self.prediction_indices)

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
        return self.at_predictions(self.targets)

    def count(self) -> int:
        """n."""
        return int(self.predicted.sum())

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every field changed, those of a subclass too."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return type(self)(**{name: None if value is None else change(value) for name, value in values})


def predictions(batch: Tensor | Examples) -> int:
    """n of a batch: of rows int64 (B, S) all real tokens but the first ones."""
    return batch.count() if isinstance(batch, Examples) else int((batch[:, 1:] != PADDING).sum())
