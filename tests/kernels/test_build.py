"""Libraries are compiled once, for all that they depend on; where that fails, callers get None."""

import logging
import subprocess
import sys

import pytest

from attar.kernels import build

ANSWER = 'extern "C" int answer() { return %d; }\n'

pytestmark = pytest.mark.skipif(
    not any(build.shutil.which(name) for name in build.COMPILERS), reason="no C++ compiler"
)


@pytest.fixture(autouse=True)
def room(tmp_path, monkeypatch):
    """A room with one small source, and a cache of its own."""
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTAR_KERNELS", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "small.cpp").write_text(ANSWER % 42)
    build._load.cache_clear()
    yield tmp_path
    build._load.cache_clear()


def files(room):
    return sorted(file.name for file in (room / "cache" / "kernels").iterdir())


def refuse(*arguments, **options):
    raise AssertionError("compiled again")


def test_a_source_is_compiled_and_called(room):
    assert build.load("small").answer() == 42
    (name,) = files(room)
    assert name.startswith("small-") and name.endswith(".so")


def test_the_next_process_finds_it(room, monkeypatch):
    build.load("small")
    build._load.cache_clear()
    monkeypatch.setattr(build, "_compile", refuse)
    assert build.load("small").answer() == 42


def test_a_process_looks_once(monkeypatch):
    first = build.load("small")
    monkeypatch.setattr(build, "_built", refuse)
    assert build.load("small") is first


@pytest.mark.parametrize("what", ["source", "header", "flags", "processor"])
def test_the_key_holds_all_that_a_library_depends_on(what, room, monkeypatch):
    build.load("small")
    build._load.cache_clear()
    if what == "source":
        (room / "csrc" / "small.cpp").write_text(ANSWER % 7)
    elif what == "header":
        (room / "csrc" / "other.h").write_text("// changed")
    elif what == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    else:
        monkeypatch.setattr(build, "_processor", lambda: "another")
    assert build.load("small").answer() == (7 if what == "source" else 42)
    assert len(files(room)) == 2


def test_the_environment_turns_kernels_off(room, monkeypatch):
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    assert build.load("small") is None and build.missing("small") == "ATTAR_KERNELS is off"
    assert not (room / "cache").exists()


@pytest.mark.parametrize("trouble", ["no compiler", "an error in the source", "a cache that is a file"])
def test_why_there_is_no_library_is_one_line(trouble, room, monkeypatch):
    if trouble == "no compiler":
        monkeypatch.setenv("PATH", str(room))
    elif trouble == "an error in the source":
        (room / "csrc" / "small.cpp").write_text("int answer( { return 42; }")
    else:
        (room / "cache").write_text("in the way")
    assert build.load("small") is None
    said = build.missing("small")
    words = {"no compiler": "no compiler: none of c++", "an error in the source": "error"}
    assert words.get(trouble, "cache") in said and "\n" not in said
    if trouble == "an error in the source":
        assert files(room) == []


def test_nothing_is_missing_where_there_is_a_library():
    assert build.load("small") is not None and build.missing("small") == ""


def test_slower_code_is_a_warning_once_in_a_process(caplog):
    build.slower.cache_clear()
    for _ in range(3):
        build.slower("this runs in torch")
    build.slower("that runs in torch")
    assert [record.getMessage() for record in caplog.records] == ["this runs in torch", "that runs in torch"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_compiler_that_knows_only_the_second_flag(room, monkeypatch):
    monkeypatch.setattr(build, "NATIVE", ("-march=unheard-of", "-O2"))
    assert build.load("small").answer() == 42
    assert len(files(room)) == 1


def test_the_compiler_can_be_named(room, monkeypatch):
    compiler = room / "mine"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {room}/log\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.load("small").answer() == 42
    assert "small.cpp" in (room / "log").read_text()


def test_processes_build_at_the_same_time(room):
    code = (
        "from pathlib import Path; from attar.kernels import build;"
        f"build.SOURCES = Path({str(room / 'csrc')!r}); print(build.load('small').answer())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["42"] * 4
    assert len(files(room)) == 1


def test_our_own_sources_compile_without_a_warning(tmp_path, monkeypatch):
    """GCC 12 warns of its own header for AVX-512, which -Wno-uninitialized keeps quiet."""
    monkeypatch.undo()
    command = ["c++", *build.FLAGS, "-O0", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-uninitialized"]
    for source in sorted(build.SOURCES.glob("*.cpp")):
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=True)
        assert done.stderr == ""
