"""One vocabulary for a merge: which tokens it has, and every model's embedding brought into its order.

Models with different tokenizers have different tokens in row i of their embedding (V_i, d). Before the method
runs, each matrix is re-indexed to the output's vocabulary (V, d): row t of model i is

    its own row of token t          where it has the token, and no choice is forced on it
    the token's default row         otherwise

and the default row of a token comes, by the first rule that applies, from

    set        what the configuration names: a model's row of this or of another token, or zeros
    only       the only model that has it
    base       the base model, where that has it
    mean       the mean over the models that have it, in float32
    zero       zeros, where no model has it (a token that the configuration adds)

Rows behind the last token are padding, rows that exist for their number alone: a model's own unused row of
the same number where it has one, else the mean of its rows of tokens.

Source: mergekit's tokenizer merging, as documented. Differs from it:
- a vocabulary that its own model pads stays as large as that model's embedding (Qwen's 152,064 rows);
- a token whose number lies beyond the rows of its model counts as one that this model lacks; one that no
  model has a row for is dropped (mergekit strips it from the base, and passes it over in a union);
- zeros can be chosen, and a token that the configuration adds without a source gets zeros;
- models are taken in the order of the configuration, where mergekit's order hangs on hashes;
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
from attar.merging.config.schema import ModelReference, TokenizerChoice
from attar.merging.planning.naming import token_embedding
from attar.merging.tokenizer.token_rows import choose, index_of, rows_of_tokens
from attar.merging.tokenizer.tokenizer import Tokens, extend, only, read_tokens, write_tokens
from attar.merging.vocabulary_report import report, table


@dataclass(frozen=True)
class Vocabulary:
    """A merge's vocabulary. Make one with :func:`build_vocabulary`.

    Attributes:
        tokens: number of every token by its text.
        size: rows of the output's embedding.
        labels: what the models are called.
        rows: rows of each model's embedding.
        source: index of the model whose tokenizer the vocabulary starts from.
        tokenizer: the output's tokenizer.
        own: int64 (models, size); the row of a model that it keeps for an output row, or -1.
        donors: int64 (models, size); the rows whose mean is the default of an output row, -1: none of this
            model.
        rules: int64 (size,); index into :data:`attar.merging.vocabulary_report.RULES`; -1 for padding.
        used: how many tokens with a row each model has.
        dropped: how many of those are not in the output.
    """

    tokens: Mapping[str, int] = field(repr=False)
    size: int
    labels: tuple[str, ...]
    rows: tuple[int, ...]
    source: int
    tokenizer: Tokens = field(repr=False)
    own: Tensor = field(repr=False)
    donors: Tensor = field(repr=False)
    rules: Tensor = field(repr=False)
    used: tuple[int, ...]
    dropped: tuple[int, ...]

    @cached_property
    def identity(self) -> tuple[bool, ...]:
        """For each model: whether its matrices are in the output's order already."""
        order = torch.arange(self.size)
        return tuple(
            rows == self.size and bool(torch.equal(own, order))
            for rows, own in zip(self.rows, self.own, strict=True)
        )

    def align(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Bring one matrix of every model into the output's order.

        Args:
            tensors: one a model: (rows[i], d), or (rows[i],) for a bias, of one d; None for a model that
                takes no part, which then gives no default rows either. Not changed.

        Returns:
            one a model: (size, d) or (size,), in the dtype that came; the very tensor that came where its
            order is the output's already; None where None came.

        Raises:
            ModelError: a matrix has another number of rows than its model's vocabulary, or another width.
        """
        self._check(tensors)
        return [
            tensor if tensor is None or same else self._aligned(index, tensors)
            for index, (tensor, same) in enumerate(zip(tensors, self.identity, strict=True))
        ]

    def _aligned(self, index: int, tensors: Sequence[Tensor | None]) -> Tensor:
        tensor, own = tensors[index], self.own[index]
        assert tensor is not None, "the caller skips models that take no part"
        result = tensor.new_zeros(self.size, *tensor.shape[1:])
        kept = own >= 0
        result[kept] = tensor[own[kept]]
        lacking = (~kept & (self.rules >= 0)).nonzero().reshape(-1)
        result[lacking] = self._defaults(lacking, tensors).to(result.dtype)
        padding = (~kept & (self.rules < 0)).nonzero().reshape(-1)
        if len(padding):
            result[padding] = result[self.rules >= 0].mean(dim=0, dtype=torch.float32).to(result.dtype)
        return result

    def _defaults(self, wanted: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        """Default rows (len(wanted), d) in float32: the mean over their donors, zeros without any."""
        first = next(tensor for tensor in tensors if tensor is not None)
        total = torch.zeros(len(wanted), *first.shape[1:], dtype=torch.float32)
        count = torch.zeros(len(wanted), *[1] * (first.dim() - 1), dtype=torch.float32)
        for donors, tensor in zip(self.donors, tensors, strict=True):
            if tensor is None:
                continue
            rows = donors[wanted]
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
            (one, first), (two, second) = list(widths.items())[:2]
            raise ModelError(f"embeddings differ in width: {list(one)} in {first}, {list(two)} in {second}")

    def write(self, folder: Path) -> list[str]:
        """Write the tokenizer's files into a folder, in place of those that stand there; returns their names.

        Raises:
            ModelError: transformers would read the new tokenizer differently.
            OutputError: no space, or no permission.
        """
        return write_tokens(self.tokenizer, folder)

    def report(self) -> dict[str, Any]:
        """What becomes of every model's tokens, as plain values; :meth:`table` is the same as text."""
        return report(self)

    def table(self) -> str:
        """:meth:`report` as lines of text."""
        return table(report(self))


def build_vocabulary(
    choice: TokenizerChoice,
    models: Sequence[Any],
    references: Sequence[ModelReference],
    base: int | None,
) -> Vocabulary:
    """Work out the vocabulary of a merge. Reads tokenizers and headers, no weights.

    Args:
        choice: what the configuration says under ``tokenizer`` or ``tokenizer_source``. Source ``base``
            without a base model is the first model; ``union`` starts from the base, or from the first model.
        models: opened views, in the order of the configuration.
        references: what the configuration calls them.
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
    read = [read_tokens(model.path) for model in models]
    rows = tuple(embedding_rows(model) for model in models)
    ids = [
        {text: number for text, number in tokens.ids.items() if number < count}
        for tokens, count in zip(read, rows, strict=True)
    ]
    stored = frozenset[str]().union(*ids)
    read = [only(tokens, stored) for tokens in read]
    others = [tokens for i, tokens in enumerate(read) if i != source] if choice.source == "union" else []
    tokenizer = extend(read[source], others, choice.tokens)
    size = max(max(tokenizer.ids.values(), default=-1) + 1, rows[source])
    if choice.pad_to_multiple_of:
        size = -(-size // choice.pad_to_multiple_of) * choice.pad_to_multiple_of
    own, donors, rules = rows_of_tokens(tokenizer.ids, size, ids, rows, base)
    rules[[i for text, i in tokenizer.ids.items() if text not in stored and text not in choice.tokens]] = -1
    for text, wish in choice.tokens.items():
        choose(text, wish, tokenizer.ids[text], ids, rows, references, (own, donors, rules))
    return Vocabulary(
        tokens=tokenizer.ids,
        size=size,
        labels=tuple(str(reference) for reference in references),
        rows=rows,
        source=source,
        tokenizer=tokenizer,
        own=own,
        donors=donors,
        rules=rules,
        used=tuple(len(known) for known in ids),
        dropped=tuple(sum(text not in tokenizer.ids for text in known) for known in ids),
    )


def embedding_rows(model: Any) -> int:
    """Rows of a model's embedding of tokens: as its config says, or those of its largest embedding.

    Raises:
        ModelError: no tensor of it is such an embedding.
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
