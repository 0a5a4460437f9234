"""What types of llama.cpp cost: bytes of a GGUF file to the byte, metadata and padding included.

The types, groups and their bytes are those of ``attar export --size`` (deployment/gguf_type_search.py). A
recipe names the type of every matrix, so that the export chooses nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attar.deployment.gguf import dense_view, file_metadata, refuse
from attar.deployment.gguf_type_search import (
    KEYS,
    FileLayout,
    TypeBudget,
    candidates,
    data_bytes,
    file_layout,
    head_bytes,
)
from attar.deployment.settings import ExportSettings
from attar.errors import ModelError
from attar.formats.gguf.tensor_map import placements
from attar.formats.gguf.tokenizer.files import read_tokenizer_files
from attar.models.anatomy.discover import discover
from attar.models.loading.empty import empty_model
from attar.planner.costs import GroupChoice, WeightCosts, patterns_of

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

ROUNDINGS = {"rtn": "nearest"}
"""Roundings of an export by methods of a plan; the others have the same name."""


@dataclass(frozen=True)
class GGUFCosts:
    """Bytes of every type of every group of a file.

    Attributes:
        matrices: names of the tensors that the types of an export are given to.
        head: bytes before the data.
    """

    layout: FileLayout
    matrices: Sequence[str]
    head: int

    @property
    def groups(self) -> Mapping[str, Sequence[str]]:
        """Modules by group."""
        return self.layout.groups

    @property
    def table(self) -> dict[str, dict[str, int]]:
        """Bytes of each group's tensors by type, padding included."""
        budget = TypeBudget(self.layout, 0.0, 1, self.head)
        return {
            group: {kind: budget.group(group, kind) // 8 for kind in self.layout.candidates(group)}
            for group in self.layout.groups
        }

    @property
    def uniform(self) -> dict[str, dict[str, str]]:
        """Choices of one type for all groups that can have it."""
        every = [frozenset(self.layout.candidates(group)) for group in self.layout.groups]
        names = [kind for kind in candidates() if all(kind in kinds for kinds in every)]
        return {kind: dict.fromkeys(self.layout.groups, kind) for kind in names}

    def file_bytes(self, choice: GroupChoice) -> int:
        """Bytes of the file."""
        return self.head + data_bytes(self.layout.spread(choice), self.layout.shapes)

    def stage(self, choice: GroupChoice, method: str) -> dict[str, Any]:
        """The stage of a recipe that makes a choice."""
        kinds = self.layout.spread(choice)
        patterns = patterns_of({name: kinds[name] for name in self.matrices})
        stage = {"stage": "export", "format": "gguf", "rounding": ROUNDINGS.get(method, method)}
        weighted = {"imatrix": "compute", "samples": 8} if method == "rtn" else {}
        return {**stage, **weighted, "overrides": [f"{pattern}={kind}" for pattern, kind in patterns]}


PlanCosts = WeightCosts | GGUFCosts


def gguf_costs(checkpoint: Checkpoint, method: str) -> GGUFCosts:
    """The tensors of a file. Reads headers and the tokenizer.

    Args:
        method: of the recipe's rounding.

    Raises:
        ModelError: the model has no place in a GGUF file, the method does not take its experts, or nothing
            in it can be chosen.
    """
    refuse(checkpoint, ExportSettings(format="gguf", size="1B", rounding=ROUNDINGS.get(method, method)))
    view = dense_view(checkpoint)
    placed = placements(view.config, view.infos)
    model = empty_model(checkpoint.config, unstacked=True)
    layout = file_layout(model, discover(model), checkpoint, placed)
    if not layout.groups:
        raise ModelError("no tensor can have one of llama.cpp's types", hint="see attar export --type F16")
    tokenizer = read_tokenizer_files(checkpoint.path, view.config)
    head = head_bytes(layout.shapes, {**KEYS, **file_metadata(checkpoint, view, tokenizer)})
    matrices = list(dict.fromkeys(placement.gguf for placement in placed if placement.matrix))
    return GGUFCosts(layout, matrices, head)
