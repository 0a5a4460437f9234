"""Signals in a loop of steps, and the state that a file holds."""

import os
import signal
import threading

import pytest
import torch

from attar import interruption
from attar.interruption import Interruption, StateFile, StoppedError, interruptible


def steps(state, count, stop_at=0):
    """A training of ``count`` steps: the sum of their numbers; a signal comes in step ``stop_at``."""
    stored = state.load() or {"step": 0, "sum": torch.zeros(())}
    total = stored["sum"]
    for number in range(stored["step"] + 1, count + 1):
        total = total + number
        if number == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        state.step(lambda number=number, total=total: {"step": number, "sum": total})
    state.remove()
    return float(total), count - stored["step"]


def test_a_stopped_training_goes_on_from_its_step(tmp_path):
    with interruptible() as stop, pytest.raises(StoppedError):
        steps(StateFile(tmp_path / "s.pt", stop), 9, stop_at=4)
    with interruptible() as stop:
        assert steps(StateFile(tmp_path / "s.pt", stop), 9) == (45.0, 5)
    assert list(tmp_path.iterdir()) == []


def test_states_are_written_by_time(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        torch, "save", lambda state, path: (written.append(state["step"]), path.write_bytes(b""))[0]
    )
    monkeypatch.setattr(interruption, "SAVE_S", 0.0)
    steps(StateFile(tmp_path / "s.pt", Interruption()), 3)
    assert written == [1, 2, 3]
    monkeypatch.setattr(interruption, "SAVE_S", 1e9)
    steps(StateFile(tmp_path / "s.pt", Interruption()), 3)
    assert written == [1, 2, 3]


def test_handlers_are_given_back_and_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_thread_gets_no_signals():
    seen = []

    def work():
        with interruptible() as stop:
            seen.append(stop.due())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
