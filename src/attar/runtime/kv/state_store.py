"""The states of sequences: what layers without keys and values carry from token to token.

A layer of linear attention, a state space or a short convolution keeps a recurrent state and the last inputs
of its convolution, of the same size whatever the length of the sequence. After the tokens [0, position) of a
sequence its :class:`SequenceState` has both for every such layer. States are never changed: a step makes new
ones, and they take the place of the old ones once it has run. So a fork shares them, and a step that fails
has changed nothing.

A state cannot be taken back from a token, so it is never moved over tokens that may be rejected (drafts). It
stays before them, and the layers' inputs of these tokens are kept instead: the next step runs those that were
accepted through the layers again, together with its own tokens, and drops the others. Keeping a state of
every draft would cost a pass of one token through the layers for each of them.

    position ≤ start of the next span ≤ end         inputs: of the tokens [position, end)

This file holds tensors and reads none, so it needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attar.runtime.kv.state_snapshots import StateSnapshots
from attar.runtime.step import TokenSpan


@dataclass(frozen=True)
class SequenceState:
    """A sequence's states after its tokens [0, position).

    Args:
        end: tokens that were run; those from ``position`` on may have been rejected since.
        layers: tensors by name, of each layer; empty at the start of a sequence.
        inputs: of each layer, its inputs of the tokens [position, end); empty where there are none.
    """

    position: int
    end: int
    layers: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)


class StateStore:
    """The states of all sequences that run, by their ids.

    Args:
        snapshots: that a sequence may start from; None: none.
    """

    def __init__(self, snapshots: StateSnapshots | None = None) -> None:
        self.snapshots = snapshots
        self._states: dict[int, SequenceState] = {}

    @property
    def sequences(self) -> list[int]:
        """Ids with a state."""
        return list(self._states)

    def before(self, span: TokenSpan) -> SequenceState:
        """The state that a span continues from; an empty one for the first tokens of a sequence.

        Raises:
            AssertionError: the states of the tokens before the span are not here.
        """
        if span.offset == 0:
            return SequenceState(span.start, span.start)
        state = self._states.get(span.sequence)
        if state is None and self.snapshots is not None:
            state = self.snapshots.started(span.sequence)
        assert state is not None, f"sequence {span.sequence} starts at {span.start} without states"
        assert state.position <= span.start <= state.end, (
            f"sequence {span.sequence} starts at {span.start}, its states are of {state.position} "
            f"to {state.end} tokens"
        )
        return state

    def update(
        self, states: Mapping[int, SequenceState], snapshots: Mapping[int, Mapping[int, SequenceState]]
    ) -> None:
        """A step has run: the states after it, by sequence, and its snapshots, by sequence and position."""
        self._states.update(states)
        if self.snapshots is not None:
            for sequence, at in snapshots.items():
                self.snapshots.take(sequence, at)

    def fork(self, sequence: int, child: int) -> None:
        """``child`` continues from the same states."""
        if sequence in self._states:
            self._states[child] = self._states[sequence]

    def forget(self, sequence: int) -> None:
        """A sequence ended or was preempted; an unknown one is no error."""
        self._states.pop(sequence, None)
        if self.snapshots is not None:
            self.snapshots.forget(sequence)
