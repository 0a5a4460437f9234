"""A draft head apart from its modules, and what its layouts have in common.

``values`` is what ``HeadConfig.to_dict`` gives (attar.models.draft_heads.config), ``tensors`` the state of
its modules. A layout states some of the values in its own words; the others are under ``attar`` in its
config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from attar.checkpoint.draft_head import OURS
from attar.errors import CheckpointError, ModelError


@dataclass(frozen=True)
class HeadTarget:
    """The model that a head drafts for.

    Attributes:
        layers: its blocks; 0: not known.
        context: tokens of its longest sequence; 0: not known.
        embedding: reads its table (V, H); None: the model is not here.
    """

    name: str
    architectures: tuple[str, ...] = ()
    layers: int = 0
    context: int = 0
    embedding: Callable[[], Tensor] | None = field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON content."""
        return {
            "name": self.name,
            "architectures": list(self.architectures),
            "layers": self.layers,
            "context": self.context,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadTarget:
        """From JSON content, of which anything may be missing."""
        return cls("").stated(values)

    def stated(self, values: Mapping[str, Any]) -> HeadTarget:
        """With what a config says of it."""
        return replace(
            self,
            name=str(values.get("name") or self.name),
            architectures=tuple(values.get("architectures") or self.architectures),
            layers=int(values.get("layers", self.layers)),
            context=int(values.get("context", self.context)),
        )


@dataclass(frozen=True)
class HeadContent:
    """A draft head: its config, its tensors and its target."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    target: HeadTarget

    @property
    def kind(self) -> str:
        """Such as ``medusa``."""
        return str(self.values["kind"])


def with_rest(
    config: dict[str, Any], stated: HeadContent, head: HeadContent, says: Sequence[str]
) -> dict[str, Any]:
    """A layout's config with the values that the layout does not state.

    Args:
        stated: the head as it is read from the config.
        says: what the layout states of the target.
    """
    values = {key: value for key, value in head.values.items() if stated.values.get(key) != value}
    known = {key: value for key, value in head.target.to_dict().items() if value}
    target = {key: value for key, value in known.items() if key not in says}
    unstated = {key: value for key, value in (("head", values), ("target", target)) if value}
    return {**config, OURS: unstated} if unstated else config


def rest_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a config states under ``attar``: of the head, and of its target."""
    stated = config.get(OURS)
    parts = [stated.get(key) if isinstance(stated, dict) else None for key in ("head", "target")]
    head, target = (part if isinstance(part, dict) else {} for part in parts)
    return head, target


def rename(tensors: Mapping[str, Tensor], rules: Sequence[tuple[str, str]], layout: str) -> dict[str, Tensor]:
    """Tensors under other names.

    Args:
        rules: (pattern of a whole name, replacement); the first that fits is used. No replacement: dropped.

    Raises:
        CheckpointError: no rule fits a name.
    """
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules:
            if (match := re.fullmatch(pattern, name)) is not None:
                if replacement:
                    renamed[match.expand(replacement)] = tensor
                break
        else:
            raise CheckpointError(f"{layout} has no tensor {name!r}")
    return renamed


def entry(config: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """A field of a config.

    Raises:
        CheckpointError: it is missing or of another type.
    """
    value = config.get(key)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(f"{where}: {key} is {value!r}", hint="the folder is incomplete; copy it again")
    return value


def known_layers(target: HeadTarget, where: str) -> int:
    """The number of the target's layers, which the layout itself does not state.

    Raises:
        ModelError: it is not known.
    """
    if not target.layers:
        raise ModelError(
            f"{where} does not say how many layers its target has", hint="name the model with --target MODEL"
        )
    return target.layers
