"""Free memory as limits of the process and of its control group leave it, and what is refused for it."""

import subprocess
import sys

import pytest
import torch

from attar import memory
from attar.errors import MemoryNeededError
from attar.models.loading.load import load_model
from attar.runtime.loading import load as load_runner

GB = 10**9
LIMITED = """
import resource
from attar.memory import free_memory
before = free_memory()
resource.setrlimit(resource.{limit}, (2 * 10**9, 2 * 10**9))
print(before, free_memory())
"""


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """An empty tree of control groups, of which this process is a member of ``/a/b``."""
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def write_group(folder, names, limit, used, cached):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{text}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\ntotal_inactive_file {2 * cached}\n")


SECOND = ("memory.max", "memory.current")
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_the_least_of_all_groups_above_counts(groups):
    (groups / "membership").write_text("0::/a/b\n")
    write_group(groups / "a" / "b", SECOND, "max", 1, 0)
    write_group(groups / "a", SECOND, 50_000_000, 20_000_000, 5_000_000)
    assert memory.free_memory() == 35_000_000  # what is cached and unused can be had
    write_group(groups / "a" / "b", SECOND, 30_000_000, 20_000_000, 0)
    assert memory.free_memory() == 10_000_000


def test_groups_of_the_first_version(groups):
    (groups / "membership").write_text("7:cpu:/elsewhere\n4:memory:/a\n0::/\n")
    write_group(groups / "memory" / "a", FIRST, 50_000_000, 20_000_000, 1_000_000)
    assert memory.free_memory() == 32_000_000


def test_a_group_above_its_limit_leaves_nothing(groups):
    (groups / "membership").write_text("0::/\n")
    write_group(groups, SECOND, 10, 30, 0)
    assert memory.free_memory() == 0


def test_without_limits_the_machine_counts(groups, monkeypatch):
    assert memory.free_memory() > GB / 10


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_limits_of_the_process_count(limit):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.format(limit=limit)], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert 0 < after < 2 * GB and after < before


def test_what_does_not_fit_is_refused_with_both_amounts(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda **_: 10_000_000)
    with pytest.raises(MemoryNeededError, match=r"^m needs 27.3 MB .* and 10.0 MB are free$"):
        memory.check_memory("m", 27_300_000, hint="")
    memory.check_memory("m", 10_000_000, hint="")


def test_models_are_refused_before_their_weights_are_read(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda **_: 14_000_000)
    with pytest.raises(MemoryNeededError, match=r"attar:tiny needs 27.3 MB"):
        load_model("attar:tiny", dtype=torch.float32)
    load_runner("attar:tiny")  # 6.8 M parameters in 16 bits
    monkeypatch.setattr(memory, "free_memory", lambda **_: 13_000_000)
    with pytest.raises(MemoryNeededError, match=r"attar:tiny needs 13.6 MB"):
        load_runner("attar:tiny")
    load_runner("attar:tiny", weights="int4")  # half and a quarter of it
