"""Which row of which model an output token's embedding comes from, by the rules of
:mod:`attar.merging.tokenizer.vocabulary`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attar.errors import RecipeError, nearest
from attar.merging.config.schema import ModelReference, ModelToken, TokenChoice
from attar.merging.vocabulary_report import RULES


def index_of(wanted: ModelReference, references: Sequence[ModelReference], where: str) -> int:
    """Place of a model among those of the merge.

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


def rows_of_tokens(
    tokens: Mapping[str, int],
    size: int,
    ids: Sequence[Mapping[str, int]],
    rows: Sequence[int],
    base: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Own rows, donors and rules by the rules for all tokens.

    Args:
        tokens: number of every token of the output by its text.
        size: rows of the output.
        ids: numbers of each model's tokens, those without a row left out.
        rows: rows of each model.
        base: index of the base model, or None.

    Returns:
        ``own``, ``donors`` and ``rules`` as :class:`attar.merging.tokenizer.vocabulary.Vocabulary` has them.
    """
    own = torch.full((len(ids), size), -1, dtype=torch.int64)
    names, places = list(tokens), torch.tensor(list(tokens.values()), dtype=torch.int64)
    for index, known in enumerate(ids):
        own[index, places] = torch.tensor([known.get(text, -1) for text in names], dtype=torch.int64)
    donors = own.clone()
    rules = torch.full((size,), -1, dtype=torch.int64)
    count = (own >= 0).sum(dim=0)
    rules[places] = RULES.index("mean")
    if base is not None:
        given = own[base] >= 0
        rules[given] = RULES.index("base")
        elsewhere = torch.arange(len(ids)) != base
        donors[elsewhere[:, None] & given] = -1
    rules[places[count[places] == 0]] = RULES.index("zero")
    rules[places[count[places] == 1]] = RULES.index("only")
    padding = (rules < 0).nonzero().reshape(-1)
    for index, known in enumerate(ids):
        taken = torch.zeros(max(size, rows[index]), dtype=torch.bool)
        taken[torch.tensor(list(known.values()), dtype=torch.int64)] = True
        free = padding[(padding < rows[index]) & ~taken[padding]]
        own[index, free] = free
    return own, donors, rules


def choose(
    text: str,
    wish: TokenChoice,
    place: int,
    ids: Sequence[Mapping[str, int]],
    rows: Sequence[int],
    references: Sequence[ModelReference],
    made: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Enter what the configuration says of one token into own rows, donors and rules, in place.

    Raises:
        RecipeError: a model that the merge does not have, or a token that the model does not have.
    """
    own, donors, rules = made
    if wish.source is not None:
        donors[:, place] = -1
        rules[place] = RULES.index("set")
    if isinstance(wish.source, ModelReference | ModelToken):
        named = wish.source
        model = named.model if isinstance(named, ModelToken) else named
        index = index_of(model, references, wish.where)
        donors[index, place] = _donor(text, named, ids[index], rows[index], wish.where)
    if wish.force:
        own[:, place] = -1


def _donor(
    text: str, named: ModelReference | ModelToken, known: Mapping[str, int], rows: int, where: str
) -> int:
    """The row of a model that a choice names."""
    if isinstance(named, ModelToken) and named.token_id is not None:
        if 0 <= named.token_id < rows:
            return named.token_id
        problem = f"{named.model} has rows 0 to {rows - 1}, and no token_id {named.token_id}"
    else:
        wanted, model = (named.token or text, named.model) if isinstance(named, ModelToken) else (text, named)
        if wanted in known:
            return known[wanted]
        problem = f"{model} has no token {wanted!r}"
    raise RecipeError(f"{where}: tokenizer: tokens: {text!r}: {problem}")
