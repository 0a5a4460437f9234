"""Forward passes through one block that stop at each group of Linears, wait, and continue.

True sequential quantization needs a group's inputs after the groups before it have their new weights.
Running the block again up to each group costs two to three times a plain pass. A pass that *waits* costs
one: it runs in a coroutine, yields the group's input, and is resumed when the weights are in place. The
tensors of a waiting pass (residual, attention output, the MLP's product) stay in memory for every batch;
where that exceeds the limit, passes start again for each group. Both ways compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from attar.models.loading.device import bf16_products


class StopForward(Exception):  # noqa: N818  (control flow, not an error)
    """Ends a forward pass early, from inside a hook."""


class BlockPasses:
    """Every batch's pass through one block, group by group.

    Args:
        run: ``run(number)`` is the whole forward pass of a batch and returns the block's output.
        stops: for each group, the module at which a pass stops; in forward order.
        waiting: passes wait between two groups, instead of starting again.
        fast: products in bfloat16 inside the block.
    """

    def __init__(
        self,
        run: Callable[[int], Tensor],
        count: int,
        stops: Sequence[nn.Module],
        *,
        waiting: bool,
        device: torch.device,
        fast: bool,
    ) -> None:
        self.run, self.count, self.stops, self.waiting = run, count, list(stops), waiting
        self.device, self.fast = device, fast
        self.coroutines: list[greenlet] = []
        self.hooks = [stop.register_forward_pre_hook(_yield_input) for stop in stops] if waiting else []

    def inputs(self, group: int) -> Iterator[Tensor]:
        """The inputs (B, S, K) of a group, batch by batch; each group once, in forward order."""
        yield from (arguments[0] for arguments in self.arguments(group))

    def arguments(self, group: int) -> Iterator[tuple[Tensor, ...]]:
        """All positional arguments of a group's stop, batch by batch; instead of :meth:`inputs`."""
        if not self.waiting:
            yield from (self._until(self.stops[group], number) for number in range(self.count))
            return
        if group == 0:
            self.coroutines = [greenlet(self.run) for _ in range(self.count)]
        for number, coroutine in enumerate(self.coroutines):
            yield self._switch(coroutine, *([number] if group == 0 else []))

    def outputs(self) -> Iterator[Tensor]:
        """The block's outputs (B, S, D), batch by batch, after the last group."""
        for number in range(self.count):
            if self.coroutines:
                output = self._switch(self.coroutines[number])
                self.coroutines[number] = _DONE
            else:
                with bf16_products(self.device, self.fast):
                    output = self.run(number)
            yield output

    def close(self) -> None:
        """Remove hooks and end passes that still wait."""
        for hook in self.hooks:
            hook.remove()
        for coroutine in self.coroutines:
            if coroutine:
                coroutine.throw()
        self.coroutines, self.hooks = [], []

    def _switch(self, coroutine: greenlet, *args: Any) -> Any:
        # autocast is thread state: on only while the pass runs
        with bf16_products(self.device, self.fast):
            return coroutine.switch(*args)

    def _until(self, stop: nn.Module, number: int) -> tuple[Tensor, ...]:
        """Run a batch up to a module; the module's arguments."""
        inputs: list[tuple[Tensor, ...]] = []

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            inputs.append(args)
            raise StopForward

        handle = stop.register_forward_pre_hook(hook)
        try:
            with bf16_products(self.device, self.fast):
                self.run(number)
        except StopForward:
            pass
        finally:
            handle.remove()
        return inputs[0]


_DONE = greenlet(lambda: None)


def _yield_input(_: nn.Module, args: tuple[Any, ...]) -> None:
    """Hook of a waiting pass: yield the arguments to the code that resumed the pass, and wait."""
    parent = getcurrent().parent
    if parent is not None:
        parent.switch(args)
