"""How the tokens of several models align in one vocabulary: counted, and as a table for ``--dry-run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from attar.merging.tokenizer.vocabulary import Vocabulary

RULES = ("set", "only", "base", "mean", "zero")
"""Where the default row of a token comes from; :mod:`attar.merging.tokenizer.vocabulary` says when."""

COLUMNS = ("model", "tokens", "rows", "shared", "alone", "missing", "dropped", *RULES)


def report(vocabulary: Vocabulary) -> dict[str, Any]:
    """What becomes of every model's tokens, as plain values.

    Returns:
        ``tokens`` and ``rows`` of the output, ``padding`` rows without a token, ``source``, whose tokenizer
        it starts from, and for each model: ``tokens`` (with a row) and ``rows`` of its own; of the output's
        tokens those that it keeps its own row for, ``shared`` with another model or ``alone``, and those
        that it takes the default for: ``missing``, by rule in ``defaults``; ``dropped``, tokens that the
        output lacks; ``unchanged``: its matrices stay as they are.
    """
    named = vocabulary.rules >= 0
    kept = (vocabulary.own >= 0) & named
    several = kept.sum(dim=0) > 1
    models = []
    for index, label in enumerate(vocabulary.labels):
        defaults = vocabulary.rules[named & ~kept[index]]
        models.append(
            {
                "model": label,
                "tokens": vocabulary.used[index],
                "rows": vocabulary.rows[index],
                "shared": int((kept[index] & several).sum()),
                "alone": int((kept[index] & ~several).sum()),
                "missing": len(defaults),
                "dropped": vocabulary.dropped[index],
                "defaults": {rule: int(torch.sum(defaults == i)) for i, rule in enumerate(RULES)},
                "unchanged": vocabulary.identity[index],
            }
        )
    return {
        "tokens": len(vocabulary.tokens),
        "rows": vocabulary.size,
        "padding": vocabulary.size - int(named.sum()),
        "source": vocabulary.labels[vocabulary.source],
        "models": models,
    }


def table(counted: dict[str, Any]) -> str:
    """A :func:`report` as lines of text: a headline, and a line for each model."""
    lines = [COLUMNS] + [
        tuple(str(model.get(name, model["defaults"].get(name))) for name in COLUMNS)
        for model in counted["models"]
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    headline = (
        f"vocabulary: {counted['tokens']:,} tokens in {counted['rows']:,} rows ({counted['padding']:,} of "
        f"padding), from the tokenizer of {counted['source']}"
    )
    return "\n".join([headline, *(_line(line, widths) for line in lines)])


def _line(texts: tuple[str, ...], widths: list[int]) -> str:
    first, *rest = (
        text.rjust(width) if i else text.ljust(width)
        for i, (text, width) in enumerate(zip(texts, widths, strict=True))
    )
    return "  ".join([first, *rest])
