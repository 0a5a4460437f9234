"""A head that is spread over processes: their gradients must be added, so the loss is inside the module."""

import copy
import os

import pytest
import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from attar.data.examples import Examples
from attar.distillation.head_settings import MedusaSettings
from attar.distillation.heads.states import TargetStates
from attar.distillation.heads.train import HeadLearner, HeadLoss
from attar.models.draft_heads.medusa_module import MedusaConfig, MedusaHeads
from attar.models.head import head_of
from attar.walks.optimizers import split
from tests import tiny_models


def parts():
    model = tiny_models.build("llama3").requires_grad_(False)
    heads = MedusaHeads(MedusaConfig(hidden=64, vocabulary=320, layers=(3,), drafts=2))
    heads.start_from(model.lm_head.weight.detach())
    loss = HeadLoss(TargetStates(model, head_of(model), (3,)))
    batch = Examples.of_text(tiny_models.tokens(model, batch=4, length=10))
    return HeadLearner(heads, MedusaSettings(drafts=2)), loss, batch


def gradients(learner):
    return [parameter.grad.clone() for parameter in learner.parameters()]


def process(rank, port, file):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    learner, loss, batch = parts()
    wrapped = DistributedDataParallel(learner)
    loss(wrapped, batch[2 * rank : 2 * rank + 2]).backward()
    torch.save(gradients(learner), f"{file}.{rank}")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(tmp_path):
    learner, loss, batch = parts()
    loss(learner, batch).backward()
    context = multiprocessing.get_context("spawn")
    port = 20000 + os.getpid() % 20000
    processes = [context.Process(target=process, args=(rank, port, tmp_path / "grad")) for rank in (0, 1)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(600)
        assert one.exitcode == 0
    for rank in (0, 1):
        for given, wanted in zip(torch.load(f"{tmp_path}/grad.{rank}"), gradients(learner), strict=True):
            torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-6)


def test_output_matrices_are_no_hidden_ones():
    """Muon is for hidden matrices: those that make logits are trained by AdamW."""
    learner, _, _ = parts()
    hidden, matrices, rest = split(learner)
    assert {id(p) for p in matrices} == {id(head.weight) for head in learner.head.heads}
    assert len(hidden) == 2 and len(rest) == 2
    assert {id(p) for p in hidden} == {id(block[0].linear.weight) for block in learner.head.blocks}


def test_the_loss_reaches_the_head_alone():
    learner, loss, batch = parts()
    before = copy.deepcopy(loss.states.target.state_dict())
    loss(learner, batch).backward()
    assert all(parameter.grad is not None for parameter in learner.parameters())
    assert all(parameter.grad is None for parameter in loss.states.target.parameters())
    for name, value in loss.states.target.state_dict().items():
        assert torch.equal(value, before[name])
