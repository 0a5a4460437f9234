"""A document ready to be merged: its models opened, its vocabulary built, its plan made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attar.merging.config.schema import MergeConfig
from attar.merging.parents import Parents
from attar.merging.planning.plan import make_plan
from attar.merging.settings import MergeSettings
from attar.merging.weights import Merge

if TYPE_CHECKING:
    from attar.merging.tokenizer.vocabulary import Vocabulary

TOKENS = 2048
"""Measured where a tokenizer was built and nothing else was asked for."""


@dataclass(frozen=True)
class Prepared:
    """A merge that can be run.

    Attributes:
        document: what it was made from.
        merge: plan and vocabulary.
        notes: what a person should know.
    """

    document: MergeConfig
    merge: Merge
    notes: tuple[str, ...]


def prepare(document: MergeConfig, parents: Parents, settings: MergeSettings) -> Prepared:
    """Plan one document. Reads headers, configs and tokenizers, no weights.

    Raises:
        ModelError: the models do not fit together.
        RecipeError: the configuration does not fit the models.
    """
    vocabulary = _vocabulary(document, parents)
    first = document.base or document.models()[0]
    unnamed = document.dtype is None and document.out_dtype is None
    notes: tuple[str, ...] = ()
    if unnamed and first.model not in parents.made and parents.in_blocks(first):
        document = replace(document, out_dtype="bfloat16")
        notes = (
            f"{first.model} decodes to float32, the merge is stored as bfloat16; dtype: float32 keeps it",
        )
    plan = make_plan(document, parents.view, vocabulary, compat=settings.compat)
    merge = Merge(plan, vocabulary, settings.compat, settings.seed)
    return Prepared(document, merge, (*notes, *plan.notes))


def _vocabulary(document: MergeConfig, parents: Parents) -> Vocabulary | None:
    """The merged vocabulary; None where the configuration leaves the tokenizer alone."""
    if document.tokenizer is None:
        return None
    from attar.merging.tokenizer.vocabulary import build_vocabulary

    references = document.models()
    views = [parents.view(reference) for reference in references]
    base = references.index(document.base) if document.base else None
    return build_vocabulary(document.tokenizer, views, references, base)


def asked_tokens(settings: MergeSettings, prepared: Prepared) -> int:
    """How many held-out tokens the merge and its parents are measured on; 0: none."""
    if settings.tokens >= 0:
        return settings.tokens
    return TOKENS if prepared.merge.vocabulary is not None else 0
