"""Gradients at the outputs of Linears, of the log-likelihood of labels sampled from the model's own output:
the Fisher matrix of the model is the mean of their products (kronecker.py), what a position is worth the mean
of their squares (positions.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

GradientCallback = Callable[[str, Tensor, Tensor], None]
"""``callback(name, inputs, gradients)``: (B, S, K) and (B, S, N)."""


class GradientHooks:
    """Hooks that pass the input and the output gradient of each named module to ``callback``, by sequence.
    Backward ends at the first of them.

    Attributes:
        shape: (B, S) of the batch that is running.
    """

    def __init__(self, names: Sequence[str], callback: GradientCallback) -> None:
        self.names, self.callback = names, callback
        self.shape = (0, 0)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Hooks set, and no gradients of parameters: only those of activations are needed."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handles = []
        for name in self.names:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(self._require_gradient))
            handles.append(module.register_forward_hook(partial(self._hook_output, name)))
        try:
            for parameter in trainable:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)
            for handle in handles:
                handle.remove()

    @staticmethod
    def _require_gradient(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if args[0].requires_grad else (args[0].detach().requires_grad_(True), *args[1:])

    def _hook_output(self, name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x = self._sequences(args[0].detach())
        output.register_hook(lambda g: self.callback(name, x, self._sequences(g)))

    def _sequences(self, value: Tensor) -> Tensor:
        """(B, S, features). Some families flatten the batch before a Linear; the tokens of an expert count
        as one sequence."""
        if value.ndim == 3:
            return value
        complete = value.shape[0] == self.shape[0] * self.shape[1]
        return value.reshape(self.shape[0] if complete else 1, -1, value.shape[-1])


def gradients(
    model: nn.Module,
    batches: Sequence[Tensor],
    hooks: GradientHooks,
    generator: torch.Generator,
    autocast: torch.dtype | None,
) -> Iterator[None]:
    """Run each batch forward and, with labels drawn from its output, backward."""
    device = next(model.parameters()).device
    with hooks.on(model):
        for batch in batches:
            hooks.shape = (batch.shape[0], batch.shape[1])
            context = torch.autocast(device.type, autocast) if autocast else nullcontext()
            with torch.enable_grad(), context:
                logits = _logits(model, batch.to(device)).flatten(0, -2).float()
            labels = _sampled_labels(logits.detach(), generator)
            with torch.enable_grad():
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
            loss.backward()
            yield


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _sampled_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A label for each row of logits (T, V), sampled from their softmax: int64 (T,)."""
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
