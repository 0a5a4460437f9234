"""Cases of a parametrized test: some, by their names, run always, the others with the slow tests.

Where any few of them do, spread evenly: ``@pytest.mark.few(n)`` (conftest.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Cases for ``pytest.mark.parametrize`` (tuples: several names); those not in ``fast`` are slow."""
    values = list(values)
    assert all(value in values for value in fast), f"{fast} are not all among {values}"
    return [value if value in fast else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
