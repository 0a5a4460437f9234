"""CUDA graphs of steps with few tokens, one for each shape that steps are rounded up to.

A captured step reads one tensor of numbers, which is overwritten from pinned memory before each replay: what
its kernels read of lengths and tables is in there, and nothing of it is a constant of the launch. Shapes
follow from the number of tokens (BUCKETS), from the longest table (powers of two) and from whether there are
trees.

ATTAR_GRAPHS=off: none. Never run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attar.runtime.runner.device.step import StepShape

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WORDS = 2  # of a tree: 64 nodes
WARM_UPS = 2  # runs before a capture, which allocate and compile

RunShape = Callable[[Tensor, StepShape], Tensor]
"""Logits of staged numbers on the device."""


def wanted(device: torch.device) -> bool:
    """Whether steps on a device are captured."""
    return device.type == "cuda" and os.environ.get("ATTAR_GRAPHS", "on") != "off"


def bucket(shape: StepShape) -> StepShape | None:
    """The shape of the graph that runs a step; None: too large for one."""
    tokens = next((size for size in BUCKETS if size >= shape.tokens), None)
    if tokens is None or shape.words > WORDS:
        return None
    blocks = 1 << (shape.blocks - 1).bit_length()
    return StepShape(tokens, tokens + 1, blocks, tokens, WORDS if shape.words else 0)


@dataclass
class CapturedStep:
    """A graph with the tensors that it reads and writes.

    Attributes:
        pinned, numbers: of a step, on the host and on the device.
        copied: the event after their last copy.
    """

    graph: Any
    pinned: Tensor
    numbers: Tensor
    logits: Tensor
    copied: Any

    def replay(self, staged: Tensor) -> Tensor:
        """Logits of a step's numbers, in a tensor of their own."""
        self.copied.synchronize()
        self.pinned.copy_(staged)
        self.numbers.copy_(self.pinned, non_blocking=True)
        self.copied.record()
        self.graph.replay()
        return self.logits.clone()


@dataclass
class StepGraphs:
    """The graphs of a program, captured when their shape first comes; they share memory: one runs at a time.

    Args:
        run: a step; reads nothing on the host.
    """

    run: RunShape
    device: torch.device
    captured: dict[StepShape, CapturedStep] = field(default_factory=dict)
    memory: Any = None

    def replay(self, staged: Tensor, shape: StepShape) -> Tensor:
        """Logits (shape.rows, vocabulary) of numbers on the CPU, in a tensor of their own."""
        if shape not in self.captured:
            self.captured[shape] = self.capture(staged, shape)
        return self.captured[shape].replay(staged)

    def forget(self) -> None:
        """Capture anew: the program has other tensors."""
        self.captured.clear()

    def capture(self, staged: Tensor, shape: StepShape) -> CapturedStep:
        """A graph of a shape, from the first step of it."""
        pinned, numbers = staged.pin_memory(), staged.to(self.device)
        self.memory = self.memory or torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.run(numbers, shape)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            logits = self.run(numbers, shape)
        copied = torch.cuda.Event()
        copied.record()
        return CapturedStep(graph, pinned, numbers, logits, copied)
