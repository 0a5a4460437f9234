"""What every run of a distillation's test is held to."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest


@pytest.fixture(autouse=True, scope="module")
def little_held_out_text() -> Iterator[None]:
    """Every run measures its student before and after, on thirty times less than people do."""
    packages = ("tasks.causal", "tasks.masked", "rollouts.teacher")  # a package has its task by the same name
    with pytest.MonkeyPatch.context() as patch:
        for name in packages:
            patch.setattr(import_module(f"attar.distillation.{name}"), "HELD_OUT_TOKENS", 512)
        yield
