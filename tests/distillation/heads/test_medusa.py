"""Medusa's heads: their loss against a loop, and from training to drafts."""

import json
from pathlib import Path

import pytest
import torch

import attar
from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.head_settings import MedusaSettings
from attar.distillation.heads import medusa_loss as medusa
from attar.distillation.heads.target_pass import run_target
from attar.distillation.rollouts import teacher as rollouts
from attar.models.draft_heads.medusa_module import MedusaConfig, MedusaHeads
from attar.models.draft_heads.static_tree import PUBLISHED, search_tree
from attar.models.draft_heads.vocabulary import set_vocabulary
from attar.models.head import head_of
from tests import tiny_models

OPTIONS = {"steps": 6, "batch_size": 2, "sequence_length": 32, "num_rollouts": 4, "precision": "fp32"}


CHOSEN = torch.arange(0, 320, 2)  # every other token


def heads_of(model, drafts=3, chosen=None, **changes):
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    changes |= {"draft_vocabulary": 0 if chosen is None else len(chosen)}
    config = MedusaConfig(
        hidden=hidden, vocabulary=model.config.vocab_size, layers=(layers,), drafts=drafts, **changes
    )
    heads = MedusaHeads(config)
    set_vocabulary(heads, chosen)
    heads.start_from(model.lm_head.weight.detach())
    return heads


@pytest.mark.parametrize("chosen", [None, CHOSEN])
@pytest.mark.parametrize("changes", [{}, {"shared": True, "residual_layers": 2}])
def test_the_loss_is_that_of_a_loop_over_heads_and_positions(chosen, changes):
    model = tiny_models.build("llama3")
    heads = heads_of(model, chosen=chosen, **changes).double()
    model = model.double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = tiny_models.tokens(model)
    batch = Examples.of_text(tokens)
    batch.targets[0, 5] = PADDING  # an answer ends there
    target = run_target(model, head_of(model), (3,), batch)
    value = medusa.loss(heads, target, MedusaSettings(drafts=3, decay=0.5))
    wanted = 0.0
    h = target.final
    for k in range(1, 4):
        terms = []
        for row in range(len(tokens)):
            for s in range(tokens.shape[1] - k):
                label = int(batch.targets[row, s + k])
                if (batch.targets[row, s : s + k + 1] == PADDING).any():
                    continue
                if chosen is not None and label % 2:  # the head has no such token
                    continue
                logits = heads.logits(h[row, s], k - 1)
                terms.append(-logits.log_softmax(-1)[label if chosen is None else label // 2])
        wanted = wanted + 0.5**k * torch.stack(terms).mean()
    torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=1e-6)
    parameters = dict(heads.named_parameters())
    ours, theirs = (torch.autograd.grad(one, parameters.values()) for one in (value, wanted))
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8, msg=name)


@pytest.mark.parametrize("changes", [{}, {"shared": True}, {"residual_layers": 3}])
def test_a_head_starts_as_the_targets_own(changes):
    model = tiny_models.build("llama3")
    h = torch.randn(2, model.config.hidden_size)
    torch.testing.assert_close(heads_of(model, **changes).logits(h, 2), model.lm_head(h))
    reduced = heads_of(model, chosen=CHOSEN, **changes)
    torch.testing.assert_close(reduced.logits(h, 1), model.lm_head(h)[:, CHOSEN])


def test_no_two_blocks_share_their_weights():
    heads = heads_of(tiny_models.build("llama3"), residual_layers=2)
    assert len({id(parameter) for parameter in heads.parameters()}) == 3 * (2 * 2 + 1)
    with torch.no_grad():
        heads.blocks[1][0].linear.bias.fill_(1.0)
    h = torch.randn(2, 64)
    assert torch.equal(heads.logits(h, 0), heads.logits(h, 2))
    assert not torch.equal(heads.logits(h, 0), heads.logits(h, 1))


def test_a_shared_output_matrix_is_one():
    heads = heads_of(tiny_models.build("llama3"), shared=True)
    assert len(heads.heads) == 1 and heads.weight(0) is heads.weight(2)
    assert len(list(heads.output_weights())) == 1


@pytest.mark.parametrize("chosen", [None, CHOSEN])
def test_the_report_is_that_of_a_loop_over_chains(chosen, monkeypatch):
    monkeypatch.setattr(medusa, "POSITIONS", 5)
    model = tiny_models.build("llama3")
    heads = heads_of(model, drafts=2, chosen=chosen)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = tiny_models.tokens(model, batch=3, length=9)
    tokens[2, 6:] = PADDING
    batch = Examples.of_text(tokens)
    batch.targets[0, :3] = PADDING  # a prompt

    def run(part):
        return run_target(model, head_of(model), (3,), part)

    options = MedusaSettings(drafts=2, tree_drafts=4)
    chains, details = medusa.finish(heads, run, [batch[:2], batch[2:]], options)
    accepted, agreed, right = [], [], [[0] * medusa.RANKS for _ in range(2)]
    passed = run(batch)
    p = model(input_ids=batch.inputs, attention_mask=batch.mask.long()).logits.softmax(-1)
    for row in range(3):
        for s in range(9):
            if (batch.targets[row, s : s + 3] == PADDING).any() or s + 3 > 9:
                continue
            chain = []
            for k in (1, 2):
                order = heads.logits(passed.final[row, s], k - 1).argsort(descending=True)
                order = order if chosen is None else chosen[order]
                best = int(p[row, s + k].argmax())
                chain.append((float(p[row, s + k, order[0]].detach()), float(order[0] == best)))
                for rank in range(medusa.RANKS):
                    right[k - 1][rank] += int(order[rank] == best)
            accepted.append([a for a, _ in chain])
            agreed.append([g for _, g in chain])
    torch.testing.assert_close(chains.acceptance, torch.tensor(accepted), rtol=1e-4, atol=1e-6)
    assert chains.agreement.tolist() == agreed
    rates = [[round(hits / len(accepted), 4) for hits in of_head] for of_head in right]
    assert details["rank_accuracies"] == rates
    wanted = search_tree([[hits / len(accepted) for hits in of_head] for of_head in right], 4)
    assert heads.config.tree == wanted and details["tree"]["drafts"] == len(wanted)


@pytest.mark.parametrize(("tree", "paths"), [("chain", 0), ("mc_sim_7b_63", 1)])
def test_a_tree_can_be_given(tree, paths):
    model = tiny_models.build("llama3")
    heads = heads_of(model, drafts=2)
    batch = Examples.of_text(tiny_models.tokens(model))
    medusa.finish(heads, lambda part: run_target(model, head_of(model), (3,), part), [batch],
                  MedusaSettings(drafts=2, tree=tree))  # fmt: skip
    assert len(heads.config.tree) == (paths and sum(len(path) <= 2 for path in PUBLISHED[tree]))


@pytest.fixture(params=[{}, {"draft_vocabulary": 100, "shared_head": True}])
def trained(tmp_path, monkeypatch, request):
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 64)
    target = tiny_models.save(tiny_models.build("llama3"), tmp_path / "target")
    options = OPTIONS | {"head": "medusa", "data": str(Path(json.__file__).parent)} | request.param
    return target, attar.train_head(target, tmp_path / "head", **options)


@pytest.mark.few(1)
def test_from_training_to_drafts(trained):
    target, head = trained
    assert head.card.details["steps"] == 6 and head.config["head"]["kind"] == "medusa"
    report = head.card.details["drafting"]
    assert len(report["agreement"]) == len(report["acceptance"]) == 4 and report["tokens_a_pass"] >= 1.0
    assert len(head.config["head"]["tree"]) == report["tree"]["drafts"]
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12]]
    params = attar.SamplingParams(max_tokens=20, temperature=0.0)
    plain = attar.LLM(target, dtype="float32").generate(prompts, params)
    llm = attar.LLM(target, draft=head.path, dtype="float32")
    drafted = llm.generate(prompts, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
