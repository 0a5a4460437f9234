"""Progress of verbs called from Python: who sees a bar, and in which form."""

import sys
import types

import pytest

from attar.progress import SILENT, Terminal, shown


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)


@pytest.fixture
def notebook(monkeypatch):
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))


def test_who_sees_a_bar(monkeypatch, request):
    given = Terminal()
    assert shown(None) is SILENT and shown(False) is SILENT and shown(given) is given
    assert isinstance(shown(True), Terminal)
    request.getfixturevalue("terminal")
    assert isinstance(shown(None), Terminal) and shown(False) is SILENT


def test_a_notebook_shows_tqdm_with_the_latest_numbers(notebook, capsys):
    progress = shown(None)
    with progress.task("recover", total=4, done=1) as task:
        task.advance(loss=0.25)
        task.advance(2, loss=0.125)
    written = capsys.readouterr().err
    assert "recover" in written and "4/4" in written and "loss 0.125" in written


def test_an_interactive_python_without_a_notebook_is_no_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert shown(None) is SILENT


def test_the_time_left_has_the_form_of_a_plan(monkeypatch, capsys):
    now = iter([0.0, 16.0, 32.0, 754.0])
    monkeypatch.setattr("attar.progress.time.monotonic", lambda: next(now))
    with Terminal().task("recover", total=36) as task:
        task.advance(loss=0.25)
        task.advance(35, loss=0.125)
    assert capsys.readouterr().err.splitlines() == [
        "recover: 1/36  about 9 min 20 s left  loss 0.25",
        "recover: 36/36  loss 0.125",
        "recover: done in 13 min  loss 0.125",
    ]


def test_a_bar_has_the_same_form(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # here: capsys has put its own file in place
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("rich.progress.Task.time_remaining", 814.0)
    with Terminal().task("recover", total=4) as task:
        task.advance(loss=0.25)
    assert "about 14 min left" in capsys.readouterr().err
