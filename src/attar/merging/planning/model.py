"""One opened model of a merge: its stacks, its token embedding, its names for another model's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from attar.errors import ModelError
from attar.merging.config.schema import ModelReference
from attar.merging.planning.naming import (
    ModelStack,
    find_stacks,
    has_token_rows,
    kind_of,
    position_of,
    token_embedding,
)

_SAME_BIAS = {
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
"""Biases of encoders' heads that are one tensor, stored under one of the names or both."""


class ModelView(Protocol):
    """A checkpoint, or a view of one: decoded, or with an adapter added."""

    @property
    def path(self) -> Path:
        """Its folder."""

    @property
    def name(self) -> str:
        """Its name for people."""

    @property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """By name; each has a ``shape``, and a ``dtype`` as safetensors writes it, such as ``"BF16"``."""

    def load(self, name: str) -> Tensor:
        """One tensor."""


@dataclass(frozen=True, eq=False)
class MergeModel:
    """A model that takes part in a merge."""

    index: int
    reference: ModelReference
    view: ModelView

    @property
    def label(self) -> str:
        """Its name in errors."""
        return str(self.reference)

    @cached_property
    def stacks(self) -> tuple[ModelStack, ...]:
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
        return (name for name in self.view.tensors if position_of(name, self.stacks) is None)

    def names_in_layer(self, stack: ModelStack, layer: int) -> list[str]:
        """Names of a layer's tensors inside the layer, sorted."""
        return sorted(self._names_by_layer.get((stack.prefix, layer), ()))

    @cached_property
    def _names_by_layer(self) -> dict[tuple[str, int], list[str]]:
        names: dict[tuple[str, int], list[str]] = {}
        for name in self.view.tensors:
            position = position_of(name, self.stacks)
            if position is not None:
                names.setdefault((position.stack.prefix, position.layer), []).append(position.local_name)
        return names

    def stack_like(self, stack: ModelStack, lead: MergeModel) -> ModelStack:
        """This model's stack that corresponds to one of ``lead``.

        Raises:
            ModelError: it has none of that name.
        """
        own_prefix, lead_prefix = self._prefixes(lead)
        names = (stack.prefix, _replace_prefix(stack.prefix, lead_prefix, own_prefix))
        for candidate in self.stacks:
            if candidate.prefix in names:
                return candidate
        prefixes = ", ".join(candidate.prefix for candidate in self.stacks)
        raise ModelError(
            f"{self.label}: no layers named {stack.prefix}.0, as {lead.label} has them; it has {prefixes}.0",
            hint="only models of one family can be merged",
        )

    def stored_name(self, name: str, lead: MergeModel) -> str | None:
        """This model's name for a tensor outside the stacks that ``lead`` calls ``name``; None: it has none.

        A head that is not stored is the token embedding, unless the config says that it is not tied; so is
        another name of the embedding (T5's ``encoder.embed_tokens``).
        """
        own_prefix, lead_prefix = self._prefixes(lead)
        for candidate in (name, _replace_prefix(name, lead_prefix, own_prefix), _SAME_BIAS.get(name)):
            if candidate is not None and candidate in self.view.tensors:
                return candidate
        is_matrix = self.rows is not None and name.endswith(".weight")
        if not is_matrix or not has_token_rows(name, (self.rows or 0,), self.rows):
            return None
        if kind_of(name, False) == "head" and self.view.config.get("tie_word_embeddings") is False:
            return None
        return self.embedding

    def name_in(self, lead: MergeModel, name: str) -> str:
        """``lead``'s name for this model's tensor ``name`` outside the stacks."""
        own_prefix, lead_prefix = self._prefixes(lead)
        if name in lead.view.tensors or kind_of(name, False) == "head":
            return name
        return _replace_prefix(name, own_prefix, lead_prefix)

    def _prefixes(self, lead: MergeModel) -> tuple[str, str]:
        """The prefixes of this model's names and of ``lead``'s where they differ: models saved with and
        without a head differ by ``transformer.`` or ``bert.``."""
        prefix, lead_prefix = self.stacks[0].prefix, lead.stacks[0].prefix
        if prefix.endswith("." + lead_prefix):
            return prefix.removesuffix(lead_prefix), ""
        if lead_prefix.endswith("." + prefix):
            return "", lead_prefix.removesuffix(prefix)
        return "", ""


def _replace_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old)
