"""Block drafters as they draft: the same logits and confidences as in training."""

import pytest
import torch

from attar.data.examples import Examples
from attar.distillation.heads.anchors import run_blocks
from attar.distillation.heads.target_pass import run_target
from attar.models.head import head_of
from attar.runtime.speculate.draft_model import GrowingDraft
from attar.runtime.speculate.heads.block_proposer import block_head
from attar.runtime.speculate.heads.own_tensors import OwnTensors
from attar.runtime.speculate.proposer import DraftRequest
from tests import tiny_models
from tests.distillation.heads.drafters import drafter_of

K = 3


def growing(sequence, tokens):
    return GrowingDraft(DraftRequest(sequence, tokens, K), list(tokens), len(tokens), K, frozenset(), 0.0, 1)


def trained_logits(drafter, target, hidden, row, anchor, k):
    """Logits over the target's vocabulary, and the confidence, as in the training pass."""
    tokens = target.tokens[row, anchor : anchor + k + 1]
    z = target.head.logits(hidden[k][None].clone())[0]
    chosen = drafter.chosen
    z = z if chosen is None else z[chosen]
    if drafter.markov_head is not None:
        z = z + drafter.markov_head.markov_w2(drafter.markov_head.latents(tokens, hidden[: k + 1])[k])
    if chosen is not None:
        z = torch.full((drafter.config.vocabulary,), -torch.inf).index_copy(0, chosen, z)
    if drafter.confidence_head is None:
        return z, None
    return z, float(torch.sigmoid(drafter.confidence_logits(hidden[k], tokens[k])))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "family", "changes", "chosen"),
    [
        ("dflash", "llama3", {}, None),
        ("dspark", "qwen3", {}, None),
        ("dspark", "gemma2", {"markov": "gated"}, range(3, 320, 3)),
        ("dspark", "smollm", {"markov": "rnn", "head_layers": 1}, range(3, 320, 3)),
        ("dspark", "llama2", {"markov_rank": 0}, None),
    ],
)
@torch.no_grad()
def test_drafting_is_the_training_pass(kind, family, changes, chosen, monkeypatch):
    model = tiny_models.build(family)
    picked = None if chosen is None else torch.tensor(list(chosen))
    drafter = drafter_of(model, kind, chosen=picked, **changes).eval()
    batch = Examples.of_text(tiny_models.tokens(model, batch=2, length=20))
    target = run_target(model, head_of(model), drafter.config.layers, batch)
    anchors = torch.tensor([[2, 9], [0, 14]])
    hidden = run_blocks(drafter, target, anchors)[:, :, drafter.config.skipped :]
    own = head_of(model)
    tensors = OwnTensors(target.embedding, lambda h: h @ own.weight.T, own.scale, own.softcap)
    head = block_head(drafter, tensors)
    assert head.drafts == K and hasattr(head, "confidence") == (kind == "dspark")
    monkeypatch.setattr(
        "attar.runtime.speculate.heads.block_proposer.BYTES", 4 * 320 * 4
    )  # fewer slots than a block
    drafts, rows = [], [(0, 2), (0, 9), (1, 0), (1, 14)]
    for sequence, (row, anchor) in enumerate(rows):
        tokens = batch.tokens[row, : anchor + 1].tolist()
        for start in range(0, anchor, 4):  # in chunks
            head.read(sequence, tokens, start, target.states[row, start : min(start + 4, anchor)])
        drafts.append(growing(sequence, tokens))
    head.begin(drafts)
    for k in range(K):
        if kind == "dspark":
            chances = head.confidence(drafts)
        logits = head.logits(drafts)
        for place, draft in enumerate(drafts):
            row, anchor = rows[draft.request.sequence]
            index = int((anchors[row] == anchor).nonzero())
            z, chance = trained_logits(drafter, target, hidden[row, index], row, anchor, k)
            torch.testing.assert_close(logits[place], z, rtol=1e-4, atol=1e-4)
            if chance is not None:
                assert chances[place] == pytest.approx(chance, abs=1e-5)
            draft.tokens.append(int(batch.tokens[row, anchor + k + 1]))
        if k == 0:
            del drafts[1]  # closed
    head.forget(0)
    assert head.cache.read(0)[0].shape[1] == 0 and head.cache.read(3)[0].shape[1] == 14


@torch.no_grad()
def test_positions_that_were_never_read_are_not_seen():
    """The blocks of the first tokens were released: the context begins behind them."""
    model = tiny_models.build("llama3")
    drafter = drafter_of(model, "dspark").eval()
    states, tokens = torch.randn(12, len(drafter.config.layers), 64), list(range(3, 16))
    embedding = model.get_input_embeddings().weight
    own = OwnTensors(embedding, lambda h: h @ model.lm_head.weight.T)
    late, early = block_head(drafter, own), block_head(drafter, own)
    late.read(0, tokens, 8, states[8:])
    early.read(0, tokens, 0, states)
    draft = growing(0, tokens)
    late.begin([draft]), early.begin([draft])
    x = drafter.slots(embedding[tokens[-1]])
    keys, values = drafter.context(states[8:], torch.arange(8, 12))

    def attend(layer, q, k, v):
        from attar.models.draft_heads.decoder_layer import attention

        return attention(q, torch.cat([keys[layer], k]), torch.cat([values[layer], v]))

    hidden = drafter(x, torch.arange(12, 12 + len(x)), attend)
    bias = drafter.markov_head.markov_w2(drafter.markov_head.markov_w1.weight[tokens[-1]])
    wanted = model.lm_head(hidden[0]) + bias
    torch.testing.assert_close(late.logits([draft])[0], wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(early.logits([draft])[0], wanted, atol=1e-2)


@torch.no_grad()
def test_temperatures_calibrate_each_slot():
    from dataclasses import replace

    model = tiny_models.build("llama3")
    drafter = drafter_of(model, "dspark").eval()
    h, tokens = torch.randn(2, 64), torch.tensor([5, 6])
    z = drafter.confidence_logits(h, tokens)
    drafter.config = replace(drafter.config, temperatures=(0.5, 2.0, 4.0))
    for k, T in enumerate(drafter.config.temperatures):
        torch.testing.assert_close(drafter.confidence(h, tokens, k), torch.sigmoid(z / T))
