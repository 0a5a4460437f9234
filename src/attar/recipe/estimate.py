"""Estimates of a stage's time: counted operations over the measured rates of this machine (machine.py).

What a stage does to a model is counted in units such as tokens read or products of weights with Hessians
(:class:`Work`); the model's shape makes operations of the units (:func:`operations`). Finished stages of the
same method correct an estimate (history.py); without any it is known within a factor :data:`UNSURE`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from attar.deployment.settings import ExportSettings
from attar.distillation.head_settings import TrainHeadSettings
from attar.distillation.settings import LearnSettings, RowSettings
from attar.measure.settings import EvaluateSettings
from attar.pruning.settings import MixedSettings, PruneSettings, UnitSettings, ZerosSettings
from attar.quantization.settings import (
    GPTQ_KIN,
    OPTION_TOKENS,
    AutoRoundSettings,
    QATSettings,
    QuantizeSettings,
    tuning_rows,
)
from attar.recipe.costs import (
    CRITERION_PASSES,
    EXL2_COST,
    METHOD_COSTS,
    PRUNE_COSTS,
    RECONSTRUCTION_COST,
    MethodCost,
    criterion_of,
)
from attar.recipe.machine import Rates
from attar.recipe.memory_needs import BASE_MEMORY, memory_needs
from attar.recipe.schema import StageEntry
from attar.recipe.shapes import Shape, bits_of
from attar.walks.settings import MEASURED_ROWS, curvature_rows

UNSURE = 2.0
"""Times between an estimate of arithmetic alone and the ends of its range."""

_START = 1.0  # seconds to load models and data
_DISK_RATE = 2e8  # bytes per second, read, packed and written
_MEMORY_RATE = 1e10  # bytes per second of weights read by decoding
_REACHED = 0.7  # fraction of the rate of products that models and factorizations reach
_CHARACTERS_AN_ELEMENT = 0.005  # characters tokenized in the time of one element-wise operation
_LEAST_TEXT = 900_000  # tokens of 256 documents, which are tokenized together
_HELD_OUT = 16_384  # tokens of a held-out loss
_SEARCH = 5_120.0  # operations a weight that try 20 scales
_SMOOTHING = 40_960.0  # operations for each K^2: 20 candidates on 1,024 rows
_SMALL = 2**30  # bytes of the largest model of which a check makes two completions: 48 passes of 44 tokens


@dataclass(frozen=True)
class Work:
    """Work on a model with P parameters (B in blocks), L layers, width h, vocabulary V, Linears (N, K).

    Attributes:
        read: tokens through the model: 2 P operations and 6 V elements each.
        learned: tokens forward and backward: 6 P operations and 12 V elements.
        steps: optimizer steps: 10 P elements; ``muon`` steps also 30 h B operations.
        swept: tokens through every block, twice: 0.6 * 4 B operations.
        hessians: tokens whose inputs go into each Hessian: 0.6 * 2 K^2 operations.
        blocks: further operations for each weight of the blocks.
        products: N K^2 operations for each Linear: products of a weight with its Hessian, factors.
        squares: K^2 operations for each Linear.
        columns: passes over the columns of all Linears, 200 small operations a column.
        passes: of a few tokens through the layers, 1,000 small operations a layer.
        touched: numbers read and written for each weight.
        text: tokens that are read and tokenized.
    """

    read: float = 0.0
    learned: float = 0.0
    steps: float = 0.0
    muon: float = 0.0
    swept: float = 0.0
    hessians: float = 0.0
    blocks: float = 0.0
    products: float = 0.0
    squares: float = 0.0
    columns: float = 0.0
    passes: float = 0.0
    touched: float = 0.0
    text: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def operations(work: Work, shape: Shape) -> tuple[float, float, float]:
    """Operations of products, element-wise ones and small ones, in the units of the rates."""
    P, B, V, linears = shape.parameters, shape.blocks, shape.vocabulary, shape.linears
    hessians = 2.0 * shape.layers * (3 * shape.hidden**2 + shape.inner**2)
    products = 2 * P * work.read + 6 * P * work.learned + 30 * shape.hidden * B * work.muon
    products += 0.6 * (4 * B * work.swept + hessians * work.hessians) + B * work.blocks
    products += work.products * sum(n * N * K**2 for n, N, K in linears)
    products += work.squares * sum(n * K**2 for n, _, K in linears)
    elements = V * (6 * work.read + 12 * work.learned) + P * (10 * work.steps + work.touched)
    elements += 4 * work.text / _CHARACTERS_AN_ELEMENT
    columns = sum(n * K for n, _, K in linears)
    return products, elements, 200 * work.columns * columns + 1000 * work.passes * shape.layers


def seconds(work: Work, shape: Shape, rates: Rates) -> float:
    """Time of work on a machine with these rates."""
    products, elements, calls = operations(work, shape)
    return products / (_REACHED * rates.products) + elements / rates.elements + calls / rates.calls


@dataclass(frozen=True)
class EstimatedTime:
    """An estimated time in seconds.

    Attributes:
        plain: by arithmetic alone.
        seconds: corrected by finished stages.
        least, most: the ends of its range.
    """

    plain: float = 0.0
    seconds: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def __add__(self, other: EstimatedTime) -> EstimatedTime:
        return EstimatedTime(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Correction:
    """Time over estimate of finished stages, and how far off the product may be either way (1: it is not)."""

    factor: float = 1.0
    spread: float = UNSURE

    def span(self, plain: float) -> EstimatedTime:
        """The range of an estimate by arithmetic."""
        likeliest = plain * self.factor
        return EstimatedTime(plain, likeliest, likeliest / self.spread, likeliest * self.spread)


@dataclass(frozen=True)
class Estimate:
    """Estimated needs of a stage: time, memory, disk for the result and for the work on it."""

    time: EstimatedTime
    memory_bytes: float
    disk_bytes: float
    scratch_bytes: float


def estimate(
    entry: StageEntry,
    source: Shape,
    teacher: Shape | None,
    result: Shape,
    rates: Rates,
    correction: Correction = Correction(),
) -> Estimate:
    """Estimate a stage that takes ``source``, learns from ``teacher`` and makes ``result``."""
    memory, scratch = memory_needs(entry.stage, entry.settings, source, teacher, result)
    works = stage_work(entry.settings, source, teacher, result)
    moved = (source.bytes + result.bytes) / _DISK_RATE
    plain = _START + moved + sum(seconds(work, shape, rates) for work, shape in works)
    return Estimate(correction.span(plain), BASE_MEMORY + memory, result.bytes, scratch)


def evaluation_seconds(settings: EvaluateSettings, shape: Shape, rates: Rates) -> float:
    """Estimated time of the evaluation of one checkpoint, with a stored reference."""
    work = Work(read=settings.tokens, text=_text(settings.data, settings.tokens))
    token = seconds(Work(passes=1), shape, rates) + 2 * shape.parameters / _MEMORY_RATE
    decoded = settings.decode_tokens * token
    speed = min(8 * decoded, 2.0 + 2 * decoded) if settings.speed else 0.0  # rounds until 2 s are over
    answered = 2 if settings.answers else 1  # the sample, and the answers in one batch
    return _START + seconds(work, shape, rates) + speed + answered * settings.sample_tokens * token


def stage_work(
    settings: Any, source: Shape, teacher: Shape | None, result: Shape
) -> list[tuple[Work, Shape]]:
    """The work of a stage with these settings, and the models that are worked on."""
    match settings:
        case RowSettings():
            return _learning(settings, source, teacher or source, result)
        case PruneSettings():
            return [(_pruning(settings, source), source), (_reconstructing(settings), result)]
        case QuantizeSettings():
            return [(_quantizing(settings) + _check(settings, source), source)]
        case ExportSettings():
            return [(_exporting(settings) + Work(touched=10), source)]
    return [(Work(touched=4), source)]


def _learning(
    settings: RowSettings, source: Shape, teacher: Shape, result: Shape
) -> list[tuple[Work, Shape]]:
    """Distillation and recovery with their held-out losses; a draft head's model also writes rows."""
    batch = settings.batch_size * settings.accumulate * settings.sequence_length
    tokens, held_out = float(settings.steps * batch), float(_HELD_OUT)
    held_out *= 1 + (settings.steps // settings.evaluate_every if settings.evaluate_every else 0)
    muon = settings.steps if settings.optimizer == "muon" else 0
    text = _text(settings.data, tokens) + _text(settings.data, _HELD_OUT)
    works = [(Work(read=held_out, learned=tokens, steps=settings.steps, muon=muon, text=text), result)]
    match settings:
        case LearnSettings(runs_teacher=True, keeps_predictions=kept):
            once = settings.rows * settings.sequence_length if kept else 0
            works.append((Work(read=(min(tokens, once) if once else tokens) + held_out), teacher))
        case TrainHeadSettings(teacher_rows=written):
            length = settings.sequence_length
            rows = min(written.num_rollouts, settings.teacher_share * tokens / length)
            works.append((Work(read=tokens + held_out), source))
            works.append((Work(read=rows * length, passes=rows * length / 64), source))  # 64 rows together
    return works


def _pruning(settings: PruneSettings, source: Shape) -> Work:
    """Scores, solving, and the measurements that amounts are chosen by."""
    cost, tokens = PRUNE_COSTS[settings.method], float(settings.samples * settings.sequence_length)
    read, learned, measured = cost.passes * tokens, 0.0, 0.0
    match settings.options:
        case UnitSettings(rounds=rounds):
            passes = CRITERION_PASSES | {"kl": source.layers / 2}
            read = rounds * passes.get(criterion_of(settings.options), cost.passes) * tokens
        case ZerosSettings(allocation="owl"):
            read += tokens
        case ZerosSettings(allocation="measured"):
            measured = 20 * source.layers  # groups of a layer, each at some amounts
        case MixedSettings(candidates=candidates, candidate_steps=steps):
            measured = 24 + 5 * source.layers  # 6 amounts of 4 structures; each in each layer
            learned = candidates * steps * settings.batch_size * settings.sequence_length
            learned = learned if candidates > 1 else 0
    read += measured * min(settings.samples, 16) * settings.sequence_length
    text = _text(settings.data, tokens) if cost.passes or cost.swept else 0.0
    scored = Work(read=read + learned, learned=learned, touched=40, text=text)
    return scored + _sweep(cost, tokens)


def _reconstructing(settings: PruneSettings) -> Work:
    """What is reconstructed after pruning: nothing, each Linear, or then each block at two learning rates."""
    tokens = float(settings.samples * settings.sequence_length)
    if settings.reconstruction == "none":
        return Work()
    if settings.reconstruction == "linear":
        return _sweep(RECONSTRUCTION_COST, tokens)
    blocks = Work(swept=2 * tokens, blocks=12 * settings.reconstruct_epochs * tokens)
    return _sweep(RECONSTRUCTION_COST, tokens) + blocks


def _quantizing(settings: QuantizeSettings) -> Work:
    """Smoothing, training, rounding, and the search of mixed precision."""
    settings = settings.with_method(bits_of(settings.storage))
    cost, rounding, calibration = METHOD_COSTS[settings.method], settings.rounding, settings.calibration
    length = calibration.sequence_length
    tokens, batch = float(calibration.samples * length), calibration.batch_size * length
    text = _text(settings.data, tokens)
    work = Work(touched=40, blocks=8 * tokens if settings.storage.bits else 0.0)
    if settings.storage.bits and settings.method in GPTQ_KIN:
        work += rounded_options()
    if settings.smoothing != "none":
        searched = settings.smoothing == "awq" or settings.transform.alpha < 0
        work += Work(swept=tokens, hessians=tokens, squares=_SMOOTHING * searched, text=text)
    if isinstance(rounding, QATSettings):
        learned = rounding.steps * batch
        taught = (learned + _HELD_OUT) * (rounding.distill > 0)
        work += Work(read=_HELD_OUT + taught, learned=learned, steps=rounding.steps, text=text)
        cost = METHOD_COSTS["gptq" if rounding.start == "auto" else rounding.start]
    if cost.swept:
        learned = batch * (rounding.iterations if isinstance(rounding, AutoRoundSettings) else 0)
        options = getattr(rounding, "scales", "auto"), getattr(rounding, "refine", 0)
        work += Work(text=text) + _rounding(cost, calibration.samples, length, learned, *options)
        if calibration.first_tokens < 0 and not settings.amount:
            work += Work(learned=float(MEASURED_ROWS * length))
    steps = settings.tuning.steps(settings.method, bits_of(settings.storage), length)
    return work + _tuning(steps, length, settings.data)


def rounded_options() -> Work:
    """The sweep that rounds every Linear on the grids of five options."""
    work = Work(swept=OPTION_TOKENS, hessians=OPTION_TOKENS)
    for _ in range(5):
        work += _rounding(METHOD_COSTS["gptq"], 0, 0, 0.0, refine=4)
    return work


def _tuning(steps: int, length: int, data: str) -> Work:
    """Scales and norms that learn behind a rounding."""
    step, held_out, rows = tuning_rows(steps, length)
    tokens, learned = float(rows * length), float(steps * step * length)
    if not steps:
        return Work()
    return Work(read=tokens + 2 * held_out * length, learned=learned, text=_text(data, tokens))


def _rounding(
    cost: MethodCost, rows: int, length: int, learned: float, scales: str = "auto", refine: int = 0
) -> Work:
    """A sweep with its solver over rows of ``length`` tokens; each block learns from ``learned``."""
    searched, passes = scales in ("auto", "output") and not learned, refine if cost.columns else 0
    curvature = float(curvature_rows(rows) * length) if cost.backward else 0.0
    more = Work(blocks=6 * learned + _SEARCH * searched, learned=curvature)
    products = 2 * searched + max(5 * passes - 2, 0)
    return _sweep(cost, float(rows * length)) + more + Work(products=products, columns=cost.columns * passes)


def _sweep(cost: MethodCost, tokens: float) -> Work:
    """A sweep over the blocks with a method's Hessians and solver."""
    swept = cost.swept * tokens
    hessians = swept if cost.products else 0.0
    return Work(swept=swept, hessians=hessians, products=cost.products, columns=cost.columns)


def _exporting(settings: ExportSettings) -> Work:
    """An export's work with text."""
    rows = settings.calibration_rows
    tokens = float(rows * settings.sequence_length)
    tuning = _tuning(settings.most_steps, settings.sequence_length, settings.data)
    if not tokens:
        return tuning
    text = _text(settings.data, tokens)
    if settings.format not in ("exl2", "exl3") and settings.rounding == "nearest":
        return Work(blocks=2 * tokens, text=text) + tuning
    cost = METHOD_COSTS.get(settings.rounding, EXL2_COST)
    iterations = AutoRoundSettings.iterations if settings.rounding == "autoround" else 0
    learned = float(iterations * settings.batch_size * settings.sequence_length)
    return _rounding(cost, rows, settings.sequence_length, learned) + Work(text=text) + tuning


def _check(settings: QuantizeSettings, source: Shape) -> Work:
    """The comparison of the written checkpoint with the original."""
    tokens = settings.check_tokens
    if not tokens:
        return Work()
    passes = 48 if source.bytes <= _SMALL else 0
    return Work(read=2 * tokens + 44 * passes, passes=passes, touched=18, text=_text(settings.data, tokens))


def _text(data: str, tokens: float) -> float:
    """Tokens that are read and tokenized for a number of tokens of a text."""
    wanted, path = max(tokens, _LEAST_TEXT), Path(data or ".")
    if path.is_file():
        size = path.stat().st_size / 4
        wanted = min(wanted, size) if ".jsonl" in data else size  # one document is tokenized whole
    return wanted
