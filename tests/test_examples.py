"""Every script of examples/ runs to its end on a tiny model, and prints what it says that it prints."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests import tiny_models

EXAMPLES = Path(__file__).parent.parent / "examples"
FEW = ("--samples", "4")
SHORT = ("--steps", "2", "--length", "32")
CASES = {
    "gguf_for_ollama": (("attar:tiny", "{out}", "--type", "Q8_0", *FEW), r"MB, KL to the original 0\.\d+"),
    "compare_bits": (
        ("attar:tiny", "{out}", "--schemes", "W8A16", *FEW),
        r"W8A16 +\d+\.\d +0\.\d+ +\d+\.\d%",
    ),
    "own_data": (("attar:tiny", "{out}", "{texts}", *FEW), r"KL to the original 0\.\d+ .* on \d+ tokens"),
    "half_the_layers": (("attar:tiny", "{out}", *SHORT), r"\d layers, \d\.\d M parameters, \d+\.\d % kept"),
    "prune_and_recover": (("attar:tiny", "{out}", *SHORT, *FEW), r"recovered +\d.* MB, KL \d"),
    "merge_two": (("{base}", "{first}", "{second}", "{out}"), r"llama"),
    "draft_and_verify": (("attar:tiny", "--tokens", "24"), r"suffix trees: \d.*\nthe same text"),
    "ask_a_server": (("attar:tiny", "{out}", *FEW), r"def add\(a, b\):."),
}
FAST = ("merge_two", "draft_and_verify")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A model and two that were made of it."""
    folder, model = tmp_path_factory.mktemp("examples"), tiny_models.build("llama3")
    places = {"base": tiny_models.save(model, folder / "base")}
    for name in ("first", "second"):
        model.model.norm.weight.data *= 1.01
        places[name] = tiny_models.save(model, folder / name)
    return places


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_it_runs_to_its_end(name, family, tmp_path, monkeypatch, capsys):
    words, printed = CASES[name]
    texts = tmp_path / "texts.txt"
    texts.write_text(
        "".join(f"The {i}th line is about {i * i} apples and some pears.\n" * 3 for i in range(900))
    )
    places = {"out": tmp_path / "out", "texts": texts, **family}
    monkeypatch.setattr(sys, "argv", [name, *(word.format(**places) for word in words)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert re.search(printed, capsys.readouterr().out)


def test_the_list_has_all_of_them():
    listed = re.findall(r"\[(\w+)\.py\]", (EXAMPLES / "README.md").read_text())
    assert listed == list(CASES) and set(listed) == {path.stem for path in EXAMPLES.glob("*.py")}
