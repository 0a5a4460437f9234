"""Dynamic masking: the hidden tokens of a masked language model, drawn anew for every batch.

    of all tokens but special ones 15 % are predicted, each drawn by itself; of these
    80 % become [MASK], 10 % a random token, 10 % stay as they are

Paper: Devlin et al. 2018, "BERT", arXiv 1810.04805, section 3.1 and appendix A.1; drawn anew for every batch
as Liu et al. 2019, "RoBERTa", arXiv 1907.11692, section 4.1.

Differs from the paper: a batch's draws have a seed of their own, its number, so that a resumed run hides the
same tokens.

Letters: N rows, B rows a batch, S tokens a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.data.packing import PADDING, Batches, PackedRows, numbered_generator, pack
from attar.errors import DataError

PREDICTED, MASKED, RANDOM = 0.15, 0.8, 0.1


@dataclass(frozen=True)
class MaskRule:
    """What may be hidden, and by what.

    Attributes:
        mask: number of the token [MASK].
        special: numbers of tokens that are never hidden nor drawn.
        vocabulary: tokens that a random one is drawn from.
    """

    mask: int
    special: tuple[int, ...]
    vocabulary: int

    @classmethod
    def of(cls, tokenizer: Any) -> MaskRule:
        """The rule of a tokenizer.

        Raises:
            DataError: it has no token for what is hidden.
        """
        if tokenizer.mask_token_id is None:
            raise DataError("the tokenizer has no mask token", hint="a masked language model needs one")
        special = tuple(sorted({int(token) for token in tokenizer.all_special_ids}))
        return cls(int(tokenizer.mask_token_id), special, len(tokenizer))


def hide(rows: Tensor, rule: MaskRule, generator: torch.Generator) -> Examples:
    """Rows int64 (B, S) with tokens hidden, and these as targets."""
    special = torch.tensor(rule.special)
    candidates = (rows != PADDING) & ~torch.isin(rows, special)
    chance, kind = (torch.rand(rows.shape, generator=generator) for _ in range(2))
    ordinary = torch.tensor([token for token in range(rule.vocabulary) if token not in set(rule.special)])
    drawn = ordinary[torch.randint(len(ordinary), rows.shape, generator=generator)]
    predicted = candidates & (chance < PREDICTED)
    tokens = torch.where(predicted & (kind < MASKED), rule.mask, rows)
    tokens = torch.where(predicted & (kind >= 1 - RANDOM), drawn, tokens)
    return Examples(tokens, rows.masked_fill(~predicted, PADDING))


@dataclass(frozen=True)
class MaskedBatches:
    """Batches of rows with hidden tokens, by number; see :class:`attar.walks.train.BatchSource`."""

    rows: Batches
    rule: MaskRule

    def batch(self, number: int, model: Any) -> Examples:
        """Batch ``number``: its rows and its hidden tokens depend on the seed and the number alone."""
        generator = numbered_generator(self.rows.seed + 1, number)
        return hide(self.rows[number], self.rule, generator)


def masked_rows(
    tokenizer: Any,
    data: str,
    split: str,
    *,
    length: int,
    rows: int | None,
    seed: int,
    packing: str = "stream",
) -> PackedRows:
    """Rows int64 (N, S) of a split, each between the tokens that the tokenizer puts around a text ([CLS] and
    [SEP]). Raises as :func:`attar.data.packing.pack`."""
    front, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    body = length - (front is not None) - (end is not None)
    if body < 1:
        raise DataError(f"rows of {length} tokens hold nothing but the tokenizer's own")
    packed = pack(tokenizer, data, split, length=body, rows=rows, seed=seed, packing=packing, bos="never")
    text, count = packed.rows, len(packed.rows)
    if end is not None:
        text = torch.cat([text, torch.full((count, 1), PADDING)], 1)
        last = (text != PADDING).sum(1) - 1
        after = last + (text.gather(1, last[:, None])[:, 0] != end)
        text[torch.arange(count), after] = end
    if front is not None:
        text = torch.cat([torch.full((count, 1), int(front)), text], 1)
    return PackedRows(text, packed.shared)
