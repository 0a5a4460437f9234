"""Estimates of a stage's time, memory and disk.

    P parameters of the model (B of them inside its blocks), Q of the teacher, h width, f width inside the
    MLP, T tokens, V vocabulary; a pass through the blocks is 2 B T operations

    training       6 P T + 2 Q T' operations, T' tokens that the teacher reads; 12 V T elements of losses;
                   muon 30 h B operations per step; each held-out loss on E tokens E (2 P + 2 Q); 10 P
                   elements of an optimizer step
    prune          the text once through the model, 2 P T, with gradients 6 P T, in each round of units; for
                   zeros a sweep with its Hessians and its solving; leaving layers out one by one: each from
                   its block on, P T; a scan: every structure at some amounts, and each layer alone; then
                   reconstruction: a sweep and solving, or training of each block, 6 B T an epoch
    sweep          every block twice (its input, its rounded output): 4 B T; Hessians 2 K^2 T for each group
                   of Linears with K inputs; twice with the original's inputs (gptaq, qronos, yaqa)
    solving        for each group of Linears with K inputs the factor of its Hessian, 4/3 K^3: a Cholesky
                   factor and the inverse of that; for each Linear (N, K): K columns for the rounding and for
                   each pass of refinement, each some small operations; N K^2 operations for the rounding,
                   3 N K^2 for a sweep of refinement with its refit of scales; a search of scales, which tries
                   40 on each tile; and tr(E H E^T), N K^2 with half of H, for the search and the report
    yaqa           in addition, a forward and backward pass through the model for each round
    autoround      for each block ``iterations`` batches forward and backward: 6 B times their tokens
    smoothing      a sweep with its Hessians; a search: N' K^2 operations for each candidate, N' rows tried
    qat            training, after the rounding that it starts from
    rounding       the weights' elements
    check          both models on held-out tokens, and a short completion of each small model
    text           characters tokenized: many documents are read a few hundred at a time

Work becomes seconds by the measured rates of this machine (machine.py) and the fraction that such work
reaches of them. The errors of a run's finished stages correct the later estimates.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import psutil

from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.units import bytes_text
from attar.errors import MemoryNeededError
from attar.memory import free_memory
from attar.quantization.settings import AutoRoundSettings, YAQASettings
from attar.recipe.machine import Rates
from attar.recipe.schema import ORIGINAL, StageEntry
from attar.recipe.shapes import Shape, after, flat_settings, shape_of

_SURE = 0.75  # of an estimate of memory: less is not free, and the system ends the process
_BASE_MEMORY = 450e6  # the interpreter with torch and transformers loaded
_DISK_RATE = 2e8  # bytes per second, read, packed and written
_START = 1.0  # seconds to load models and data
_REACHED = 0.7  # fraction of the rate of products that models and factorizations reach
_SWEPT = 0.6  # cost of a sweep's pass over one of training: it keeps nothing for a backward pass
_CALLS_A_COLUMN = 200.0  # small operations of a solver for one column
_CALLS_A_LAYER = 1000.0  # small operations of a layer's forward pass of a few tokens
_MEMORY_RATE = 1e10  # bytes per second of weights read by decoding
_SPEED_ROUNDS, _SPEED_BUDGET = 8, 2.0  # most runs of a speed measurement; seconds of all but the first
_ROUNDED = 40.0  # numbers read and written for a weight: scale 5, code 10, report 19, packing 6
_CHOSEN = 40.0  # the same to choose zeros: scores 5, selection 12, masks and ties 10, the weight 5, report 8
_COMPARED = 18.0  # numbers read and written to load a weight of both models, and to decode one
_CANDIDATES = 20  # of a search for scales
_TRIED = 2 * _CANDIDATES * 128.0  # operations for one weight: both signs, half a tile's Hessian
_HALVED = 2048  # inputs from which on half of a symmetric Hessian is multiplied
_SEARCHED_ROWS = 512  # rows of a weight on which a smoothing's candidates are tried, times two
_CHARACTERS_AN_ELEMENT = 0.005  # characters tokenized in the time of one element-wise operation
_DOCUMENTS, _DOCUMENT = 256, 14e3  # tokenized at a time; characters of one
_CHARACTERS_A_TOKEN = 4.0
_HELD_OUT = 16_384  # tokens of a held-out loss
_SCORED_ROWS = 32  # on which a student's units are chosen
_SAMPLED_TOGETHER = 64  # rows of a batch that a model writes
_SAMPLED = 24 * 44  # tokens read by a check's greedy completion, without a cache
_SPILLED = 2**30  # bytes of hidden states that are in memory on a machine of 8 GB; the rest is on disk
_WAITING = 2**31  # bytes of the passes that wait between two groups there; more start again instead
_REFINED = 2**25  # weights that are refined at a time
_STREAMED = {"merge": 8.0, "export": 14.0, "prune": 26.0, "quantize": 16.0}
"""Bytes of a weight in a stream: of two parents and their float32 sum; stored, float32, coded, read back and
their difference; scores, a copy with the numbers of its columns to select from, and a running sum of ties;
float32, scales, codes, decoded."""
_LOGITS = 2**28  # bytes of the logits of a pass of an evaluation
_SMALL = 2**30  # bytes of the largest model of which a check makes a completion


@dataclass(frozen=True)
class MethodCost:
    """What a rounding takes in addition to nearest codes.

    Attributes:
        swept: models whose blocks are swept; 2: the original's too.
        refined: passes of refinement follow.
        learned: each block is trained.
        backward: the whole model runs backward for its Hessian.
        trained: the whole model is trained, after the rounding that it starts from.
        matrices: of a Hessian's size at the peak, itself among them.
    """

    swept: int = 0
    matrices: float = 0.0
    refined: bool = False
    learned: bool = False
    backward: bool = False
    trained: bool = False


METHOD_COSTS = {
    "rtn": MethodCost(),
    "smoothquant": MethodCost(),
    "awq": MethodCost(swept=1, matrices=2),
    "gptq": MethodCost(swept=1, refined=True, matrices=2),
    "gptaq": MethodCost(swept=2, refined=True, matrices=12),
    "qronos": MethodCost(swept=2, refined=True, matrices=6),
    "yaqa": MethodCost(swept=2, refined=True, backward=True, matrices=8),
    "autoround": MethodCost(swept=1, learned=True, matrices=3),
    "qat": MethodCost(trained=True),
}
"""By the methods of attar.quantization.rounding.METHODS, which would import torch."""
_EXL2_COST = MethodCost(swept=1, refined=True, matrices=3)


@dataclass(frozen=True)
class PruneCost:
    """What pruning takes besides writing.

    Attributes:
        passes: of the text through the model, for scores.
        backward: the scores are gradients.
        swept: blocks are swept.
        hessians: with Hessians.
        columns: solved column by column.
        products: products of a weight (N, K) with its Hessian, for iterative solvers.
        scanned: amounts of every structure that are measured.
    """

    passes: float = 0.0
    backward: bool = False
    swept: bool = False
    hessians: bool = False
    columns: bool = False
    products: int = 0
    scanned: int = 0


PRUNE_COSTS = {
    "magnitude": PruneCost(),
    "wanda": PruneCost(swept=True),
    "sparsegpt": PruneCost(swept=True, hessians=True, columns=True),
    "alps": PruneCost(swept=True, hessians=True, products=100),
    "heads": PruneCost(passes=1),
    "query-heads": PruneCost(passes=1),
    "neurons": PruneCost(passes=1),
    "hidden": PruneCost(passes=1),
    "layers": PruneCost(passes=1),
    "experts": PruneCost(passes=1),
    "mixed": PruneCost(passes=1, scanned=6),
}
"""By the methods of attar.pruning.stage.METHODS, with the first criterion of each."""

CRITERION_COSTS = {
    "gradient": PruneCost(passes=1, backward=True),
    "taylor": PruneCost(passes=1, backward=True),
    "activation": PruneCost(passes=1),
    "wanda": PruneCost(passes=1),
    "influence": PruneCost(passes=1),
    "run": PruneCost(passes=3),  # and each of the best runs is measured
}
"""By the criteria of units; "kl" takes half a pass for each layer."""
_WIDTHS = 3  # structures of a scan besides layers: heads, neurons, hidden
_MEASURED_ROWS = 16  # at most, on which cuts and groups of layers are measured
_REFITS = 22  # products of a weight with its Hessian: the target, the first residual, 20 steps
_RATES_TRIED = 2  # learning rates of a block's reconstruction
_GROUP_PASSES = 20  # of a layer's groups, each at some fractions of zeros, from its block on


@dataclass(frozen=True)
class Work:
    """Work in the units of :class:`attar.recipe.machine.Rates`, and characters of text."""

    products: float = 0.0
    elements: float = 0.0
    calls: float = 0.0
    characters: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.elements + other.elements,
            self.calls + other.calls,
            self.characters + other.characters,
        )

    def times(self, factor: float) -> Work:
        """The same work a number of times."""
        return Work(*(factor * part for part in astuple(self)))

    def seconds(self, rates: Rates) -> float:
        """Time on a machine with these rates."""
        return (
            self.products / (_REACHED * rates.products)
            + self.elements / rates.elements
            + self.calls / rates.calls
            + self.characters / (_CHARACTERS_AN_ELEMENT * rates.elements)
        )


@dataclass(frozen=True)
class Estimate:
    """Estimated needs of a stage.

    Args:
        seconds: time, corrected by the errors of earlier estimates.
        plain: the same without the correction.
        scratch_bytes: additional disk space during the stage.
    """

    seconds: float
    plain: float
    memory_bytes: float
    disk_bytes: float
    scratch_bytes: float


def estimate(
    entry: StageEntry, source: Shape, teacher: Shape | None, result: Shape, rates: Rates, factor: float = 1.0
) -> Estimate:
    """Estimate a stage.

    Args:
        source, teacher, result: the checkpoints that it takes, learns from, and makes.
        factor: time over estimate of earlier stages.
    """
    memory, scratch = _memory(entry, source, teacher, result)
    work = stage_work(entry, source, teacher, result)
    plain = _START + work.seconds(rates) + (source.bytes + result.bytes) / _DISK_RATE
    return Estimate(plain * factor, plain, _BASE_MEMORY + memory, result.bytes, scratch)


def check_memory(verb: str, model: Any, settings: Any) -> None:
    """Refuse a stage that holds its batches in memory, where they cannot fit. Those that work block by block
    spill instead; on a GPU its own memory counts.

    Raises:
        MemoryNeededError: names both amounts.
    """
    import torch

    entry = StageEntry(1, verb, verb, ORIGINAL, None, settings, "")
    flat = flat_settings(entry)
    cost = _prune_cost(flat) if verb == "prune" else PruneCost()
    whole = verb in ("distill", "recover") or (verb == "prune" and cost.passes and not cost.swept)
    if not whole or torch.cuda.is_available():
        return
    source = shape_of(open_checkpoint(model))
    needed = _BASE_MEMORY + _memory(entry, source, source, after(entry, source))[0]
    needed -= min(psutil.Process().memory_info().rss, _BASE_MEMORY)
    free = free_memory(swap=True)
    if _SURE * needed > free:
        batch = f"{getattr(flat, 'batch_size', 1)} x {getattr(flat, 'sequence_length', 1)} tokens"
        amounts = f"needs about {bytes_text(needed)} of memory, and {bytes_text(free)} are free"
        raise MemoryNeededError(
            f"{verb} with batches of {batch} {amounts}",
            hint="a smaller --batch-size or --sequence-length needs less",
        )


def evaluation_seconds(settings: Any, shape: Shape, rates: Rates) -> float:
    """Estimated time of the evaluation of one checkpoint, with a stored reference."""
    tokens = getattr(settings, "tokens", 16384)
    work = Work(2.0 * shape.parameters * tokens, 6.0 * shape.vocabulary * tokens)
    work += _text(settings, tokens)
    token = _CALLS_A_LAYER * shape.layers / rates.calls + 2 * shape.parameters / _MEMORY_RATE
    once = getattr(settings, "decode_tokens", 0) * token
    speed = min(_SPEED_ROUNDS * once, _SPEED_BUDGET + 2 * once) if getattr(settings, "speed", False) else 0.0
    return _START + work.seconds(rates) + speed + getattr(settings, "sample_tokens", 0) * token


def evaluation_memory(settings: Any, shape: Shape, free: float, *, reference: bool = False) -> float:
    """Estimated memory of the evaluation of one checkpoint, above nothing.

    Args:
        free: bytes of the machine: a larger model is read block by block.
        reference: in float32, as the reference is; else as it is stored.
    """
    row = 4.0 * getattr(settings, "sequence_length", 512) * shape.vocabulary
    logits = max(min(4.0 * getattr(settings, "tokens", 16384) * shape.vocabulary, _LOGITS), row)
    whole = _BASE_MEMORY + (4 * shape.parameters if reference else shape.bytes) + 2 * logits
    if whole <= free:
        return whole
    head = 4.0 * shape.vocabulary * shape.hidden
    return _BASE_MEMORY + max(4 * shape.blocks / shape.layers, head + 2 * logits)


def stage_work(entry: StageEntry, source: Shape, teacher: Shape | None, result: Shape) -> Work:
    """The work of a stage."""
    settings = flat_settings(entry)
    if entry.stage in ("distill", "recover"):
        work = _training(settings, result, teacher or source) + _text(settings, _HELD_OUT)
        if not entry.makes_model:
            return work + _writing(settings, source, result)
        return work + (_choosing(settings, source) if entry.stage == "distill" else Work())
    if entry.stage == "prune":
        elements = 4 if _prune_cost(settings).passes else _CHOSEN
        work = _pruning(settings, source) + Work(elements=elements * source.parameters)
        return work + _reconstructing(settings, result, getattr(entry.settings, "reconstruction", "none"))
    if entry.stage == "quantize":
        return _quantizing(settings, source, entry.settings.smoothing) + _check(settings, source)
    if entry.stage == "export":
        return _exporting(settings, source) + Work(elements=10 * source.parameters)
    return Work(elements=4 * source.parameters)


def _training(settings: Any, result: Shape, teacher: Shape) -> Work:
    """Training steps and held-out losses."""
    steps = float(settings.steps)
    batch = getattr(settings, "batch_size", 1) * getattr(settings, "accumulate", 1)
    tokens = steps * batch * getattr(settings, "sequence_length", 1)
    every = getattr(settings, "evaluate_every", 0)
    held_out = _HELD_OUT * (1 + (steps // every if every else 0))
    guide = teacher.parameters if _guided(settings) else 0.0
    products = tokens * 6 * result.parameters + _taught(settings, tokens) * 2 * guide
    products += held_out * 2 * (result.parameters + guide)
    if getattr(settings, "optimizer", "") == "muon":
        products += steps * 30 * result.hidden * result.blocks
    elements = (12 * tokens + 4 * held_out) * result.vocabulary + 10 * steps * result.parameters
    return Work(products, elements) + _text(settings, tokens)


def _writing(settings: Any, source: Shape, result: Shape) -> Work:
    """Rows that a draft head's model writes, in batches, and the logits of further heads."""
    steps = float(settings.steps * settings.batch_size * settings.accumulate)
    share = 1.0 if settings.share is None else settings.share
    drawn = min(settings.samples, share * steps) * settings.sequence_length + _HELD_OUT
    further = (settings.drafts - 1) * steps * settings.sequence_length
    products = 2.0 * source.parameters * drawn + 6.0 * further * result.outside / settings.drafts
    calls = _CALLS_A_LAYER * source.layers * drawn / _SAMPLED_TOGETHER
    return Work(products, 12.0 * further * source.vocabulary, calls)


def _choosing(settings: Any, source: Shape) -> Work:
    """The passes that choose a student's units: one for each structure, some for the layers."""
    passes = float(sum(bool(units) for units in (settings.heads, settings.neurons, settings.hidden)))
    passes += {"influence": 1.0, "run": 3.0, "kl": source.layers / 2}.get(settings.layer_map, 0.0)
    tokens = _SCORED_ROWS * settings.sequence_length
    return Work(2.0 * source.parameters * tokens * passes) if settings.init == "copy" else Work()


def _guided(settings: Any) -> bool:
    """Whether a teacher is run; without, the text alone teaches."""
    weight = getattr(settings, "distill", getattr(settings, "alpha", 1.0))  # qat's alpha is SmoothQuant's
    return bool(weight > 0.0) and getattr(settings, "objective", "") != "hard"


def _taught(settings: Any, tokens: float) -> float:
    """Tokens that the teacher reads: each once if its predictions are stored."""
    if not getattr(settings, "keeps_predictions", False) or not settings.rows:
        return tokens
    return min(tokens, float(settings.rows * settings.sequence_length))


def _pruning(settings: Any, source: Shape) -> Work:
    """Scores and solving; with text where any is read."""
    cost, tokens, rounds = _prune_cost(settings), _calibration(settings), getattr(settings, "rounds", 1)
    passes = source.layers / 2 if getattr(settings, "criterion", "") == "kl" else cost.passes
    a_pass = Work((6 if cost.backward else 2) * source.parameters * tokens, 6.0 * source.vocabulary * tokens)
    work = a_pass.times(passes * rounds)
    if cost.swept:
        work += _sweeping(settings, source, hessians=cost.hessians)
    if cost.columns:
        work += _factoring(source) + _rounding(source) + _energies(source, 2)
    work += Work(2.0 * cost.products * _cubes(source))
    work += _measuring(settings, source, cost)
    return work + (_text(settings, tokens) if work.products else Work())


def _measuring(settings: Any, source: Shape, cost: PruneCost) -> Work:
    """Measured KLs that amounts are chosen by: of groups of layers, of a scan's cuts, of candidates."""
    rows = min(getattr(settings, "samples", 0), _MEASURED_ROWS)
    read = rows * getattr(settings, "sequence_length", 0)
    a_cut = Work(2 * source.parameters * read, 6.0 * source.vocabulary * read)
    allocation, work = getattr(settings, "allocation", "uniform"), Work()
    if allocation == "owl":
        work = Work(2 * source.blocks * _calibration(settings))
    elif allocation == "measured":
        work = a_cut.times(_GROUP_PASSES * source.layers)
    if cost.scanned:
        work += a_cut.times(cost.scanned * (_WIDTHS + 1) + (1 + 3 * _WIDTHS) * source.layers / 2)
    if (candidates := getattr(settings, "candidates", 1)) > 1:
        learned = candidates * settings.candidate_steps * settings.batch_size * settings.sequence_length
        work += Work(8.0 * source.parameters * learned, 12.0 * source.vocabulary * learned)
    return work


def _reconstructing(settings: Any, result: Shape, reconstruction: str) -> Work:
    """What is reconstructed after pruning: nothing, each Linear, or then each block too."""
    if reconstruction == "none":
        return Work()
    work = _sweeping(settings, result) + Work(2.0 * _REACHED * _REFITS * _cubes(result))
    if reconstruction == "block":
        learned = _RATES_TRIED * getattr(settings, "reconstruct_epochs", 1) * _calibration(settings)
        work += _sweeping(settings, result, 2, hessians=False) + Work(6 * result.blocks * learned)
    return work


def _prune_cost(settings: Any) -> PruneCost:
    """The cost of the criterion, where one is chosen, else of the method."""
    cost, criterion = PRUNE_COSTS.get(getattr(settings, "method", ""), PruneCost()), _criterion(settings)
    return CRITERION_COSTS.get(criterion, cost)


def _criterion(settings: Any) -> str:
    """The criterion of units; over all layers at once it is the gradient where none is named."""
    criterion = str(getattr(settings, "criterion", ""))
    over_layers = criterion == "auto" and getattr(settings, "scope", "layer") == "global"
    return "gradient" if over_layers else criterion


def _quantizing(settings: Any, source: Shape, smoothing: str) -> Work:
    cost = METHOD_COSTS[settings.method]
    work = Work(elements=_ROUNDED * source.parameters)
    tokens = _calibration(settings)
    if smoothing != "none":
        searched = smoothing == "awq" or settings.alpha < 0
        work += _sweeping(settings, source) + _text(settings, tokens)
        work += Work(4.0 * _CANDIDATES * _SEARCHED_ROWS * _squares(source) if searched else 0.0)
    if cost.trained:
        work += _training(settings, source, source)
        cost = METHOD_COSTS["gptq" if settings.start == "auto" else settings.start]
    if cost.swept:
        work += _solving(settings, source, cost) + _text(settings, tokens)
    if settings.bits:
        work += Work(8 * source.blocks * tokens)
    return work


def _exporting(settings: Any, source: Shape) -> Work:
    """An export's work with text: none for nearest rounding, except exl2."""
    rounding = getattr(settings, "rounding", "nearest")
    if getattr(settings, "format", "") == "exl2" or rounding != "nearest":
        cost = METHOD_COSTS.get(rounding, _EXL2_COST)
        return _solving(settings, source, cost) + _text(settings, _calibration(settings))
    if rows := getattr(settings, "importance_rows", 0):
        tokens = float(rows * settings.sequence_length)
        return Work(2 * source.blocks * tokens) + _text(settings, tokens)
    return Work()


def _solving(settings: Any, source: Shape, cost: MethodCost) -> Work:
    """A sweep with its solver over all blocks."""
    tokens = _calibration(settings)
    work = _sweeping(settings, source, cost.swept)
    if cost.learned:
        batch = settings.batch_size * settings.sequence_length
        iterations = getattr(
            settings, "iterations", AutoRoundSettings.iterations
        )  # an export's are the default
        return work + Work(6 * source.blocks * iterations * batch)
    if getattr(settings, "scales", "auto") in ("auto", "output"):
        work += Work(_TRIED * source.blocks, _CANDIDATES * 4 * source.blocks) + _energies(source, 2)
    if cost.refined:
        work += _factoring(source) + _rounding(source)
        work += _refining(source, getattr(settings, "refine", 0))
    work += _energies(source, 3)
    if cost.backward:
        work += Work(6 * source.parameters * tokens * getattr(settings, "rounds", YAQASettings.rounds))
    return work


def _factoring(source: Shape) -> Work:
    """The factors of all Hessians: of q, k and v; o; gate and up; down."""
    return Work(4 / 3 * source.layers * (3 * source.hidden**3 + _inner(source) ** 3))


def _rounding(source: Shape) -> Work:
    """A solver's pass over the columns of all Linears, each corrected in those that follow it."""
    return Work(_cubes(source), calls=_CALLS_A_COLUMN * _inputs(source))


def _refining(source: Shape, passes: int) -> Work:
    """Coordinate descent: the first gradient, sweeps and, between two, a refit of the scales."""
    if not passes:
        return Work()
    return Work((5 * passes - 2) * _cubes(source), calls=_CALLS_A_COLUMN * passes * _inputs(source))


def _energies(source: Shape, count: int) -> Work:
    """tr(E H E^T) of an E for each Linear, ``count`` times: products of large matrices, which reach the
    measured rate."""
    return Work(_REACHED * count * sum(n * N * K * (K + min(K, _HALVED)) for n, N, K in _linears(source)))


def _linears(source: Shape) -> tuple[tuple[float, float, float], ...]:
    """(how many, outputs, inputs) of all Linears: q, k, v, o; gate, up; down."""
    layers, hidden, inner = float(source.layers), float(source.hidden), _inner(source)
    return (4 * layers, hidden, hidden), (2 * layers, inner, hidden), (layers, hidden, inner)


def _inputs(source: Shape) -> float:
    """Columns of all Linears."""
    return sum(n * K for n, _, K in _linears(source))


def _cubes(source: Shape) -> float:
    """N K^2 of all Linears."""
    return sum(n * N * K**2 for n, N, K in _linears(source))


def _sweeping(settings: Any, source: Shape, models: int = 1, *, hessians: bool = True) -> Work:
    """A pass over all blocks with their Hessians, of the quantized model and optionally the original."""
    squares = 2.0 * source.layers * (3 * source.hidden**2 + _inner(source) ** 2) if hessians else 0.0
    return Work(_SWEPT * models * _calibration(settings) * (4.0 * source.blocks + squares))


def _squares(source: Shape) -> float:
    """K^2 of all Linears."""
    return sum(n * K**2 for n, _, K in _linears(source))


def _inner(source: Shape) -> float:
    """f, from the parameters of gate, up and down."""
    return max(source.mlp / source.layers / (3 * source.hidden), 1.0)


def _check(settings: Any, source: Shape) -> Work:
    """The comparison of the written checkpoint with the original."""
    tokens = settings.check_tokens
    if not tokens:
        return Work()
    sampled = 2 * _SAMPLED if source.bytes <= _SMALL else 0
    calls = _CALLS_A_LAYER * source.layers * sampled / 44  # a forward pass reads 44 of the tokens
    elements = _COMPARED * source.parameters + 40.0 * source.vocabulary * tokens
    both = Work(4 * source.parameters * tokens, elements)
    return both + Work(2 * source.parameters * sampled, calls=calls) + _text(settings, tokens)


def _calibration(settings: Any) -> float:
    """Tokens of the calibration sequences."""
    return float(getattr(settings, "samples", 0) * getattr(settings, "sequence_length", 0))


def _text(settings: Any, tokens: float) -> Work:
    """Reading and tokenizing a number of tokens of the settings' text."""
    data = str(getattr(settings, "data", ""))
    wanted = max(tokens * _CHARACTERS_A_TOKEN, _DOCUMENTS * _DOCUMENT)
    path = Path(data)
    if data and path.is_file():
        size = float(path.stat().st_size)
        wanted = min(wanted, size) if ".jsonl" in data else size  # one document is tokenized whole
    return Work(characters=wanted)


def _memory(entry: StageEntry, source: Shape, teacher: Shape | None, result: Shape) -> tuple[float, float]:
    """Bytes of memory above the base, and of scratch on disk."""
    settings = flat_settings(entry)
    if entry.stage in ("distill", "recover"):
        other = (teacher or source).parameters if _guided(settings) else 0.0
        memory = 16 * result.parameters + 4 * other + _activations(settings, result)
        return memory, 12 * result.parameters
    if entry.stage == "prune":
        return _pruning_memory(settings, source, getattr(entry.settings, "reconstruction", "none"))
    if entry.stage == "quantize" and METHOD_COSTS[settings.method].trained:
        return 20 * source.parameters + _activations(settings, source), 12 * source.parameters
    if entry.stage == "quantize" and getattr(settings, "method", "") != "rtn":
        return _sweep_memory(settings, source, METHOD_COSTS[settings.method]), result.bytes
    checked = _check_memory(source) if getattr(settings, "check_tokens", 0) else 0.0
    return max(_stream_memory(entry.stage, source), checked), 0.0


def _stream_memory(stage: str, source: Shape) -> float:
    """The largest tensor in its copies: of the embedding, where that is touched, or of a Linear."""
    outside = source.vocabulary if stage in ("merge", "export") else 0
    return _STREAMED.get(stage, 8.0) * source.hidden * max(_inner(source), outside)


def _check_memory(source: Shape) -> float:
    """A block in float32 of one model after the other, and its largest weight in three more copies while its
    codes are decoded."""
    return 4 * source.blocks / source.layers + 12 * _inner(source) * source.hidden


def _pruning_memory(settings: Any, source: Shape, reconstruction: str) -> tuple[float, float]:
    """A sweep's, or that of the whole model and what a backward pass keeps; a magnitude needs one weight."""
    cost = _prune_cost(settings)
    if cost.swept:
        matrices = 2.0 * cost.hessians + 2.0 * bool(cost.products)
        largest = _inner(source) * source.hidden
        zeros = _sweep_memory(settings, source, MethodCost(swept=1, matrices=matrices), stored=2)
        if not cost.hessians:  # zeros are chosen by scores
            zeros += (_STREAMED["prune"] - 8) * largest
        descent = 0.0 if reconstruction == "none" else 32 * min(largest, _REFINED)
        solved = _sweep_memory(settings, source, MethodCost(swept=1, matrices=1), stored=2) + descent
        return max(zeros, solved if descent else 0.0), source.bytes
    if not cost.passes:
        return _stream_memory("prune", source), 0.0
    tokens = getattr(settings, "batch_size", 1) * getattr(settings, "sequence_length", 1)
    kept = 8.0 * tokens * (source.vocabulary + source.hidden)  # logits, and what a block makes of the states
    if cost.backward:
        kept = _activations(settings, source)
    return (8 if cost.backward else 4) * source.parameters + kept, 0.0


def _sweep_memory(settings: Any, source: Shape, cost: MethodCost, *, stored: int = 1) -> float:
    """A block in float32 for each model with what is stored of it (bytes a weight), the matrices of the
    widest Hessian, two copies of the largest weight, or those of its refinement, the hidden states of the
    text, and the passes that wait."""
    block, widest = source.blocks / source.layers, float(_inner(source))
    models, tokens, largest = max(cost.swept, 1), _calibration(settings), widest * source.hidden
    sorted_too = getattr(settings, "act_order", "") == "group"
    square = 4 * widest**2
    solving = square * (cost.matrices + sorted_too) + 8 * largest
    if cost.refined and int(getattr(settings, "refine", 0)):
        solving = max(solving, square * (cost.matrices + sorted_too - 1) + 32 * min(largest, _REFINED))
    states = min(4.0 * tokens * source.hidden, _SPILLED)
    waiting = models * 4.0 * tokens * (5 * source.hidden + widest)
    passes = models * states + (waiting if waiting <= _WAITING else 0.0)
    return (4 * models + stored) * block + solving + passes


def _activations(settings: Any, shape: Shape) -> float:
    """Bytes kept for the backward pass, and of the logits with their gradient."""
    tokens = getattr(settings, "batch_size", 1) * getattr(settings, "sequence_length", 1)
    return float(tokens) * (34 * shape.hidden * shape.layers + 12 * shape.vocabulary)
