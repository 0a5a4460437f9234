"""What the compiled step carries of a sequence: the last inputs of its convolutions, and the states of its
recurrences.

After the tokens [0, position) a sequence's window has the inputs of the last width - 1 of them, zeros before
the first, and its states have seen them all. The store (kv/state_store.py) keeps both, and behind them the
inputs of tokens that may still be rejected. Once it is known how many stay, the next window is a part of
both, and a recurrence goes over those that stay again before the tokens of the next step: its products are
not computed again, and their inputs take less room than a state of each draft.

Letters: w width - 1, c layers that carry states, h numbers of a token in one of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from attar.kernels.decode import ModelWeights
from attar.kernels.memory import huge_pages
from attar.kernels.structures import CarriedSpan
from attar.runtime.kv.state_snapshots import BYTES, StateSnapshots
from attar.runtime.kv.state_store import SequenceState, StateStore
from attar.runtime.step import StepInput, TokenSpan

WINDOW, STATES = "window", "states"  # of the tensors in a SequenceState


class CarriedStates:
    """The states of a compiled runner's sequences.

    Attributes:
        nbytes: of a sequence.
    """

    def __init__(self, weights: ModelWeights, block_size: int) -> None:
        self.shape, self.buffers = weights.window_shape, StateBuffers(weights.state_numbers)
        self.nbytes = 4 * (prod(self.shape) + weights.state_numbers)
        kept = BYTES // self.nbytes if self.nbytes else 0
        self.store = StateStore(StateSnapshots(block_size, kept) if kept else None)

    def step(self, step: StepInput) -> CarriedStep:
        """What a step reads, and keeps."""
        assert not any(tree for _, tree in step.trees()), "a state follows one chain of tokens"
        rows = zip(step.spans, step.offsets[:-1], strict=True)
        spans = [WalkedSpan(span, self.store.before(span), row, self.shape) for span, row in rows]
        for span in spans:
            span.save(self.buffers)
        return CarriedStep(spans)

    def update(self, steps: Sequence[CarriedStep]) -> None:
        """The parts of a step have run."""
        pairs = [pair for step in steps for pair in step.with_inputs()]
        states = {span.span.sequence: span.after(inputs) for span, inputs in pairs}
        self.store.update(states, {span.span.sequence: span.snapshots(inputs) for span, inputs in pairs})


class StateBuffers:
    """Room for states of recurrences; it is used again once nothing refers to what was taken.

    Args:
        numbers: of a sequence's.
    """

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """float32 (numbers,), of any content."""
        room = self._free.pop() if self._free else huge_pages(4 * self.numbers)
        states = room[: 4 * self.numbers].view(torch.float32)
        weakref.finalize(states, self._free.append, room)
        return states


class WalkedSpan:
    """One span: what comes before it, and the tokens of it whose inputs are needed afterwards.

    Attributes:
        history: float32 (w + n, c, h): of the tokens from w before the kept state to the span.
        again: n.
        keep: tokens of the span.
        saved: states of recurrences, by the position that they are of.
    """

    def __init__(self, span: TokenSpan, before: SequenceState, row: int, shape: tuple[int, ...]) -> None:
        self.span, self.before, self.row = span, before, row
        self.width = shape[0]
        window = before.layers[WINDOW] if before.layers else torch.zeros(shape)
        self.again = span.start - before.position
        self.history = torch.cat([window, before.inputs[WINDOW][: self.again]]) if self.again else window
        self.certain = max(span.stop - span.drafts, before.position)
        self.due = [end for end in span.snapshots if before.position < end <= self.certain]
        wanted = {token for end in (*self.due, self.certain) for token in range(end - self.width, end)}
        wanted |= set(range(self.certain, span.stop))
        self.keep = sorted(token for token in wanted if span.start <= token < span.stop)
        self.saved: dict[int, Tensor] = {}

    def save(self, buffers: StateBuffers) -> None:
        """Take room for the states of recurrences, if there are any."""
        if buffers.numbers:
            ends = sorted({*self.due, self.certain} - {self.before.position})
            self.saved = {end: buffers.take() for end in ends}

    @property
    def carried(self) -> CarriedSpan:
        """What the library reads and writes."""
        saves = [(end - self.before.position, to) for end, to in self.saved.items()]
        states = self.before.layers.get(STATES)
        return CarriedSpan(again=self.again, history=self.history, states=states, saves=saves)

    def after(self, inputs: Tensor) -> SequenceState:
        """What the next span continues from; inputs (len(keep), c, h)."""
        uncertain = self.certain < self.span.stop
        later = {WINDOW: self._rows(self.certain, self.span.stop, inputs)} if uncertain else {}
        return SequenceState(self.certain, self.span.stop, self._layers(self.certain, inputs), later)

    def snapshots(self, inputs: Tensor) -> dict[int, SequenceState]:
        """For the prefix cache, by position."""
        return {end: SequenceState(end, end, self._layers(end, inputs)) for end in self.due}

    def _layers(self, end: int, inputs: Tensor) -> dict[str, Tensor]:
        """The window and the states after the tokens before ``end``."""
        layers = {WINDOW: self._rows(end - self.width, end, inputs)}
        states = self.saved.get(end, self.before.layers.get(STATES))
        return layers if states is None else layers | {STATES: states}

    def _rows(self, first: int, last: int, inputs: Tensor) -> Tensor:
        """Of the tokens [first, last), a copy."""
        start, begin = self.span.start, self.before.position - self.width
        parts = [self.history[first - begin : max(min(last, start) - begin, first - begin)]]
        if last > start:
            at = self.keep.index(max(first, start))
            parts.append(inputs[at : at + last - max(first, start)])
        return torch.cat(parts)


class CarriedStep:
    """All spans of a step.

    Attributes:
        keep, carried, inputs: of :class:`attar.kernels.structures.StepTokens`.
    """

    def __init__(self, spans: Sequence[WalkedSpan]) -> None:
        self._spans = spans
        self.keep = [span.row + token - span.span.start for span in spans for token in span.keep]
        self.carried = [span.carried for span in spans]
        self.inputs = torch.empty(len(self.keep), *spans[0].history.shape[1:])

    def with_inputs(self) -> list[tuple[WalkedSpan, Tensor]]:
        """Each span with those of its tokens, once they are there."""
        parts = self.inputs.split([len(span.keep) for span in self._spans])
        return list(zip(self._spans, parts, strict=True))
