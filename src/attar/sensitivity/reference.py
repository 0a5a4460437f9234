"""A model with the logits that it has before any change, and forward passes that start at any block.

    kl = mean over tokens of KL(p || q)      p the model before; q the model as it is now

What measures many changes of one model (a layer rounded, pruned, left out), each alone, runs only the blocks
from the first changed one on: the hidden states before it are stored. Hidden states and logits beyond a limit
are on disk.
"""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.walks.objectives import token_kl
from attar.walks.offloaded_model import HiddenStates, fixed_output
from attar.walks.passes import StopForward

MEMORY = 8 * 2**30  # bytes of reference logits kept in memory; the rest is spilled to disk


@contextmanager
def reference_of(
    model: nn.Module,
    blocks: Sequence[str],
    batches: Sequence[Tensor],
    precision: str,
    memory: int,
    work: Path,
    after_blocks: Sequence[str] = (),
) -> Iterator[ReferenceModel]:
    """The model with its logits before any change, for the length of the context.

    Args:
        model: loaded dense, in evaluation mode.
        blocks: names of its blocks in order; without them every pass runs the whole model.
        batches: int64 (B, S), none padded.
        precision: of the passes: ``bf16`` or ``fp32``.
        memory: bytes of logits, and as many of hidden states, that are kept in memory.
        work: folder for the rest; removed before and afterwards.
        after_blocks: names of modules that run after the last block, such as an untied head.
    """
    shutil.rmtree(work, ignore_errors=True)
    try:
        with torch.no_grad():
            stores = [HiddenStates(work / name, memory) for name in ("hidden", "logits")]
            dtype = torch.bfloat16 if precision == "bf16" else None
            yield ReferenceModel(model, blocks, batches, stores[0], stores[1], dtype, after_blocks)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class ReferenceModel:
    """The logits of the unchanged model, and forward passes that start at any block.

    The blocks before ``start`` are replaced by functions that return the hidden states stored before block
    ``start``. The model itself makes masks and positions, so this works for any family.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        batches: Sequence[Tensor],
        hidden: HiddenStates,
        logits: HiddenStates,
        dtype: torch.dtype | None,
        after_blocks: Sequence[str],
    ) -> None:
        self.model, self.names, self.batches = model, tuple(blocks), batches
        self.after_blocks = tuple(after_blocks)
        self.hidden, self.logits, self.dtype = hidden, logits, dtype
        self.device = next(model.parameters()).device
        self.blocks: list[Any] = [model.get_submodule(name) for name in blocks]
        self.extra: dict[int, int | None] = {}  # entries after the hidden states in a block's output
        self.start = 0
        parameters = inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in parameters else {}
        for number in range(len(batches)):
            logits[number] = self.run(number)
        self.tokens = sum(batch.numel() for batch in batches)

    def first_block(self, modules: Sequence[str]) -> int:
        """The first block that a change of these modules affects; the number of blocks for modules after
        them, 0 for other modules outside the blocks."""
        return min(self._block_of(module) for module in modules)

    def _block_of(self, module: str) -> int:
        if module in self.after_blocks:
            return len(self.names)
        return next((number for number, name in enumerate(self.names) if module.startswith(f"{name}.")), 0)

    def run(self, number: int) -> Tensor:
        """Logits (B, S, V) of a batch by the model as it is now."""
        with ExitStack() as stack:
            if self.dtype is not None:
                stack.enter_context(torch.autocast(self.device.type, self.dtype))
            if self.start:
                hidden = self.hidden[number].to(self.device)
                for block in range(self.start):
                    stack.enter_context(fixed_output(self.blocks[block], hidden, self.extra[block]))
            logits: Tensor = self.model(input_ids=self.batches[number].to(self.device), **self.options).logits
        return logits

    def move(self, start: int) -> None:
        """Store the hidden states before block ``start``, from which later passes run; never goes back.

        Where blocks pass on more than hidden states, the logits differ; such a model is run whole from then
        on.
        """
        if start <= self.start or not self.blocks:
            return
        for number in range(len(self.batches)):
            self.hidden[number] = self._before(start, number)
        self.start = start
        logits, expected = self.run(0).float().cpu(), self.logits[0].float()
        if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
            self.blocks, self.start = [], 0

    def restart(self) -> None:
        """Run later passes from the first block on again."""
        self.start = 0

    def _before(self, start: int, number: int) -> Tensor:
        """The output of block ``start - 1``."""
        outputs: list[Tensor] = []

        def record(block: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: Any, output: Any) -> None:
                self.extra[block] = None if isinstance(output, Tensor) else len(output) - 1
                if block == start - 1:
                    outputs.append(output if isinstance(output, Tensor) else output[0])
                    raise StopForward

            return hook

        hooks = [
            self.blocks[block].register_forward_hook(record(block)) for block in range(self.start, start)
        ]
        try:
            self.run(number)
        except StopForward:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return outputs[0]

    def kl(self) -> float:
        """Mean KL of the unchanged model to the model as it is now; infinite where it is not finite."""
        total = 0.0
        for number in range(len(self.batches)):
            q = self.run(number).flatten(0, 1)
            total += float(token_kl(self.logits[number].flatten(0, 1).to(q.device), q).sum())
        return total / self.tokens if math.isfinite(total) else math.inf
