"""Cases of a parametrized test: some run always, the others with the slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Parameters for ``pytest.mark.parametrize``: those not in ``fast`` are marked slow (``make test-all``)."""
    values = list(values)
    assert all(value in values for value in fast), f"{fast} are not all among {values}"
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
