from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import attar
from attar.checkpoint import atomic
from attar.errors import CheckpointError, OutputError
from tests.flushes import record_flushes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(folder: Path, word: str = "new") -> None:
    (folder / "config.json").write_text(word)
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text(word)


def test_write_json_and_bytes(tmp_path):
    atomic.write_json(tmp_path / "a.json", {"b": "é", "a": [1]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": "é", "a": [1]}
    atomic.write_bytes(tmp_path / "a.json", b"x")
    assert (tmp_path / "a.json").read_bytes() == b"x"
    assert names(tmp_path) == ["a.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    atomic.write_bytes(tmp_path / "f", b"old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match=r"f: no space left on the disk \(3 B needed, .* free\)"):
        atomic.write_bytes(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


@pytest.mark.parametrize("kind", ["json", "tensors", "folder"])
def test_bytes_are_on_the_disk_before_the_name_and_the_name_after(tmp_path, monkeypatch, kind):
    events = []
    fsync, replace, rename = os.fsync, Path.replace, Path.rename

    def synced(descriptor: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        events.append(f"name {target.name}")
        return (replace if self.is_file() else rename)(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    if kind == "json":
        atomic.write_json(tmp_path / "x", {})
    elif kind == "tensors":
        atomic.save_tensors(tmp_path / "x", {"w": torch.ones(2)}, {"of": "test"})
        assert load_file(tmp_path / "x")["w"].tolist() == [1.0, 1.0]
    else:
        (tmp_path / ".x.partial").mkdir()
        fill(tmp_path / ".x.partial")
        atomic.publish(tmp_path / ".x.partial", tmp_path / "x")
    assert events[-3:] == ["sync .x.partial", "name x", f"sync {tmp_path.name}"]
    assert ("sync config.json" in events) == (kind == "folder")
    assert names(tmp_path) == ["x"]


def test_tensors_can_be_read_by_whom_other_files_can(tmp_path):
    atomic.write_bytes(tmp_path / "a", b"a")
    atomic.save_tensors(tmp_path / "a.safetensors", {"a": torch.ones(2)})
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "a").stat().st_mode


def test_tensors_are_saved_by_atomic_alone():
    """Activations are scratch of one process: nothing resumes from them."""
    root = Path(attar.__file__).parent
    users = {path for path in root.rglob("*.py") if "save_file(" in path.read_text()}
    assert {path.name for path in users} == {"atomic.py", "offloaded_model.py"}


def test_a_folder_appears_when_the_block_ends(tmp_path):
    final = tmp_path / "out"
    with atomic.folder(final) as folder:
        fill(folder)
        assert folder.parent == tmp_path
        assert not final.exists()
    assert (final / "sub" / "file").read_text() == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_an_exception_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)), atomic.folder(tmp_path / "out") as folder:
        fill(folder)
        raise error
    assert names(tmp_path) == []


def test_leftovers_of_a_kill_are_cleaned(tmp_path):
    fill_in = tmp_path / ".out.partial"
    fill_in.mkdir()
    fill(fill_in, "stale")
    with atomic.folder(tmp_path / "out") as folder:
        assert names(folder) == []
        (folder / "config.json").write_text("new")
    assert names(tmp_path / "out") == ["config.json"]


def test_an_existing_checkpoint_is_replaced_by_force_only(tmp_path):
    final = tmp_path / "out"
    final.mkdir()
    fill(final, "old")
    with pytest.raises(OutputError, match="already exists") as caught, atomic.folder(final):
        raise AssertionError("not reached")
    assert "--force" in str(caught.value.hint)
    with pytest.raises(ValueError, match="x"), atomic.folder(final, force=True):
        raise ValueError("x")
    assert (final / "config.json").read_text() == "old"
    with atomic.folder(final, force=True) as folder:
        (folder / "config.json").write_text("new")
        assert (final / "config.json").read_text() == "old"
    assert names(final) == ["config.json"]
    assert names(tmp_path) == ["out"]


def test_force_deletes_only_checkpoints(tmp_path):
    final = tmp_path / "thesis"
    final.mkdir()
    (final / "chapter1.tex").write_text("words")
    with pytest.raises(OutputError, match="is not a checkpoint"), atomic.folder(final, force=True):
        raise AssertionError("not reached")
    file = tmp_path / "file"
    file.write_text("words")
    with pytest.raises(OutputError, match="exists and is not a folder"), atomic.folder(file, force=True):
        raise AssertionError("not reached")
    assert (final / "chapter1.tex").exists()


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "out").mkdir()
    with atomic.folder(tmp_path / "out") as folder:
        fill(folder)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_failed_second_rename_brings_the_old_one_back(tmp_path, monkeypatch):
    final = tmp_path / "out"
    final.mkdir()
    fill(final, "old")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == ".out.partial":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(KeyboardInterrupt), atomic.folder(final, force=True) as folder:
        fill(folder)
    assert (final / "config.json").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_a_kill_between_the_two_renames_is_mended(tmp_path):
    aside = tmp_path / ".out.old"
    aside.mkdir()
    fill(aside, "old")
    with pytest.raises(OutputError, match="already exists"), atomic.folder(tmp_path / "out"):
        raise AssertionError("not reached")
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    aside.mkdir()
    atomic.recover(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_impossible_outputs(tmp_path):
    (tmp_path / "file").write_text("words")
    for out, message in (
        (Path("/"), "cannot be an output"),
        (tmp_path / ("x" * 250), "name is too long"),
        (tmp_path / "file" / "deep" / "out", "file is a file"),
    ):
        with pytest.raises(OutputError, match=message), atomic.folder(out):
            raise AssertionError("not reached")


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big-disk")
    with atomic.folder(tmp_path / "out") as folder:
        fill(folder)
    assert (tmp_path / "big-disk" / "config.json").exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "full"), "no space left"),
        (OSError(errno.EROFS, "Read-only file system", "/ro/x"), "/ro/x: read-only file system"),
        (PermissionError(errno.EACCES, "Permission denied", "/no"), "/no: permission denied"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), "no space left"),
        (ValueError("I/O error: No space left on device (os error 28)"), "no space left"),
        (ValueError("Read-only file system (os error 30)"), "read-only"),
    ],
)
def test_system_errors_are_explained(error, message):
    with pytest.raises(OutputError, match=message), atomic.explain_os_errors(Path("/some/out"), 10):
        raise error


def test_other_errors_pass():
    for error in (FileExistsError(errno.EEXIST, "x"), RuntimeError("x"), CheckpointError("No space left")):
        with pytest.raises(type(error)) as caught, atomic.explain_os_errors(Path("/some/out")):
            raise error
        assert caught.value is error


def test_space_is_checked_early(tmp_path):
    atomic.check_space(tmp_path / "not" / "yet", 10)
    with pytest.raises(OutputError, match=r"no space left on the disk \(1000 PB needed"):
        atomic.check_space(tmp_path / "not" / "yet", 10**18)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    yield from mounted(tmp_path / "disk", "size=1m")


def mounted(mount_point: Path, options: str) -> Iterator[Path]:
    mount_point.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mount_point], capture_output=True)
    if mount.returncode:
        pytest.skip("may not mount a tmpfs here")
    yield mount_point
    subprocess.run(["umount", mount_point], check=True)


def test_a_full_disk(small_disk):
    with (
        pytest.raises(OutputError, match=r"out: no space left on the disk \(.* free\)"),
        atomic.folder(small_disk / "out") as folder,
    ):
        (folder / "weights").write_bytes(b"\0" * 2_000_000)
    assert names(small_disk) == []


def test_a_read_only_disk(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OutputError, match="read-only file system"), atomic.folder(small_disk / "out"):
        raise AssertionError("not reached")
    assert names(small_disk) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folders_bytes_are_on_the_disk_before_its_name_and_the_name_after(tmp_path, monkeypatch, replaced):
    final, partial, old = tmp_path / "x", tmp_path / ".x.partial", tmp_path / ".x.old"
    if replaced:
        final.mkdir()
        (final / "config.json").write_text("old")
    events = record_flushes(monkeypatch)
    with atomic.folder(final, force=replaced) as folder:
        fill(folder)
    name = events.index(("rename", final))
    written = [partial / "config.json", partial / "sub" / "file", partial / "sub", partial]
    assert sorted(events[: len(written)]) == sorted(("flush", path) for path in written)
    assert events[len(written) : name] == ([("rename", old)] if replaced else [])
    assert events[name + 1 :] == [("flush", tmp_path)] and names(tmp_path) == ["x"]
    order = [path for _, path in events]
    assert order.index(partial / "sub" / "file") < order.index(partial / "sub") < order.index(partial)


HIDDEN = {
    "link": lambda path, victim: path.symlink_to(victim),
    "broken link": lambda path, victim: path.symlink_to(victim / "new"),
    "pipe": lambda path, victim: os.mkfifo(path),
    "file": lambda path, victim: path.write_text("left by a kill"),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_temporary_file_is_never_what_others_put_there(tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("keep")
    HIDDEN[kind](tmp_path / ".f.partial", victim)
    atomic.write_bytes(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new" and not (tmp_path / "f").is_symlink()
    assert victim.read_text() == "keep" and names(tmp_path) == ["f", "victim"]


@pytest.mark.parametrize("suffix", ["partial", "old"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_temporary_folder_that_is_none_is_refused(tmp_path, suffix, kind):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "keep").touch()
    HIDDEN[kind](tmp_path / f".x.{suffix}", victim)
    with (
        pytest.raises(OutputError, match=rf"\.x\.{suffix}: is no folder of attar's"),
        atomic.folder(tmp_path / "x"),
    ):
        pass
    assert names(victim) == ["keep"] and not (tmp_path / "x").exists()


LIMITED = """
import resource, signal, sys
from pathlib import Path
from attar.checkpoint import atomic
from attar.errors import OutputError
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    atomic.write_bytes(Path(sys.argv[1]), bytes(5000))
except OutputError as error:
    print(error)
"""


def test_a_limit_of_file_sizes_is_named_as_that(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "f")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == (
        f"{tmp_path / 'f'}: larger than 4.10 kB, the limit of this process's files\n"
        "hint: raise it (ulimit -f unlimited), or write to another file system\n"
    ), done.stderr
    assert names(tmp_path) == []
