"""What every draft head says of itself and of its target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Self, get_type_hints

from attar.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A head of one kind; subclasses add what their modules need.

    Attributes:
        hidden: H of the target.
        vocabulary: V of the target.
        layers: of the target, whose states the head reads, ascending (``models/hidden_states.py``).
        drafts: most tokens of a chain.
        draft_vocabulary: tokens that the head can propose; 0: all.
    """

    kind: ClassVar[str]
    hidden: int
    vocabulary: int
    layers: tuple[int, ...]
    drafts: int
    draft_vocabulary: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON content."""
        return {"kind": self.kind, **asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], file: str) -> Self:
        """From JSON content.

        Raises:
            CheckpointError: a field is missing or unknown; names the file.
        """
        given = {name: value for name, value in values.items() if name != "kind"}
        known = {field.name for field in fields(cls)}
        for name in given.keys() - known:
            raise CheckpointError(f"{file}: a {cls.kind} head has no field {name!r}")
        try:
            for name, inner in get_type_hints(cls).items():
                if isinstance(inner, type) and is_dataclass(inner) and isinstance(given.get(name), dict):
                    given[name] = inner(**given[name])
            return cls(**{**given, "layers": tuple(given.get("layers", ()))})
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: {error}") from error
