"""The words of the tensor map: tap (one model's tensor), row (a tensor of the result), piece (its layers)."""

from __future__ import annotations

from dataclasses import dataclass

from attar.merging.config.schema import Module, Slice, Source
from attar.merging.member import Member
from attar.merging.planning.naming import Stack


@dataclass(frozen=True)
class Tap:
    """A stored tensor of one model, and the source whose settings hold for it."""

    member: Member
    name: str
    source: Source


@dataclass(frozen=True)
class Row:
    """One tensor of the result.

    Attributes:
        name: its name.
        kind: as in :class:`attar.merging.planning.plan.Output`.
        stack: prefix of its stack; empty outside of stacks.
        layer: number of its layer, or None.
        depth: where gradients are read.
        module, slice: whose settings hold.
        taps: what is merged.
        base: the base model's tensor.
        passed: the single tap is the result, no method is run.
    """

    name: str
    kind: str
    stack: str
    layer: int | None
    depth: float
    module: Module
    slice: Slice
    taps: tuple[Tap, ...]
    base: Tap | None
    passed: bool = False


@dataclass(frozen=True)
class Start:
    """Where a source's layers begin.

    Attributes:
        source: with its settings.
        member: its model.
        stack: of that model.
        first: first layer.
        count: how many layers.
    """

    source: Source
    member: Member
    stack: Stack
    first: int
    count: int


@dataclass(frozen=True)
class Piece:
    """Some layers of the result: where they come from.

    Attributes:
        slice: the slice that they are of.
        lead: model whose names the result has.
        stack: the lead's stack.
        length: how many layers.
        starts: what is merged.
        base: the base model.
        passed: there is one source and no method is run.
    """

    slice: Slice
    lead: Member
    stack: Stack
    length: int
    starts: tuple[Start, ...]
    base: Start | None
    passed: bool

    def all(self) -> tuple[Start, ...]:
        """What is merged, and after it the base where there is one."""
        return (*self.starts, self.base) if self.base else self.starts
