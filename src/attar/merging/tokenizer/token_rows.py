"""Which row of which model an output token's embedding comes from, by the rules of
:mod:`attar.merging.tokenizer.vocabulary`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.errors import RecipeError, nearest
from attar.merging.config.schema import ModelReference, ModelToken, TokenChoice

RULES = ("set", "only", "base", "mean", "zero")
"""Where the default row of a token comes from."""


@dataclass(frozen=True)
class TokenRows:
    """The sources of every output row.

    Attributes:
        kept: int64 (models, size); the row of a model that it keeps for an output row, or -1.
        donors: int64 (models, size); the rows whose mean is an output row's default; -1: none of this model.
        rules: int64 (size,); index into :data:`RULES`; -1 for padding.
    """

    kept: Tensor
    donors: Tensor
    rules: Tensor


def index_of(wanted: ModelReference, references: Sequence[ModelReference], where: str) -> int:
    """Index of a model among the models of the merge.

    Raises:
        RecipeError: it is not one of them.
    """
    if wanted in references:
        return list(references).index(wanted)
    close = nearest(str(wanted), [str(reference) for reference in references])
    raise RecipeError(
        f"{wanted.where or where}: tokenizer: the merge has no model {str(wanted)!r}",
        hint=f"did you mean {close!r}?" if close else "list it under models, or name one that is listed",
    )


def rows_by_rules(
    tokens: Mapping[str, int],
    size: int,
    ids: Sequence[Mapping[str, int]],
    rows: Sequence[int],
    base: int | None,
) -> TokenRows:
    """The sources of every row by the rules for all tokens.

    Args:
        tokens: ids of the output's tokens by their text.
        ids: ids of each model's tokens with a row.
        base: index of the base model, or None.
    """
    kept = torch.full((len(ids), size), -1, dtype=torch.int64)
    texts, output_ids = list(tokens), torch.tensor(list(tokens.values()), dtype=torch.int64)
    for index, known in enumerate(ids):
        kept[index, output_ids] = torch.tensor([known.get(text, -1) for text in texts], dtype=torch.int64)
    donors = kept.clone()
    rules = torch.full((size,), -1, dtype=torch.int64)
    count = (kept >= 0).sum(dim=0)
    rules[output_ids] = RULES.index("mean")
    if base is not None:
        in_base = kept[base] >= 0
        rules[in_base] = RULES.index("base")
        others = torch.arange(len(ids)) != base
        donors[others[:, None] & in_base] = -1
    rules[output_ids[count[output_ids] == 0]] = RULES.index("zero")
    rules[output_ids[count[output_ids] == 1]] = RULES.index("only")
    padding = (rules < 0).nonzero().reshape(-1)
    for index, known in enumerate(ids):
        used = torch.zeros(max(size, rows[index]), dtype=torch.bool)
        used[torch.tensor(list(known.values()), dtype=torch.int64)] = True
        unused = padding[(padding < rows[index]) & ~used[padding]]
        kept[index, unused] = unused
    return TokenRows(kept, donors, rules)


def apply_choice(
    token_rows: TokenRows,
    text: str,
    choice: TokenChoice,
    token_id: int,
    ids: Sequence[Mapping[str, int]],
    rows: Sequence[int],
    references: Sequence[ModelReference],
) -> None:
    """Enter the configuration's choice for one token into ``token_rows``, in place.

    Raises:
        RecipeError: a model that the merge does not have, or a token that the model does not have.
    """
    source = choice.source
    if source is not None:
        token_rows.donors[:, token_id] = -1
        token_rows.rules[token_id] = RULES.index("set")
    if isinstance(source, ModelReference | ModelToken):
        model = source.model if isinstance(source, ModelToken) else source
        index = index_of(model, references, choice.where)
        row = _donor_row(text, source, ids[index], rows[index], choice.where)
        token_rows.donors[index, token_id] = row
    if choice.force:
        token_rows.kept[:, token_id] = -1


def _donor_row(
    text: str, source: ModelReference | ModelToken, known: Mapping[str, int], rows: int, where: str
) -> int:
    """The row of a model that a choice names."""
    if isinstance(source, ModelToken) and source.token_id is not None:
        if 0 <= source.token_id < rows:
            return source.token_id
        problem = f"{source.model} has rows 0 to {rows - 1}, and no token_id {source.token_id}"
    else:
        wanted, model = text, source
        if isinstance(source, ModelToken):
            wanted, model = source.token or text, source.model
        if wanted in known:
            return known[wanted]
        problem = f"{model} has no token {wanted!r}"
    raise RecipeError(f"{where}: tokenizer: tokens: {text!r}: {problem}")
