"""What tensors of a GGUF file cost, and how much of a budget is left for those whose type is to be chosen.

``bits``   average over every weight of the file, norms included, of the bytes of its tensors
           (what llama.cpp prints as BPW)
``size``   bytes of the file: header, metadata, infos, tensors, and what fills them up to the alignment
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from attar.errors import SettingsError
from attar.formats.gguf.container import MetadataValue
from attar.formats.gguf.mixes import tensor_bytes
from attar.formats.gguf.values import encode, string
from attar.formats.gguf.writer import ALIGNMENT

HEADER = 24  # bytes before the metadata: magic, version, two counts
SMALLEST = "every tensor in its smallest type"


@dataclass(frozen=True)
class Layout:
    """The tensors of a file: those whose type is to be chosen, and the others.

    Attributes:
        shapes: of every tensor of the file.
        kinds: types that are settled.
        tensors: names of the tensors of each module that gets a type.
        groups: modules by group.
    """

    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, str]
    tensors: dict[str, list[str]]
    groups: dict[str, list[str]]

    def of(self, group: str) -> list[str]:
        """Names of a group's tensors."""
        return [name for module in self.groups[group] for name in self.tensors[module]]

    def spread(self, choice: Mapping[str, str]) -> dict[str, str]:
        """The type of every tensor, given that of every group."""
        chosen = {name: kind for group, kind in choice.items() for name in self.of(group)}
        return {name: chosen.get(name) or self.kinds[name] for name in self.shapes}

    @property
    def weights(self) -> int:
        """How many weights the file has."""
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True)
class Budget:
    """What may be spent, in bits of stored tensors.

    Attributes:
        layout: what it is spent on.
        bits: the average; with ``size`` not looked at.
        size: bytes of the file, or 0.
        head: bytes of the file before its data.
    """

    layout: Layout
    bits: float
    size: int
    head: int

    def cost(self, kinds: Mapping[str, str]) -> int:
        """Bits of tensors in these types."""
        return 8 * data_bytes(kinds, self.layout.shapes, padding=self.size > 0)

    def group(self, group: str, kind: str) -> int:
        """Bits of a group in a type."""
        return self.cost(dict.fromkeys(self.layout.of(group), kind))

    @property
    def settled(self) -> int:
        """Bits that are spent already."""
        return self.cost(self.layout.kinds) + (8 * self.head if self.size else 0)

    @property
    def left(self) -> int:
        """Bits for the groups; may be negative."""
        whole = 8 * self.size if self.size else math.floor(self.bits * self.layout.weights)
        return whole - self.settled

    def check(self, least: int) -> None:
        """Raise where the groups need more bits than are left."""
        if least <= self.left:
            return
        least += self.settled
        if self.size:
            raise SettingsError("size", self.size, f"at least {-(-least // 8)} bytes: {SMALLEST}")
        average = math.ceil(1000 * least / self.layout.weights) / 1000
        raise SettingsError("bits", self.bits, f"at least {average:g}: {SMALLEST}")

    def check_smallest(self, kinds: Callable[[int], Sequence[str]]) -> None:
        """The same for the smallest of the types that ``kinds`` has for K inputs."""
        least = 0
        for group in self.layout.groups:
            columns = self.layout.shapes[self.layout.of(group)[0]][-1]
            least += min(self.group(group, kind) for kind in kinds(columns))
        self.check(least)


def head_bytes(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, MetadataValue]) -> int:
    """Bytes of a GGUF file of one part before its data."""
    said = sum(len(encode(key, value)) for key, value in metadata.items())
    infos = sum(len(string(name)) + 16 + 8 * len(shape) for name, shape in shapes.items())
    return _padded(HEADER + said + infos)


def data_bytes(kinds: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], padding: bool = True) -> int:
    """Bytes of tensors, with what fills them up to the file's alignment."""
    sizes = [tensor_bytes(kind, shapes[name]) for name, kind in kinds.items()]
    return sum(_padded(size) if padding else size for size in sizes)


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
