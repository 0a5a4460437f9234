"""One vocabulary for a merge: its tokens, and every model's embedding brought into its order.

Models with different tokenizers have different tokens in row i of their embedding (V_i, d). Before the method
runs, each matrix is re-indexed to the output's vocabulary (V, d): row t of model i is

    its own row of token t          if it has the token, and no choice is forced on it
    the token's default row         otherwise

and the default row of a token comes, by the first rule that applies, from

    set        the configuration's choice: a model's row of this or of another token, or zeros
    only       the only model that has it
    base       the base model, if that has it
    mean       the mean over the models that have it, in float32
    zero       zeros, if no model has it (a token that the configuration adds)

Rows after the last token are padding: a model's own unused row of the same index if it has one, else the mean
of its rows of tokens.

Source: mergekit's tokenizer merging, as documented. Differs from it:
- a vocabulary that its own model pads stays as large as that model's embedding (Qwen's 152,064 rows);
- a token whose id lies beyond the rows of its model counts as missing there; one that no model has a row for
  is dropped (mergekit removes it from the base, and skips it in a union);
- zeros can be chosen, and a token that the configuration adds without a source gets zeros;
- models are taken in the order of the configuration, where mergekit's order depends on hashes;
- how new tokens enter a tokenizer: see :mod:`attar.merging.tokenizer.tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError, SettingsError
from attar.merging.adapters.apply import tokenizer_folder
from attar.merging.config.schema import ModelReference, TokenizerChoice
from attar.merging.planning.model import ModelView
from attar.merging.planning.naming import token_embedding
from attar.merging.tokenizer.token_rows import RULES, TokenRows, apply_choice, index_of, rows_by_rules
from attar.merging.tokenizer.tokenizer import (
    TokenizerTokens,
    extend_tokenizer,
    read_tokenizer,
    with_stored_tokens,
    write_tokenizer,
)

COLUMNS = ("model", "tokens", "rows", "shared", "alone", "missing", "dropped", *RULES)


@dataclass(frozen=True)
class MergedVocabulary:
    """A merge's vocabulary, made by :func:`build_vocabulary`.

    Attributes:
        size: rows of the output's embedding.
        source: index of the model whose tokenizer the vocabulary starts from.
        token_rows: the sources of every output row.
        used: number of tokens with a row, of each model.
        dropped: how many of the used tokens are not in the output.
    """

    size: int
    labels: tuple[str, ...]
    rows: tuple[int, ...]
    source: int
    tokenizer: TokenizerTokens = field(repr=False)
    token_rows: TokenRows = field(repr=False)
    used: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def tokens(self) -> Mapping[str, int]:
        """Token ids by the token's text."""
        return self.tokenizer.ids

    @cached_property
    def identity(self) -> tuple[bool, ...]:
        """For each model: whether its matrices are in the output's order already."""
        order = torch.arange(self.size)
        return tuple(
            rows == self.size and bool(torch.equal(kept, order))
            for rows, kept in zip(self.rows, self.token_rows.kept, strict=True)
        )

    def align(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Bring one matrix of every model into the output's order.

        Args:
            tensors: one a model: (rows[i], d), or (rows[i],) for a bias, of one d; None for a model that
                takes no part, which then gives no default rows either. Not changed.

        Returns:
            one a model: (size, d) or (size,), in the input's dtype; the input itself if its order is the
            output's already; None for None.

        Raises:
            ModelError: a matrix has another number of rows than its model's vocabulary, or another width.
        """
        self._check(tensors)
        return [
            tensor if tensor is None or same else self._aligned(index, tensor, tensors)
            for index, (tensor, same) in enumerate(zip(tensors, self.identity, strict=True))
        ]

    def _aligned(self, index: int, tensor: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        rows, rules = self.token_rows.kept[index], self.token_rows.rules
        result = tensor.new_zeros(self.size, *tensor.shape[1:])
        kept = rows >= 0
        result[kept] = tensor[rows[kept]]
        missing = (~kept & (rules >= 0)).nonzero().reshape(-1)
        result[missing] = self._defaults(missing, tensors).to(result.dtype)
        padding = (~kept & (rules < 0)).nonzero().reshape(-1)
        if len(padding):
            result[padding] = result[rules >= 0].mean(dim=0, dtype=torch.float32).to(result.dtype)
        return result

    def _defaults(self, tokens: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        """Default rows (len(tokens), d) in float32: the mean over their donors, zeros without any."""
        first = next(tensor for tensor in tensors if tensor is not None)
        total = torch.zeros(len(tokens), *first.shape[1:], dtype=torch.float32)
        count = torch.zeros(len(tokens), *[1] * (first.dim() - 1), dtype=torch.float32)
        for donors, tensor in zip(self.token_rows.donors, tensors, strict=True):
            if tensor is None:
                continue
            rows = donors[tokens]
            given = rows >= 0
            total[given] += tensor[rows[given]].float()
            count[given] += 1
        return total / count.clamp(min=1)

    def _check(self, tensors: Sequence[Tensor | None]) -> None:
        assert len(tensors) == len(self.rows), "one matrix a model"
        widths = {
            tuple(tensor.shape[1:]): self.labels[i] for i, tensor in enumerate(tensors) if tensor is not None
        }
        for label, rows, tensor in zip(self.labels, self.rows, tensors, strict=True):
            if tensor is not None and tensor.shape[0] != rows:
                raise ModelError(
                    f"{label}: a matrix of shape {tuple(tensor.shape)} where its vocabulary has {rows} rows"
                )
        if len(widths) > 1:
            (width, first), (other_width, second) = list(widths.items())[:2]
            raise ModelError(
                f"embeddings differ in width: {list(width)} in {first}, {list(other_width)} in {second}"
            )

    def write(self, folder: Path) -> list[str]:
        """Write the tokenizer's files in place of a folder's tokenizer files; returns the names of the
        written files.

        Raises:
            ModelError: transformers would read the new tokenizer differently.
            OutputError: no space, or no permission.
        """
        return write_tokenizer(self.tokenizer, folder)

    def report(self) -> dict[str, Any]:
        """How every model's tokens align, as plain values.

        Returns:
            ``tokens`` and ``rows`` of the output, ``padding`` rows without a token, ``source``, the model
            whose tokenizer the output starts from, and for each model: its ``tokens`` (with a row) and
            ``rows``; of the output's tokens the kept rows, ``shared`` with another model or ``alone``, and
            the default rows: ``missing``, by rule in ``defaults``; ``dropped``, tokens that the output does
            not have; ``unchanged``: the model's matrices stay as they are.
        """
        rules = self.token_rows.rules
        named = rules >= 0
        kept = (self.token_rows.kept >= 0) & named
        several = kept.sum(dim=0) > 1
        models = []
        for index, label in enumerate(self.labels):
            defaults = rules[named & ~kept[index]]
            models.append(
                {
                    "model": label,
                    "tokens": self.used[index],
                    "rows": self.rows[index],
                    "shared": int((kept[index] & several).sum()),
                    "alone": int((kept[index] & ~several).sum()),
                    "missing": len(defaults),
                    "dropped": self.dropped[index],
                    "defaults": {rule: int(torch.sum(defaults == i)) for i, rule in enumerate(RULES)},
                    "unchanged": self.identity[index],
                }
            )
        return {
            "tokens": len(self.tokens),
            "rows": self.size,
            "padding": self.size - int(named.sum()),
            "source": self.labels[self.source],
            "models": models,
        }

    def table(self) -> str:
        """:meth:`report` as lines of text: a headline, and a line for each model."""
        report = self.report()
        lines = [COLUMNS] + [
            tuple(str(model.get(name, model["defaults"].get(name))) for name in COLUMNS)
            for model in report["models"]
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
        headline = (
            f"vocabulary: {report['tokens']:,} tokens in {report['rows']:,} rows ({report['padding']:,} of "
            f"padding), from the tokenizer of {report['source']}"
        )
        return "\n".join([headline, *(_table_line(line, widths) for line in lines)])


def _table_line(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])


def build_vocabulary(
    choice: TokenizerChoice,
    models: Sequence[ModelView],
    references: Sequence[ModelReference],
    base: int | None,
) -> MergedVocabulary:
    """The vocabulary of a merge. Reads tokenizers and headers, no weights.

    Args:
        choice: the configuration's ``tokenizer`` or ``tokenizer_source``. Source ``base`` without a base
            model is the first model; ``union`` starts from the base, or from the first model.
        models: in the order of the configuration.
        base: index of the base model, or None.

    Raises:
        CheckpointError: a model has no tokenizer.
        ModelError: a model has no embedding, or the tokenizer cannot be extended.
        RecipeError: the choice names a model that the merge does not have, or a token that a model does not
            have.
        SettingsError: ``pad_to_multiple_of`` is not positive.
    """
    if choice.pad_to_multiple_of is not None and choice.pad_to_multiple_of < 1:
        raise SettingsError("pad_to_multiple_of", choice.pad_to_multiple_of, "at least 1")
    source = _source(choice, references, base)
    tokenizers = [read_tokenizer(tokenizer_folder(model)) for model in models]
    rows = tuple(embedding_rows(model) for model in models)
    ids = [
        {text: token_id for text, token_id in tokenizer.ids.items() if token_id < count}
        for tokenizer, count in zip(tokenizers, rows, strict=True)
    ]
    stored = frozenset[str]().union(*ids)
    tokenizers = [with_stored_tokens(tokenizer, stored) for tokenizer in tokenizers]
    others = [t for i, t in enumerate(tokenizers) if i != source] if choice.source == "union" else []
    tokenizer = extend_tokenizer(tokenizers[source], others, choice.tokens)
    size = max(max(tokenizer.ids.values(), default=-1) + 1, rows[source])
    if choice.pad_to_multiple_of:
        size = -(-size // choice.pad_to_multiple_of) * choice.pad_to_multiple_of
    token_rows = rows_by_rules(tokenizer.ids, size, ids, rows, base)
    without_row = [i for text, i in tokenizer.ids.items() if text not in stored and text not in choice.tokens]
    token_rows.rules[without_row] = -1
    for text, token in choice.tokens.items():
        apply_choice(token_rows, text, token, tokenizer.ids[text], ids, rows, references)
    return MergedVocabulary(
        size=size,
        labels=tuple(str(reference) for reference in references),
        rows=rows,
        source=source,
        tokenizer=tokenizer,
        token_rows=token_rows,
        used=tuple(len(known) for known in ids),
        dropped=tuple(sum(text not in tokenizer.ids for text in known) for known in ids),
    )


def embedding_rows(model: ModelView) -> int:
    """Rows of a model's token embedding: as its config says, or of its largest embedding.

    Raises:
        ModelError: it has none.
    """
    name = token_embedding(model.tensors, model.config)
    if name is None:
        raise ModelError(f"{model.path}: no embedding of tokens among its tensors")
    return int(model.tensors[name].shape[0])


def _source(choice: TokenizerChoice, references: Sequence[ModelReference], base: int | None) -> int:
    """Index of the model whose tokenizer the vocabulary starts from."""
    if isinstance(choice.source, ModelReference):
        return index_of(choice.source, references, choice.where)
    if choice.source not in ("union", "base"):
        raise SettingsError("tokenizer source", choice.source, "union, base, or a model of the merge")
    return 0 if base is None else base
