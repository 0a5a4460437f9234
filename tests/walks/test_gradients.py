"""The mean of gradients over processes, one of which is played by a table of what it would send."""

import torch
from torch import nn

from attar.walks import distributed


def test_each_gradient_is_the_mean_over_the_processes_also_where_one_has_none(monkeypatch):
    model = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(4))
    model[3].requires_grad_(False)
    model[0].grad = torch.tensor([1.0, 3.0])
    sent = [torch.tensor([1, 1, 0]), torch.tensor([5.0, 1.0]), torch.tensor([4.0, -2.0])]
    monkeypatch.setattr(distributed.distributed, "all_reduce", lambda tensor: tensor.add_(sent.pop(0)))
    monkeypatch.setattr(distributed, "count", lambda: 2)
    distributed.average_gradients(model)
    assert model[0].grad.tolist() == [3.0, 2.0]
    assert model[1].grad.tolist() == [2.0, -1.0]  # here it had none
    assert model[2].grad is None and model[3].grad is None and not sent
