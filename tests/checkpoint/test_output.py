from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from attar.checkpoint import open_checkpoint, produce, write_checkpoint_tensors
from attar.checkpoint.output import StageOutput, command_line, finished
from attar.errors import DataError, OutputError
from tests.checkpoint.checkpoint_files import CONFIG, llama_tensors
from tests.flushes import record_flushes

SETTINGS = {"ratio": 0.25, "method": "heads", "names": ["a", "b"], "fast": True, "none": None, "seed": 5}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def start(out: Path, model: Path | None = None, **changes: Any) -> Any:
    weights = [open_checkpoint(model)] if model else []
    work = {"stage": "prune", "version": 1, "settings": SETTINGS, "weights": weights}
    return produce(out, **{**work, **changes})


def fill(output: StageOutput) -> None:
    (output.folder / "config.json").write_text(json.dumps(CONFIG))
    write_checkpoint_tensors(output.folder, llama_tensors())


def test_a_finished_stage_is_a_checkpoint_with_a_card(make, tmp_path):
    model = make()
    with start(tmp_path / "runs" / "small", model) as output:
        fill(output)
        output.details["layers"] = [{"name": "x", "error": float("nan")}]
        output.measurements["perplexity"] = 3.0
        (output.work / "scratch").write_text("x")
    checkpoint = open_checkpoint(tmp_path / "runs" / "small")
    card = checkpoint.card
    assert names(tmp_path / "runs") == ["small"]
    assert (card.name, card.stage, card.seed, card.settings) == ("small", "prune", 5, SETTINGS)
    assert card.details == {"layers": [{"name": "x", "error": None}]}
    assert card.measurements == {"perplexity": 3.0}
    assert card.key == output.key
    assert card.parents[0].fingerprint == open_checkpoint(model).fingerprint()
    assert card.parents[0].licence["ids"] == ["unknown"]
    assert card.licence["status"] == "unknown"
    assert sorted(card.files) == ["README.md", "config.json", "model.safetensors"]
    for name, digest in card.files.items():
        assert hashlib.sha256((checkpoint.path / name).read_bytes()).hexdigest() == digest
    assert card.command == (
        f"attar prune {model} -o small --ratio 0.25 --method heads --names a --names b --fast --seed 5"
    )


def test_the_lineage_grows(make, tmp_path):
    model = make()
    for source, name in ((model, "one"), (tmp_path / "one", "two")):
        with start(tmp_path / name, source) as output:
            fill(output)
    (parent,) = open_checkpoint(tmp_path / "two").card.parents
    assert (parent.name, parent.stage, parent.settings["ratio"]) == ("one", "prune", 0.25)
    assert [(root.name, root.stage) for root in parent.parents] == [("model", "original")]


def test_rounds_of_pruning_and_recovery_grow_the_card_by_the_same_each(make, tmp_path):
    model, sizes = make(files={"README.md": "---\nlicense: gemma\n---"}), []
    for index in range(6):
        pruned, recovered = tmp_path / f"pruned-{index}", tmp_path / f"recovered-{index}"
        with start(pruned, model) as output:
            fill(output)
            (output.folder / "tokenizer.json").write_text(f"p{index}")
        inputs = {"weights": [open_checkpoint(pruned)], "signals": [open_checkpoint(model)]}
        with start(recovered, stage="recover", **inputs) as output:
            fill(output)
            (output.folder / "tokenizer.json").write_text(f"r{index}")
        model = recovered
        sizes.append((recovered / "attar.json").read_text().count('"fingerprint"'))
    assert sizes == [3, 6, 9, 12, 15, 18]
    card = open_checkpoint(model).card
    assert card.parents[1].licence["ids"] == ["gemma"]
    assert {source["role"] for source in card.licence["sources"]} == {"weights", "signal"}


def test_the_same_work_gives_the_same_bytes(make, tmp_path):
    model = make()
    for folder in ("a", "b"):
        with start(tmp_path / folder / "out", model) as output:
            fill(output)
    for name in names(tmp_path / "a" / "out"):
        assert (tmp_path / "a" / "out" / name).read_bytes() == (tmp_path / "b" / "out" / name).read_bytes()


def test_an_error_of_the_user_leaves_nothing(make, tmp_path):
    with pytest.raises(DataError), start(tmp_path / "new" / "deep" / "out", make("in")) as output:
        fill(output)
        (output.work / "scratch").write_text("x")
        raise DataError("the text is empty")
    assert names(tmp_path) == ["in"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug"), MemoryError()])
def test_an_interruption_keeps_the_work_for_the_same_key(tmp_path, error):
    out = tmp_path / "out"
    with pytest.raises(type(error)), start(out) as output:
        assert not output.resumed
        (output.work / "done-1").write_text("x")
        fill(output)
        raise error
    assert names(tmp_path) == [".out.work"]
    with start(out) as output:
        assert output.resumed
        assert (output.work / "done-1").exists()
        assert names(output.folder) == []
        fill(output)
    assert names(tmp_path) == ["out"]


def test_an_interruption_before_any_work_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), start(tmp_path / "new" / "out") as output:
        fill(output)
        raise KeyboardInterrupt
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "change", [{"settings": {**SETTINGS, "seed": 6}}, {"version": 2}, {"settings": {}}, {"key": "other"}]
)
def test_other_work_starts_clean(tmp_path, change):
    with pytest.raises(KeyboardInterrupt), start(tmp_path / "out") as output:
        (output.work / "sub").mkdir()
        (output.work / "done-1").write_text("x")
        raise KeyboardInterrupt
    with start(tmp_path / "out", **change) as output:
        assert not output.resumed
        assert not (output.work / "done-1").exists()
        assert not (output.work / "sub").exists()


def test_changed_input_starts_clean(make, tmp_path):
    model = make()
    with pytest.raises(KeyboardInterrupt), start(tmp_path / "out", model) as output:
        (output.work / "done-1").write_text("x")
        raise KeyboardInterrupt
    (model / "tokenizer.json").write_text("{}")
    with start(tmp_path / "out", model) as output:
        assert not output.resumed


def test_an_existing_output_needs_force_and_keeps_interrupted_work(tmp_path):
    out = tmp_path / "out"
    with start(out) as output:
        fill(output)
    with pytest.raises(OutputError, match="already exists"), start(out):
        raise AssertionError("not reached")
    with pytest.raises(KeyboardInterrupt), start(out, force=True) as output:
        (output.work / "done-1").write_text("x")
        raise KeyboardInterrupt
    with pytest.raises(OutputError, match="already exists"), start(out):
        raise AssertionError("not reached")
    with start(out, force=True) as output:
        assert output.resumed
        fill(output)
        (output.folder / "new").write_text("x")
    assert (out / "new").exists()
    assert names(tmp_path) == ["out"]


def test_an_input_may_be_replaced_but_not_its_parent_folder(make, tmp_path):
    model = make("outer/model")
    (tmp_path / "outer" / "config.json").write_text("{}")
    with (
        pytest.raises(OutputError, match="contains the input model"),
        start(tmp_path / "outer", model, force=True),
    ):
        raise AssertionError("not reached")
    with start(model, model, force=True) as output:
        fill(output)
    assert open_checkpoint(model).card.parents[0].name == "model"


def test_two_processes_cannot_write_the_same_output(tmp_path):
    code = (
        "import sys\n"
        "from attar.checkpoint import produce\n"
        "with produce(sys.argv[1], 's', {}, 1, []) as output:\n"
        "    print('in', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "out"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        with pytest.raises(OutputError, match="being written by another process"), start(tmp_path / "out"):
            raise AssertionError("not reached")
        assert names(tmp_path) == [".out.partial", ".out.work"]
        other.communicate()
    assert names(tmp_path) == ["out"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from checkpoint_files import llama_tensors
from attar.checkpoint import ShardWriter, produce
from attar.checkpoint.shards import tensor_spec

CALLS = ("pwrite", "fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir", "posix_fallocate")
left = 0

def counted(function):
    def call(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

def write(out):
    tensors = llama_tensors()
    with produce(out, "s", {}, 1, [], force=True) as output:
        layout = [tensor_spec(*item) for item in tensors.items()]
        writer = ShardWriter(output.folder, layout, max_shard_bytes=1200, work=output.work)
        for name in writer.missing():
            writer.add(name, tensors[name])
        (output.folder / "config.json").write_text("{}")
        writer.finish()

def run(out, kill):
    # Write in a child that is killed before its kill-th system call; True when it came to its end.
    global left
    child = os.fork()
    if not child:
        left = kill
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        write(out)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return status == 0

def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.exists() else None

root = Path(sys.argv[1])
assert run(root / "whole" / "out", -1)
whole = content(root / "whole" / "out")
kill, ended, step = 1 - int(sys.argv[3]), False, int(sys.argv[3])
while not ended:
    kill += step
    out = root / str(kill) / "out"
    ended = run(out, kill)
    assert content(out) in (None, whole), f"half a checkpoint after kill {kill}"
    assert run(out, -1), kill
    assert content(out) == whole, f"other bytes after kill {kill}"
    assert os.listdir(out.parent) == ["out"], os.listdir(out.parent)
# and over an existing checkpoint, with a second kill while the first is being made good
for kill in range(1, kill, 15):
    out = root / "1" / "out"
    run(out, kill)
    run(out, 2 * kill % 50 + 1)
    assert run(out, -1)
    assert content(out) == whole, f"other bytes after kill {kill}"
print(kill)
"""


@pytest.mark.parametrize("step", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_9_before_every_system_call_then_again_gives_the_undisturbed_bytes(tmp_path, step):
    """Before every fifteenth one always."""
    # In memory where there is such a folder: a disk spends the time on fsync, and a kill needs no disk.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        command = [sys.executable, "-c", KILLED, folder, Path(__file__).parent, str(step)]
        run = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 50


def test_finished_work_is_recognised_and_tidied(tmp_path):
    out = tmp_path / "out"
    assert not finished(out, "k")
    with start(out, key="k") as output:
        fill(output)
    (tmp_path / ".out.work").mkdir()  # as a kill right after the last rename leaves it
    assert not finished(out, "other")
    assert finished(out, "k")
    assert names(tmp_path) == ["out"]
    (out / "attar.json").write_text("{")
    assert not finished(out, "k")


def mount(mount_point: Path, size: str) -> None:
    mount_point.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount_point], capture_output=True
    )
    if done.returncode:
        pytest.skip("may not mount a tmpfs here")


def test_a_full_disk_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    mount(disk, "1m")
    try:
        with pytest.raises(OutputError, match="no space left"), start(disk / "runs" / "out") as output:
            fill(output)
            (output.work / "scratch").write_bytes(b"x" * 600_000)
            (output.folder / "more").write_bytes(b"x" * 600_000)
        assert names(disk) == []
        with pytest.raises(OutputError, match=r"2\.00 MB needed"), start(disk / "out", needed=2_000_000):
            raise AssertionError("not reached")
        assert names(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_read_only_disk_is_refused_before_any_work(tmp_path):
    disk = tmp_path / "disk"
    mount(disk, "1m")
    try:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for out in (disk / "out", disk / "new" / "out"):
            with pytest.raises(OutputError, match="read-only file system"), start(out):
                raise AssertionError("not reached")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_parent_that_is_a_file(make, tmp_path):
    model = make()
    with pytest.raises(OutputError, match=r"config\.json is a file"), start(model / "config.json" / "out"):
        raise AssertionError("not reached")


def test_command_lines_name_teachers(make):
    student, teacher = open_checkpoint(make("student")), open_checkpoint(make("teacher"))
    line = command_line(
        "recover",
        {"top_k": 3, "keep": False, "seed": 1},
        [(student, "weights"), (teacher, "signal")],
        Path("o"),
    )
    assert line == f"attar recover {student.path} -o o --teacher {teacher.path} --top-k 3 --no-keep --seed 1"


def test_command_lines_name_a_model_once(make):
    """distill reads one model for its weights and for its outputs, and has no option for a second one."""
    teacher = open_checkpoint(make("teacher"))
    line = command_line(
        "distill", {"layers": 2, "seed": 1}, [(teacher, "weights"), (teacher, "signal")], Path("o")
    )
    assert line == f"attar distill {teacher.path} -o o --layers 2 --seed 1"


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_foreign_scratch_folder_is_not_cleared(tmp_path: Path, kind: str) -> None:
    work, victim = tmp_path / ".out.work", tmp_path / "photos"
    victim.mkdir()
    (victim / "keep").write_text("mine")
    if kind == "folder":
        victim.rename(work)
    elif kind == "link":
        work.symlink_to(victim)
    else:
        work.write_text("mine")
    before = sorted(path for path in tmp_path.rglob("*"))
    with (
        pytest.raises(OutputError, match=r"\.out\.work: is no (scratch )?folder of attar's"),
        start(tmp_path / "out"),
    ):
        raise AssertionError("work began")
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_an_output_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial, work = tmp_path / "out", tmp_path / ".out.partial", tmp_path / ".out.work"
    events = record_flushes(monkeypatch)
    with start(out) as output:
        fill(output)
    name = events.index(("rename", out))
    key = events.index(("rename", work / "key.json"))
    assert events[key - 1 : key + 2 : 2] == [("flush", work / ".key.json.partial"), ("flush", work)]
    for path in sorted(out.rglob("*")):
        written = ("flush", partial / path.relative_to(out))
        last = max(index for index, event in enumerate(events[:name]) if event == written)
        renames = [index for index, event in enumerate(events) if event == ("rename", written[1])]
        assert last > max(renames, default=-1), f"{path.name} is flushed under its own name"
    assert events[name - 1] == ("flush", partial) and events[name + 1] == ("flush", tmp_path)
