"""How many bits the inputs of a Linear get in EXL2, and which Linear gets how many: patterns, and the choice
among them under an average.

turboderp, ExLlamaV2, ``conversion/qparams.py`` (patterns, and the two of the head) and ``optimize.py`` (the
choice). There is no paper.

A pattern gives so many percent of the inputs, those of the largest H_ii first, a number of bits in groups of
a size. Errors are measured for a few patterns of each Linear; the choice is exact (allocate.py).

Differs from the reference: it chooses by simulated annealing and minimises the product of the errors of
attention and MLP blocks, whose patterns it lists together; here each Linear is chosen alone, and what is
minimised is a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attar.errors import SettingsError
from attar.formats.exl2 import refuse
from attar.quantization.grids.exl2 import TILE, EXL2Grid
from attar.quantization.mixed_precision.allocate import Option, allocate


@dataclass(frozen=True)
class BitPattern:
    """Bits of the inputs of a Linear.

    Attributes:
        parts: (bits, percent of the inputs, inputs of a group), bits falling, percents 100 in all. Each part
            is rounded up to whole groups, the last one takes what is left.
    """

    parts: tuple[tuple[int, int, int], ...]

    @property
    def name(self) -> str:
        """Such as ``10%:4b128+90%:3b128``."""
        return "+".join(f"{percent}%:{bits}b{size}" for bits, percent, size in self.parts)

    def sections(self, columns: int) -> tuple[tuple[int, int], ...]:
        """(bits, inputs) of each group of K inputs.

        Raises:
            ModelError: K is no multiple of 32.
        """
        refuse((TILE, columns))
        left, groups = columns, []
        for number, (bits, percent, size) in enumerate(self.parts):
            last = number == len(self.parts) - 1
            count = -(-left // size) if last else -(-columns * percent // (100 * size))
            for _ in range(count):
                width = min(size, left)
                groups += [(bits, width)] if width else []
                left -= width
        return tuple(groups)

    def grid(self, columns: int) -> EXL2Grid:
        """The number format of a weight with K inputs."""
        return EXL2Grid(self.sections(columns))

    def stored_bits(self, shape: tuple[int, int]) -> int:
        """Bits of everything that is stored for a weight (N, K)."""
        return round(self.grid(shape[1]).bits_per_weight(shape) * shape[0] * shape[1])


def _pattern(*parts: tuple[int, int, int]) -> BitPattern:
    return BitPattern(parts)


PATTERNS = (
    _pattern((3, 5, 64), (2, 95, 64)),
    _pattern((3, 15, 64), (2, 85, 64)),
    _pattern((3, 30, 64), (2, 70, 64)),
    _pattern((4, 10, 64), (3, 35, 64), (2, 55, 64)),
    _pattern((4, 15, 64), (3, 55, 64), (2, 30, 64)),
    _pattern((3, 100, 128)),
    _pattern((4, 10, 128), (3, 90, 128)),
    _pattern((4, 25, 64), (3, 75, 64)),
    _pattern((5, 10, 64), (4, 35, 64), (3, 55, 64)),
    _pattern((5, 15, 64), (4, 55, 64), (3, 30, 64)),
    _pattern((4, 100, 128)),
    _pattern((5, 10, 128), (4, 90, 128)),
    _pattern((5, 25, 64), (4, 75, 64)),
    _pattern((6, 10, 64), (5, 35, 64), (4, 55, 64)),
    _pattern((5, 100, 128)),
    _pattern((6, 10, 128), (5, 90, 128)),
    _pattern((6, 50, 128), (5, 50, 128)),
    _pattern((6, 100, 128)),
    _pattern((8, 10, 128), (6, 90, 128)),
    _pattern((8, 50, 128), (6, 50, 128)),
    _pattern((8, 100, 128)),
)
"""From some 2.1 to some 8.05 bits a weight."""

HEADS = {6: _pattern((8, 15, 128), (6, 85, 128)), 8: _pattern((8, 100, 128))}
"""The reference's patterns of a head, by ``head_bits``."""


def patterns(shape: tuple[int, int], low: float = 0.0, high: float = 16.0) -> list[BitPattern]:
    """The patterns that differ for a weight (N, K), from few bits to many.

    Args:
        shape: (N, K).
        low: stored bits a weight at least.
        high: stored bits a weight at most; where no pattern is between the two, the smallest is given alone.

    Raises:
        ModelError: K is no multiple of 32.
    """
    distinct: dict[tuple[tuple[int, int], ...], BitPattern] = {}
    for pattern in PATTERNS:
        distinct.setdefault(pattern.sections(shape[1]), pattern)
    count = shape[0] * shape[1]
    ranked = sorted(distinct.values(), key=lambda pattern: pattern.stored_bits(shape))
    kept = [pattern for pattern in ranked if low <= pattern.stored_bits(shape) / count <= high]
    return kept or ranked[:1]


@dataclass(frozen=True)
class PatternError:
    """A Linear under a pattern.

    Attributes:
        pattern: its groups.
        bits: stored, of the whole Linear.
        error: relative squared error of its output.
    """

    pattern: BitPattern
    bits: int
    error: float


def choose(
    measured: Mapping[str, Sequence[PatternError]],
    weights: Mapping[str, int],
    bits: float,
    importance: Mapping[str, float] | None = None,
) -> dict[str, PatternError]:
    """A pattern for each Linear: the smallest sum of errors within an average of stored bits.

    Args:
        measured: of each Linear, by name.
        weights: N K of each.
        bits: the average over all weights, scales and order of the inputs included.
        importance: what a relative error of 1 of a Linear costs, in any unit that adds up; None: the same.

    Raises:
        SettingsError: not even the smallest patterns are within the average.
        NumericsError: an error is not finite.
    """
    cost = importance or dict.fromkeys(measured, 1.0)
    options = {
        name: [Option(one.pattern.name, one.bits, one.error * cost[name]) for one in errors]
        for name, errors in measured.items()
    }
    total = sum(weights[name] for name in measured)
    least = sum(min(one.bits for one in errors) for errors in measured.values()) / total
    if least > bits:
        raise SettingsError("bits", bits, f"at least {least:.2f}: no Linear can be smaller")
    chosen = allocate(options, int(bits * total)).choice
    return {
        name: next(one for one in errors if one.pattern.name == chosen[name])
        for name, errors in measured.items()
    }
