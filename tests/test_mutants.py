"""The table of breaks: every row can be run, and its runner sees a killed break and a survivor."""

import pytest

from tests import mutants
from tests.mutants import MUTANTS, Mutant, run, stale, survives


def test_every_row_can_be_run():
    assert [why for why in map(stale, MUTANTS) if why] == []
    assert len({(one.file, one.old, one.new) for one in MUTANTS}) == len(MUTANTS) >= 80


@pytest.fixture
def tree(tmp_path):
    """A tree of one function and its test."""
    for folder in ("src/attar", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/attar/__init__.py").touch()
    (tmp_path / "src/attar/sums.py").write_text("def double(x):\n    return 2 * x\n")
    test = "from attar.sums import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
    (tmp_path / "tests/test_sums.py").write_text(test)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("new", "survived"), [("3 * x", False), ("x + 2", True)])
def test_a_break_is_tried_and_taken_back(tree, new, survived):
    assert survives(Mutant("sums.py", "2 * x", new, "test_sums.py::test_double"), tree) == survived
    assert "return 2 * x" in (tree / "src/attar/sums.py").read_text()


@pytest.mark.slow
def test_a_break_that_no_longer_compiles_is_no_break(tree):
    with pytest.raises(SystemExit, match="did not run"):
        survives(Mutant("sums.py", "2 * x", "2 *", "test_sums.py::test_double"), tree)


@pytest.mark.parametrize(
    ("mutant", "why"),
    [
        (Mutant("sums.py", "2 * x", "3 * x", "test_sums.py"), ""),
        (Mutant("sums.py", "x", "y", "test_sums.py"), "2 times"),
        (Mutant("sums.py", "absent", "y", "test_sums.py"), "0 times"),
        (Mutant("none.py", "x", "y", "test_sums.py"), "no file"),
        (Mutant("sums.py", "2 * x", "2 * x", "test_sums.py"), "nothing changes"),
        (Mutant("sums.py", "2 * x", "3 * x", "test_sums.py::test_half"), "no test"),
        (Mutant("sums.py", "2 * x", "3 * x", "test_none.py"), "no test"),
    ],
)
def test_rows_that_do_not_fit_the_tree_are_stale(tree, mutant, why):
    assert why in stale(mutant, tree) and bool(why) == bool(stale(mutant, tree))


@pytest.mark.slow
def test_survivors_stale_rows_and_those_not_reached_count(tree, monkeypatch, capsys):
    monkeypatch.setattr(mutants, "ROOT", tree)
    kill, survive = (Mutant("sums.py", "2 * x", new, "test_sums.py") for new in ("3 * x", "x + 2"))
    assert run([kill, survive, Mutant("sums.py", "no", "y", "test_sums.py")], 2, 5.0) == 2
    said = capsys.readouterr().out.splitlines()
    assert [line.partition("] ")[2].partition(":")[0] for line in said[:3]] == ["killed", "survives", "stale"]
    assert run([kill], 1, 0.0) == 1 and "not reached" in capsys.readouterr().out
