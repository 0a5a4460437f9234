"""Steps side by side: the same bytes, the bound on memory, errors, torch's threads."""

import threading

import pytest
import torch

from attar.checkpoint.shards import tensor_spec
from attar.walks.stream import WriteStep, stream_steps


def steps(count=12, watch=None, nbytes=4):
    def make(number):
        if watch:
            watch(number)
        return {f"t{number}": torch.full((16,), float(number))}

    return [
        WriteStep([tensor_spec(f"t{number}", torch.empty(16))], lambda number=number: make(number), nbytes)
        for number in range(count)
    ]


@pytest.mark.parametrize("together", [0, 4, 8, 1000])
def test_the_bytes_do_not_depend_on_what_is_done_side_by_side(tmp_path, together):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = stream_steps(steps(), tmp_path / "a", shard_bytes=200)
    neighbour = stream_steps(steps(), tmp_path / "b", shard_bytes=200, together=together)
    assert len(plain) == len(neighbour) > 2
    assert [file.read_bytes() for file in plain] == [file.read_bytes() for file in neighbour]


def test_no_more_is_read_than_allowed(tmp_path):
    """With room for two, never three at once; a step larger than the room is alone."""
    lock, inside, seen = threading.Lock(), [0], []
    gate = threading.Barrier(2, timeout=5)

    def watch(number):
        with lock:
            inside[0] += 1
            seen.append(inside[0])
        if number < 2:
            gate.wait()  # both are at work: side by side is real
        with lock:
            inside[0] -= 1

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        stream_steps(steps(8, watch), tmp_path, together=8)
        assert max(seen) == 2
        seen.clear()
        stream_steps(steps(4, lambda n: watch(n + 2), nbytes=9), tmp_path, together=8)
        assert max(seen) == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_an_error_in_one_step_ends_the_walk(tmp_path):
    def watch(number):
        if number == 5:
            raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        stream_steps(steps(12, watch), tmp_path, together=8)
    assert not list(tmp_path.glob("model*.safetensors"))
