"""Numbers of a config by which a model multiplies what its layers compute, and which a file has in the
weights (Falcon-H1's muP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError


def multipliers(
    config: Mapping[str, Any], keys: tuple[str, ...], rows: tuple[int, ...] = ()
) -> tuple[float | Tensor, ...]:
    """The numbers, but ones.

    Args:
        keys: of the config; ``KEY.1`` is the second number of a list.
        rows: how many rows each number of a list is for, where its key has no index.

    Returns:
        numbers, and float32 (N, 1) for lists.

    Raises:
        ModelError: a key has no number, or a list of another length.
    """
    scales: list[float | Tensor] = []
    for key in keys:
        name, _, index = key.partition(".")
        value = config.get(name)
        if value is None:
            continue
        try:
            numbers = [float(value[int(index)])] if index else [float(n) for n in _listed(value)]
            spread = isinstance(value, list | tuple) and not index
            scale = (
                torch.tensor(numbers).repeat_interleave(torch.tensor(rows))[:, None] if spread else numbers[0]
            )
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ModelError(
                f"config.json: {name} is {value!r}, not as many numbers as there should be",
                hint="check config.json",
            ) from error
        if any(number != 1 for number in numbers):
            scales.append(scale)
    return tuple(scales)


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]
