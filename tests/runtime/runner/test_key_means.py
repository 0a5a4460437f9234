"""The shift of int4 keys: the mean keys of transformers, of fixed tokens that fit the model."""

import copy

import pytest
import torch

from attar.runtime.runner.key_means import FIRST, POSITIONS, calibration_step
from attar.runtime.runner.modules import Modules
from tests import tiny_models


def test_the_mean_keys_of_fixed_tokens():
    plain = tiny_models.build("llama3", max_position_embeddings=900)
    runner = Modules(copy.deepcopy(plain), blocks=4, kv_dtype="int4")
    step = calibration_step(runner.vocabulary, 900, 16)
    rows = torch.tensor(step.tokens[FIRST:]).view(8, 32)
    positions = torch.stack([torch.arange(span.start, span.stop) for span in step.spans[FIRST:]])
    with torch.no_grad():
        cache = plain(input_ids=rows, position_ids=positions, use_cache=True).past_key_values
        alone = plain(torch.tensor(step.tokens[:FIRST])[:, None], use_cache=True).past_key_values
    want = [layer.keys[:, :, 1:].mean((0, 2)) for layer in cache.layers]
    want += [layer.keys.mean((0, 2)) for layer in alone.layers]
    torch.testing.assert_close(
        runner.pool.store.basis.centers.flatten(0, 1), torch.stack(want), rtol=0, atol=1e-5
    )
    assert runner.capacity == 4 and not runner.pool.store.codes.any()


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_windows_and_learned_positions(family):
    assert (
        Modules(tiny_models.build(family), blocks=4, kv_dtype="int4").pool.store.basis.centers.abs().max() > 0
    )


def test_a_model_whose_keys_are_not_finite_has_no_shift():
    plain = tiny_models.build("llama3")
    with torch.no_grad():
        plain.model.layers[0].self_attn.k_proj.weight[3] = float("inf")
    assert torch.isfinite(Modules(plain, blocks=4, kv_dtype="int4").pool.store.basis.centers).all()


@pytest.mark.parametrize("context", [1, 3, 255, 256, 700, 100_000, None])
@pytest.mark.parametrize("windowed", [False, True])
def test_the_tokens_fit_the_context(context, windowed):
    step = calibration_step(5, context, 16, windowed=windowed)
    blocks = step.spans[-1].blocks[-1] + 1
    step.check(16, blocks)
    assert step.spans[-1].stop <= min(context or POSITIONS, POSITIONS) and step.wants == 0
    assert step.spans[-1].start == (0 if windowed or (context or 300) < 256 else step.spans[-1].stop - 32)
