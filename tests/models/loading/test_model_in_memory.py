"""A transformers model in memory goes where a path goes."""

import pytest
import torch
from transformers import AutoTokenizer

import attar
from attar.errors import UsageError
from attar.models.loading.in_memory import checkpoint_of
from tests import tiny_models


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_weights_config_and_tokenizer_are_those_in_memory(tmp_path):
    model = tiny_models.build("smollm")
    tokenizer = AutoTokenizer.from_pretrained(attar.open_checkpoint("attar:tiny").path)
    model.name_or_path = "org/some-model"
    checkpoint = checkpoint_of((model, tokenizer))
    assert checkpoint.name == "some-model" and (checkpoint.path / "tokenizer.json").is_file()
    stored = {name: checkpoint.load(name) for name in checkpoint.tensors}
    for name, tensor in model.state_dict().items():
        assert name not in stored or torch.equal(stored[name], tensor)
    assert checkpoint_of(model).fingerprint() == checkpoint_of(model).fingerprint()


def test_a_verb_takes_it_and_leaves_it_as_it_is(tmp_path):
    model = tiny_models.build("smollm")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = attar.quantize(model, tmp_path / "w8", scheme="W8A16", method="rtn", group_size=0, check_tokens=0)
    assert small.nbytes < sum(tensor.nbytes for tensor in before.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("model", [3, object(), (1, 2, 3)])
def test_what_is_no_model_is_refused_with_what_is_one(model, tmp_path):
    with pytest.raises(UsageError, match=r"the model is") as refusal:
        attar.quantize(model, tmp_path / "out")
    assert "transformers model" in str(refusal.value.hint)
