"""How a model runs: runner, weights, threads, KV cache, speculation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from attar.checkpoint.units import bytes_text
from attar.runtime.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Description:
    """How an engine runs a model.

    Attributes:
        why: why the compiled runner does not run it, in a sentence; empty where it does.
        weights: format of the Linears' weights: int4, int8, bf16, or a dtype; "int4 2:4" where only the kept
            values of 2:4 weights are read.
        activations: format of the inputs of products: int16 or int8 where weights are codes, else a dtype.
        threads: of the runner; 0 on a GPU.
        kv_tokens, kv_bytes: size of the KV cache; hidden_bytes: of the hidden states that a draft head reads.
        state_bytes: of a sequence's states, in the layers that carry them instead of keys and values.
        context: most positions; None: no limit.
        sequences: most sequences that run together.
        speculation: the proposer, its most draft tokens, and whether it is lossy; empty without one.
        prefix_cache: whether prompts share the blocks of a common prefix.
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
    hidden_bytes: int
    state_bytes: int
    block_size: int
    context: int | None
    sequences: int
    speculation: str
    prefix_cache: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For a terminal: one line for each fact, the name first."""
        why = f" ({self.why})" if self.why else ""
        context = "no limit" if self.context is None else f"{self.context:,} tokens"
        states = f" and {bytes_text(self.hidden_bytes)} of hidden states" if self.hidden_bytes else ""
        pool = f"{self.kv_tokens:,} tokens, {self.kv_dtype}, {bytes_text(self.kv_bytes)}{states}"
        shared = "prefixes shared" if self.prefix_cache else "no prefixes shared"
        rows = {
            "model": self.model,
            "runner": f"{self.runner}{why}",
            "weights": f"{self.weights}, activations {self.activations}",
            "threads": str(self.threads) if self.threads else "",
            "context": f"{context}, {self.sequences} sequences at a time",
            "kv cache": f"{pool}, {shared}",
            "states": f"{bytes_text(self.state_bytes)} a sequence" if self.state_bytes else "",
            "speculation": self.speculation or "off",
        }
        return [f"{name:<12}{value}" for name, value in rows.items() if value]


def describe(model: str, engine: Engine, why: str = "") -> Description:
    """The description of an engine; ``why`` tells why the compiled runner does not run the model."""
    runner, manager, speculator = engine.runner, engine.scheduler.manager, engine.speculator
    unknown = {
        "weights": "",
        "activations": "",
        "threads": 0,
        "kv_dtype": "",
        "kv_bytes": 0,
        "hidden_bytes": 0,
        "state_bytes": 0,
    }
    drafts = speculator and f"{speculator.proposer.name}, up to {speculator.most} tokens drafted"
    if speculator is not None and speculator.lossy:
        drafts = f"{drafts}, typical acceptance (LOSSY: sampled completions are not the model's)"
    return Description(
        model=model,
        runner=type(runner).__name__.lower(),
        why=why,
        **{**unknown, **getattr(runner, "facts", {})},
        kv_tokens=runner.capacity * runner.block_size,
        block_size=runner.block_size,
        context=runner.context,
        sequences=engine.scheduler.limits.sequences,
        speculation=drafts or "",
        prefix_cache=manager.reuse,
    )
