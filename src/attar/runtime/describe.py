"""What runs a model, in facts and in lines: runner, weights, threads, keys and values, speculation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from attar.checkpoint.units import bytes_text
from attar.runtime.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Description:
    """Facts about an engine.

    Attributes:
        model: its name.
        runner: compiled or modules.
        why: why the compiled runner does not run it, in a sentence; empty where it does.
        weights: how the Linears' weights are held: int4, int8, bf16, or a dtype.
        activations: what products take: int16 or int8 where weights are codes, else a dtype.
        threads: of the runner; 0 on a GPU.
        kv_dtype: of keys and values.
        kv_tokens: that the pool holds.
        kv_bytes: of the pool.
        block_size: tokens of a block.
        context: most positions; None: no limit.
        sequences: that run together at most.
        speculation: what drafts, and how much; empty where nothing does.
        prefix_cache: whether prompts share what they begin with.
    """

    model: str
    runner: str
    why: str
    weights: str
    activations: str
    threads: int
    kv_dtype: str
    kv_tokens: int
    kv_bytes: int
    block_size: int
    context: int | None
    sequences: int
    speculation: str
    prefix_cache: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For a terminal: one fact a line, the name first."""
        why = f" ({self.why})" if self.why else ""
        context = "no limit" if self.context is None else f"{self.context:,} tokens"
        pool = f"{self.kv_tokens:,} tokens, {self.kv_dtype}, {bytes_text(self.kv_bytes)}"
        shared = "prefixes shared" if self.prefix_cache else "no prefixes shared"
        rows = {
            "model": self.model,
            "runner": f"{self.runner}{why}",
            "weights": f"{self.weights}, activations {self.activations}",
            "threads": str(self.threads) if self.threads else "",
            "context": f"{context}, {self.sequences} sequences at a time",
            "kv cache": f"{pool}, {shared}",
            "speculation": self.speculation or "off",
        }
        return [f"{name:<12}{value}" for name, value in rows.items() if value]


def describe(model: str, engine: Engine, why: str = "") -> Description:
    """The facts.

    Args:
        model: its name.
        why: why the compiled runner does not run it.
    """
    runner, manager, speculator = engine.runner, engine.scheduler.manager, engine.speculator
    nothing = {"weights": "", "activations": "", "threads": 0, "kv_dtype": "", "kv_bytes": 0}
    drafts = speculator and f"{speculator.proposer.name}, up to {speculator.most} tokens drafted"
    return Description(
        model=model,
        runner=type(runner).__name__.lower(),
        why=why,
        **getattr(runner, "facts", nothing),
        kv_tokens=runner.capacity * runner.block_size,
        block_size=runner.block_size,
        context=runner.context,
        sequences=engine.scheduler.limits.sequences,
        speculation=drafts or "",
        prefix_cache=manager.reuse,
    )
