"""Nothing is lost, nothing is half, one writer."""

import json
import os
import subprocess
import sys

import pytest

from attar.collection.journal import Journal, open_journal
from attar.errors import DataError, OutputError


def row(id, text="x"):
    return {"messages": [{"role": "assistant", "content": text}], "id": id}


def write(path, *rows):
    with open_journal(path) as journal:
        for one in rows:
            journal.append(one)


def test_rows_come_back_in_the_order_of_arrival(tmp_path):
    path = tmp_path / "a.journal"
    write(path, row("b", "größer\n\u2028"), row("a"))
    with open_journal(path) as journal:
        assert "a" in journal and "c" not in journal and len(journal) == 2
        assert journal.row("b") == row("b", "größer\n\u2028")
        journal.append(row("c"))
        assert journal.row("c") == row("c")
    assert [one["id"] for one in Journal(path).rows()] == ["b", "a", "c"]


@pytest.mark.parametrize("cut", range(1, 80, 7))
def test_a_half_written_last_line_is_cut_off(tmp_path, cut):
    path = tmp_path / "a.journal"
    write(path, row("a"), row("b", "größer" * 20))
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    before = path.read_bytes()
    assert Journal(path).path.read_bytes() == before, "reading changes nothing"
    with open_journal(path) as journal:
        whole = cut == 1  # only its end of line is missing
        assert ("b" in journal) == whole and "a" in journal
        if not whole:
            assert path.read_bytes() == data.splitlines(keepends=True)[0], "nothing of it stays"
            journal.append(row("b", "größer" * 20))
    assert path.read_bytes() == data


def test_a_damaged_line_before_the_last_is_an_error(tmp_path):
    path = tmp_path / "a.journal"
    write(path, row("a"), row("b"), row("c"))
    lines = path.read_bytes().splitlines(keepends=True)
    for broken in (b"{]\n", b'{"id": 1}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(lines[0] + broken + lines[2])
        with pytest.raises(DataError, match=r"a\.journal:2: not an answer"), open_journal(path):
            pass


def test_an_empty_journal_leaves_no_file(tmp_path):
    with open_journal(tmp_path / "a.journal"):
        assert (tmp_path / "a.journal").exists()
    assert not list(tmp_path.iterdir())


def test_a_second_process_is_refused(tmp_path):
    path = tmp_path / "a.journal"
    program = (
        "import sys; from pathlib import Path\n"
        "from attar.collection.journal import open_journal\n"
        "from attar.errors import OutputError\n"
        "try:\n    open_journal(Path(sys.argv[1])).__enter__()\n"
        "except OutputError as error:\n    print(error.message)\n"
    )
    with open_journal(path) as journal:
        journal.append(row("a"))
        done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert "another process collects into it" in done.stdout, done.stderr
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.stdout == "", done.stderr


def test_a_row_is_on_the_disk_when_append_returns(tmp_path, monkeypatch):
    path, synced = tmp_path / "a.journal", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.stat().st_size))
    with open_journal(path) as journal:
        for number in range(3):
            journal.append(row(str(number)))
            assert synced[-1] == path.stat().st_size and len(synced) == number + 1


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    path, real = tmp_path / "a.journal", os.pwrite
    with open_journal(path) as journal:
        journal.append(row("a"))

        def full(descriptor, data, offset):
            real(descriptor, data[:5], offset)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OutputError, match="no space left"):
            journal.append(row("b"))
        monkeypatch.undo()
        journal.append(row("c"))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "c"]


FOREIGN = [b"keep\n", b"keep", b"one\ntwo\n", b'{"keep": 1}', b"\n", b'{"messages": 3}\n', b"[1]"]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_foreign_file_stays_as_it_is(tmp_path, content):
    path = tmp_path / "a.journal"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.journal:\d: not an answer"), open_journal(path):
        pass
    assert path.read_bytes() == content


@pytest.mark.parametrize("tail", [b"\0" * 9, b'{"mess\0\0\0', b"{", b'{"messages": [{"role": "us'])
def test_what_a_power_cut_leaves_is_cut_off(tmp_path, tail):
    path = tmp_path / "a.journal"
    write(path, row("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with open_journal(path) as journal:
        assert len(journal) == 1
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["link", "broken link", "pipe", "folder"])
def test_a_journal_is_a_file_of_its_own(tmp_path, kind):
    path, victim = tmp_path / "a.journal", tmp_path / "victim.txt"
    if kind != "broken link":
        victim.write_text("keep\n")
    path.symlink_to(victim) if "link" in kind else os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(OutputError, match=r"a\.journal: is no file of attar's"), open_journal(path):
        pass
    assert not victim.exists() if kind == "broken link" else victim.read_text() == "keep\n"


def test_a_failed_flush_takes_the_row_back(tmp_path, monkeypatch):
    path = tmp_path / "a.journal"
    with open_journal(path) as journal:
        journal.append(row("a"))

        def broken(descriptor):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", broken)
            with pytest.raises(OutputError, match="no space left"):
                journal.append(row("b"))
        assert "b" not in journal and len(path.read_bytes().splitlines()) == 1
