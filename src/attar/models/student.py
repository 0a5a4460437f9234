"""Students: smaller models that start from a teacher's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attar.errors import ModelError
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


def spread(total: int, count: int) -> list[int]:
    """``count`` of ``total`` layers, evenly spaced; the first and the last are among them.

    Raises:
        ModelError: ``count`` is not between 1 and ``total``.

    >>> spread(8, 4)
    [0, 2, 5, 7]
    """
    if not 1 <= count <= total:
        raise ModelError(f"{count} layers are asked of a teacher with {total}", hint=f"ask for 1 to {total}")
    if count == 1:
        return [0]
    return [(2 * index * (total - 1) + count - 1) // (2 * (count - 1)) for index in range(count)]
