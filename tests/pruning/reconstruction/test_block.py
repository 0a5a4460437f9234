"""Training of a block against its original outputs: gradients, masks, the choice on held-out rows."""

import copy
import os
import signal

import pytest
import torch
from torch import nn

from attar.errors import NumericsError
from attar.interruption import StateFile, StoppedError, interruptible
from attar.pruning.reconstruction.block import BlockReconstructor, _share, _split

K, HIDDEN, T = 12, 20, 64


class View:
    """A block of two Linears with a non-linearity; the pruned model's hidden states differ from the original
    one's."""

    state = StateFile()

    def __init__(self, batches=20, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(K, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, K, bias=False))
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g) / 4)
        self.module.requires_grad_(False)
        self.names = ["0", "2"]
        self.modules = {name: self.module.get_submodule(name) for name in self.names}
        self.count = batches
        rows = [torch.randn(2, T, K, generator=g) for _ in range(batches)]
        self._targets = [self.module(x) for x in rows]
        self._inputs = [(x + 0.05 * torch.randn(x.shape, generator=g)) for x in rows]

    def inputs(self, number):
        return self._inputs[number]

    def targets(self, number):
        return self._targets[number]

    def __call__(self, hidden, number):
        return self.module(hidden)


def pruned(view, dtype=torch.float32, seed=3):
    g = torch.Generator().manual_seed(seed)
    return {
        name: (module.weight.cpu() * (torch.rand(module.weight.shape, generator=g) < 0.5)).to(dtype)
        for name, module in view.modules.items()
    }


def reconstructor(view, weights, **options):
    biases = {name: module.bias for name, module in view.modules.items()}
    return BlockReconstructor(weights.__getitem__, biases.__getitem__, **options)


def loss_of(view, solutions, numbers):
    block = copy.deepcopy(view.module)
    with torch.no_grad():
        for name, solution in solutions.items():
            block.get_submodule(name).weight.copy_(solution.tensors["weight"])
            if "bias" in solution.tensors:
                block.get_submodule(name).bias.copy_(solution.tensors["bias"])
        return sum(
            float((block(view.inputs(n)) - view.targets(n)).double().square().mean()) for n in numbers
        ) / len(numbers)


def test_the_loss_falls_on_rows_that_were_not_trained_on():
    view = View()
    weights = pruned(view)
    fresh = View(seed=0, batches=30)  # the same block, ten batches more
    start = reconstructor(view, weights, rates=()).solve_block(view)
    solved = reconstructor(view, weights, epochs=8, rates=(0.03,)).solve_block(view)
    rows = range(20, 30)
    assert loss_of(fresh, solved, rows) < 0.5 * loss_of(fresh, start, rows)
    report = solved["0"].report
    held = _split(20)[1]
    assert report["rate"] == 0.03
    assert report["loss_first"] == pytest.approx(loss_of(view, start, held), rel=1e-4)
    assert report["loss_best"] == pytest.approx(loss_of(view, solved, held), rel=1e-4)


def test_zeros_stay_and_the_block_is_left_as_it_was():
    view = View()
    before, weights = copy.deepcopy(view.module.state_dict()), pruned(view, torch.bfloat16)
    parameters = [id(parameter) for parameter in view.module.parameters()]
    solved = reconstructor(view, weights, epochs=2, rates=(0.01,)).solve_block(view)
    assert [id(parameter) for parameter in view.module.parameters()] == parameters
    assert all(torch.equal(before[name], value) for name, value in view.module.state_dict().items())
    for name, weight in weights.items():
        tensors = solved[name].tensors
        assert torch.equal(tensors["weight"] == 0, weight == 0) and tensors["weight"].dtype == torch.bfloat16
        assert not torch.equal(tensors["weight"], weight)
        assert torch.equal(solved[name].weight, tensors["weight"].float()), "later blocks see stored weights"
    assert "bias" in solved["0"].tensors and "bias" not in solved["2"].tensors


@pytest.mark.slow
def test_a_first_step_goes_down_the_gradient_of_finite_differences():
    """Adam's first step is the sign of the gradient; that of the loss is measured by moving each weight."""
    view = View(batches=1)
    weights = pruned(view)
    start = reconstructor(view, weights, rates=()).solve_block(view)
    solved = reconstructor(view, weights, epochs=1, rates=(1e-3,)).solve_block(view)
    agree = total = 0
    for name in view.names:
        step = solved[name].weight - start[name].weight
        for row, column in (weights[name] != 0).nonzero().tolist():
            losses = []
            for move in (-1e-2, 1e-2):
                moved = copy.deepcopy(start)
                moved[name].tensors["weight"][row, column] += move
                losses.append(loss_of(view, moved, [0]))
            slope = (losses[1] - losses[0]) / 2e-2
            if abs(slope) > 1e-4:
                total += 1
                agree += bool(step[row, column] * slope < 0)
    assert total > 100 and agree >= 0.99 * total


def test_a_rate_that_harms_is_not_taken():
    view = View()
    weights = pruned(view)
    solved = reconstructor(view, weights, epochs=1, rates=(30.0,)).solve_block(view)
    assert solved["0"].report["rate"] == 0.0
    assert solved["0"].report["loss_best"] == solved["0"].report["loss_first"]
    assert torch.equal(solved["0"].weight, weights["0"])


def test_a_block_that_is_not_finite_is_refused():
    view = View()
    weights = pruned(view)
    weights["2"][0, 0] = torch.inf
    with pytest.raises(NumericsError, match="the loss of the pruned block"):
        reconstructor(view, weights).solve_block(view)


def test_the_rate_rises_and_falls_and_a_tenth_is_held_out():
    shares = [_share(step, 100) for step in range(100)]
    assert shares[0] == pytest.approx(0.1) and max(shares) == 1.0 and 0 < shares[-1] < 0.02
    assert shares.index(1.0) == 9 and sorted(shares[10:], reverse=True) == shares[10:]
    assert _split(20) == (list(range(18)), [18, 19])
    assert _split(3) == ([0, 1], [2]) and _split(1) == ([0], [0])


def test_the_seed_is_the_order_of_the_batches():
    view = View()
    weights = pruned(view)
    first, again, other = (
        reconstructor(view, weights, epochs=1, rates=(0.01,), seed=seed).solve_block(view)["0"].weight
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("stop_at", [7, 22])  # in the first rate, and in the second
def test_a_stopped_block_goes_on_from_its_step(tmp_path, stop_at):
    view = View()
    weights = pruned(view)
    wanted = reconstructor(view, weights, epochs=1, rates=(0.01, 0.03)).solve_block(view)

    class Stops(StateFile):
        done = 0

        def step(self, state):
            Stops.done += 1
            if Stops.done == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            super().step(state)

    with interruptible() as stop, pytest.raises(StoppedError):
        view.state = Stops(tmp_path / "learning.pt", stop)
        reconstructor(view, weights, epochs=1, rates=(0.01, 0.03)).solve_block(view)
    view.state = Stops(tmp_path / "learning.pt")
    solved = reconstructor(view, weights, epochs=1, rates=(0.01, 0.03)).solve_block(view)
    assert Stops.done == 2 * 18  # of 20 batches two are held out
    for name, solution in solved.items():
        assert torch.equal(solution.weight, wanted[name].weight) and solution.report == wanted[name].report
