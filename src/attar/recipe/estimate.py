"""How long a stage will take and what it needs: simple formulas, said with 'about'.

    P parameters of the model, Q of the teacher, T tokens that pass through

    training     T (6 P + 2 Q) operations;  16 P + 4 Q bytes (weights, gradients, moments) and the activations
    gradients    6 P T operations;  8 P bytes and the activations
    GPTQ         4 P T + 6 T h^2 layers + P h operations;  one block, its calibration activations
    rounding     the bytes read and written
    evaluation   2 P T operations, twice where a reference is compared;  4 P bytes and the kept logits

Operations become seconds at the speed that earlier receipts of this run show for the verb, and else at half
the speed of this machine's matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attar.recipe.schema import StageEntry
from attar.recipe.shape import Shape

_BASE_MEMORY = 450e6  # the interpreter with torch and transformers loaded
_DISK_RATE = 2e8  # bytes per second, read, packed and written
_START = 2.0  # seconds to load models and data
_KEPT_LOGITS = 512e6  # the most that a kept reference takes


@dataclass(frozen=True)
class Estimate:
    """About what a stage will need.

    Args:
        work: floating-point operations.
        seconds: duration.
        memory_bytes: the most memory of the process.
        disk_bytes: of the finished checkpoint.
        scratch_bytes: beside it while it works.
    """

    work: float
    seconds: float
    memory_bytes: float
    disk_bytes: float
    scratch_bytes: float


def estimate(entry: StageEntry, source: Shape, teacher: Shape | None, made: Shape, rate: float) -> Estimate:
    """About what a stage needs.

    Args:
        entry: the stage and its settings.
        source: the checkpoint it takes.
        teacher: the checkpoint it learns from, where there is one.
        made: the checkpoint it makes.
        rate: operations per second.
    """
    work, memory, scratch = _needs(entry, source, teacher, made)
    seconds = _START + work / rate + (source.bytes + made.bytes) / _DISK_RATE
    return Estimate(work, seconds, _BASE_MEMORY + memory, made.bytes, scratch)


def evaluation_seconds(settings: Any, shape: Shape, rate: float) -> float:
    """About how long the evaluation of one checkpoint takes."""
    tokens = getattr(settings, "tokens", 16384)
    rounds = 5 * getattr(settings, "decode_tokens", 32) if getattr(settings, "speed", False) else 0
    sample = getattr(settings, "sample_tokens", 0)
    # a decoding step costs some milliseconds however small the model is
    return (
        _START
        + 4 * shape.parameters * tokens / rate
        + (rounds + sample) * (0.003 + shape.parameters * 2 / 1e10)
    )


def _needs(
    entry: StageEntry, source: Shape, teacher: Shape | None, made: Shape
) -> tuple[float, float, float]:
    """Operations, memory beside the base, scratch on disk."""
    settings = entry.settings
    tokens = _tokens(settings)
    if entry.stage in ("distill", "recover"):
        other = teacher or source
        work = tokens * (6 * made.parameters + 2 * other.parameters)
        memory = 16 * made.parameters + 4 * other.parameters + _activations(settings, made)
        return work, memory, 12 * made.parameters
    if entry.stage == "prune":
        return 6 * source.parameters * tokens, 8 * source.parameters + _activations(settings, source), 0.0
    if entry.stage == "quantize" and getattr(settings, "method", "") != "rtn":
        gram = 6 * tokens * source.hidden**2 * source.layers
        work = 4 * source.blocks * tokens + gram + source.blocks * source.hidden
        return work, 8 * source.blocks / source.layers + 4.0 * tokens * source.hidden, made.bytes
    return 0.0, min(source.bytes, 1e9), 0.0


def _tokens(settings: Any) -> float:
    """Tokens that pass through the model."""
    length = getattr(settings, "sequence_length", 0)
    if hasattr(settings, "steps"):
        batch = getattr(settings, "batch_size", 1) * getattr(settings, "accumulate", 1)
        return float(settings.steps * batch * length)
    return float(getattr(settings, "samples", 0) * length)


def _activations(settings: Any, shape: Shape) -> float:
    """What a forward pass keeps for the backward pass, and the logits with their gradient."""
    tokens = getattr(settings, "batch_size", 1) * getattr(settings, "sequence_length", 1)
    return float(tokens) * (34 * shape.hidden * shape.layers + 12 * shape.vocabulary)
