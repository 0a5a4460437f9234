"""The model whose ``config.json`` describes the result: whether it fits, and whether heads are tied."""

from __future__ import annotations

from collections.abc import Mapping

from attar.errors import ModelError
from attar.merging.member import Member
from attar.merging.planning.naming import layer_count
from attar.merging.planning.tensor_map import TensorMap


def check_donor(donor: Member, shapes: Mapping[str, tuple[int, ...]], found: TensorMap) -> None:
    """Refuse a base model that only gives its config, where that is of another shape than the result.

    Args:
        donor: the base model, else the first.
        shapes: of the result's tensors by name, without those that have one row a token.
        found: the tensor map.

    Raises:
        ModelError: names the tensor, both models and both shapes.
    """
    used = [start.member for pieces in found.pieces.values() for piece in pieces for start in piece.all()]
    if donor in used:
        return
    if layer_count(donor.view.config) is not None:
        donor.stack_like(found.lead.stacks[0], found.lead)
    for name, shape in shapes.items():
        if name in donor.view.tensors and donor.shape(name) != shape:
            raise ModelError(
                f"{name}: {found.lead.label} has {in_words(shape)}, and the base model {donor.label},"
                f" whose config the result gets, has {in_words(donor.shape(name))}",
                hint="leave base_model out, or name one of the same shapes",
            )


def untied(found: TensorMap) -> bool:
    """Whether the result has a head of its own where the head of some model is its embedding."""
    heads = [row for row in found.rows if row.kind == "head" and row.name.endswith(".weight")]
    taps = [tap for row in heads for tap in ((*row.taps, row.base) if row.base else row.taps)]
    gives = any(tap.name == tap.member.embedding for tap in taps)
    said = [tap.member.view.config.get("tie_word_embeddings") for tap in taps]
    return gives or (False in said and True in said)


def in_words(shape: tuple[int, ...]) -> str:
    """A shape for errors: ``320 x 64``."""
    return " x ".join(str(size) for size in shape) or "one number"
