"""The gate lets every family pass as transformers saves it; what is odd: tests/test_odd_models.py."""

import json

import pytest
from safetensors.torch import load_file, save_file

from attar.errors import CheckpointError
from attar.models.loading.fit import admit
from attar.models.loading.load import load_model
from tests import tiny_models

FAMILIES = tiny_models.FAMILIES | tiny_models.MIXTURES | tiny_models.HYBRIDS | tiny_models.VISION


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_models_of_every_family_pass(family, tmp_path):
    model = tiny_models.build(family)
    model.save_pretrained(tmp_path)
    checkpoint = admit(tmp_path)
    assert checkpoint.notes == [] and checkpoint.as_stored and checkpoint.fits


@pytest.mark.few(1)
@pytest.mark.parametrize("stored", [False, True])
def test_a_tie_inside_text_config_is_that_of_the_model(stored, tmp_path):
    """Older configs of vision models have the flag there alone; a stored head of its own goes before it."""
    model = tiny_models.build("qwen3_vl", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    tensors, file = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    head = tensors.pop("lm_head.weight")
    save_file(tensors | ({"lm_head.weight": head} if stored else {}), tmp_path / "model.safetensors")
    config = json.loads(file.read_text())
    config["text_config"]["tie_word_embeddings"] = True
    file.write_text(json.dumps({key: value for key, value in config.items() if key != "tie_word_embeddings"}))
    checkpoint = admit(tmp_path)
    assert checkpoint.config["tie_word_embeddings"] is not stored
    loaded = load_model(checkpoint)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) is not stored


@pytest.mark.parametrize(("content", "words"), [("{no", "not JSON"), ("[1, 2]", "not a JSON object")])
def test_a_generation_config_that_is_none_is_refused_before_any_work(tmp_path, content, words):
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path / "model")
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"generation_config.json.*{words}"):
        admit(folder)
