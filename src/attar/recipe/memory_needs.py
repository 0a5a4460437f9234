"""Estimates of memory: what a stage holds at its peak, and what it keeps on disk while it works.

training    16 bytes a parameter (weight, gradient, two moments), 4 of a teacher's, activations
sweep       a block in float32 for each model, matrices of the widest Hessian, copies of the largest weight,
            hidden states of the text, and the passes that wait
stream      the largest tensor in its copies
evaluation  the model, or a block of a model that is larger than memory, and logits
"""

from __future__ import annotations

from typing import Any

import psutil

from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.units import bytes_text
from attar.distillation.settings import LearnSettings
from attar.errors import MemoryNeededError
from attar.measure.settings import EvaluateSettings
from attar.memory import free_memory
from attar.pruning.settings import PruneSettings
from attar.quantization.settings import QuantizeSettings, tuning_memory, tuning_rows
from attar.recipe.costs import (
    GRADIENTS,
    METHOD_COSTS,
    PRUNE_COSTS,
    RECONSTRUCTION_COST,
    MethodCost,
    criterion_of,
)
from attar.recipe.schema import ORIGINAL, StageEntry
from attar.recipe.shapes import Shape, after, bits_of, shape_of

BASE_MEMORY = 450e6
"""Bytes of the interpreter with torch and transformers loaded."""

_SURE = 0.75  # of an estimate of memory: less is not free, and the system ends the process
_REFINED = 2**25  # weights that are solved at a time
_SPILLED = 2**30  # bytes of hidden states that are in memory on a machine of 8 GB; the rest is on disk
_WAITING = 2**31  # bytes of the passes that wait between two groups there; more start again instead
_LOGITS = 2**28  # bytes of the logits of a pass of an evaluation
_STREAMED = {"merge": 8.0, "export": 14.0, "prune": 26.0, "quantize": 16.0}
"""Bytes of a weight in a stream: of two parents and their float32 sum; stored, float32, coded, read back and
their difference; scores, a copy with the numbers of its columns to select from, and a running sum of ties;
float32, scales, codes, decoded."""


def memory_needs(
    stage: str, settings: Any, source: Shape, teacher: Shape | None, result: Shape
) -> tuple[float, float]:
    """Bytes of memory above the base, and of scratch on disk."""
    match settings:
        case LearnSettings():
            guide = (teacher or source).parameters if settings.runs_teacher else 0.0
            tokens = settings.batch_size * settings.sequence_length
            return 16 * result.parameters + 4 * guide + _activations(tokens, result), 12 * result.parameters
        case PruneSettings():
            return _pruning(settings, source)
        case QuantizeSettings(method="qat", calibration=text):
            kept = _activations(text.batch_size * text.sequence_length, source)
            return 20 * source.parameters + kept, 12 * source.parameters
        case QuantizeSettings(method="rtn", check_tokens=tokens):
            checked = 4 * source.blocks / source.layers + 12 * source.inner * source.hidden
            return max(_stream(stage, source), checked if tokens else 0.0), 0.0
        case QuantizeSettings(calibration=text):
            tokens, bits = text.samples * text.sequence_length, bits_of(settings.storage)
            swept = _sweep(source, METHOD_COSTS[settings.with_method(bits).method], tokens)
            tuned, length = 0.0, text.sequence_length
            if steps := settings.tuning.steps(settings.method, bits, length):
                tuned = tuning_memory(source.parameters, source.blocks)
                tuned += _activations(tuning_rows(steps, length)[0] * length, source)
            return max(swept, tuned), result.bytes
    return _stream(stage, source), 0.0


def evaluation_memory(
    settings: EvaluateSettings, shape: Shape, free: float, *, reference: bool = False
) -> float:
    """Estimated memory of the evaluation of one checkpoint, above nothing.

    Args:
        free: bytes of the machine: a larger model is read block by block.
        reference: in float32, as the reference is; else as it is stored.
    """
    row = 4.0 * settings.sequence_length * shape.vocabulary
    logits = max(min(4.0 * settings.tokens * shape.vocabulary, _LOGITS), row)
    needed = BASE_MEMORY + (4 * shape.parameters if reference else shape.bytes) + 2 * logits
    if needed <= free:
        return needed
    head = 4.0 * shape.vocabulary * shape.hidden
    return BASE_MEMORY + max(4 * shape.blocks / shape.layers, head + 2 * logits)


def check_memory(verb: str, model: Any, settings: Any) -> None:
    """Refuse a stage that holds its batches in memory, where they cannot fit. Stages that work block by block
    spill instead; on a GPU its own memory counts.

    Raises:
        MemoryNeededError: names both amounts.
    """
    import torch

    trains_all = isinstance(settings, LearnSettings) or (
        isinstance(settings, PruneSettings) and PRUNE_COSTS[settings.method].passes > 0
    )
    if not trains_all or torch.cuda.is_available():
        return
    source = shape_of(open_checkpoint(model))
    result = after(StageEntry(1, verb, verb, ORIGINAL, None, settings, ""), source)
    needed = BASE_MEMORY + memory_needs(verb, settings, source, source, result)[0]
    needed -= min(psutil.Process().memory_info().rss, BASE_MEMORY)
    free = free_memory(swap=True)
    if _SURE * needed > free:
        batch = f"{settings.batch_size} x {settings.sequence_length} tokens"
        amounts = f"needs about {bytes_text(needed)} of memory, and {bytes_text(free)} are free"
        raise MemoryNeededError(
            f"{verb} with batches of {batch} {amounts}",
            hint="a smaller --batch-size or --sequence-length needs less",
        )


def _pruning(settings: PruneSettings, source: Shape) -> tuple[float, float]:
    """A sweep's, or that of the whole model and what a backward pass keeps; a magnitude needs one weight."""
    cost, largest = PRUNE_COSTS[settings.method], source.inner * source.hidden
    tokens = settings.batch_size * settings.sequence_length
    if cost.swept:
        text = settings.samples * settings.sequence_length
        zeros = _sweep(source, cost, text, stored=2)
        if not cost.products:  # zeros are chosen by scores
            zeros += (_STREAMED["prune"] - 8) * largest
        if settings.reconstruction == "none":
            return zeros, source.bytes
        solved = _sweep(source, RECONSTRUCTION_COST, text, stored=2)
        return max(zeros, solved + 32 * min(largest, _REFINED)), source.bytes
    if not cost.passes:
        return _stream("prune", source), 0.0
    if criterion_of(settings.options) in GRADIENTS:
        return 8 * source.parameters + _activations(tokens, source), 0.0
    # logits, and what a block makes of the states
    return 4 * source.parameters + 8.0 * tokens * (source.vocabulary + source.hidden), 0.0


def _sweep(source: Shape, cost: MethodCost, tokens: float, *, stored: int = 1) -> float:
    """The peak of a sweep that keeps ``stored`` bytes of each weight of its block."""
    models = max(cost.swept, 1)
    solving = 4 * cost.matrices * source.inner**2 + 8 * source.inner * source.hidden
    waiting = models * 4.0 * tokens * (5 * source.hidden + source.inner)
    passes = models * min(4.0 * tokens * source.hidden, _SPILLED) + (waiting if waiting <= _WAITING else 0.0)
    return (4 * models + stored) * source.blocks / source.layers + solving + passes


def _stream(stage: str, source: Shape) -> float:
    """The largest tensor in its copies: of the embedding, where that is touched, or of a Linear."""
    outside = source.vocabulary if stage in ("merge", "export") else 0
    return _STREAMED.get(stage, 8.0) * source.hidden * max(source.inner, outside)


def _activations(tokens: float, shape: Shape) -> float:
    """Bytes kept for the backward pass, and of the logits with their gradient."""
    return float(tokens) * (34 * shape.hidden * shape.layers + 12 * shape.vocabulary)
