"""``attar list``: results by their cards, whatever else lies there."""

import json

import pytest

from attar.checkpoint.card import Card, Parent
from attar.cli.main import call


@pytest.fixture
def results(tmp_path):
    root = Parent(role="weights", name="org/base", stage="original")
    pruned = Parent(role="weights", name="pruned", stage="prune", parents=(root,))
    teacher = Parent(role="signal", name="org/teacher", stage="original")
    quantized = Card(name="w4", stage="quantize", parents=(pruned, teacher))
    for name, card in {
        "runs/01-prune": Card(name="pruned", stage="prune", parents=(root,)),
        "runs/02-w4": quantized.with_measurements(kl_mean=0.125),
        ".hidden/03": Card(name="x", stage="prune"),
        "a/b/c/d/e/f": Card(name="deep", stage="prune"),
    }.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        card.write(folder)
        (folder / "model.safetensors").write_bytes(b"0" * 1500)
    (tmp_path / "single.attar.json").write_text(json.dumps(Card(name="s", stage="export").to_dict()))
    (tmp_path / "single.gguf").write_bytes(b"0" * 700)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "attar.json").write_text("{")
    return tmp_path


def test_results_with_base_size_and_loss(results, capsys):
    assert call(["list", str(results), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [(row["result"], row["stage"], row["made_of"], row["bytes"], row["kl_mean"]) for row in rows] == [
        ("runs/01-prune", "prune", ["org/base"], 1500, None),
        ("runs/02-w4", "quantize", ["org/base"], 1500, 0.125),
        ("single.gguf", "export", [], 700, None),
    ]
    assert call(["list", str(results)]) == 0
    assert "runs/02-w4     quantize  org/base  1.50 kB     0.125" in capsys.readouterr().out


def test_a_folder_without_results_and_one_that_is_missing(tmp_path, capsys):
    assert call(["list", str(tmp_path)]) == 0
    assert "no results" in capsys.readouterr().out
    assert call(["list", str(tmp_path / "none")]) == 2
