"""Tests of compiled kernels are skipped without a compiler alone: a source that one refuses is a failure."""

from __future__ import annotations

import shutil

import pytest

from attar.kernels.build import COMPILERS, load, why_missing


def no_compiler() -> bool:
    """Whether the compiled step is missing for want of a compiler, or because it was turned off."""
    found = any(map(shutil.which, COMPILERS))
    return load("decode") is None and (not found or why_missing("decode") == "ATTAR_KERNELS is off")


needs_compiler = pytest.mark.skipif(no_compiler(), reason="no C++ compiler")
