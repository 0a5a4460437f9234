"""The kernels in Triton's interpreter, against float64: a process for each file of interpreted/.

Triton reads TRITON_INTERPRET when it is imported, and other tests compile."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(
    path for path in Path(__file__).with_name("interpreted").glob("*.py") if path.stem != "conftest"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_kernels_are_their_definitions_in_float64(file):
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[
        -4000:
    ]
