"""Students: smaller models that start from a teacher's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attar.models.surgery import keep_layers


def student_by_depth(model: Any, layers: Sequence[int]) -> Any:
    """A student with some of the teacher's blocks, its embeddings, norms and head.

    Args:
        model: the teacher; not changed, and no memory is shared with it.
        layers: the teacher's blocks that the student gets, ascending.

    Raises:
        ModelError: ``layers`` is empty, not ascending, or beyond the teacher's.
    """
    return keep_layers(model, layers)
