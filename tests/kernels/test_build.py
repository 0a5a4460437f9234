"""Libraries are compiled once, for all that they depend on; where that fails, callers get None."""

import logging
import os
import subprocess
import sys
import time

import pytest

from attar.errors import AttarError
from attar.kernels import build, levels

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


def test_compiling_is_announced_once(room, caplog):
    with caplog.at_level(logging.INFO, logger="attar.kernels.build"):
        build.load("small")
        build._load.cache_clear()
        build.load("small")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["compiling small for this processor, once: about a minute"]


def test_the_next_process_finds_it(room, monkeypatch):
    build.load("small")
    build._load.cache_clear()
    monkeypatch.setattr(build, "_compile", refuse)
    assert build.load("small").answer() == 42


def test_a_process_looks_once(monkeypatch):
    first = build.load("small")
    monkeypatch.setattr(build, "_built", refuse)
    assert build.load("small") is first


@pytest.mark.few(4)
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


def test_an_image_says_that_its_libraries_do_not_run_here(room, monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ())
    monkeypatch.setattr(build, "PREBUILT", room / "prebuilt")
    monkeypatch.setattr(build, "levels", lambda: ())
    (room / "prebuilt").mkdir()
    (room / "prebuilt" / "small-v9.so").write_bytes(b"")
    assert build.load("small") is None
    monkeypatch.setenv("ATTAR_KERNELS", "required")
    with pytest.raises(
        AttarError, match=r"no compiled small: no compiler.*; this processor runs no.*: v9"
    ) as raised:
        build.load("small")
    assert "unset ATTAR_KERNELS" in raised.value.hint


def test_the_environment_turns_kernels_off(room, monkeypatch):
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    assert build.load("small") is None and build.why_missing("small") == "ATTAR_KERNELS is off"
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
    message = build.why_missing("small")
    words = {"no compiler": "no compiler: none of c++", "an error in the source": "error"}
    assert words.get(trouble, "cache") in message and "\n" not in message
    if trouble == "an error in the source":
        assert files(room) == []


@pytest.fixture
def prebuilt(room, monkeypatch):
    """A wheel's libraries: of the best level here one that answers with 1, of a lesser one 2."""
    monkeypatch.setattr(build, "PREBUILT", room / "prebuilt")
    monkeypatch.setattr(build, "levels", lambda: levels.LEVELS[:2])
    (room / "prebuilt").mkdir()
    for number, level in enumerate(levels.LEVELS[:2], start=1):
        source, path = room / "other.cpp", room / "prebuilt" / f"small-{level.name}.so"
        source.write_text(ANSWER % number)
        subprocess.run(["c++", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return room / "prebuilt"


def test_what_is_compiled_here_comes_before_what_is_prebuilt(prebuilt):
    assert build.load("small").answer() == 42


@pytest.mark.parametrize("trouble", ["no compiler", "a cache that is a file"])
def test_the_best_prebuilt_library_stands_in_for_the_compiler(trouble, prebuilt, room, monkeypatch):
    if trouble == "no compiler":
        monkeypatch.setenv("PATH", str(room))
    else:
        (room / "cache").write_text("in the way")
    assert build.load("small").answer() == 1 and build.why_missing("small") == ""


def test_a_prebuilt_library_that_does_not_load_leaves_it_to_the_next(prebuilt, room, monkeypatch):
    monkeypatch.setenv("PATH", str(room))
    spoil(prebuilt / f"small-{levels.LEVELS[0].name}.so")
    assert build.load("small").answer() == 2
    assert build.load("another") is None and "no compiler" in build.why_missing("another")


def test_a_target_that_was_asked_for_is_not_replaced(prebuilt, room, monkeypatch):
    monkeypatch.setenv("PATH", str(room))
    monkeypatch.setenv("ATTAR_KERNELS_TARGET", "x86-64-v3")
    assert build.load("small") is None


@pytest.mark.parametrize(
    "machine, flags, best",
    [
        ("x86_64", "flags\t\t: " + " ".join(levels._V3) + " sse", "v3"),
        ("x86_64", "flags: " + " ".join(levels._V4) + " avx512_vnni avx512_bf16", "v4-vnni-bf16"),
        (
            "x86_64",
            "flags: " + " ".join(levels._V4) + " avx512_vnni avx512_bf16 amx_bf16 amx_int8 amx_tile",
            "v4-vnni-bf16-amx",
        ),
        ("x86_64", "flags: " + " ".join(levels._V4) + " avx512_bf16", "v4"),
        ("aarch64", "Features\t: fp asimd asimddp i8mm bf16", "i8mm-bf16"),
        ("aarch64", "Features\t: fp asimd asimddp i8mm", "dotprod"),
        ("aarch64", "Features\t: fp asimd", "armv8"),
        ("x86_64", "flags: sse4_2", None),
        ("riscv64", "isa: rv64", None),
    ],
)
def test_the_best_level_of_a_processor(machine, flags, best, room, monkeypatch):
    (room / "cpuinfo").write_text(f"processor : 0\n{flags}\n\nprocessor : 1\n{flags}\n")
    monkeypatch.setattr(levels, "CPUINFO", room / "cpuinfo")
    monkeypatch.setattr(levels.platform, "machine", lambda: machine)
    actual = levels.levels()
    assert (actual[0].name if actual else None) == best
    monkeypatch.setattr(levels, "CPUINFO", room / "none")
    assert levels.levels() == ()


def test_nothing_is_missing_where_there_is_a_library():
    assert build.load("small") is not None and build.why_missing("small") == ""


def test_slower_code_is_a_warning_once_in_a_process(caplog):
    build.warn_slower.cache_clear()
    for _ in range(3):
        build.warn_slower("this runs in torch")
    build.warn_slower("that runs in torch")
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


@pytest.mark.slow
def test_of_processes_at_the_same_time_one_compiles(room, monkeypatch):
    compiler = room / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {room}/log\nsleep 2\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    code = (
        "from pathlib import Path; from attar.kernels import build;"
        f"build.SOURCES = Path({str(room / 'csrc')!r}); print(build.load('small').answer())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["42"] * 4
    assert len(files(room)) == 1 and (room / "log").read_text().count("small.cpp") == 1


@pytest.mark.slow
def test_a_compilation_that_hangs_stops_no_other_process(room, monkeypatch):
    code = (
        "import sys; from pathlib import Path; from attar.kernels import build;"
        f"build.SOURCES = Path({str(room / 'csrc')!r});"
        "build._compile = lambda *rest: print('held', flush=True) or sys.stdin.read(); build.load('small')"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as holder:
        assert holder.stdout.readline() == b"held\n"
        monkeypatch.setattr(build, "TIMEOUT", 5.0)
        begun = time.monotonic()
        assert build.load("small").answer() == 42 and time.monotonic() - begun > 4
        holder.kill()


def test_what_killed_compilations_left_goes_and_old_libraries_too(room, monkeypatch):
    folder = room / "cache" / "kernels"
    folder.mkdir(parents=True)
    for number in range(build.KEPT + 3):
        (folder / f"small-{number:016x}.so").write_text("old")
        os.utime(folder / f"small-{number:016x}.so", (1000 + number, 1000 + number))
    (folder / "smaller-0000000000000000.so").write_text("another's")
    for name, age in ((".small-1-dead", 2 * build.TIMEOUT + 60), (".small-2-alive", 60)):
        (folder / name).mkdir()
        (folder / name / "half.so").write_text("half")
        os.utime(folder / name, (time.time() - age,) * 2)
    assert build.load("small").answer() == 42
    names = files(room)
    assert ".small-1-dead" not in names and ".small-2-alive" in names
    assert "smaller-0000000000000000.so" in names
    kept = [name for name in names if name.startswith("small-")]
    assert len(kept) == build.KEPT and "small-0000000000000000.so" not in kept
    assert f"small-{build.KEPT + 2:016x}.so" in kept


def test_a_library_that_is_used_stays(room, monkeypatch):
    build.load("small")
    (name,) = files(room)
    path = room / "cache" / "kernels" / name
    os.utime(path, (1000, 1000))
    build._load.cache_clear()
    build.load("small")
    assert path.stat().st_mtime > 2000


def test_the_folder_is_its_owners_alone(room):
    build.load("small")
    assert (room / "cache" / "kernels").stat().st_mode & 0o777 == 0o700


def spoil(path):
    """Another file; the one that is loaded stays as it is."""
    path.unlink()
    path.write_bytes(b"not a library")


def test_another_users_folder_is_not_used(room, monkeypatch, caplog):
    """Any user who may write there could put code into this process."""
    build.warn_slower.cache_clear()
    build.load("small")
    build._load.cache_clear()
    (name,) = files(room)
    spoil(room / "cache" / "kernels" / name)
    monkeypatch.setattr(build, "_owned", lambda path: room not in path.parents)
    assert build.load("small").answer() == 42
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "belongs to another user: small is compiled for this process alone" in line
    assert files(room) == [name]


def test_another_users_library_is_built_again(room, monkeypatch):
    build.load("small")
    build._load.cache_clear()
    (name,) = files(room)
    path = room / "cache" / "kernels" / name
    spoil(path)
    monkeypatch.setattr(build, "_ours", lambda owned: owned != path)
    assert build.load("small").answer() == 42


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o722])
@pytest.mark.parametrize("what", ["library", "folder"])
def test_what_others_may_write_is_built_again(room, mode, what):
    """The planted library would answer 1."""
    build.load("small")
    build._load.cache_clear()
    (name,) = files(room)
    folder = room / "cache" / "kernels"
    (room / "planted.cpp").write_text(ANSWER % 1)
    path = folder / name
    path.unlink()
    subprocess.run(["c++", "-shared", "-fPIC", "-o", str(path), str(room / "planted.cpp")], check=True)
    path.chmod(0o755)
    (path if what == "library" else folder).chmod(mode)
    assert build.load("small").answer() == 42
    assert folder.stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o700


def test_a_library_that_is_a_link_is_built_again(room):
    build.load("small")
    build._load.cache_clear()
    (name,) = files(room)
    path = room / "cache" / "kernels" / name
    path.rename(room / "elsewhere.so")
    path.symlink_to(room / "elsewhere.so")
    assert build.load("small").answer() == 42 and not path.is_symlink()


def test_the_umask_opens_nothing(room):
    before = os.umask(0)
    try:
        build.load("small")
    finally:
        os.umask(before)
    (name,) = files(room)
    folder = room / "cache" / "kernels"
    assert folder.stat().st_mode & 0o777 == (folder / name).stat().st_mode & 0o777 == 0o700


def test_whose_a_file_is(room, monkeypatch):
    assert build._ours(room)
    monkeypatch.setattr(os, "geteuid", lambda: room.stat().st_uid + 1)
    assert not build._ours(room)


@pytest.mark.slow
def test_our_own_sources_compile_without_a_warning(tmp_path, monkeypatch):
    """GCC 12 warns of its own header for AVX-512, which -Wno-uninitialized keeps quiet."""
    monkeypatch.undo()
    command = ["c++", *build.FLAGS, "-O0", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-uninitialized"]
    for source in sorted(build.SOURCES.glob("*.cpp")):
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=True)
        assert done.stderr == ""
