"""What the compiled step carries of a sequence: the last inputs of its short convolutions.

After the tokens [0, position) a sequence's window has the inputs of the last width - 1 of them, zeros before
the first. The store (kv/state_store.py) keeps windows, and behind each the inputs of tokens that may still be
rejected: once it is known how many stay, the next window is a part of both, and nothing is run again.

Letters: w width - 1, c convolutions, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from attar.kernels.decode import ModelWeights
from attar.runtime.kv.state_snapshots import BYTES, StateSnapshots
from attar.runtime.kv.state_store import SequenceState, StateStore
from attar.runtime.step import StepInput, TokenSpan

NAME = "convolutions"  # of the tensors in a SequenceState


class ConvolutionStates:
    """The states of a compiled runner's sequences.

    Attributes:
        nbytes: of a sequence.
    """

    def __init__(self, weights: ModelWeights, block_size: int) -> None:
        self.shape = weights.state_shape
        self.nbytes = 4 * prod(self.shape)
        kept = BYTES // self.nbytes if self.nbytes else 0
        self.store = StateStore(StateSnapshots(block_size, kept) if kept else None)

    def step(self, step: StepInput) -> ConvolutionStep:
        """What a step reads, and keeps."""
        assert not any(tree for _, tree in step.trees()), "a state follows one chain of tokens"
        rows = zip(step.spans, step.offsets[:-1], strict=True)
        return ConvolutionStep(
            [ConvolutionSpan(span, self.store.before(span), row, self.shape) for span, row in rows]
        )

    def update(self, steps: Sequence[ConvolutionStep]) -> None:
        """The parts of a step have run."""
        pairs = [pair for step in steps for pair in step.with_inputs()]
        states = {span.span.sequence: span.after(inputs) for span, inputs in pairs}
        self.store.update(states, {span.span.sequence: span.snapshots(inputs) for span, inputs in pairs})


class ConvolutionSpan:
    """One span: its inputs before it, and the tokens of it whose inputs are needed afterwards.

    Attributes:
        history: float32 (w + n, c, h): of the tokens from w before the kept state to the span.
        keep: tokens of the span.
    """

    def __init__(self, span: TokenSpan, before: SequenceState, row: int, shape: tuple[int, ...]) -> None:
        self.span, self.before, self.row = span, before, row
        self.width = shape[0]
        window = before.layers[NAME] if before.layers else torch.zeros(shape)
        count = span.start - before.position
        self.history = torch.cat([window, before.inputs[NAME][:count]]) if count else window
        self.certain = max(span.stop - span.drafts, before.position)
        self.due = [end for end in span.snapshots if before.position < end <= self.certain]
        wanted = {token for end in (*self.due, self.certain) for token in range(end - self.width, end)}
        wanted |= set(range(self.certain, span.stop))
        self.keep = sorted(token for token in wanted if span.start <= token < span.stop)

    @property
    def window(self) -> Tensor:
        """(w, c, h): of the tokens before the span."""
        return self.history[len(self.history) - self.width :]

    def after(self, inputs: Tensor) -> SequenceState:
        """What the next span continues from; inputs (len(keep), c, h)."""
        uncertain = self.certain < self.span.stop
        later = {NAME: self._rows(self.certain, self.span.stop, inputs)} if uncertain else {}
        return SequenceState(self.certain, self.span.stop, {NAME: self._window(self.certain, inputs)}, later)

    def snapshots(self, inputs: Tensor) -> dict[int, SequenceState]:
        """For the prefix cache, by position."""
        return {end: SequenceState(end, end, {NAME: self._window(end, inputs)}) for end in self.due}

    def _window(self, end: int, inputs: Tensor) -> Tensor:
        """(w, c, h): of the tokens before ``end``."""
        return self._rows(end - self.width, end, inputs)

    def _rows(self, first: int, last: int, inputs: Tensor) -> Tensor:
        """Of the tokens [first, last), a copy."""
        start, begin = self.span.start, self.before.position - self.width
        parts = [self.history[first - begin : max(min(last, start) - begin, first - begin)]]
        if last > start:
            at = self.keep.index(max(first, start))
            parts.append(inputs[at : at + last - max(first, start)])
        return torch.cat(parts)


class ConvolutionStep:
    """All spans of a step.

    Attributes:
        keep, states, inputs: of :class:`attar.kernels.structures.StepTokens`.
    """

    def __init__(self, spans: Sequence[ConvolutionSpan]) -> None:
        self._spans = spans
        self.keep = [span.row + token - span.span.start for span in spans for token in span.keep]
        self.states = torch.stack([span.window for span in spans])
        self.inputs = torch.empty(len(self.keep), *self.states.shape[2:])

    def with_inputs(self) -> list[tuple[ConvolutionSpan, Tensor]]:
        """Each span with those of its tokens, once they are there."""
        parts = self.inputs.split([len(span.keep) for span in self._spans])
        return list(zip(self._spans, parts, strict=True))
