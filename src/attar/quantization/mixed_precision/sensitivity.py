"""How much each part of a model minds being quantized, measured once, and the mix of schemes that follows.

    kl[g, c] = mean over tokens of KL(p || p_gc)      p the model; p_gc the model with group g alone on grid c

Letters: g a group of matrices that share a scheme: Linears, or the embedding; c a candidate grid; W (N, K)
weight; x (K,) its input (of an embedding, the unit vector of a token). An embedding that is the head too is
measured as one, in both places at once.

Weights are rounded to nearest with scales searched for the smallest squared error: what a better rounding
gains, it gains for every grid, so the order of the grids holds. The sum of the groups' KLs stands for the KL
of the whole mix. That is an approximation (Taylor's second order without its mixed terms; it fails when a
few groups at few bits dominate); :func:`interaction` measures how good it is for one mix.

The measurements live in a JSON file, one for each model, text, amount of text and seed:

    {"format": "attar sensitivity", "version": 2,
     "key": {"model": fingerprint, "data", "tokens", "sequence_length", "seed", "precision"},
     "measurements": [{"group", "modules": [names],
                       "grid": name, "definition": the grid in full and how weights were rounded,
                       "bits": stored bits of the group, "weights": how many it has,
                       "kl": nats a token (null: infinite),
                       "output_error": ||(W - W') x||^2 / ||W x||^2 over the group}, ...]}

An entry is looked up by its group, modules, name and definition, so that integer mixes, GGUF type mixes and
EXL2 targets can share a file, a new candidate is measured alone, and a grid that changed under its old name
is measured again. The file is written whole after every measurement, beside and renamed: a killed run goes
on behind the last.
"""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attar.checkpoint.atomic import write_json
from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.checkpoint.jsonfile import read_json
from attar.errors import CheckpointError, DataError, ModelError, SettingsError
from attar.models.parts import weight_of
from attar.progress import SILENT, Progress
from attar.quantization.grids import Grid, IntGrid, QuantizedTensor
from attar.quantization.grids.scales import choose_scales
from attar.quantization.mixed_precision.allocate import Option, allocate, frontier
from attar.walks.objectives import token_kl
from attar.walks.passes import StopForward
from attar.walks.skeleton import HiddenStates, fixed_output

FORMAT, VERSION = "attar sensitivity", 2
MEMORY = 8 * 2**30  # bytes of reference logits kept in memory; the rest waits on disk

CandidateGrid = Callable[[torch.dtype], Grid]
"""A grid for weights of a storage type."""

RoundFunction = Callable[[Tensor, Grid], QuantizedTensor]
"""Rounds a weight (N, K) on a grid."""


@dataclass(frozen=True)
class SensitivityKey:
    """What a file of measurements is about.

    Attributes:
        model: fingerprint of the checkpoint.
        data: name (or fingerprint) of the text.
        tokens: how many were run.
        sequence_length: tokens in a row.
        seed: of the choice of text.
        precision: ``fp32``, or ``bf16`` for arithmetic in bf16 (autocast), whose noise hides small KLs.
    """

    model: str
    data: str
    tokens: int
    sequence_length: int
    seed: int
    precision: str = "fp32"

    def file_name(self) -> str:
        """A name of its own for a file of these measurements."""
        return f"sensitivity-{sha256_text(canonical_json({**asdict(self), 'version': VERSION}))[:16]}.json"


@dataclass(frozen=True)
class Measurement:
    """One group on one grid.

    Attributes:
        group: its name.
        modules: the Linears of the group.
        grid: the candidate's name.
        definition: the grid in full, and how weights were rounded to it.
        bits: stored bits of the group, scales included.
        weights: how many weights the group has.
        kl: nats a token; infinite when the model's output was not finite.
        output_error: relative squared error of the group's outputs.
    """

    group: str
    modules: tuple[str, ...]
    grid: str
    definition: str
    bits: int
    weights: int
    kl: float
    output_error: float

    @property
    def identity(self) -> tuple[str, tuple[str, ...], str, str]:
        """What it is looked up by."""
        return self.group, self.modules, self.grid, self.definition


def integer_candidates(group_size: int, symmetric: bool = True) -> dict[str, CandidateGrid]:
    """W2A16 to W8A16 at one group size."""

    def grid(bits: int) -> CandidateGrid:
        return lambda storage: IntGrid(bits, group_size, symmetric, storage)

    return {f"W{bits}A16": grid(bits) for bits in (2, 3, 4, 5, 6, 8)}


def shared_groups(blocks: Sequence[Any], modules: Sequence[str]) -> dict[str, list[str]]:
    """Linears that must share a scheme, because runtimes fuse them: q, k and v; gate and up.

    Args:
        blocks: those of an Anatomy.
        modules: names of the Linears that will be quantized.

    Returns:
        modules by group, in the order of the blocks; a group is called after its modules.
    """
    groups: dict[str, list[str]] = {}
    for block in blocks:
        attention, mlp = block.attention, block.mlp
        families = [[attention.q, attention.k, attention.v], [mlp.gate, mlp.up]]
        together = [[part.name for part in family if part is not None] for family in families]
        done: dict[str, None] = {}
        for name in block.linears:
            mates = next((family for family in together if name in family), [name])
            members = [mate for mate in dict.fromkeys(mates) if mate in modules and mate not in done]
            if members:
                done.update(dict.fromkeys(members))
                leaves = "+".join(member.rpartition(".")[2] for member in members)
                groups[".".join(filter(None, [members[0].rpartition(".")[0], leaves]))] = members
    return groups


def nearest_mse(weight: Tensor, grid: Grid) -> QuantizedTensor:
    """Round to nearest, each tile's scale searched for the smallest squared error."""
    return grid.quantize(weight, choose_scales(weight, grid, how="mse"))


def measure(
    model: nn.Module,
    groups: Mapping[str, Sequence[str]],
    candidates: Mapping[str, CandidateGrid],
    batches: Sequence[Tensor],
    file: Path,
    *,
    key: SensitivityKey,
    blocks: Sequence[str] = (),
    behind: Sequence[str] = (),
    storage: torch.dtype | None = None,
    fits: Callable[[Grid, tuple[int, int]], bool] = lambda grid, shape: True,
    rounding: RoundFunction = nearest_mse,
    memory: int = MEMORY,
    progress: Progress = SILENT,
) -> list[Measurement]:
    """The sensitivity of every group to every candidate; what the file knows is not measured again.

    Args:
        model: loaded dense, in evaluation mode. Its weights are changed while this runs and are the very same
            bytes afterwards, whatever happens.
        groups: names of Linears (or Conv1D, or Embedding) by group.
        candidates: grids by name.
        batches: int64 (B, S), none padded.
        file: where the measurements live; made when it is not there.
        key: what is measured; must be the file's.
        blocks: names of the model's blocks in order. With them only the part of the model from the group's
            block on is run, which gives the same numbers in about half the time.
        behind: names of modules that run after the last block, such as a head of its own; for them the blocks
            are not run at all.
        storage: the type of the stored weights; None: that of the loaded ones.
        fits: whether a grid can take an (N, K) weight; a group where one cannot lacks that candidate.
        rounding: how weights are rounded.
        memory: bytes of reference logits kept in memory; what is beyond waits on disk.

    Returns:
        the measurements of these groups and candidates, group by group.

    Raises:
        ModelError: the file is about another model or text.
        CheckpointError: the file is damaged.
        DataError: there are no batches.
    """
    if not batches:
        raise DataError("no text to measure sensitivities with", hint="more --samples")
    known = {found.identity: found for found in read(file, key)} if file.exists() else {}
    asked = list(_asked(model, groups, candidates, storage, fits, rounding))
    todo = [request for request in asked if request.blank.identity not in known]
    done = len(asked) - len(todo)
    with progress.task("sensitivity", total=len(asked), done=done) as task:
        if todo:
            work = file.with_name(f".{file.name}.work")
            with _reference(model, blocks, batches, key.precision, memory, work, behind) as reference:
                for request in sorted(todo, key=lambda request: reference.place(request.blank.modules)):
                    found = _measured(reference, request, rounding)
                    known[found.identity] = found
                    _write(file, key, list(known.values()))
                    task.advance(kl=found.kl)
    return [known[request.blank.identity] for request in asked]


def read(file: Path, key: SensitivityKey | None = None) -> list[Measurement]:
    """The measurements of a file.

    Raises:
        CheckpointError: the file is no such file, or is damaged.
        ModelError: it is about something else than ``key``; says what differs.
    """
    content = read_json(file)
    hint = "delete it to measure again"
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(f"{file}: not a file of sensitivities, version {VERSION}", hint=hint)
    try:
        has = SensitivityKey(**content["key"])
        found = [_from_json(entry) for entry in content["measurements"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: a measurement is incomplete: {error}", hint=hint) from error
    if key is not None and has != key:
        wrong = [name for name, value in asdict(key).items() if asdict(has)[name] != value]
        raise ModelError(
            f"{file}: was measured with another {', '.join(wrong)}",
            hint="give another file, or delete this one",
        )
    return found


def _from_json(entry: Mapping[str, Any]) -> Measurement:
    kl = math.inf if entry["kl"] is None else float(entry["kl"])
    error = math.inf if entry["output_error"] is None else float(entry["output_error"])
    return Measurement(**{**entry, "modules": tuple(entry["modules"]), "kl": kl, "output_error": error})


def _write(file: Path, key: SensitivityKey, measurements: Sequence[Measurement]) -> None:
    entries = [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(found).items()
        }
        for found in measurements
    ]
    write_json(file, {"format": FORMAT, "version": VERSION, "key": asdict(key), "measurements": entries})


@dataclass(frozen=True)
class _Request:
    """A measurement to make: the measurement without its numbers, and the grid."""

    blank: Measurement
    grid: Grid


def _asked(
    model: nn.Module,
    groups: Mapping[str, Sequence[str]],
    candidates: Mapping[str, CandidateGrid],
    storage: torch.dtype | None,
    fits: Callable[[Grid, tuple[int, int]], bool],
    rounding: RoundFunction,
) -> Iterator[_Request]:
    for group, modules in groups.items():
        weights = [weight_of(model.get_submodule(module)) for module in modules]
        shapes = [(int(weight.shape[0]), int(weight.shape[1])) for weight in weights]
        for name, candidate in candidates.items():
            grid = candidate(storage or weights[0].dtype)
            if all(fits(grid, shape) for shape in shapes):
                bits = sum(round(grid.bits_per_weight(shape) * shape[0] * shape[1]) for shape in shapes)
                definition = f"{rounding.__name__} {grid!r}"
                count = sum(rows * columns for rows, columns in shapes)
                blank = Measurement(group, tuple(modules), name, definition, bits, count, 0.0, 0.0)
                yield _Request(blank, grid)


@contextmanager
def _reference(
    model: nn.Module,
    blocks: Sequence[str],
    batches: Sequence[Tensor],
    precision: str,
    memory: int,
    work: Path,
    behind: Sequence[str] = (),
) -> Iterator[_Reference]:
    """The model with what it says before any change, for the length of the context."""
    shutil.rmtree(work, ignore_errors=True)
    try:
        with torch.no_grad():
            stores = [HiddenStates(work / name, memory) for name in ("hidden", "logits")]
            dtype = torch.bfloat16 if precision == "bf16" else None
            yield _Reference(model, blocks, batches, stores[0], stores[1], dtype, behind)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Reference:
    """The logits of the unchanged model, and the means to run it from any block on.

    The blocks before ``start`` are replaced by functions that hand on the hidden states kept before block
    ``start``: the model itself makes masks and positions, so nothing here knows a family.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        batches: Sequence[Tensor],
        hidden: HiddenStates,
        logits: HiddenStates,
        dtype: torch.dtype | None,
        behind: Sequence[str],
    ) -> None:
        self.model, self.names, self.batches, self.behind = model, tuple(blocks), batches, tuple(behind)
        self.hidden, self.logits, self.dtype = hidden, logits, dtype
        self.device = next(model.parameters()).device
        self.blocks: list[Any] = [model.get_submodule(name) for name in blocks]
        self.more: dict[int, int | None] = {}  # entries behind the hidden states in a block's output
        self.start = 0
        parameters = inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in parameters else {}
        for number in range(len(batches)):
            logits[number] = self.run(number)
        self.tokens = sum(batch.numel() for batch in batches)

    def place(self, modules: Sequence[str]) -> int:
        """The first block that a change of these modules touches; the number of blocks for what is behind
        them, 0 for what else is in none."""
        return min(self._place(module) for module in modules)

    def _place(self, module: str) -> int:
        if module in self.behind:
            return len(self.names)
        return next((number for number, name in enumerate(self.names) if module.startswith(f"{name}.")), 0)

    def run(self, number: int) -> Tensor:
        """Logits (B, S, V) of a batch, as the model stands now."""
        with ExitStack() as stack:
            if self.dtype is not None:
                stack.enter_context(torch.autocast(self.device.type, self.dtype))
            if self.start:
                hidden = self.hidden[number].to(self.device)
                for place in range(self.start):
                    stack.enter_context(fixed_output(self.blocks[place], hidden, self.more[place]))
            logits: Tensor = self.model(input_ids=self.batches[number].to(self.device), **self.options).logits
        return logits

    def move(self, start: int) -> None:
        """Go to the block ``start`` (never back), keeping the hidden states before it.

        A model whose blocks hand on more than hidden states does not give its own logits again from there;
        it is run whole from then on.
        """
        if start <= self.start or not self.blocks:
            return
        for number in range(len(self.batches)):
            self.hidden[number] = self._before(start, number)
        self.start = start
        again, whole = self.run(0).float().cpu(), self.logits[0].float()
        if not torch.allclose(again, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max())):
            self.blocks, self.start = [], 0

    def _before(self, start: int, number: int) -> Tensor:
        """The hidden states that block ``start - 1`` gives."""
        seen: list[Tensor] = []

        def note(place: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: Any, output: Any) -> None:
                self.more[place] = None if isinstance(output, Tensor) else len(output) - 1
                if place == start - 1:
                    seen.append(output if isinstance(output, Tensor) else output[0])
                    raise StopForward

            return hook

        places = range(self.start, start)
        hooks = [self.blocks[place].register_forward_hook(note(place)) for place in places]
        try:
            self.run(number)
        except StopForward:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return seen[0]

    def kl(self) -> float:
        """Mean KL of the model as it was to the model as it stands; infinite where it is no number."""
        total = 0.0
        for number in range(len(self.batches)):
            q = self.run(number).flatten(0, 1)
            total += float(token_kl(self.logits[number].flatten(0, 1).to(q.device), q).sum())
        return total / self.tokens if math.isfinite(total) else math.inf


def _measured(reference: _Reference, request: _Request, rounding: RoundFunction) -> Measurement:
    """One measurement: the group rounded, the rest of the model run, the weights put back."""
    modules = request.blank.modules
    reference.move(reference.place(modules))
    with rounded(reference.model, dict.fromkeys(modules, request.grid), rounding) as energy:
        kl = reference.kl()
    lost, whole = (sum(each[part] for each in energy.values()) for part in (0, 1))
    error = lost / max(whole, 1e-30) if math.isfinite(lost) else math.inf
    return replace(request.blank, kl=kl, output_error=error)


@contextmanager
def rounded(
    model: nn.Module, grids: Mapping[str, Grid], rounding: RoundFunction = nearest_mse
) -> Iterator[dict[str, list[float]]]:
    """Matrices on grids for the length of the context; afterwards their weights are the very same bytes.

    Yields:
        by module, the sums of ||(W - W') x||^2 and ||W x||^2 over the inputs x it has had so far.
    """
    energy: dict[str, list[float]] = {name: [0.0, 0.0] for name in grids}
    with torch.no_grad(), ExitStack() as stack:
        for name, grid in grids.items():
            module = model.get_submodule(name)
            original = weight_of(module).clone()
            stack.callback(weight_of(module).copy_, original)
            weight_of(module).copy_(rounding(original, grid).dequantize().to(original.dtype))
            hook = module.register_forward_pre_hook(_adding(original, energy[name]))
            stack.callback(hook.remove)
        yield energy


def _adding(original: Tensor, energy: list[float]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A hook that adds up the output error of a changed matrix."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        W, changed = original.float(), weight_of(module).float()
        with torch.autocast(W.device.type, enabled=False):
            lost, whole = (_output(module, args[0], each) for each in (W - changed, W))
            energy[0] += float(lost.square().sum(dtype=torch.float64))
            energy[1] += float(whole.square().sum(dtype=torch.float64))

    return hook


def _output(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """What a module with this weight would give, without bias: rows of an embedding, products otherwise."""
    return weight[x] if isinstance(module, nn.Embedding) else F.linear(x.flatten(0, -2).float(), weight)


@dataclass(frozen=True)
class SchemeMix:
    """A scheme for every module under a budget.

    Attributes:
        schemes: candidate's name by module.
        kl: the sum of the groups' KLs, nats a token: what the mix is predicted to cost.
        gap: no mix within the budget has a sum below ``kl - gap``; 0: this is the best.
        bits: stored bits in all.
        bits_per_weight: the same for each weight.
        curve: (bits per weight, summed KL) from the smallest mix to the best, for the report.
    """

    schemes: dict[str, str]
    kl: float
    gap: float
    bits: int
    bits_per_weight: float
    curve: tuple[tuple[float, float], ...]


def mix(
    measurements: Sequence[Measurement], shapes: Mapping[str, tuple[int, int]], bits_per_weight: float
) -> SchemeMix:
    """The mix of the smallest summed KL whose stored bits, scales included, stay within the average.

    Args:
        measurements: of groups that cover the modules, each module in one group.
        shapes: (N, K) of every module that gets a scheme.
        bits_per_weight: the budget, over all these weights.

    Raises:
        ModelError: a module was not measured, or belongs to two groups.
        SettingsError: not even the smallest candidates fit; names the smallest possible average.
    """
    groups: dict[str, list[Option]] = {}
    members: dict[str, tuple[str, ...]] = {}
    for found in measurements:
        if all(name in shapes for name in found.modules):
            options = groups.setdefault(found.group, [])
            members[found.group] = found.modules
            if math.isfinite(found.kl):
                options.append(Option(found.grid, found.bits, found.kl))
    _check_cover(members, shapes)
    weights = sum(rows * columns for rows, columns in shapes.values())
    curve = tuple((point.bits / weights, point.loss) for point in frontier(groups))
    if curve[0][0] > bits_per_weight:
        least = math.ceil(curve[0][0] * 1000) / 1000
        raise SettingsError("bits", bits_per_weight, f"at least {least:g}, scales included")
    found_mix = allocate(groups, math.floor(bits_per_weight * weights))
    schemes = {name: found_mix.choice[group] for group, names in members.items() for name in names}
    bits = found_mix.bits
    ordered = {name: schemes[name] for name in shapes}
    return SchemeMix(ordered, found_mix.loss, found_mix.gap, bits, bits / weights, curve)


def _check_cover(members: Mapping[str, tuple[str, ...]], shapes: Mapping[str, Any]) -> None:
    owners: dict[str, list[str]] = {name: [] for name in shapes}
    for group, names in members.items():
        for name in names:
            owners[name].append(group)
    for name, groups in owners.items():
        if len(groups) != 1:
            what = f"is in the groups {' and '.join(groups)}" if groups else "was not measured"
            raise ModelError(f"{name} {what}", hint="measure groups that hold each Linear once")


def assign(
    measurements: Sequence[Measurement], shapes: Mapping[str, tuple[int, int]], bits_per_weight: float
) -> dict[str, str]:
    """The candidate's name for every module: the schemes of :func:`mix`, which says more."""
    return mix(measurements, shapes, bits_per_weight).schemes


@dataclass(frozen=True)
class Interaction:
    """How well the sum of the groups' KLs foretells the KL of their mix.

    Attributes:
        predicted: the sum.
        measured: the KL of the model with all groups rounded at once, in the same way on the same text.
    """

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted: above 1 the groups' errors reinforce each other."""
        return self.measured / max(self.predicted, 1e-30)


def interaction(
    model: nn.Module,
    chosen: SchemeMix,
    candidates: Mapping[str, CandidateGrid],
    batches: Sequence[Tensor],
    work: Path,
    *,
    precision: str = "fp32",
    storage: torch.dtype | None = None,
    rounding: RoundFunction = nearest_mse,
    memory: int = MEMORY,
) -> Interaction:
    """Measure a mix as a whole, as :func:`measure` measures its groups one by one; same arguments.

    Args:
        work: folder for what does not fit in memory; removed afterwards.
    """
    grids = {
        name: candidates[scheme](storage or weight_of(model.get_submodule(name)).dtype)
        for name, scheme in chosen.schemes.items()
    }
    with (
        _reference(model, (), batches, precision, memory, work) as reference,
        rounded(model, grids, rounding),
    ):
        return Interaction(chosen.kl, reference.kl())
