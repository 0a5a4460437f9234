"""A merge before it is made: what goes in, what comes out, how the tokenizers align. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.tensors import tensor_bytes
from attar.checkpoint.units import bytes_text
from attar.merging.planning.prepare import Prepared, prepare
from attar.merging.settings import MergeSettings
from attar.merging.stage import open_parents
from attar.merging.written import read_configs


@dataclass(frozen=True)
class Preview:
    """What a merge would do.

    Attributes:
        first: the documents that can be planned before any other is merged.
        later: names of those that need their results.
    """

    first: tuple[Prepared, ...]
    later: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"documents": [_content(prepared) for prepared in self.first], "later": list(self.later)}

    def text(self) -> str:
        """For people."""
        parts = [_text(prepared) for prepared in self.first]
        if self.later:
            parts.append(f"then: {', '.join(self.later)}")
        return "\n\n".join(parts)


def preview(settings: MergeSettings, models: Mapping[str, str | Path] | None = None) -> Preview:
    """Plan what can be planned. Raises as :func:`attar.merging.stage.merge` does before it writes."""
    documents, _ = read_configs(settings.config)
    parents = open_parents(documents, models or {})
    names = [document.name for document in documents]
    first = [d for d in documents if not any(reference.model in names for reference in d.models())]
    later = [d.name or "the last document" for d in documents if d not in first]
    return Preview(tuple(prepare(document, parents, settings) for document in first), tuple(later))


def _content(prepared: Prepared) -> dict[str, Any]:
    plan, vocabulary = prepared.merge.plan, prepared.merge.vocabulary
    slots = [prepared.merge.slot(output) for output in plan.outputs]
    return {
        "name": prepared.document.name,
        "method": prepared.document.method,
        "models": list(plan.labels),
        "base": None if plan.base is None else plan.labels[plan.base],
        "tensors": len(slots),
        "layers": len({output.layer for output in plan.outputs if output.layer is not None}),
        "bytes": sum(tensor_bytes(slot.dtype, slot.shape) for slot in slots),
        "largest_bytes": max(prepared.merge.nbytes(output) for output in plan.outputs),
        "vocabulary": None if vocabulary is None else vocabulary.report(),
        "notes": list(prepared.notes),
    }


def _text(prepared: Prepared) -> str:
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
