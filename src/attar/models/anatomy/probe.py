"""A probe: a block run with random Linears, to see which module depends on which.

Every Linear of a model without weights returns fixed random numbers for any input; everything between the
Linears (norms, rotary positions, attention, activations) runs as it is. Multiply the output of one module,
and see which Linears' inputs change, how, and whether the block's output does: facts about the function,
without a table of families and without a weight. A probe of five tokens takes milliseconds even for a block
of many gigabytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Anatomy, Block
from attar.models.anatomy.roles import is_linear
from attar.models.loading.empty import empty_model

TOKENS = 5

OutputChange = Callable[[Tensor], Tensor]
"""Changes a module's output (..., width)."""


@dataclass(frozen=True)
class BlockResponse:
    """The inputs and the output of a block's run.

    Attributes:
        inputs: input of every Linear, by module name.
        output: hidden states (1, T, D) after the block.
    """

    inputs: dict[str, Tensor]
    output: Tensor


class _Stop(Exception):  # noqa: N818  (control flow, not an error)
    pass


class BlockProbe:
    """A model whose Linears return fixed random numbers.

    Args:
        config: a parsed config.json, or a transformers config whose ``architectures`` name the class.
    """

    def __init__(self, config: Mapping[str, Any] | Any) -> None:
        self.model = empty_model(config, unstacked=True)
        self.anatomy: Anatomy = discover(self.model)
        self.changes: Mapping[str, OutputChange] = {}
        self.inputs: dict[str, Tensor] = {}
        for name, parameter in list(self.model.named_parameters()):
            if not name.startswith(f"{self.anatomy.blocks_name}."):  # zeros that occupy four bytes
                self._set(name, torch.zeros(1).expand(parameter.shape))
        for block in self.anatomy.blocks:
            self._set_random(block)
        self.calls = self._record()

    def run(
        self, block: Block, changes: Mapping[str, OutputChange] | None = None, hidden: Tensor | None = None
    ) -> BlockResponse:
        """Run one block.

        Args:
            block: one of ``anatomy.blocks``.
            changes: by name of a Linear or of a norm over the residual stream, what happens to its output.
            hidden: (1, 5, D) the block's input; None: fixed random numbers of mean 1.
        """
        args, kwargs = self.calls[block.index]
        hidden = self.hidden() if hidden is None else hidden
        self.changes, self.inputs = changes or {}, {}
        with torch.no_grad():
            if args:
                output = block.module(hidden, *args[1:], **kwargs)
            else:
                output = block.module(**{**kwargs, "hidden_states": hidden})
        return BlockResponse(self.inputs, output if isinstance(output, Tensor) else output[0])

    def hidden(self) -> Tensor:
        """Random hidden states (1, 5, D) of mean 1, the same each time."""
        return 1.0 + _numbers("hidden", (1, TOKENS, self.anatomy.hidden_size))

    def _set_random(self, block: Block) -> None:
        """Random Linears for a block, and random values for its few other parameters."""
        for name, module in block.module.named_modules():
            full = f"{block.name}.{name}"
            if is_linear(module):
                rows = module.out_features if isinstance(module, nn.Linear) else module.nf
                module.forward = self._random_linear(full, int(rows))  # type: ignore[arg-type, assignment]
                continue
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                self._set(f"{full}.{leaf}", 1.0 + 0.3 * _numbers(f"{full}.{leaf}", tuple(parameter.shape)))
            if full in block.norms:
                module.register_forward_hook(self._changed(full))

    def _random_linear(self, name: str, rows: int) -> Callable[..., Tensor]:
        def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
            self.inputs[name] = x
            answer = _numbers(name, (*x.shape[:-1], rows))
            return self.changes[name](answer) if name in self.changes else answer

        return forward

    def _changed(self, name: str) -> Callable[..., Tensor | None]:
        def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
            return self.changes[name](output) if name in self.changes else None

        return hook

    def _record(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """How the model calls each of its blocks (masks, rotary tables), from one run up to the last."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args, kwargs))
            if len(calls) == len(self.anatomy.blocks):
                raise _Stop

        handles = [
            block.module.register_forward_pre_hook(hook, with_kwargs=True) for block in self.anatomy.blocks
        ]
        tokens = torch.arange(3, 3 + TOKENS)[None] % self.anatomy.vocab_size
        try:
            with torch.no_grad():
                self.model(input_ids=tokens, **({"use_cache": False} if self.anatomy.causal else {}))
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def _set(self, name: str, value: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


def _numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers that depend on a name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two results of a probe are equal but for float32's rounding."""
    if a.shape != b.shape:
        return False
    if not a.numel():  # no token came to this expert
        return True
    return bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max())))
