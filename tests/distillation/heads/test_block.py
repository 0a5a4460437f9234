"""The losses of DFlash and DSpark against loops in float64, with their gradients."""

import math

import pytest
import torch

import attar
from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.heads import block_loss as block
from attar.distillation.heads import draft_loss
from attar.distillation.heads.anchors import choose_anchors, run_blocks
from attar.distillation.heads.target_pass import run_target
from attar.distillation.objectives import chunked
from attar.distillation.rollouts import teacher as rollouts
from attar.models.head import head_of
from tests import tiny_models
from tests.distillation.heads.drafters import drafter_of, options_of
from tests.runtime.speculate.proposing import Eager

CASES = [
    ("dflash", "llama3", {}, None),
    ("dspark", "llama3", {}, None),
    ("dspark", "qwen3", {"markov": "gated"}, None),
    ("dspark", "llama3", {"markov": "rnn"}, 90),
    ("dspark", "gemma2", {}, 90),  # soft cap
    ("dspark", "llama3", {"markov_rank": 0, "confidence": 0.5}, 90),
    ("dflash", "smollm", {}, 90),
]


def batch_of(model):
    batch = Examples.of_text(tiny_models.tokens(model, batch=2, length=14))
    batch.targets[0, 9:] = PADDING  # an answer ends there
    batch.targets[1, :4] = PADDING  # a prompt
    batch.targets[1, 8] = PADDING  # a gap, behind which no block is learned that began before it
    return batch


def latents_of(markov, tokens, h):
    """e_k of a block, from the formulas."""
    s, out = torch.zeros(markov.markov_w1.embedding_dim, dtype=h.dtype), []
    for k, token in enumerate(tokens):
        w = markov.markov_w1.weight[token]
        if markov.kind == "gated":
            layer = markov.gate_proj
            w = w / (1 + torch.exp(-(layer.weight @ torch.cat([h[k], w]) + layer.bias)))
        elif markov.kind == "rnn":
            g, c, o = (markov.joint_proj.weight @ torch.cat([s, w, h[k]]) + markov.joint_proj.bias).chunk(3)
            gate = 1 / (1 + torch.exp(-g))
            s, w = gate * s + (1 - gate) * torch.tanh(c), torch.tanh(o)
        out.append(w)
    return out


def loop(drafter, model, target, options, anchors, real):
    """The loss, a prediction after the other."""
    B, K = drafter.config.block, options.drafts
    hidden, chosen = run_blocks(drafter, target, anchors), drafter.chosen
    own = head_of(model)
    total, weights = 0.0, 0.0
    for row in range(len(anchors)):
        for index, anchor in enumerate(anchors[row].tolist()):
            if not real[row, index]:
                continue
            h = hidden[row, index, B - K :]
            tokens = [int(target.tokens[row, min(anchor + k, 13)]) for k in range(K)]
            latents = latents_of(drafter.markov_head, tokens, h) if drafter.markov_head is not None else None
            for k in range(K):
                if anchor + k >= 14 or target.batch.targets[row, anchor + k] == PADDING:
                    break
                z = own.logits(h[k][None].clone())[0]
                z = z if chosen is None else z[chosen]
                if latents is not None:
                    z = z + drafter.markov_head.markov_w2.weight @ latents[k]
                q = torch.zeros(drafter.config.vocabulary, dtype=z.dtype)
                q = z.softmax(-1) if chosen is None else q.index_copy(0, chosen, z.softmax(-1))
                p = own.logits(target.final[row, anchor + k][None].clone())[0].softmax(-1).detach()
                y, w = int(target.batch.targets[row, anchor + k]), math.exp(-k / 4.0)
                weights += w
                distance = (q - p).abs().sum()
                ce = -torch.log(q[y]) if q[y] > 0 else 0.0
                if drafter.config.kind == "dflash":
                    total = total + w * ce
                    continue
                total = total + w * (0.1 * ce + 0.9 * distance)
                x = h[k]
                if drafter.markov_head is not None:
                    x = torch.cat([x, drafter.markov_head.markov_w1.weight[tokens[k]]])
                c = torch.sigmoid(
                    drafter.confidence_head.proj.weight[0] @ x + drafter.confidence_head.proj.bias[0]
                )
                a = (1 - distance / 2).detach()
                total = total - w * options.confidence * (a * c.log() + (1 - a) * (1 - c).log())
    return total / weights


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "family", "changes", "reduced"), CASES)
def test_the_loss_and_its_gradients_are_those_of_a_loop(kind, family, changes, reduced, monkeypatch):
    monkeypatch.setattr(draft_loss, "BYTES", 4 * 320 * 10)  # ten predictions a chunk
    monkeypatch.setattr(chunked, "CACHED", 4 * 320)  # and four, or more, of them at a time
    model = tiny_models.build(family).double()
    chosen = None if reduced is None else torch.arange(3, 320, 320 // reduced)
    drafter, options = drafter_of(model, kind, chosen=chosen, **changes).double(), options_of(kind, **changes)
    batch = batch_of(model)
    target = run_target(model, head_of(model), drafter.config.layers, batch)
    torch.manual_seed(3)
    anchors, real = choose_anchors(batch.targets, options.anchors, None)
    wanted = loop(drafter, model, target, options, anchors, real)
    names, parameters = zip(*[x for x in drafter.named_parameters() if x[1].requires_grad], strict=True)
    slopes = torch.autograd.grad(wanted, parameters, allow_unused=True)
    torch.manual_seed(3)
    value = block.loss(drafter.train(), target, options)
    torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-9)
    ours = torch.autograd.grad(value, parameters, allow_unused=True)
    for name, a, b in zip(names, ours, slopes, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(
            zero if a is None else a,
            zero if b is None else b,
            rtol=1e-6,
            atol=1e-9,
            msg=name,
            check_dtype=False,
        )
        assert b is not None, f"{name} is not trained"


def test_a_held_out_loss_is_the_same_each_time_and_draws_nothing():
    model = tiny_models.build("llama3")
    drafter, options = drafter_of(model, "dspark", anchors=2).eval(), options_of("dspark", anchors=2)
    target = run_target(model, head_of(model), drafter.config.layers, batch_of(model))
    state = torch.get_rng_state()
    with torch.no_grad():
        first, second = (float(block.loss(drafter, target, options)) for _ in range(2))
    assert first == second and torch.equal(torch.get_rng_state(), state)


def test_chains_have_the_acceptance_of_each_draft():
    model = tiny_models.build("llama3")
    drafter, options = drafter_of(model, "dspark").eval(), options_of("dspark")
    target = run_target(model, head_of(model), drafter.config.layers, batch_of(model))
    with torch.no_grad():
        chains = block.chains(drafter, target, options)
    assert chains.acceptance.shape == chains.agreement.shape == chains.confidence.shape == (10, 3)
    known = ~chains.acceptance.isnan()
    assert 0 < int(known.sum()) < known.numel()
    assert ((chains.acceptance[known] > 0) & (chains.acceptance[known] < 1)).all()
    assert torch.equal(known, ~chains.confidence.isnan()) and torch.equal(known, ~chains.agreement.isnan())


@pytest.mark.parametrize(
    ("blocks", "count", "layers"),
    [(36, 5, (1, 9, 17, 25, 33)), (8, 5, (1, 2, 3, 4, 5)), (3, 5, (0, 1, 2)), (8, 1, (4,)), (1, 5, (0,))],
)
def test_layers_are_spread_as_the_published_drafters_have_them(blocks, count, layers):
    assert block.spread_layers(blocks, count) == layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dspark", {"markov": "gated", "draft_vocabulary": 200}),
        pytest.param("dflash", {"head_layers": 1}, marks=pytest.mark.slow),
    ],
)
def test_from_training_to_drafts(kind, options, tmp_path, monkeypatch):
    """The text is the target's, greedy and with a seed; a drafted sample has a q, and is accepted by it."""
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 64)
    target = tiny_models.save(tiny_models.build("llama3"), tmp_path / "target")
    training = {"steps": 4, "batch_size": 2, "sequence_length": 32, "num_rollouts": 4, "precision": "fp32"}
    head = attar.train_head(
        target, tmp_path / "head", head=kind, data="python-stdlib", drafts=4, anchors=4, **training, **options
    )
    assert head.config["head"]["kind"] == kind and head.card.details["steps"] == 4
    drafting = head.card.details["drafting"]
    assert len(drafting["acceptance"]) == 4 and 1.0 <= drafting["tokens_a_pass"] <= 5.0
    assert head.load("mask_embedding").shape == (64,)
    assert ("lm_head.weight" in head.tensors) == ("draft_vocabulary" in options)
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12]]
    llm = attar.LLM(target, draft=head.path, dtype="float32", drafts=4)
    llm.engine.speculator.policy = Eager()
    plain = attar.LLM(target, dtype="float32")
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
        wanted, drafted = (
            one.generate(prompts, attar.SamplingParams(max_tokens=20, **params)) for one in (plain, llm)
        )
        assert [one.token_ids for one in drafted] == [one.token_ids for one in wanted]
    llm.generate(prompts, attar.SamplingParams(max_tokens=20, temperature=1.0))
    assert llm.engine.speculator.failure is None and llm.engine.speculator.counts.drafted > 30


@pytest.mark.slow
def test_a_short_training_raises_the_acceptance_at_each_position(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 1024)
    training = {
        "data": "python-stdlib",
        "batch_size": 4,
        "sequence_length": 128,
        "num_rollouts": 32,
        "drafts": 4,
    }
    training |= {
        "num_rollouts": 32,
        "head": "dspark",
        "head_layers": 1,
        "context_layers": 3,
        "learning_rate": 2e-3,
        "warmup": 0.1,
    }
    reports = [
        attar.train_head("attar:tiny", tmp_path / f"{steps}", steps=steps, **training).card.details[
            "drafting"
        ]
        for steps in (1, 40)
    ]
    before, after = (report["acceptance"] for report in reports)
    assert all(b > a + 0.02 for a, b in zip(before, after, strict=True)), reports
    assert reports[1]["tokens_a_pass"] > reports[0]["tokens_a_pass"] + 0.05, reports
    size = (tmp_path / "40" / "model.safetensors").stat().st_size
    assert size < 6_000_000
