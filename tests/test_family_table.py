"""docs/families.md: every cell is what the verb does with a tiny model of the family, or the words with which
it refuses."""

import pytest

from tests import tiny_models
from tests.family_table import DOCUMENT, ROWS, VERBS, Tiny, cell, parse, render
from tests.marks import slow_but

WRITTEN = parse(DOCUMENT.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(ROWS.values(), "granitemoe"))
def test_every_cell_is_what_happens(family, tmp_path):
    tiny = Tiny(family, tmp_path)
    assert {verb: cell(verb, tiny) for verb in VERBS} == WRITTEN[family]


def test_the_page_has_every_family_and_every_verb():
    assert list(WRITTEN) == list(ROWS.values())
    assert all(set(row) == set(VERBS) and all(row.values()) for row in WRITTEN.values())
    assert render(WRITTEN) == DOCUMENT.read_text(encoding="utf-8")
    built = [*tiny_models.FAMILIES, *tiny_models.MIXTURES, *tiny_models.HYBRIDS, *tiny_models.VISION]
    assert set(built) - set(ROWS.values()) == {"smollm"}  # a Llama


@pytest.mark.slow
def test_a_cell_can_be_wrong(tmp_path, monkeypatch):
    """A verb that computes something else is no yes."""
    tiny = Tiny("llama3", tmp_path)
    assert cell("run: modules", tiny) == "yes"
    monkeypatch.setattr(tiny, "greedy", [5] * 8)
    with pytest.raises(AssertionError):
        cell("run: modules", tiny)
    monkeypatch.setattr(tiny, "wanted", tiny.wanted.flip(-1))
    with pytest.raises(AssertionError):
        cell("quantize", tiny)
