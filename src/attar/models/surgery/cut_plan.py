"""Which units of a model stay when it is made smaller: any of heads, neurons, hidden channels and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attar.errors import ModelError
from attar.models.anatomy.parts import Anatomy, Attention

LayerUnits = tuple[tuple[int, ...], ...]
"""For each block of the whole model, units of it, ascending."""


@dataclass(frozen=True)
class CutPlan:
    """The units that stay. None: all of them. All numbers are those of the whole model, ascending.

    Attributes:
        heads: of each block, the query heads. A KV head stays with any of its query heads; every KV head that
            stays keeps as many.
        neurons: of each block, the neurons of the MLP.
        hidden: channels of the residual stream.
        layers: blocks. What the plan says of other blocks does not matter.
    """

    heads: LayerUnits | None = None
    neurons: LayerUnits | None = None
    hidden: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None

    def blocks(self, anatomy: Anatomy) -> list[int]:
        """Numbers of the blocks that stay."""
        return list(range(len(anatomy.blocks)) if self.layers is None else self.layers)

    @property
    def is_narrower(self) -> bool:
        """Whether units within layers go."""
        return any(units is not None for units in (self.heads, self.neurons, self.hidden))

    def check(self, anatomy: Anatomy) -> None:
        """Raise ModelError where the plan does not fit the model."""
        if self.layers is not None:
            check_units([self.layers], [len(anatomy.blocks)], "layers")
        if self.hidden is not None:
            check_units([self.hidden], [anatomy.hidden_size], "hidden channels")
        if self.heads is not None:
            check_units(self.heads, [block.attention.heads for block in anatomy.blocks], "heads")
        if self.neurons is not None:
            check_units(self.neurons, [block.mlp.neurons for block in anatomy.blocks], "neurons")


def check_units(keep: Sequence[Sequence[int]], limits: Sequence[int], what: str) -> None:
    """Raise where the kept units of a block are not ascending numbers within limits, at least one."""
    if len(keep) != len(limits):
        raise ModelError(f"kept {what} are given for {len(keep)} blocks, but the model has {len(limits)}")
    for index, (kept, limit) in enumerate(zip(keep, limits, strict=True)):
        if not kept or list(kept) != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= limit:
            raise ModelError(
                f"kept {what} of block {index} must be ascending numbers from 0 to {limit - 1}, at least "
                f"one; they are {list(kept)[:8]}"
            )


def same_count(keep: Sequence[Sequence[int]], what: str) -> int:
    """How many units every block keeps; raises where they differ."""
    counts = sorted({len(kept) for kept in keep})
    if len(counts) > 1:
        raise ModelError(
            f"kept {what} differ from block to block ({counts[0]} to {counts[-1]})",
            hint="a config has one number for all layers; keep as many in each",
        )
    return counts[0]


def heads_of_groups(attention: Attention, groups: Sequence[int]) -> tuple[int, ...]:
    """All query heads that read these KV heads."""
    size = attention.heads // attention.kv_heads
    return tuple(head for group in groups for head in range(group * size, (group + 1) * size))


def groups_of_heads(attention: Attention, heads: Sequence[int]) -> list[int]:
    """The KV heads that these query heads read.

    Raises:
        ModelError: some of these KV heads are read by fewer of them than others.
    """
    size = attention.heads // attention.kv_heads
    groups = [head // size for head in heads]
    if len({groups.count(group) for group in groups}) > 1:
        raise ModelError(
            f"{attention.name}: its KV heads would keep different numbers of query heads",
            hint="keep as many query heads of every KV head that stays",
        )
    return sorted(set(groups))
