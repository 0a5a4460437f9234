"""A document ready to be merged: its models opened, its vocabulary built, its plan made."""

from __future__ import annotations

from dataclasses import dataclass

from attar.merging.config import MergeConfig
from attar.merging.parents import Parents
from attar.merging.plan import make_plan
from attar.merging.settings import MergeSettings
from attar.merging.vocabulary import Vocabulary, build_vocabulary
from attar.merging.weights import Merge


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
    plan = make_plan(document, parents.view, vocabulary, compat=settings.compat)
    merge = Merge(plan, vocabulary, settings.compat, settings.seed)
    return Prepared(document, merge, plan.notes)


def _vocabulary(document: MergeConfig, parents: Parents) -> Vocabulary | None:
    """The merged vocabulary; None where the configuration leaves the tokenizer alone."""
    if document.tokenizer is None:
        return None
    references = document.models()
    views = [parents.view(reference) for reference in references]
    base = references.index(document.base) if document.base else None
    return build_vocabulary(document.tokenizer, views, references, base)
