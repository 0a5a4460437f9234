"""One step through the layers that carry states: each span from its own state.

    inputs of a span    those kept since the state, of tokens accepted since; then the step's tokens
    segments            [state, certain) moves the state; [certain, end) are drafts, from a copy of it

Each segment is one call of transformers' layer. In each round the next segments of all spans are run: those
of one length, all begun or all at their start, are stacked. So sequences that decode take one call, whatever
their number.

Letters: T tokens of the step, n sequences of a call, t tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from attar.runtime.kv.state_store import SequenceState, StateStore
from attar.runtime.runner.state_layers import LayerCall, LayerState
from attar.runtime.step import StepInput, TokenSpan

States = dict[str, Tensor]
"""One sequence's states of a layer, each (1, ...)."""
CallContext = Callable[[Sequence[str], int], AbstractContextManager[None]]
"""Entered around a call, with the adapter of each sequence and t."""


class SpanStates:
    """One span's way through a layer: which of its tokens move the state.

    Attributes:
        bounds: positions where its segments begin and end.
        certain: the state is kept after the tokens [0, certain).
    """

    def __init__(self, span: TokenSpan, before: SequenceState, rows: slice) -> None:
        self.span, self.before, self.rows = span, before, rows
        self.certain = max(span.stop - span.drafts, before.position)
        due = [end for end in span.snapshots if before.position < end <= self.certain]
        self.bounds = sorted({before.position, *due, self.certain, span.stop})
        self.layers: dict[str, States] = {}  # after [0, certain)
        self.snapshots: dict[int, dict[str, States]] = {end: {} for end in due}
        self.inputs: dict[str, Tensor] = {}  # of [certain, stop)

    def inputs_of(self, name: str, hidden: Tensor) -> Tensor:
        """(t, hidden): of the tokens [position of the state, stop)."""
        kept = self.before.inputs.get(name)
        new = hidden[self.rows]
        count = self.span.start - self.before.position
        return new if not count or kept is None else torch.cat([kept[:count], new])

    def after(self) -> SequenceState:
        """The state that the next span continues from."""
        return SequenceState(self.certain, self.span.stop, self.layers, self.inputs)


class StatePass:
    """The states of one step.

    Args:
        step: of chains.
        store: the states before it, which stay as they are.
        around: see :data:`CallContext`.
        stepwise: layers that, once begun, are called with one token at a time.
    """

    def __init__(
        self,
        step: StepInput,
        store: StateStore,
        around: CallContext,
        stepwise: Collection[str] = (),
    ) -> None:
        assert not any(tree for _, tree in step.trees()), "a state follows one chain of tokens"
        self._around, self._stepwise = around, stepwise
        bounds = zip(step.spans, step.offsets[:-1], step.offsets[1:], strict=True)
        self._spans = [SpanStates(span, store.before(span), slice(*rows)) for span, *rows in bounds]

    def snapshots(self) -> dict[int, dict[int, SequenceState]]:
        """The states that spans keep for the prefix cache, by sequence and position."""
        return {
            part.span.sequence: {end: SequenceState(end, end, kept) for end, kept in part.snapshots.items()}
            for part in self._spans
        }

    def states(self) -> dict[int, SequenceState]:
        """The states after the step, by sequence."""
        return {part.span.sequence: part.after() for part in self._spans}

    def run(self, name: str, call: LayerCall, hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
        """hidden (1, T, hidden); returns what the layer returns for it, in the order of its tokens."""
        inputs = [part.inputs_of(name, hidden[0]) for part in self._spans]
        states: list[States] = [dict(part.before.layers.get(name, {})) for part in self._spans]
        outputs: list[list[tuple[Tensor, ...]]] = [[] for _ in self._spans]
        for index in range(max(len(part.bounds) for part in self._spans)):
            self._keep(name, index, inputs, states)
            for group in self._groups(index, states):
                x = torch.stack([self._segment(number, index, inputs[number]) for number in group])
                stacked = LayerState(_stacked([states[number] for number in group]))
                alone = name in self._stepwise and bool(stacked.tensors)
                for token in x.split(1, dim=1) if alone else (x,):
                    with self._around([self._spans[number].span.adapter for number in group], token.shape[1]):
                        output = call(token, stacked)
                    parts = output if isinstance(output, tuple) else (output,)
                    for row, number in enumerate(group):
                        outputs[number].append(tuple(part[row] for part in parts))
                for row, number in enumerate(group):
                    states[number] = {key: value[row : row + 1] for key, value in stacked.tensors.items()}
        joined = [
            torch.cat([_last(part, rows) for part, rows in zip(self._spans, column, strict=True)])[None]
            for column in zip(*(_joined(segments) for segments in outputs), strict=True)
        ]
        return tuple(joined) if isinstance(output, tuple) else joined[0]

    def _keep(self, name: str, index: int, inputs: list[Tensor], states: list[States]) -> None:
        """Keep the states of the spans that are at a snapshot, or at the end of their certain tokens."""
        for part, x, state in zip(self._spans, inputs, states, strict=True):
            if index < len(part.bounds) and part.bounds[index] in part.snapshots:
                copied = {key: value.clone() for key, value in state.items()}  # not a row of its batch
                part.snapshots[part.bounds[index]][name] = copied
            if index < len(part.bounds) and part.bounds[index] == part.certain:
                part.layers[name] = state
                if part.span.stop > part.certain:
                    part.inputs[name] = x[part.certain - part.before.position :].clone()

    def _groups(self, index: int, states: list[States]) -> list[list[int]]:
        """The spans that have a segment ``index``, by its length and whether they have begun."""
        groups: dict[tuple[int, bool], list[int]] = {}
        for number, part in enumerate(self._spans):
            if index + 1 < len(part.bounds):
                length = part.bounds[index + 1] - part.bounds[index]
                groups.setdefault((length, bool(states[number])), []).append(number)
        return list(groups.values())

    def _segment(self, number: int, index: int, inputs: Tensor) -> Tensor:
        bounds = self._spans[number].bounds
        return inputs[bounds[index] - bounds[0] : bounds[index + 1] - bounds[0]]


def _stacked(states: Sequence[States]) -> States:
    """(n, ...) of n sequences: copies, which the layer may overwrite."""
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


def _joined(segments: list[tuple[Tensor, ...]]) -> list[Any]:
    """A span's outputs (t, ...) from those of its segments."""
    return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*segments, strict=True)]


def _last(part: SpanStates, outputs: Tensor) -> Tensor:
    """Of the step's tokens, without those that were run again."""
    return outputs[-part.span.count :]
