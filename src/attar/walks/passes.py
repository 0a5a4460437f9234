"""Forward passes through one block that stop at each group of Linears, wait, and go on.

True sequential quantization wants a group's inputs after the groups before it have got their new weights.
Running the block anew up to each group costs two to three times a plain pass. A pass that *waits* costs one:
it runs in a coroutine, hands the group's input up and is resumed when the weights are in place. What a
waiting pass holds (residual, attention output, the MLP's product) has to stay in memory for every batch;
where that is more than the limit, passes start again for each group instead. Both ways see the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn


class StopForward(Exception):  # noqa: N818  (control flow, not an error)
    """Ends a forward pass once all it was run for has been seen."""


class BlockPasses:
    """Every batch's pass through one block, group by group.

    Args:
        run: ``run(number)`` is the whole forward pass of a batch; gives the block's output.
        count: batches.
        stops: the module at which a pass stops for each group, in the order they run.
        waiting: hold the passes between two groups, instead of starting them again.
        fast: arithmetic in bfloat16 inside the block.
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
        self.held: list[greenlet] = []
        self.hooks = [stop.register_forward_pre_hook(_hand_up) for stop in stops] if waiting else []

    def inputs(self, group: int) -> Iterator[Tensor]:
        """The inputs (B, S, K) of a group, batch by batch; groups are asked for in order, each once."""
        if not self.waiting:
            yield from (self._until(self.stops[group], number) for number in range(self.count))
            return
        if group == 0:
            self.held = [greenlet(self.run) for _ in range(self.count)]
        for number, held in enumerate(self.held):
            yield self._switch(held, *([number] if group == 0 else []))

    def outputs(self) -> Iterator[Tensor]:
        """The block's outputs (B, S, D), batch by batch, after the last group."""
        for number in range(self.count):
            if self.held:
                output = self._switch(self.held[number])
                self.held[number] = _DONE
            else:
                with arithmetic(self.device, self.fast):
                    output = self.run(number)
            yield output

    def close(self) -> None:
        """Let go of hooks and of passes that still wait."""
        for hook in self.hooks:
            hook.remove()
        for held in self.held:
            if held:
                held.throw()
        self.held, self.hooks = [], []

    def _switch(self, held: greenlet, *args: Any) -> Any:
        # autocast is a state of the thread: it is on only while the pass runs
        with arithmetic(self.device, self.fast):
            return held.switch(*args)

    def _until(self, stop: nn.Module, number: int) -> Tensor:
        """Run a batch up to a module and give that module's input."""
        seen: list[Tensor] = []

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(args[0])
            raise StopForward

        handle = stop.register_forward_pre_hook(hook)
        try:
            with arithmetic(self.device, self.fast):
                self.run(number)
        except StopForward:
            pass
        finally:
            handle.remove()
        return seen[0]


_DONE = greenlet(lambda: None)


def _hand_up(_: nn.Module, args: tuple[Any, ...]) -> None:
    """A hook in a waiting pass: give the input to whoever resumed the pass, and wait."""
    parent = getcurrent().parent
    if parent is not None:
        parent.switch(args[0])


@contextmanager
def arithmetic(device: torch.device, fast: bool) -> Iterator[None]:
    """bfloat16 products inside, where wanted; what is outside stays float32."""
    with torch.autocast(device.type, torch.bfloat16, enabled=fast, cache_enabled=False):
        yield
