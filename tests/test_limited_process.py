"""A child process answers, refuses, is ended, and is started again."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attar.limited_process import CostError, LimitedProcess, RequestError

NAME = "tests.test_limited_process:work"


def work(asked):
    """In the child."""
    if asked == "time":
        sum(range(10**12))
    elif asked == "inside":
        return 3**10**9  # one instruction
    elif asked == "memory":
        return len(b"x" * (1 << 40))
    elif asked == "end":
        os._exit(3)
    elif asked == "print":
        print("no answer", flush=True)
    elif asked == "error":
        raise KeyError("what is wrong")
    return [asked, os.getpid()]


@pytest.fixture()
def limited(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # the child imports this file
    return LimitedProcess(NAME, 0.3, 1 << 30)


@pytest.mark.few(1)
@pytest.mark.parametrize("costly", ["time", "inside", "memory", "end"])
def test_what_costs_too_much_is_ended_and_the_next_is_answered(limited, costly):
    first = limited("a")
    with pytest.raises(CostError, match=r"0.3 s or 1,024 MiB"):
        limited(costly)
    second = limited("b")
    assert (first[0], second[0]) == ("a", "b") and (first[1] == second[1]) == (costly == "memory")


def test_an_error_is_named_and_what_is_printed_is_no_answer(limited):
    with pytest.raises(RequestError, match="what is wrong") as caught:
        limited("error")
    assert caught.value.kind == "KeyError" and limited("print")[0] == "print"
    assert limited({"ä\n": [1.5, None]})[0] == {"ä\n": [1.5, None]}


def test_threads_get_their_own_answers_from_one_process(limited):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(limited, range(200)))
    assert [number for number, _ in answers] == list(range(200)) and len({pid for _, pid in answers}) == 1


@pytest.mark.slow
def test_a_child_that_was_killed_is_started_again_and_ends_with_its_owner(limited):
    _, pid = limited("a")
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 30
    while limited._child.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    _, pid = limited(json.dumps("a"))
    child = limited._child
    del limited._child
    limited.__dict__.clear()
    child.stdin.close()
    assert child.wait(30) == 0
