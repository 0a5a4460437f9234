"""A finished plan: its point, its recipe, what else there is, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoint.atomic import write_bytes
from attar.checkpoint.units import bytes_text, table
from attar.planner.settings import NOISE, PlanSettings
from attar.recipe.schema import Recipe, parse_recipe
from attar.settings import plain

if TYPE_CHECKING:
    import pandas

HEADER = ("layers", "weights", "KV cache", "KL", "90 %", "KV", "embedding", "decode tok/s")


@dataclass(frozen=True)
class PlanRow:
    """A point as it is shown.

    Attributes:
        name: groups of layers by scheme, or the scheme of all.
        file_bytes, cache_bytes: of the weight files and of the KV cache.
        kl, kl_low, kl_high: predicted, nats a token, with the ends of the 90 % interval.
        decode_tokens_per_s: of all sequences; None: not asked for.
        flips: mean margin of the original where the likeliest token changes; None: not measured.
    """

    name: str
    file_bytes: int
    cache_bytes: int
    kl: float
    kl_low: float
    kl_high: float
    kv_dtype: str
    embedding: str
    decode_tokens_per_s: float | None
    flips: float | None

    def cells(self) -> tuple[str, ...]:
        """For a table with :data:`HEADER`."""
        speed = "-" if self.decode_tokens_per_s is None else f"{self.decode_tokens_per_s:.1f}"
        interval = f"{self.kl_low:.2g} to {self.kl_high:.2g}"
        sizes = (bytes_text(self.file_bytes), bytes_text(self.cache_bytes) if self.cache_bytes else "-")
        return (self.name, *sizes, f"{self.kl:.4g}", interval, self.kv_dtype, self.embedding, speed)


@dataclass(frozen=True)
class Plan:
    """What ``attar plan`` found.

    Attributes:
        model: as it was given.
        point: the plan.
        recipe: makes it; its ``predicted`` is compared with what a run measures.
        alternatives: plans that KL does not tell from it.
        front: from the smallest to the best.
        uniform: one scheme for all layers.
        reasons: sentences.
    """

    model: str
    settings: PlanSettings
    point: PlanRow
    recipe: Recipe
    alternatives: tuple[PlanRow, ...] = ()
    front: tuple[PlanRow, ...] = ()
    uniform: tuple[PlanRow, ...] = ()
    reasons: tuple[str, ...] = field(default=())

    def write(self, path: str | Path) -> Path:
        """Write the recipe, which ``attar run`` takes.

        Raises:
            OutputError: the file cannot be written.
        """
        write_bytes(Path(path), self.recipe.written().encode())
        return Path(path)

    def text(self) -> str:
        """The plan, what else there is, and why, for people."""
        shown = [self.point, *self.alternatives]
        parts = [table(HEADER, [row.cells() for row in shown])]
        if self.alternatives:
            parts.append(
                f"Below a KL of {NOISE} nats these are equal: the first changes the fewest confident tokens."
            )
        parts.append("Other sizes\n" + table(HEADER, [row.cells() for row in self.front]))
        parts.append("One scheme for all\n" + table(HEADER, [row.cells() for row in self.uniform]))
        parts.append("\n".join(f"- {reason}" for reason in self.reasons))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = {
            name: [asdict(row) for row in getattr(self, name)]
            for name in ("alternatives", "front", "uniform")
        }
        return {
            "model": self.model,
            "settings": plain(self.settings),
            "point": asdict(self.point),
            **rows,
            "reasons": list(self.reasons),
            "recipe": self.recipe.to_dict(),
        }

    def to_frame(self) -> pandas.DataFrame:
        """All points, a row each; ``kind`` is plan, alternative, front or uniform."""
        import pandas

        named = [("plan", self.point), *(("alternative", row) for row in self.alternatives)]
        named += [("front", row) for row in self.front] + [("uniform", row) for row in self.uniform]
        return pandas.DataFrame([{"kind": kind, **asdict(row)} for kind, row in named])


def recipe_of(
    model: str,
    settings: PlanSettings,
    stages: Sequence[Mapping[str, Any]],
    kv_dtype: str,
    predicted: Mapping[str, float],
) -> Recipe:
    """The recipe of these stages, whose last is measured with this format of keys and values."""
    import yaml

    evaluate = {} if kv_dtype == "auto" else {"evaluate": {"kv_dtype": kv_dtype}}
    content = {"model": model, "data": settings.data, "seed": settings.seed, **evaluate}
    content |= {"stages": [dict(stage) for stage in stages], "predicted": dict(predicted)}
    return parse_recipe(yaml.safe_dump(content, sort_keys=False, width=1000), "plan")
