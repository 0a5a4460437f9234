"""Local reconstruction: Wagner, Roux, Zimmer, Pokutta 2026, "A Free Lunch in LLM Compression: Revisiting
Retraining after Pruning", arXiv 2510.14444 v2. The weights of one block that stay are trained until its
output on the pruned model's hidden states is the original block's on the original model's; then the next:

    loss = mean || block(x; W * M) - block(x~; W~) ||^2          Adam on W, M stays

Letters: W a block's Linears, from their pruned weights on; M their mask, W != 0; W~ the original ones; x, x~
(S, D) a row's hidden states before the block, after the pruned blocks and in the original model.

Differs from the paper: the learning rate is a fraction of the weights' root mean square, matrix by matrix, so
that one number fits every model. A tenth of the rows is held out: of the start and the results of several
rates, the one with the least loss there is taken, so that a block never becomes worse. Norms keep their
weights. The paper finds that it does not matter whether attention and MLP are trained apart or as one block,
as long as there is a non-linearity inside; here it is the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attar.errors import NumericsError
from attar.models.anatomy.parts import weight_of
from attar.models.loading.device import bf16_products
from attar.pruning.reconstruction.linear import PrunedSource
from attar.walks.solvers import BlockView, Solution

RATES = (0.003, 0.01)  # learning rates, as a fraction of the root mean square of a matrix's kept weights
BETAS, WARM = (0.9, 0.99), 0.1  # of Adam; share of the steps in which the rate rises
HELD_OUT = 10  # every tenth batch is held out


@dataclass(frozen=True)
class BlockReconstructor:
    """The sweep's solver.

    Attributes:
        pruned: the weights to start from; one that is zero stays zero.
        biases: the biases to start from; None where a Linear has none.
        epochs: passes over the calibration batches for each rate.
        rates: see :data:`RATES`.
        fast: products in bfloat16.
    """

    pruned: PrunedSource
    biases: Callable[[str], Tensor | None]
    epochs: int = 4
    rates: Sequence[float] = RATES
    fast: bool = False
    seed: int = 0

    def solve_block(self, view: BlockView) -> dict[str, Solution]:
        """Train the view's Linears; the module is left as it was.

        Raises:
            NumericsError: the loss of the pruned block is not finite.
        """
        if not view.names:
            return {}
        stored = {name: self.pruned(name) for name in view.names}
        with _originals(view.modules), torch.enable_grad():
            parameters = []
            for name in view.names:
                parameters += _make_trainable(view.modules[name], stored[name], self.biases(name))
            training, held = _split(view.count)
            start = _copies(parameters)
            first = best = self._loss(view, held)
            if not first < float("inf"):
                raise NumericsError(f"the loss of the pruned block of {view.names[0]} is {first}")
            kept, chosen, stored_state = start, 0.0, view.state.load() or {}
            if stored_state:
                best, kept, chosen = (stored_state[name] for name in ("best", "kept", "chosen"))
            for number, rate in enumerate(self.rates):
                if number < stored_state.get("rate", 0):
                    continue
                _load(parameters, start)
                resumed = stored_state if number == stored_state.get("rate") else {}
                others = {"rate": number, "best": best, "kept": kept, "chosen": chosen}
                self._train(view, parameters, training, rate, resumed, others)
                _round(view.modules, stored)
                loss = self._loss(view, held)
                if loss < best:
                    best, kept, chosen = loss, _copies(parameters), rate
            _load(parameters, kept)
            report = {"loss_first": first, "loss_best": best, "rate": chosen}
            return {name: _solution(view.modules[name], stored[name].dtype, report) for name in view.names}

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """The stored weight (N, K)."""
        return tensors["weight"]

    def _train(
        self,
        view: BlockView,
        parameters: Sequence[nn.Parameter],
        batches: Sequence[int],
        rate: float,
        resumed: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> None:
        """Adam over the batches in random order, ``epochs`` times; the rate rises, then falls to zero.

        Args:
            resumed: the state of an earlier call, or empty.
            others: what a state has besides.
        """
        masks = [parameter.detach() != 0 if parameter.dim() == 2 else None for parameter in parameters]
        groups = [{"params": [parameter], "lr": rate * _size(parameter)} for parameter in parameters]
        optimizer = torch.optim.Adam(groups, betas=BETAS, fused=True)
        steps = self.epochs * len(batches)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps))
        generator = torch.Generator().manual_seed(self.seed)
        if resumed:
            _load(parameters, resumed["parameters"])
            optimizer.load_state_dict(resumed["optimizer"])
            scheduler.load_state_dict(resumed["scheduler"])
        step = 0
        for _ in range(self.epochs):
            for at in torch.randperm(len(batches), generator=generator).tolist():
                step += 1
                if step <= resumed.get("step", 0):
                    continue
                optimizer.zero_grad()
                self._error(view, batches[at]).backward()
                for parameter, mask in zip(parameters, masks, strict=True):
                    if mask is not None and parameter.grad is not None:
                        parameter.grad.mul_(mask)
                optimizer.step()
                scheduler.step()
                view.state.step(
                    lambda step=step: {  # type: ignore[misc]
                        **others,
                        "step": step,
                        "parameters": _copies(parameters),
                        "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(),
                    }
                )

    def _loss(self, view: BlockView, batches: Sequence[int]) -> float:
        """The mean loss over some batches."""
        with torch.no_grad():
            return sum(float(self._error(view, number)) for number in batches) / len(batches)

    def _error(self, view: BlockView, number: int) -> Tensor:
        """The loss of one batch."""
        target = view.targets(number)
        with bf16_products(target.device, self.fast):
            output = view(view.inputs(number), number)
        return (output.float() - target).square().mean()


def _split(count: int) -> tuple[list[int], list[int]]:
    """The batches that are trained on, and the last ones, which are held out; one batch alone is both."""
    numbers = list(range(count))
    held = max(count // HELD_OUT, 1)
    return numbers[:-held] or numbers, numbers[-held:]


def _share(step: int, steps: int) -> float:
    """The learning rate as a share of its peak."""
    return min((step + 1) / (WARM * steps), (steps - step) / ((1.0 - WARM) * steps), 1.0)


def _size(parameter: Tensor) -> float:
    """The root mean square of what is not zero; of a bias of zeros, 1e-3."""
    kept = parameter.detach()[parameter.detach() != 0]
    return float(kept.square().mean().sqrt()) if len(kept) else 1e-3


def _make_trainable(module: Any, weight: Tensor, bias: Tensor | None) -> list[nn.Parameter]:
    """Give a Linear or Conv1D a weight (N, K) and a bias as parameters that learn; returns them."""
    turned = weight if isinstance(module, nn.Linear) else weight.T
    module.weight = nn.Parameter(turned.to(module.weight, copy=True).contiguous())
    if bias is None:
        return [module.weight]
    module.bias = nn.Parameter(bias.to(module.weight, copy=True))
    return [module.weight, module.bias]


def _copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _load(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _round(modules: Mapping[str, Any], stored: Mapping[str, Tensor]) -> None:
    """Round every weight and bias to its stored type."""
    with torch.no_grad():
        for name, weight in stored.items():
            for parameter in modules[name].parameters():
                parameter.copy_(parameter.to(weight.dtype))


def _solution(module: Any, dtype: torch.dtype, report: dict[str, Any]) -> Solution:
    tensors = {"weight": weight_of(module).detach().to(dtype)}
    if module.bias is not None:
        tensors["bias"] = module.bias.detach().to(dtype)
    return Solution(weight_of(module).detach().clone(), tensors, dict(report))


@contextmanager
def _originals(modules: Mapping[str, Any]) -> Iterator[None]:
    """Give the modules their own parameters back on exit."""
    before = {name: (module.weight, module.bias) for name, module in modules.items()}
    try:
        yield
    finally:
        for name, (weight, bias) in before.items():
            modules[name].weight, modules[name].bias = weight, bias
