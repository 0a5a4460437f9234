"""The published layouts of draft heads by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from attar.formats.draft_heads import deepspec, speculators
from attar.formats.draft_heads import eagle_layout as eagle
from attar.formats.draft_heads import medusa_layout as medusa
from attar.formats.draft_heads.content import HeadContent, HeadTarget


class HeadLayout(Protocol):
    """A layout's module.

    Attributes:
        KINDS: of heads that it holds.
        WEIGHTS: name of the file of tensors.
    """

    @property
    def KINDS(self) -> tuple[str, ...]: ...  # noqa: N802

    @property
    def WEIGHTS(self) -> str: ...  # noqa: N802

    def encode(self, head: HeadContent) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Config and tensors of a head."""

    def decode(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: HeadTarget
    ) -> HeadContent:
        """The head of a folder."""


HEAD_LAYOUTS: dict[str, HeadLayout] = {
    "speculators": speculators,
    "deepspec": deepspec,
    "eagle": eagle,
    "medusa": medusa,
}
