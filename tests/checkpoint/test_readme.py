"""README.md of checkpoints: what people and the hub read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import yaml

from attar.checkpoint import open_checkpoint, produce
from attar.checkpoint.atomic import write_json
from attar.checkpoint.card import Card, Parent
from attar.checkpoint.hashing import sha256_file
from attar.checkpoint.readme import FILE, render_readme, with_new_readme, write_readme
from attar.pruning.settings import prune_settings
from attar.pruning.stage import prune
from tests import tiny_models

APACHE = {"id": "apache-2.0", "title": "Apache License 2.0", "role": "weights", "model": "org/base@abc"}
ROOT = Parent(role="weights", name="org/base@abc", stage="original")
TEACHER = Parent(role="signal", name="/home/me/models/big", stage="original")
CARD = Card(
    name="small",
    stage="quantize",
    settings={"scheme": "W4A16", "method": "gptq", "ratio": None},
    parents=(Parent(role="weights", name="cut", stage="prune", parents=(ROOT,)), TEACHER),
    versions={"attar": "1", "torch": "2"},
    measurements={"kl_mean": 0.0123456, "tokens": 2048, "tasks": {"arc": 0.5}, "sample": "text"},
    details={"loads_in": {"transformers": "yes", "vllm": "no: why"}},
    licence={"sources": [APACHE], "duties": ["Hand on the text."], "display": ["Built with X"]},
    command="attar quantize /home/me/cut -o small --teacher '/home/me/models/big'",
)


def front(text):
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_an_encoder_is_loaded_by_its_own_class(tmp_path):
    for architecture, loader, task in [
        ("BertForSequenceClassification", "AutoModelForSequenceClassification", "text-classification"),
        ("BertForMaskedLM", "AutoModelForMaskedLM", "fill-mask"),
        ("LlamaForCausalLM", "AutoModelForCausalLM", "text-generation"),
    ]:
        write_json(tmp_path / "config.json", {"architectures": [architecture]})
        head, body = front(render_readme(CARD, tmp_path))
        assert head["pipeline_tag"] == task and f"{loader}.from_pretrained" in body
        assert ("attar generate" in body) == (task == "text-generation")


def test_the_front_is_what_the_hub_reads(tmp_path):
    write_json(tmp_path / "config.json", {"quantization_config": {"quant_method": "compressed-tensors"}})
    head, body = front(render_readme(CARD, tmp_path))
    (model,) = head.pop("model-index")
    (result,) = model["results"]
    assert model["name"] == "small" and 0.0123456 in [metric["value"] for metric in result["metrics"]]
    assert head == {
        "base_model": ["org/base"],
        "base_model_relation": "quantized",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["attar", "quantize", "compressed-tensors"],
    }
    for line in (
        "Made from `cut` with attar's `quantize`, learning from `big`.",
        "| KL divergence to the original, nats a token | 0.01235 |",
        "| tokens that this was measured on | 2,048 |",
        "| tasks.arc | 0.5 |",
        "pip install compressed-tensors",
        "vLLM: no: why.",
        "- Hand on the text.",
        "- Built with X",
        "  - `org/base`, original",
        "- `big`, original, a teacher",
        "attar quantize cut -o small --teacher big",
    ):
        assert line in body, line
    assert "/home" not in body


def test_the_hub_sees_no_folder_of_the_text(tmp_path):
    card = replace(CARD, measurements={**CARD.measurements, "data": "whole:/home/me/test.txt"})
    head, _ = front(render_readme(card, tmp_path))
    assert head["model-index"][0]["results"][0]["dataset"]["name"] == "test.txt"


def test_licences_that_the_hub_does_not_know_are_other(tmp_path):
    mixed = {"sources": [APACHE, {**APACHE, "id": "llama2", "title": "Llama 2"}], "duties": []}
    head, _ = front(render_readme(Card(name="a", stage="merge", parents=(ROOT,), licence=mixed), tmp_path))
    assert (head["license"], head["license_name"]) == ("other", "apache-2.0-llama2")
    assert head["base_model_relation"] == "merge"


def test_every_stage_writes_it_among_its_hashed_files(tmp_path):
    model = tiny_models.save(tiny_models.build("llama3", num_hidden_layers=1), tmp_path / "model")
    data = str(Path(json.__file__).parent)
    settings = prune_settings(ratio=0.25, method="neurons", samples=1, sequence_length=32, data=data)
    items = [prune(model, tmp_path / name / "cut", settings) for name in "ab"]
    cards = [item.card for item in items]
    for name, card in zip("ab", cards, strict=True):
        assert card.files[FILE] == sha256_file(tmp_path / name / "cut" / FILE)
    assert cards[0].files[FILE] == cards[1].files[FILE]
    text = (tmp_path / "a" / "cut" / FILE).read_text()
    assert str(tmp_path) not in text and ".partial" not in text
    assert "# cut" in text and "| ratio | `0.25` |" in text


def test_it_follows_measurements_unless_somebody_edited_it(tmp_path):
    write_readme(CARD, tmp_path)
    card = Card(**{**vars(CARD), "files": {FILE: sha256_file(tmp_path / FILE)}})
    file, more = tmp_path / FILE, card.with_measurements(perplexity=12.5)
    measured = with_new_readme(more, file)
    assert file.read_text() == render_readme(more, tmp_path) and "| perplexity | 12.5 |" in file.read_text()
    assert measured.files[FILE] == sha256_file(file)
    assert with_new_readme(more, file) == measured  # after a kill
    file.write_text("mine")
    assert with_new_readme(measured.with_measurements(perplexity=1.0), file).files == measured.files
    assert file.read_text() == "mine"


def test_an_output_of_an_old_attar_without_it_stays_as_it_is(tmp_path):
    with produce(tmp_path / "out", "prune", {}, 1, [open_checkpoint("attar:tiny")]) as output:
        write_json(output.folder / "config.json", {})
    (tmp_path / "out" / FILE).unlink()
    card = Card.read(tmp_path / "out")
    assert with_new_readme(card, tmp_path / "out" / FILE) is card
    assert not (tmp_path / "out" / FILE).exists()
    assert FILE in json.loads((tmp_path / "out" / "attar.json").read_text())["files"]
