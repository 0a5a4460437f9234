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
