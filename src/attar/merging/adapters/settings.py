"""Settings of LoRA extraction."""

from __future__ import annotations

from dataclasses import dataclass

from attar.options import check_choices, setting
from attar.walks.settings import check_range

VERSION = 1

DTYPES = ("float32", "bfloat16", "float16")
OTHERS = ("save", "leave")


@dataclass(frozen=True, kw_only=True)
class ExtractSettings:
    """Write the difference of two models as a LoRA adapter: of low rank for Linear weights, whole for the
    rest."""

    rank: int = setting(32, "rank of every Linear's update at most")
    energy: float = setting(
        0.0,
        "each Linear gets the smallest rank that holds this share of its update's squared norm, "
        "such as 0.95; 0: the full rank everywhere",
    )
    others: str = setting(
        "save",
        "embeddings, head, norms and biases that differ: save them whole in the adapter, or "
        "leave them out and list them in the card",
        choices=OTHERS,
    )
    exact: bool = setting(
        False, "full decomposition of large matrices too: slower, better by a percent or two at most"
    )
    dtype: str = setting("float32", "number type of the adapter's tensors", choices=DTYPES)
    seed: int = setting(0, "of the start of large decompositions")

    def __post_init__(self) -> None:
        check_range("rank", self.rank, 1, 2**16, "at least 1")
        check_range("energy", self.energy, 0.0, 1.0, "0 (off), or a share up to 1")
        check_choices(self)
        check_range("seed", self.seed, 0, 2**63 - 1, "0 or more")
