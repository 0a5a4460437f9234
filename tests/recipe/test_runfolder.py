"""What belongs to a run, and what a fresh start leaves alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attar.checkpoint.units import number, seconds_text, table
from attar.errors import OutputError
from attar.recipe.runfolder import (
    LOCK,
    default_folder,
    locked,
    missing_folders,
    own_folders,
    remove_own,
    undo,
)


def make(run: Path, folders: list[str]) -> None:
    """A run folder that announces these stages."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text(json.dumps({"attar": "0", "folders": folders}))
    (run / "receipts").mkdir()


def test_a_manipulated_run_json_reaches_nothing_outside(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    run = tmp_path / "run"
    make(run, ["../precious", "..", ".", ".git", "a/b", "01-prune", str(precious)])
    (run / ".git").mkdir()
    (run / "01-prune").mkdir()
    (run / ".01-prune.work").mkdir()
    (run / "02-link").symlink_to(precious)
    assert own_folders(run) == ["01-prune"]
    remove_own(run)
    assert precious.is_dir() and (run / ".git").is_dir() and (run / "02-link").exists()
    assert not (run / "01-prune").exists() and not (run / ".01-prune.work").exists()
    assert not (run / "run.json").exists() and not (run / "receipts").exists()


def test_a_link_in_the_place_of_a_stage_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    make(tmp_path / "run", ["01-prune"])
    (tmp_path / "run" / "01-prune").symlink_to(target)
    remove_own(tmp_path / "run")
    assert target.is_dir()


def test_undo_removes_the_folders_that_were_made(tmp_path: Path) -> None:
    run = tmp_path / "a" / "b" / "run"
    created = missing_folders(run)
    assert created == [run, run.parent, run.parent.parent]
    make(run, [])
    undo(run, created)
    assert not (tmp_path / "a").exists()


def test_undo_keeps_what_can_be_gone_on_with(tmp_path: Path) -> None:
    run = tmp_path / "run"
    created = missing_folders(run)
    make(run, ["01-prune"])
    (run / ".01-prune.work").mkdir()
    undo(run, created)
    assert (run / "run.json").exists()
    undo(run, [])
    assert (run / "run.json").exists()


def test_default_folder() -> None:
    assert default_folder("some/where/mine.yaml") == Path("runs/mine")


def test_tables() -> None:
    text = table(("name", "n"), [("a", "1"), ("bcdef", "100")])
    assert text.splitlines() == ["name     n", "-----  ---", "a        1", "bcdef  100"]
    assert number(None, ".2f") == "-" and number(1.239, ".2f") == "1.24"
    assert [seconds_text(s) for s in (0.2, 42.4, 75, 1800, 7260)] == [
        "under 1 s",
        "42 s",
        "1 min 15 s",
        "30 min",
        "2 h 01 min",
    ]


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
    assert (tmp_path / "run" / LOCK).exists()  # what the kill left
    with locked(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="a file is in the way"), locked(tmp_path / "file" / "run"):
        pass


@pytest.mark.parametrize("kind", ["link", "notes"])
def test_a_foreign_lock_file_is_not_emptied(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep\n")
    lock = tmp_path / "run" / LOCK
    lock.parent.mkdir()
    lock.symlink_to(victim) if kind == "link" else lock.write_text("keep\n")
    with pytest.raises(OutputError, match=r"is no (file|lock) of attar's"), locked(tmp_path / "run"):
        pass
    assert victim.read_text() == lock.read_text() == "keep\n"
    for old in ("", "123\n"):
        lock.unlink()
        lock.write_text(old)
        with locked(tmp_path / "run"):
            assert lock.read_text() == f"{os.getpid()}\n"
