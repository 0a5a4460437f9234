"""Which stored tensors go into which tensor of the result: slices, stacks, tied heads, names that differ.

Layers are renumbered in the order of the slices. What stands before the layers is merged as the first slice
says, what stands after them as the last one does, both at depth 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attar.errors import ModelError, RecipeError
from attar.merging.config.schema import MergeConfig, Module, Slice, Source
from attar.merging.member import Member
from attar.merging.methods.method import Method
from attar.merging.modules import Assignment, assign
from attar.merging.planning.naming import Stack, comes_first, is_buffer, kind_of, layer_name
from attar.merging.planning.parameters import layer_depth
from attar.merging.reference import ModelReference
from attar.merging.rows import Piece, Row, Start, Tap


class TensorMap:
    """The rows of a merge.

    Args:
        config: the document.
        method: its method.
        members: the opened models by reference.

    Attributes:
        rows: every tensor of the result, in its order.
        pieces: by prefix of a stack, its slices.
        notes: tensors that were left out.
    """

    def __init__(self, config: MergeConfig, method: Method, members: dict[ModelReference, Member]) -> None:
        self._config, self._method, self._members = config, method, members
        self.notes: list[str] = []
        self.pieces: dict[str, list[Piece]] = {}
        first = config.modules[0].slices[0].sources[0]
        self.lead = members[first.model]
        assignment = assign(config.modules, self.lead)
        rows: dict[str, Row] = {}
        for module, stack in assignment.stacks:
            pieces = [self._piece(each, stack) for each in module.slices]
            self.pieces[stack.prefix] = pieces
            for row in self._layers(module, stack, pieces):
                rows[row.name] = row
        for row in self._outside(assignment):
            rows[row.name] = row
        self.rows = sorted(rows.values(), key=_order)

    def _piece(self, part: Slice, stack: Stack) -> Piece:
        """Resolve a slice against the opened models."""
        starts = [self._start(source, stack) for source in part.sources]
        for start in starts:
            if start.count != starts[0].count:
                raise ModelError(
                    f"{start.member.label} has {start.count} layers and {starts[0].member.label} has"
                    f" {starts[0].count}",
                    hint="choose layers of each with 'slices'",
                )
        base = self._base(part, starts, stack)
        if self._method.base == "member":
            starts += [base] if base is not None and base not in starts else []
            base = None
        others = [start for start in starts if start is not base]
        passed = part.sources[0].layers is not None and not others  # the base alone
        taken = starts if passed else others
        self._check_twice(taken if passed or base is None else [base, *taken])
        if not passed:
            self._check_count(part, len(taken))
        return Piece(part, self.lead, stack, starts[0].count, tuple(taken), None if passed else base, passed)

    def _base(self, part: Slice, starts: Sequence[Start], stack: Stack) -> Start | None:
        """The base model's layers: those it is given as a source, else those that all sources have."""
        base = part.base or self._config.base
        if base is None or self._method.base == "unused":
            return None
        for start in starts:
            if start.source.model == base:
                return start
        layers = self._common_range(part.sources, base)
        if layers is not None:
            self.notes.append(
                f"{part.where}: the base model {base} is no source of this slice; its layers {layers[0]} to"
                f" {layers[1] - 1} are taken"
            )
        return self._start(Source(base, layers, {}, part.where), stack)

    def _start(self, source: Source, stack: Stack) -> Start:
        """Where a source's layers begin."""
        member = self._members[source.model]
        own = member.stack_like(stack, self.lead)
        first, end = source.layers or (0, own.count)
        if end > own.count:
            raise RecipeError(
                f"{source.where}: layer_range is [{first}, {end}], but {member.label} has {own.count} layers"
                f" (0 to {own.count - 1})"
            )
        return Start(source, member, own, first, end - first)

    def _common_range(self, sources: Sequence[Source], base: ModelReference) -> tuple[int, int] | None:
        """The layers of a base model that is not among a slice's sources: those of all of them."""
        first = sources[0].layers
        for source in sources:
            if source.layers != first:
                raise RecipeError(
                    f"{source.where}: the sources have different layers, so the base model {base} must be a"
                    " source too",
                    hint=f"add - model: {base} with the layer_range that belongs to these",
                )
        return first

    def _check_twice(self, starts: Sequence[Start]) -> None:
        """No folder under two names."""
        seen: dict[tuple[str, str | None], str] = {}
        for start in starts:
            key = (str(start.member.view.path), start.member.reference.lora)
            if key in seen:
                raise RecipeError(
                    f"{start.source.where}: {start.member.label} and {seen[key]} are one model"
                    " under two names"
                )
            seen[key] = start.member.label

    def _check_count(self, part: Slice, count: int) -> None:
        """As many models as the method takes."""
        least, most = self._method.models
        if least <= count and (most is None or count <= most):
            return
        wanted = f"exactly {least}" if least == most else f"at least {least}" if most is None else None
        beside = " beside the base" if self._method.base in ("required", "optional") else ""
        number = least if wanted else most
        raise RecipeError(
            f"{part.where}: {self._method.name} takes {wanted or f'{least} to {most}'}"
            f" {'model' if number == 1 else 'models'}{beside}, not {count}"
        )

    def _layers(self, module: Module, stack: Stack, pieces: Sequence[Piece]) -> Iterator[Row]:
        """The rows of a stack, renumbered."""
        offset = 0
        for piece in pieces:
            for index in range(piece.length):
                yield from self._layer(module, stack, piece, index, offset + index)
            offset += piece.length

    def _layer(self, module: Module, stack: Stack, piece: Piece, index: int, layer: int) -> Iterator[Row]:
        """The rows of one layer."""
        starts = piece.all()
        parts = [start.member.layer_parts(start.stack, start.first + index) for start in starts]
        depth = layer_depth(index, piece.length)
        for part in sorted({name: None for each in parts for name in each}):
            taps = [
                Tap(start.member, layer_name(start.stack.prefix, start.first + index, part), start.source)
                for start in starts
            ]
            if self._complete(taps):
                base = taps.pop() if piece.base is not None else None
                name, merged = layer_name(stack.prefix, layer, part), tuple(taps)
                yield Row(
                    name, "layer", stack.prefix, layer, depth, module, piece.slice, merged, base, piece.passed
                )

    def _complete(self, taps: Sequence[Tap]) -> bool:
        """Whether every tap's tensor is there; False for a buffer that some models store."""
        lacking = [tap for tap in taps if tap.name not in tap.member.view.tensors]
        if not lacking:
            return True
        has = next(tap for tap in taps if tap not in lacking)
        self._lacks(lacking[0].member, lacking[0].name, has.member, has.name)
        return False

    def _lacks(self, member: Member, name: str, owner: Member, owned: str) -> None:
        """Note a buffer that is left out; refuse any other tensor that a model lacks."""
        if is_buffer(owned):
            self.notes.append(
                f"{owned} is in {owner.label} and not in {member.label};"
                " it follows from the config and is left out"
            )
            return
        raise ModelError(
            f"{member.label}: no tensor {name!r}, which {owner.label} has"
            + (f" as {owned!r}" if owned != name else ""),
            hint="only models of the same layers and parts can be merged",
        )

    def _outside(self, assignment: Assignment) -> Iterator[Row]:
        """The rows outside the stacks."""
        owners: dict[str, tuple[Member, str]] = {}
        for pieces in self.pieces.values():
            for member in (start.member for piece in pieces for start in piece.all()):
                for name in member.names_outside():
                    owners.setdefault(member.called(name, self.lead), (member, name))
        for name in sorted(owners):
            module, stack = assignment.of(name)
            piece = self.pieces[stack.prefix][0 if comes_first(name) else -1]
            row = self._outer_row(name, module, piece, owners[name])
            if row is not None:
                yield row

    def _outer_row(self, name: str, module: Module, piece: Piece, owner: tuple[Member, str]) -> Row | None:
        """One row outside the stacks; None for a buffer that is left out."""
        taps = []
        for start in piece.all():
            stored = start.member.stored(name, self.lead)
            if stored is None:
                self._lacks(start.member, name, *owner)
                return None
            taps.append(Tap(start.member, stored, start.source))
        base = taps.pop() if piece.base is not None else None
        kind = kind_of(name, False)
        return Row(name, kind, "", None, 0.0, module, piece.slice, tuple(taps), base, piece.passed)


def _order(row: Row) -> tuple[int, str, int, str]:
    """Embeddings, layers in their order, the rest; by name inside each."""
    if row.layer is not None:
        return 1, row.stack, row.layer, row.name
    return (0 if comes_first(row.name) else 2), "", 0, row.name
