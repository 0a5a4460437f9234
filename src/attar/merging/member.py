"""One opened model of a merge: its stacks, its token embedding, its tensors under another model's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attar.errors import ModelError
from attar.merging.planning.naming import (
    Stack,
    find_stacks,
    has_token_rows,
    kind_of,
    place_of,
    token_embedding,
)
from attar.merging.reference import ModelReference

_TWINS = {
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
"""Tensors of encoders' heads that are one and the same, and stored under one name or both."""


@dataclass(frozen=True, eq=False)
class Member:
    """A model that takes part.

    Attributes:
        index: its number among the plan's models.
        reference: what the config calls it.
        view: the opened checkpoint.
    """

    index: int
    reference: ModelReference
    view: Any

    @property
    def label(self) -> str:
        """What errors call it."""
        return str(self.reference)

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Its stacks of layers.

        Raises:
            ModelError: there are none, or not as many layers as its config says.
        """
        return find_stacks(self.view.tensors, self.view.config, self.label)

    @cached_property
    def embedding(self) -> str | None:
        """Name of its token embedding."""
        outside = {name: self.view.tensors[name] for name in self.names_outside()}
        return token_embedding(outside, self.view.config)

    @property
    def rows(self) -> int | None:
        """Rows of its token embedding."""
        return None if self.embedding is None else int(self.view.tensors[self.embedding].shape[0])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor."""
        return tuple(self.view.tensors[name].shape)

    def names_outside(self) -> Iterator[str]:
        """Names of the tensors outside the stacks."""
        return (name for name in self.view.tensors if place_of(name, self.stacks).stack is None)

    def layer_parts(self, stack: Stack, layer: int) -> list[str]:
        """Names of a layer's tensors inside the layer, sorted."""
        return sorted(self._parts.get((stack.prefix, layer), ()))

    @cached_property
    def _parts(self) -> dict[tuple[str, int], list[str]]:
        parts: dict[tuple[str, int], list[str]] = {}
        for name in self.view.tensors:
            place = place_of(name, self.stacks)
            if place.stack is not None:
                parts.setdefault((place.stack.prefix, place.layer), []).append(place.rest)
        return parts

    def stack_like(self, stack: Stack, lead: Member) -> Stack:
        """This model's stack for one of another's.

        Raises:
            ModelError: it has none of that name.
        """
        ours, theirs = self._shift(lead)
        wanted = _renamed(stack.prefix, theirs, ours)
        for each in self.stacks:
            if each.prefix in (stack.prefix, wanted):
                return each
        found = ", ".join(each.prefix for each in self.stacks)
        raise ModelError(
            f"{self.label}: no layers named {stack.prefix}.0, as {lead.label} has them; it has {found}.0",
            hint="only models of one family can be merged",
        )

    def stored(self, name: str, lead: Member) -> str | None:
        """This model's name for a tensor outside the stacks that another model calls ``name``.

        A head that is not stored, of a model whose config does not say that it has one of its own, is the
        token embedding, and so is a further name of the embedding (T5's ``encoder.embed_tokens``).
        """
        ours, theirs = self._shift(lead)
        for each in (name, _renamed(name, theirs, ours), _TWINS.get(name)):
            if each is not None and each in self.view.tensors:
                return each
        if (
            self.rows is None
            or not name.endswith(".weight")
            or not has_token_rows(name, (self.rows,), self.rows)
        ):
            return None
        if kind_of(name, False) == "head" and self.view.config.get("tie_word_embeddings") is False:
            return None
        return self.embedding

    def called(self, name: str, lead: Member) -> str:
        """What another model would call this model's tensor ``name``."""
        ours, theirs = self._shift(lead)
        if name in lead.view.tensors or kind_of(name, False) == "head":
            return name
        return _renamed(name, ours, theirs)

    def _shift(self, lead: Member) -> tuple[str, str]:
        """What this model's names begin with and the other's do not, and the other way round: models saved
        with and without a head differ by ``transformer.`` or ``bert.``."""
        ours, theirs = self.stacks[0].prefix, lead.stacks[0].prefix
        if ours.endswith("." + theirs):
            return ours.removesuffix(theirs), ""
        if theirs.endswith("." + ours):
            return "", theirs.removesuffix(ours)
        return "", ""


def _renamed(name: str, old: str, new: str) -> str:
    """A name with its beginning exchanged."""
    return new + name.removeprefix(old)
