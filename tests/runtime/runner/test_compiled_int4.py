"""Four-bit keys and values of the compiled step: the codes and the logits of the modules' store."""

import copy

import numpy as np
import pytest
import torch

from attar.kernels.kv_int4 import encode
from attar.runtime.kv.store.rotated import CacheBasis
from attar.runtime.runner.compiled import _key_centers, compiled
from attar.runtime.runner.modules import Modules
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_mixtures, tiny_models
from tests.compiler import needs_compiler

pytestmark = needs_compiler

LENGTH, BLOCKS = 40, (2, 0, 1)
# Soft caps, sinks, a window, heads that do not fill two vectors, a head that is longer than a part of a row.
MODELS = [
    ("gemma2", {}),
    ("gpt_oss", {}),
    ("mistral", {}),
    ("qwen3", {"head_dim": 48}),
    ("qwen3", {"head_dim": 256, "num_key_value_heads": 1}),
]


def built(family, **changes):
    """One layer: a code that rounds to its other neighbour changes no later code."""
    module = tiny_mixtures if family in tiny_mixtures.FAMILIES else tiny_models
    model = module.build(family, num_hidden_layers=1, layer_types=None, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def tokens(count=LENGTH):
    drawn = torch.Generator().manual_seed(3)
    return torch.randint(2, tiny_models.VOCABULARY, (count,), generator=drawn).tolist()


def runner(model, kv_dtype="int4", threads=2, basis=None):
    settings = {"blocks": 4, "threads": threads, "bits": 16, "basis": basis}
    return compiled(model.config, model.state_dict(), kv_dtype=kv_dtype, **settings)


def run(one, ids, *cuts):
    """Logits of all tokens, in chunks."""
    rows, start = [], 0
    for stop in cuts:
        rows.append(one.run(StepInput(ids[start:stop], (TokenSpan(0, start, stop, BLOCKS, stop - start),))))
        start = stop
    return torch.cat(rows)


@pytest.mark.parametrize(("family", "changes"), MODELS)
def test_logits_are_those_of_the_modules(family, changes):
    model, ids = built(family, **changes), tokens()
    plain = Modules(copy.deepcopy(model), blocks=4, kv_dtype="int4")
    centers = plain.pool.store.basis.centers
    drawn = torch.randn(centers.shape[1:], generator=torch.Generator().manual_seed(1))
    basis = CacheBasis(centers, (drawn / 4).exp())
    want = run(Modules(copy.deepcopy(model), blocks=4, kv_dtype="int4", basis=basis), ids, 33, 34, LENGTH)
    ours = runner(model, basis=basis)
    exact = run(Modules(copy.deepcopy(model), blocks=4), ids, LENGTH)
    between, error = run(ours, ids, 33, 34, LENGTH) - want, want - exact
    assert between.norm() < 0.15 * error.norm(), (between.norm(), error.norm())  # queries and weights of int8


def test_a_token_does_not_depend_on_threads_or_chunks():
    model, ids = tiny_models.build("llama3"), tokens()
    want = run(runner(model, threads=1), ids, LENGTH)
    assert torch.equal(run(runner(model, threads=3), ids, 7, 8, 39, LENGTH), want)


def test_codes_are_those_of_the_store():
    """The first layer's keys are the same numbers in every format of the cache."""
    model, ids = tiny_models.build("qwen3", head_dim=48), tokens()
    exact, ours = runner(model, "float32"), runner(model)
    run(exact, ids, LENGTH)
    run(ours, ids, LENGTH)
    slots = np.array([BLOCKS[at // 16] * 16 + at % 16 for at in range(LENGTH)])
    keys, centers = exact._program.keys(slots)[0], _key_centers(ours.weights, 16, 1, 16)[:, 0]
    want, pairs = encode(keys, torch.ones(()), centers)
    assert (pairs[..., 0] < 0).any() and (pairs[..., 0] > 0).any()
    codes, constants = stored_keys(ours._program, slots)
    same = codes == torch.stack((want & 15, want >> 4), dim=-1).flatten(-2)
    assert same.float().mean() > 0.999
    torch.testing.assert_close(constants, pairs.float(), rtol=2e-3, atol=0)


def stored_keys(program, slots):
    """Codes (n, kv_heads, head_dim), and scales with minima (n, kv_heads, 2), of the first layer."""
    w, blocks = program.weights, program.blocks
    half = 16 * (64 // 2 + 4)
    halves = program.pool[: len(w.layers) * blocks * w.kv_heads * 2 * half].view(
        -1, blocks, w.kv_heads, 2, half
    )
    keys = halves[0, :, :, 0]  # (blocks, kv_heads, half)
    words = keys[..., : 16 * 32].contiguous().view(torch.int32).view(blocks, w.kv_heads, 8, 16)
    shifts = torch.tensor([index % 4 * 8 + index // 4 * 4 for index in range(8)])
    codes = (words[..., None] >> shifts & 15).permute(0, 3, 1, 2, 4).flatten(-2).flatten(0, 1)
    constants = keys[..., 16 * 32 :].contiguous().view(torch.float16).view(blocks, w.kv_heads, 2, 16)
    rows = torch.from_numpy(slots)
    return codes[rows, :, : w.head_dim], constants.permute(0, 3, 1, 2).flatten(0, 1)[rows].float()


def test_the_mean_keys_are_those_of_the_modules():
    model = tiny_models.build("llama3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    ours = _key_centers(runner(model).weights, 16, 2, 16)
    want = Modules(model, blocks=4, kv_dtype="int4").pool.store.basis.centers
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-4)
