"""Mixtures of experts in the transformers runner: logits are transformers' own, however the tokens come."""

import copy
import itertools

import pytest
import torch

from attar.runtime.kv.evict import H2O
from attar.runtime.runner.attention import AttentionOptions, attention, weights
from attar.runtime.runner.modules import Modules
from attar.runtime.runner.probe import probe
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_mixtures, tiny_models

LENGTH = 30
CLOSE = {"atol": 3e-5, "rtol": 1e-4}


@pytest.mark.few(5)
@pytest.mark.parametrize("family", tiny_mixtures.FAMILIES)
def test_logits_of_every_family(family):
    """A prompt in chunks, then single tokens."""
    plain = tiny_mixtures.build(family)
    ids = tiny_models.tokens(plain, batch=1, length=LENGTH)
    runner, blocks = Modules(copy.deepcopy(plain), blocks=8, block_size=4), tuple(range(8))
    rows = []
    for start, stop in itertools.pairwise([0, 11, 12, 27, 28, 29, LENGTH]):
        span = TokenSpan(0, start, stop, blocks, stop - start)
        rows.append(runner.run(StepInput(ids[0, start:stop].tolist(), (span,))))
    torch.testing.assert_close(torch.cat(rows), tiny_models.logits(plain, ids)[0], **CLOSE)


def test_chunked_attention_bounds_the_context():
    """Inside the first chunk Llama 4's layers see everything; more than that is not served."""
    assert probe(tiny_mixtures.build("llama4")).context == 64
    assert probe(tiny_mixtures.build("llama4", attention_chunk_size=256)).context == 128


def test_a_sink_takes_its_share():
    q, k, v = (torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    sinks = torch.tensor([0.5, -1.0, 2.0, -torch.inf])
    options = AttentionOptions(0.3, None, None, True, sinks)
    p = weights(q.transpose(0, 1), k.transpose(0, 1), None, options)
    s = torch.einsum("thd,nhd->htn", q, k).mul(0.3).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    want = s.exp() / (s.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    torch.testing.assert_close(p, want)
    assert (p.sum(-1)[:3] < 0.99).all() and torch.allclose(p.sum(-1)[3], torch.ones(5))
    out = attention(q, k, v, None, scaling=0.3, causal=True, sinks=sinks)
    torch.testing.assert_close(out, torch.einsum("htn,nhd->thd", want, v))


def test_eviction_knows_sinks():
    """H2O's sums are of the weights that the layer used: less than one for each query."""
    plain = tiny_mixtures.build("gpt_oss", layer_types=["full_attention"] * 3)
    ids = tiny_models.tokens(plain, batch=1, length=12)[0].tolist()
    runner = Modules(plain, blocks=8, block_size=4, eviction=H2O(heavy=8, recent=8))
    runner.run(StepInput(ids, (TokenSpan(0, 0, 12, (0, 1, 2), 1),)))
    sums = runner._observer.records[0][0]
    assert 0 < sums.sum() < 4 * 12 * 0.95
