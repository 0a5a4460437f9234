"""Medusa-2: the loss of a model and its heads in float64, what learns at which rate, a killed run, drafts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import attar
from attar.checkpoint.hashing import sha256_file
from attar.checkpoint.open import open_checkpoint
from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.head_settings import JointSettings, MedusaSettings
from attar.distillation.heads import joint_train
from attar.distillation.heads.joint import JointLearner, original_of, schedule
from attar.distillation.rollouts import teacher as rollouts
from attar.errors import SettingsError
from attar.models.draft_heads.medusa_module import MedusaConfig, MedusaHeads
from attar.models.head import head_of
from attar.runtime.speculate.heads.load import trained_for
from attar.walks.optimizers import build
from attar.walks.settings import TrainSettings
from tests import tiny_models
from tests.cases import mostly_slow
from tests.killed import Killed

SMALL = {
    "head": "medusa",
    "drafts": 2,
    "joint": 0.5,
    "steps": 8,
    "batch_size": 2,
    "sequence_length": 32,
    "num_rollouts": 4,
    "prompt_tokens": 4,
    "precision": "fp32",
    "data": str(Path(json.__file__).parent),
}


def parts(family="llama3", adapted=False, **together):
    model = tiny_models.build(family).double()
    heads = MedusaHeads(MedusaConfig(hidden=64, vocabulary=320, layers=(3,), drafts=2)).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    own = head_of(model)
    options = MedusaSettings(drafts=2, decay=0.5, together=JointSettings(joint=1.0, **together))
    if adapted:
        names = [f"model.layers.{n}.mlp.down_proj" for n in range(3)]
        model = joint_train.add_adapters(model, names, 2).double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    original = original_of(model, own, adapted) if options.together.base_loss == "self" else None
    return model, heads, own, options, original


def example(model):
    batch = Examples.of_text(tiny_models.tokens(model))
    batch.targets[0, 5] = PADDING
    return batch


@pytest.mark.few(2)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("base_loss", ["self", "text"])
def test_the_loss_is_that_of_a_loop_over_positions(adapted, base_loss):
    model, heads, own, options, original = parts(adapted=adapted, base_loss=base_loss)
    learner = JointLearner(model, heads, own, options, 10, original)
    if not adapted:
        with torch.no_grad():  # the model has moved away from what it was
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
    batch = example(model)
    reference = tiny_models.build("llama3").double()
    p0 = reference(input_ids=batch.inputs).logits.softmax(-1)
    passed = model(input_ids=batch.inputs, output_hidden_states=True)
    p, h = passed.logits.log_softmax(-1), passed.hidden_states[-1]
    value, of_heads = [], {1: [], 2: []}
    for row in range(len(batch)):
        for s in range(batch.inputs.shape[1]):
            label = int(batch.targets[row, s])
            if label == PADDING:
                continue
            kl = (p0[row, s] * (p0[row, s].log() - p[row, s])).sum()
            value.append(kl if base_loss == "self" else -p[row, s, label])
            for k in (1, 2):
                later = batch.targets[row, s : s + k + 1]
                if len(later) > k and not (later == PADDING).any():
                    of_heads[k].append(-heads.logits(h[row, s], k - 1).log_softmax(-1)[later[k]])
    for passes in (0, 5):
        t = passes / 10
        weight = 0.2 * math.sin(math.pi / 2 * t)
        wanted = torch.stack(value).mean()
        wanted = wanted + weight * sum(0.5**k * torch.stack(rows).mean() for k, rows in of_heads.items())
        learner.step.fill_(passes)
        learner.train()
        loss = learner(batch)
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
        assert int(learner.step) == passes + 1
    trained = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    ours = torch.autograd.grad(loss, trained)
    theirs = torch.autograd.grad(wanted, trained)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_held_out_losses_have_the_whole_weight():
    model, heads, own, options, _ = parts(base_loss="text")
    learner, batch = JointLearner(model, heads, own, options, 4, None), example(model)
    learner.eval()
    first = learner(batch)
    learner.step.fill_(4)
    assert torch.equal(first, learner(batch)) and int(learner.step) == 4
    assert schedule(1.0) == schedule(2.0) == 1.0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_model_learns_at_its_own_rate(optimizer):
    model, heads, own, options, _ = parts(base_loss="text")
    learner = JointLearner(model, heads, own, options, 4, None)
    of_base = {id(parameter) for parameter in model.parameters()}
    owned = []
    for one in build(learner, TrainSettings(optimizer=optimizer, precision="fp32")):
        for group in one.param_groups:
            ids = {id(parameter) for parameter in group["params"]}
            owned += ids
            assert group["scale"] == (0.25 if ids <= of_base else 1.0)
            assert ids <= of_base or not ids & of_base
    assert len(owned) == len(set(owned)) == len(list(learner.parameters()))


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 64)
    return tiny_models.save(tiny_models.build("llama3"), tmp_path / "target")


def files(folder):
    return {
        path.relative_to(folder).as_posix(): sha256_file(path) for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_killed_run_ends_with_the_bytes_of_an_undisturbed_one(target, tmp_path, monkeypatch, rank):
    options = SMALL | {"adapter_rank": rank, "checkpoint_every": 2}
    attar.train_head(target, tmp_path / "a" / "new", **options)
    calls, loss = [0], joint_train._loss

    def deadly(model, batch):
        calls[0] += model.training
        if calls[0] > 3:
            raise Killed
        return loss(model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(joint_train, "_loss", deadly)
        with pytest.raises(Killed):
            attar.train_head(target, tmp_path / "b" / "new", **options)
    assert (tmp_path / "b" / ".new.work" / "joint" / "state-00000002").is_dir()
    torch.manual_seed(99)
    attar.train_head(target, tmp_path / "b" / "new", **options)
    ours, theirs = (files(tmp_path / name / "new") for name in "ab")
    assert {"model.safetensors", "head/model.safetensors"} <= ours.keys()
    assert ours == theirs


@pytest.mark.parametrize("rank", mostly_slow([0, 4], fast=[0]))
def test_the_new_model_is_drafted_for_by_its_heads(target, tmp_path, rank):
    new = attar.train_head(target, tmp_path / "new", **SMALL | {"adapter_rank": rank, "learning_rate": 0.02})
    head = open_checkpoint(tmp_path / "new" / "head")
    assert trained_for(head, new)
    details = new.card.details
    assert details["steps"] == 4 and details["model_loss"]["before"] != details["model_loss"]["after"]
    assert head.card.details["drafting"] == details["drafting"]
    assert new.fingerprint() != open_checkpoint(target).fingerprint()
    prompts, params = [[5, 6, 7, 8, 9], [10, 11, 12]], attar.SamplingParams(max_tokens=20, temperature=0.0)
    plain = attar.LLM(new.path, dtype="float32").generate(prompts, params)
    llm = attar.LLM(new.path, draft=head.path, dtype="float32")
    assert [one.token_ids for one in llm.generate(prompts, params)] == [one.token_ids for one in plain]


@pytest.mark.slow
def test_a_model_with_tied_embeddings_learns_without_steps_of_the_heads_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "HELD_OUT_TOKENS", 64)
    target = tiny_models.save(tiny_models.build("smollm"), tmp_path / "target")
    new = attar.train_head(target, tmp_path / "new", **SMALL | {"joint": 1.0, "base_loss": "text"})
    assert new.card.details["steps"] == 8
    params = attar.SamplingParams(max_tokens=12, temperature=0.0)
    plain = attar.LLM(new.path).generate([[5, 6, 7]], params)[0]
    assert (
        attar.LLM(new.path, draft=new.path / "head").generate([[5, 6, 7]], params)[0].token_ids
        == plain.token_ids
    )


def test_adapters_without_joint_steps_are_refused(target, tmp_path):
    with pytest.raises(SettingsError, match=r"adapter_rank is 4.*joint is above 0"):
        attar.train_head(target, tmp_path / "new", **SMALL | {"joint": 0.0, "adapter_rank": 4})
    with pytest.raises(SettingsError, match="left out with head eagle"):
        attar.train_head(target, tmp_path / "new", **SMALL | {"head": "eagle", "joint": 0.5})
