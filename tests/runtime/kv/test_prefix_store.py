"""Prefixes on disk: what is read back is what was written, for the same tenant and model, or nothing."""

import os
import signal
import subprocess
import sys
import time

import pytest

from attar.errors import SettingsError
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.prefix_store import PrefixStore, store_setting

B = 4
PROMPT = list(range(100, 118))  # four full blocks, and two tokens


class Pool:
    """Blocks of 8 bytes."""

    def __init__(self, blocks=8):
        self.blocks = {index: bytes(8) for index in range(blocks)}

    def store(self, folder, most=10**6, identity="model"):
        return PrefixStore(folder, most, identity, read=self.blocks.get, write=self.blocks.__setitem__)


def process(folder, *, blocks=16, **options):
    """The pool and the block manager of a process."""
    pool = Pool(blocks)
    manager = BlockManager(blocks, B)
    manager.store = pool.store(folder, **options)
    return pool, manager


def run(pool, manager, tokens, salt="", sequence=0):
    """Prefill as a scheduler does; returns how many tokens were cached, and the content of full blocks."""
    cached = manager.admit(sequence, tokens, salt)
    assert cached is not None and manager.reserve(sequence, len(tokens) - cached)
    row = manager.table(sequence).row
    for index in range(cached // B, len(tokens) // B):
        pool.blocks[row[index]] = bytes(tokens[index * B : index * B + B]) * 2
    manager.commit(sequence, len(tokens) - cached, tokens)
    content = [pool.blocks[block] for block in manager.table(sequence).row[: len(tokens) // B]]
    manager.release(sequence)
    manager.check()
    return cached, content


def test_a_second_process_reads_the_first_ones_blocks(tmp_path):
    first = process(tmp_path)
    cached, content = run(*first, PROMPT)
    assert cached == 0
    first[1].store.close()
    again, want = run(*process(tmp_path), [*PROMPT, 7])
    assert (again, want) == (16, content)
    shorter, _ = run(*process(tmp_path), PROMPT[:16])  # one token is run, for its logits
    assert shorter == 12
    assert run(*process(tmp_path), PROMPT[:8] + [1] * 8)[0] == 8
    assert run(*process(tmp_path), [1, *PROMPT])[0] == 0


@pytest.mark.parametrize(("salt", "identity"), [("tenant", "model"), ("", "another")])
def test_tenants_and_models_share_nothing(tmp_path, salt, identity):
    first = process(tmp_path)
    run(*first, PROMPT)
    first[1].store.close()
    assert run(*process(tmp_path, identity=identity), PROMPT, salt)[0] == 0


def test_generated_tokens_are_not_kept_until_a_prompt_has_them(tmp_path):
    pool, manager = process(tmp_path)
    manager.admit(0, PROMPT)
    manager.reserve(0, 30)
    manager.commit(0, 30, PROMPT + list(range(12)))
    manager.store.close()
    assert len(files(tmp_path)) == 4
    run(pool, manager, PROMPT + list(range(12)) + [1] * 6, sequence=1)
    manager.store.close()
    assert len(files(tmp_path)) == 9


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "swapped"])
def test_a_damaged_file_is_removed_and_not_read(tmp_path, damage):
    first = process(tmp_path)
    _, content = run(*first, PROMPT)
    first[1].store.close()
    keys = []
    first[1].store.extend(keys, PROMPT, "", B)
    path, other = (first[1].store._path(keys[index]) for index in (1, 2))
    data = bytearray(path.read_bytes())
    data[-1] ^= damage == "flipped"
    path.write_bytes({"short": data[:-1], "empty": b"", "swapped": other.read_bytes()}.get(damage, data))
    second = process(tmp_path)
    assert run(*second, PROMPT) == (4, content)
    second[1].store.close()
    assert run(*process(tmp_path), PROMPT)[0] == 16  # written again


def test_the_bound_holds_and_the_least_recently_used_go(tmp_path):
    size = 32 + 8
    pool, manager = process(tmp_path, most=5 * size)
    run(pool, manager, [1] * 4 + [2])
    manager.store.close()
    for index in range(3):
        time.sleep(0.01)
        run(*process(tmp_path, most=5 * size), [1] * 4 + [9])  # used again
        pool, manager = process(tmp_path, most=5 * size)
        run(pool, manager, [10 + index] * 8 + [2])
        manager.store.close()
        assert len(files(tmp_path)) * size <= 5 * size
    assert run(*process(tmp_path), [1] * 4 + [3])[0] == 4
    assert run(*process(tmp_path), [10] * 8 + [3])[0] == 0


def test_a_pool_without_free_blocks_restores_what_fits(tmp_path):
    first = process(tmp_path)
    run(*first, PROMPT)
    first[1].store.close()
    pool, manager = process(tmp_path, blocks=5)
    assert manager.admit(1, [5] * 5) == 0 and manager.reserve(1, 5)
    assert manager.admit(0, PROMPT) is None  # five blocks are needed, three are free
    manager.check()
    manager.release(1)
    assert run(pool, manager, PROMPT)[0] == 16


def test_killed_while_writing(tmp_path):
    """After kill -9 every block that is read is right."""
    program = (
        "import sys, itertools\nfrom pathlib import Path\n"
        "from tests.runtime.kv.test_prefix_store import process, run\n"
        "pool, manager = process(Path(sys.argv[1]), blocks=64, most=10**9)\n"
        "for n in itertools.count():\n"
        "    run(pool, manager, [n % 200] * 40 + [1])\n"
        "    n or print('writes', flush=True)\n"
    )
    paths = os.pathsep.join(sys.path)
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    child.stdout.readline()
    end = time.monotonic() + 60
    while not any(file.is_file() and file.suffix != ".partial" for file in tmp_path.glob("*/*")):
        assert time.monotonic() < end, "nothing is written"
        time.sleep(0.002)
    time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    restored = 0
    pool, manager = process(tmp_path, blocks=64)
    for n in range(200):
        cached, content = run(pool, manager, [n] * 40 + [1])
        assert content == [bytes([n] * B) * 2] * 10
        restored += cached
    assert restored > 0


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    for name, age in (("old", 7200), ("new", 0)):
        path = tmp_path / "ab" / f".{name}.partial"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age,) * 2)
    tmp_path.chmod(0o700)
    Pool().store(tmp_path)
    assert [path.name for path in (tmp_path / "ab").iterdir()] == [".new.partial"]


def test_a_disk_that_fails_costs_no_request(tmp_path, caplog):
    pool, manager = process(tmp_path / "store")
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("a file")
    run(pool, manager, PROMPT)
    manager.store.close()
    assert run(pool, manager, PROMPT)[0] == 16
    assert len([record for record in caplog.records if "writes no more" in record.message]) == 1


def test_a_folder_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(SettingsError, match="no other user may write"):
        Pool().store(tmp_path)


def test_settings():
    assert store_setting("/a/b") == (store_setting("/a/b:10GB")[0], 10**10)
    assert store_setting("/a:2MiB")[1] == 2**21
    for text in ("/a:", ":5GB", "/a:0GB", "/a:x"):
        with pytest.raises(SettingsError):
            store_setting(text)


def files(folder):
    return [path for path in folder.glob("??/*") if not path.name.startswith(".")]
