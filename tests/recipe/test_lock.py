"""One run per folder: refused while the other process lives, ignored once it is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attar.errors import OutputError
from attar.recipe.runfolder import FILE, locked

HOLD = """
import sys
from pathlib import Path
from attar.recipe.runfolder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_living_run_is_respected_and_a_dead_one_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        message = f"another run is at work there \\(process {other.pid}\\)"
        with pytest.raises(OutputError, match=message), locked(tmp_path / "run"):
            pass
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    assert (tmp_path / "run" / FILE).exists()  # what the kill left
    with locked(tmp_path / "run"):
        assert (tmp_path / "run" / FILE).read_text() == f"{os.getpid()}\n"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="a file is in the way"), locked(tmp_path / "file" / "run"):
        pass
