"""What the fast suite leaves to ``make test-all``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Values for ``parametrize``: all of them, and those that are not ``fast`` marked as slow."""
    values = list(values)
    assert set(fast) <= set(values), f"{sorted(set(fast) - set(values))} are not among the values"
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
