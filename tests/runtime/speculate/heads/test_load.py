"""A head meets a model that it was not trained for."""

import json

import pytest

from attar.checkpoint.card import Card, Parent
from attar.checkpoint.open import open_checkpoint
from attar.errors import ModelError
from attar.models.draft_heads.folder import save_draft_head
from attar.models.draft_heads.medusa_module import MedusaConfig, MedusaHeads
from attar.runtime.loading import load
from attar.runtime.speculate.heads.load import load_head_proposer, trained_for
from tests import tiny_models


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("models") / "model")


def head(folder, *, hidden=64, vocabulary=320, parent=""):
    folder.mkdir()
    heads = MedusaHeads(MedusaConfig(hidden=hidden, vocabulary=vocabulary, layers=(3,), drafts=2))
    save_draft_head(heads, folder, target="target")
    if parent:
        record = Parent(role="weights", name="target", stage="original", fingerprint=parent)
        Card(name="head", stage="distill", parents=(record,)).write(folder)
    return open_checkpoint(folder)


def test_another_width_or_vocabulary_is_refused(model, tmp_path):
    target = load(model, kv_tokens=256)
    with pytest.raises(ModelError, match=r"reads 32 channels, .* has 64"):
        load_head_proposer(head(tmp_path / "narrow", hidden=32), target)
    with pytest.raises(ModelError, match=r"drafts for a vocabulary of 100, .* has 320"):
        load_head_proposer(head(tmp_path / "few", vocabulary=100), target)


def test_a_head_of_a_model_of_the_same_shape_is_loaded_with_a_warning(model, tmp_path, caplog):
    target = load(model, kv_tokens=256)
    load_head_proposer(head(tmp_path / "own", parent=open_checkpoint(model).fingerprint()), target, model)
    assert not caplog.records
    load_head_proposer(head(tmp_path / "other", parent="0" * 64), target, model)
    assert "other was trained for another model than" in caplog.records[-1].getMessage()


def test_a_quantized_copy_of_the_model_is_the_model(model, tmp_path):
    trained = head(tmp_path / "head", parent="ab")
    assert trained_for(head(tmp_path / "bare"), open_checkpoint(model))
    assert not trained_for(trained, open_checkpoint(model))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    original = Parent(role="weights", name="target", stage="original", fingerprint="ab")
    dense = Parent(role="weights", name="dense", stage="recover", parents=(original,))
    Card(name="copy", stage="quantize", parents=(dense,)).write(copy)
    assert json.loads((copy / "attar.json").read_text())["stage"] == "quantize"
    assert trained_for(trained, open_checkpoint(copy))
