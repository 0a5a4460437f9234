"""A document ready to be merged: its vocabulary built, its plan made; and its preview for ``--dry-run``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attar.checkpoint.tensors import tensor_bytes
from attar.checkpoint.units import bytes_text
from attar.merging.config.documents import MergeDocument, read_configs
from attar.merging.config.schema import MergeConfig
from attar.merging.mixture.build import PreparedMixture, prepare_mixture
from attar.merging.mixture.config import MixtureConfig
from attar.merging.parents import ParentModels, open_parents
from attar.merging.planning.plan import make_plan
from attar.merging.settings import MergeSettings
from attar.merging.tokenizer.vocabulary import MergedVocabulary
from attar.merging.weights import Merge

QUALITY_TOKENS = 2048
"""Default number of tokens that quality is measured on where a tokenizer was built."""


@dataclass(frozen=True)
class PreparedMerge:
    """A merge that can be run, and the document it was made from."""

    document: MergeConfig
    merge: Merge
    notes: tuple[str, ...]

    def nbytes(self) -> int:
        """Bytes of the result's weights."""
        return sum(tensor_bytes(spec.dtype, spec.shape) for spec in self.merge.specs())

    def quality_tokens(self, settings: MergeSettings) -> int:
        """The number of held-out tokens that the merge and its parents are measured on; 0: none."""
        if settings.tokens >= 0:
            return settings.tokens
        return QUALITY_TOKENS if self.merge.vocabulary is not None else 0


def prepare(document: MergeConfig, parents: ParentModels, settings: MergeSettings) -> PreparedMerge:
    """Plan one document. Reads headers, configs and tokenizers, no weights.

    Raises:
        ModelError: the models do not fit together.
        RecipeError: the configuration does not fit the models.
    """
    vocabulary = _vocabulary(document, parents)
    first = document.base or document.models()[0]
    no_dtype = document.dtype is None and document.out_dtype is None
    notes: tuple[str, ...] = ()
    if no_dtype and first.model not in parents.results and parents.in_blocks(first):
        document = replace(document, out_dtype="bfloat16")
        notes = (
            f"{first.model} decodes to float32, the merge is stored as bfloat16; dtype: float32 keeps it",
        )
    plan = make_plan(document, parents.view, vocabulary, compat=settings.compat)
    merge = Merge(plan, vocabulary, settings.compat, settings.seed)
    return PreparedMerge(document, merge, (*notes, *plan.notes))


def prepare_any(
    document: MergeDocument, parents: ParentModels, settings: MergeSettings
) -> PreparedMerge | PreparedMixture:
    """Plan a document of either kind; raises as :func:`prepare`."""
    if isinstance(document, MixtureConfig):
        return prepare_mixture(document, parents, settings)
    return prepare(document, parents, settings)


def _vocabulary(document: MergeConfig, parents: ParentModels) -> MergedVocabulary | None:
    """The merged vocabulary; None where the configuration leaves the tokenizer unchanged."""
    if document.tokenizer is None:
        return None
    from attar.merging.tokenizer.vocabulary import build_vocabulary

    references = document.models()
    views = [parents.view(reference) for reference in references]
    base = references.index(document.base) if document.base else None
    return build_vocabulary(document.tokenizer, views, references, base)


@dataclass(frozen=True)
class MergePreview:
    """What a merge would do: inputs, outputs, how the tokenizers align.

    Attributes:
        prepared: the documents that can be planned before any other is merged.
        later: names of the documents that need their results.
    """

    prepared: tuple[PreparedMerge | PreparedMixture, ...]
    later: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"documents": [_content(prepared) for prepared in self.prepared], "later": list(self.later)}

    def text(self) -> str:
        """For people."""
        parts = [_text(prepared) for prepared in self.prepared]
        if self.later:
            parts.append(f"then: {', '.join(self.later)}")
        return "\n\n".join(parts)


def preview(settings: MergeSettings, models: Mapping[str, str | Path] | None = None) -> MergePreview:
    """Plan the documents that need no other's result. Reads no weights; raises as the merge would."""
    documents, _ = read_configs(settings.config)
    parents = open_parents(documents, models or {})
    names = [document.name for document in documents]
    first = [d for d in documents if not any(reference.model in names for reference in d.models())]
    later = [d.name or "the last document" for d in documents if d not in first]
    return MergePreview(tuple(prepare_any(document, parents, settings) for document in first), tuple(later))


def _content(prepared: PreparedMerge | PreparedMixture) -> dict[str, Any]:
    if isinstance(prepared, PreparedMixture):
        return prepared.to_dict()
    plan, vocabulary = prepared.merge.plan, prepared.merge.vocabulary
    return {
        "name": prepared.document.name,
        "method": prepared.document.method,
        "models": list(plan.labels),
        "base": None if plan.base is None else plan.labels[plan.base],
        "tensors": len(plan.outputs),
        "layers": len({output.layer for output in plan.outputs if output.layer is not None}),
        "bytes": prepared.nbytes(),
        "largest_bytes": max(prepared.merge.input_bytes(output) for output in plan.outputs),
        "vocabulary": None if vocabulary is None else vocabulary.report(),
        "notes": list(prepared.notes),
    }


def _text(prepared: PreparedMerge | PreparedMixture) -> str:
    if isinstance(prepared, PreparedMixture):
        return prepared.text()
    content = _content(prepared)
    base = f", base {content['base']}" if content["base"] else ""
    lines = [
        f"{content['method']} of {', '.join(content['models'])}{base}",
        f"{content['tensors']} tensors in {content['layers']} layers, {bytes_text(content['bytes'])}; "
        f"at most {bytes_text(content['largest_bytes'])} of weights in memory at once",
    ]
    if prepared.merge.vocabulary is not None:
        lines.append(prepared.merge.vocabulary.table())
    return "\n".join([*lines, *content["notes"]])
