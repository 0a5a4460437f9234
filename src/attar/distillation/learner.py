"""The module that is trained: the student, and projections that are thrown away afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class Learner(nn.Module):  # type: ignore[misc]
    """A student with the projections that its features pass through.

    Args:
        student: of transformers, or peft's wrapper of one.
        projections: by feature; trained with the student, not saved with it.
    """

    def __init__(self, student: Any, projections: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.student = student
        self.projections = nn.ModuleDict(projections)

    def forward(self, **inputs: Any) -> Any:
        """The student's outputs."""
        return self.student(**inputs)

    def get_output_embeddings(self) -> Any:
        """The student's head, which the optimizers treat as an embedding."""
        return self.student.get_output_embeddings()

    @property
    def supports_gradient_checkpointing(self) -> bool:
        """See transformers."""
        return bool(getattr(self.student, "supports_gradient_checkpointing", True))

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """See transformers."""
        self.student.gradient_checkpointing_enable(**options)


def student_of(model: Any) -> Any:
    """The student inside a module that the loop runs (DDP's wrapper, a :class:`Learner`)."""
    inner = getattr(model, "module", model)
    return inner.student if isinstance(inner, Learner) else inner


def projections_of(model: Any) -> Mapping[str, nn.Module]:
    """The projections of a module that the loop runs; none without a :class:`Learner`."""
    inner = getattr(model, "module", model)
    return dict(inner.projections.items()) if isinstance(inner, Learner) else {}
