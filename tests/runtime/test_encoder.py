"""Encoders: embeddings and scores are those of transformers, whatever is in a batch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from attar.errors import ModelError, SettingsError
from attar.runtime.encoder import Encoder, is_encoder
from tests import tiny_models

ROWS = [[5, 6, 7, 8, 9], [10], [11, 12], list(range(20, 80))]


@pytest.fixture(scope="module", params=["bert", "roberta"])
def folder(request, tmp_path_factory):
    return tiny_models.save(tiny_models.build(request.param), tmp_path_factory.mktemp(request.param))


@torch.no_grad()
def states(folder, row):
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder)(torch.tensor([row])).last_hidden_state[0].numpy()


@pytest.mark.few(2)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_are_pooled_states(folder, pooling):
    encoder = Encoder(folder, pooling=pooling)
    for row, actual in zip(ROWS, encoder.embed(ROWS), strict=True):
        wanted = states(folder, row)
        wanted = wanted.mean(0) if pooling == "mean" else wanted[0]
        assert np.allclose(actual, wanted, atol=1e-4), len(row)
    assert encoder.dimensions == 64 and not encoder.scores


def test_what_the_folder_says(tmp_path):
    folder = tiny_models.save(tiny_models.build("bert"), tmp_path / "bert")
    assert (Encoder(folder).pooling, Encoder(folder).context) == ("mean", 128)
    (folder / "1_Pooling").mkdir()
    file = folder / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"word_embedding_dimension": 64, "pooling_mode_cls_token": True}))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    assert (Encoder(folder).pooling, Encoder(folder).context) == ("cls", 77)
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ModelError, match="pooling_mode_max_tokens"):
        Encoder(folder)
    with pytest.raises(SettingsError, match="pooling"):
        Encoder(folder, pooling="last")


def reranker(folder, labels=1):
    from transformers import BertForSequenceClassification

    config = tiny_models.config("bert", num_labels=labels)
    config.architectures = ["BertForSequenceClassification"]
    model = tiny_models.randomize(BertForSequenceClassification(config), seed=3).eval()
    return tiny_models.save(model, folder), model


def test_scores_are_sigmoids_of_the_logit(tmp_path):
    folder, model = reranker(tmp_path / "reranker")
    encoder = Encoder(folder)
    assert encoder.scores
    rows, segments = [[5, 6, 7, 8], [5, 9]], [[0, 0, 1, 1], [0, 1]]
    for row, types, actual in zip(rows, segments, encoder.score(rows, segments), strict=True):
        with torch.no_grad():
            logit = model(torch.tensor([row]), token_type_ids=torch.tensor([types])).logits
        assert actual.shape == (1,) and np.allclose(actual, torch.sigmoid(logit[0]).numpy(), atol=1e-5)
    with pytest.raises(ModelError, match="2 labels"):
        Encoder(reranker(tmp_path / "classifier", labels=2)[0])


def test_which_models_are_encoders():
    for name in ("BertModel", "RobertaForMaskedLM", "BertForSequenceClassification"):
        assert is_encoder({"architectures": [name]})
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        assert not is_encoder({"architectures": [name]})
    assert not is_encoder({})
