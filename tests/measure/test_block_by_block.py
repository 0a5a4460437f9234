"""A model that runs block by block has the logits of the whole one, and evaluate chooses that for a model
larger than memory."""

import pytest
import torch

from attar import memory
from attar.checkpoint.open import open_checkpoint
from attar.data.packing import PADDING
from attar.errors import MemoryNeededError, ModelError, SettingsError
from attar.measure.evaluate import evaluate
from attar.measure.logits import next_token_logits
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject
from attar.models.loading.load import load_model
from attar.verbs import quantize
from attar.walks.block_by_block import BlockByBlock
from attar.walks.offloaded_model import OffloadedModel
from tests import tiny_models

WIDTH = tiny_models.VOCABULARY
TOKENS = torch.randint(5, 240, (3, 12), generator=torch.Generator().manual_seed(0))
QUICK = EvaluateSettings(tokens=512, sequence_length=128, sample="", speed=False)


def assert_same_logits(folder, tokens=TOKENS, width=WIDTH):
    whole, parts = load_model(folder, dtype=torch.float32), load_subject(folder, runner="blocks").model
    both = zip(next_token_logits(whole, tokens, width), next_token_logits(parts, tokens, width), strict=True)
    for (expected, labels), (logits, others) in both:
        assert torch.equal(labels, others)
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", tiny_models.DECODERS)
def test_logits_are_those_of_the_whole_model(tmp_path, family):
    assert_same_logits(tiny_models.save(tiny_models.build(family), tmp_path / "model"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(tmp_path, side):
    padded = TOKENS.clone()
    padded[1, slice(0, 5) if side == "left" else slice(7, None)] = PADDING
    padded[2] = PADDING
    assert_same_logits(tiny_models.save(tiny_models.build("llama2"), tmp_path / "model"), padded)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_packed_weights_and_rounded_activations(tmp_path, scheme):
    quantize("attar:tiny", tmp_path / "packed", method="rtn", scheme=scheme, check_tokens=0)
    assert_same_logits(tmp_path / "packed", TOKENS, 1024)


def test_one_block_is_in_memory_at_a_time(tmp_path, monkeypatch):
    folder = tiny_models.save(tiny_models.build("llama2"), tmp_path / "model")
    model = BlockByBlock(open_checkpoint(folder))
    loaded = []
    advance = OffloadedModel.advance

    def counted(self, index, store, calls, **options):
        advance(self, index, store, calls, **options)
        loaded.append(sum(not weight.is_meta for weight in self.model.parameters()))

    monkeypatch.setattr(OffloadedModel, "advance", counted)
    model(input_ids=TOKENS)
    assert loaded == [0, 0, 0]  # after each block, embeddings dropped too


@pytest.mark.slow
def test_a_model_larger_than_memory_is_measured_block_by_block(monkeypatch):
    expected = evaluate("attar:tiny", QUICK, reference="attar:tiny")
    monkeypatch.setattr(memory, "free_memory", lambda **_: 1_000_000)
    measured = evaluate("attar:tiny", QUICK, reference="attar:tiny")
    assert (expected.runner, measured.runner) == ("compiled", "blocks")
    assert measured.runner_note.startswith("attar:tiny needs 13.6 MB")
    assert measured.loss == pytest.approx(expected.loss, abs=0.01)
    assert measured.kl_mean == pytest.approx(0.0, abs=1e-6) and measured.tokens == expected.tokens


@pytest.mark.slow
def test_a_named_runner_is_kept_or_refused(monkeypatch):
    exact = evaluate("attar:tiny", EvaluateSettings(**{**vars(QUICK), "runner": "transformers"}))
    blocks = evaluate("attar:tiny", EvaluateSettings(**{**vars(QUICK), "runner": "blocks"}))
    assert blocks.loss == pytest.approx(exact.loss, abs=1e-5) and blocks.runner_note is None
    assert blocks.decode_tokens_per_s is None and blocks.sample is None
    monkeypatch.setattr(memory, "free_memory", lambda **_: 1_000_000)
    with pytest.raises(MemoryNeededError, match=r"needs 27.3 MB"):
        evaluate("attar:tiny", EvaluateSettings(**{**vars(QUICK), "runner": "transformers"}))


def test_what_cannot_be_combined_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="runner blocks"):
        EvaluateSettings(runner="blocks", kv_dtype="int8")
    model = tiny_models.build("bert")
    with pytest.raises(ModelError, match="does not predict next tokens"):
        BlockByBlock(open_checkpoint(tiny_models.save_encoder(model, tmp_path / "encoder")))
