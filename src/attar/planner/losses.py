"""What each option costs the model: KL of each group alone, measured once and kept.

    KL[g, o]                   measured (mixed_precision/sensitivity.py), in the file that --bits uses
    KL[g, r] s^(b_r - b_o)     until it is: r the measured option nearest in bits; s = 4 to more bits, the
                               squared error of a uniform grid, and 3 to fewer, which is optimistic: what is
                               taken is measured, what seems bad is not (GPTQ's KL grows 1.5 to 4 times)

Only options that a plan may choose need a measurement: :meth:`Losses.measure` is called with those that a
choice took, until a choice takes measured ones alone. What a whole choice costs is kept in a second file.
A killed run goes on after the last measurement.

    {"format": "attar wholes", "version": 1, "measurements": {hash of the choice: [KL, flips]}}

Letters: g a group; o, r options; b bits of a code.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.atomic import write_json
from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.checkpoint.jsonfile import read_json
from attar.errors import CheckpointError
from attar.kernels import kv_codes, kv_int4
from attar.models.fake_quant import on_keys_and_values
from attar.planner.costs import EMBEDDING, GroupChoice, schemes_of
from attar.progress import SILENT, Progress
from attar.quantization.grids import Grid, IntGrid, QuantizedTensor
from attar.quantization.grids.grid import TileParameters
from attar.quantization.mixed_precision.allocate import Option
from attar.quantization.mixed_precision.search import integer_candidates, with_losses
from attar.quantization.mixed_precision.sensitivity import (
    CandidateGrid,
    RoundFunction,
    falling,
    measure,
    nearest_mse,
    new_weights,
)
from attar.sensitivity.reference import MEMORY, ReferenceModel, reference_of
from attar.sensitivity.weight_changes import NewWeight, SensitivityInputs, changed
from attar.walks.objectives import token_kl

REFERENCE_BITS, MIXTURE_REFERENCE_BITS = 4, 2
"""Of a dense model, and of a mixture of experts, where losses follow from the largest (:func:`falling`)."""

FEWER, MORE = 3.0, 4.0  # s

WHOLES, WHOLES_VERSION = "attar wholes", 1


@dataclass
class Losses:
    """KL by group and option.

    Attributes:
        inputs: the model and the text.
        groups: modules by group, without the embedding.
        embedding: module name of the group EMBEDDING.
        storage: type of the stored weights.
        grids: by option.
        after_blocks: groups' modules that run after the last block.
        rounding: as the method will.
        reference_bits: bits of the option that is measured first, in every group.
        measured: nats a token, by (group, option).
        errors: relative output errors, likewise.
    """

    inputs: SensitivityInputs
    groups: Mapping[str, Sequence[str]]
    embedding: str
    storage: torch.dtype
    grids: Mapping[str, CandidateGrid]
    progress: Progress = SILENT
    after_blocks: Sequence[str] = ()
    rounding: RoundFunction = nearest_mse
    reference_bits: int = REFERENCE_BITS
    measured: dict[tuple[str, str], float] = field(default_factory=dict)
    errors: dict[tuple[str, str], float] = field(default_factory=dict)

    def reference(self, options: Iterable[str]) -> str:
        """The option of a group that is measured first."""
        coded = [option for option in options if option != "dense"]
        return min(coded, key=lambda option: abs(bits_of(option) - self.reference_bits))

    def missing(self, choice: GroupChoice) -> list[tuple[str, str]]:
        """The options of a choice that were not measured."""
        return [pair for pair in choice.items() if pair not in self.measured and pair[1] != "dense"]

    def measure(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Measure options, one group at a time; those of the file are read.

        Raises:
            ModelError, CheckpointError: the file belongs to another model, or is damaged.
        """
        by_option: dict[str, dict[str, Sequence[str]]] = {}
        for group, option in pairs:
            by_option.setdefault(option, {})[group] = (
                [self.embedding] if group == EMBEDDING else self.groups[group]
            )
        for option, groups in by_option.items():
            for row in measure(
                self.inputs.model,
                groups,
                {option: self.grids[option]},
                self.inputs.batches,
                self.inputs.file,
                key=self.inputs.key,
                blocks=self.inputs.blocks,
                after_blocks=self.after_blocks,
                dtype=self.storage,
                rounding=self.rounding,
                progress=self.progress,
            ):
                self.measured[row.group, option] = row.kl
                self.errors[row.group, option] = row.output_error

    def loss(self, group: str, option: str) -> float:
        """Measured, or by the nearest measured option."""
        if option == "dense":
            return 0.0
        nearest, factor = option, 1.0
        known = [name for owner, name in self.measured if owner == group]
        if (group, option) not in self.measured:
            bits = bits_of(option)
            assert known, f"nothing of {group} was measured"
            nearest = min(known, key=lambda name: abs(bits_of(name) - bits))
            more = bits_of(nearest) - bits
            factor = (FEWER if more > 0 else MORE) ** more
        points = {name: (self.measured[group, name], self.errors.get((group, name), 0.0)) for name in known}
        return float(factor * falling(*points[nearest], points.values()))

    def options(self, costs: Mapping[str, Mapping[str, int]]) -> dict[str, list[Option]]:
        """Options for :func:`allocate`, with bytes by group and option; infinite losses are left out."""
        table = {
            group: [
                Option(name, count, loss)
                for name, count in options.items()
                if math.isfinite(loss := self.loss(group, name))
            ]
            for group, options in costs.items()
        }
        inside = with_losses({group: options for group, options in table.items() if group != EMBEDDING})
        return {**inside, **{group: table[group] for group in table if group == EMBEDDING}}

    def kv_loss(self, kv_dtype: str) -> float:
        """KL of keys and values in a format of the runtime, nats a token; measured once."""
        return 0.0 if kv_dtype == "auto" else self.joint({}, kv_dtype).kl

    def joint(self, choice: GroupChoice, kv_dtype: str = "auto") -> JointLoss:
        """What a choice costs as a whole, on the text of the measurements; measured once.

        Raises:
            CheckpointError: the file of wholes is damaged.
        """
        modules = dict(schemes_of({g: m for g, m in self.groups.items() if g in choice}, choice))
        if choice.get(EMBEDDING) == "int8":
            modules[self.embedding] = "int8"
        grids = {name: self.grids[scheme](self.storage) for name, scheme in modules.items()}
        changes = new_weights(grids, self.rounding)
        definition = {name: f"{self.rounding.__name__} {grid!r}" for name, grid in grids.items()}
        identity = sha256_text(canonical_json([definition, kv_dtype, *self.model_parts]))[:32]
        file = self.inputs.file.with_name(f"{self.inputs.file.stem}-wholes.json")
        known = read_wholes(file)
        if identity not in known:
            known[identity] = self._joint(changes, kv_dtype)
            rows = {name: [_or_none(loss.kl), loss.flips] for name, loss in known.items()}
            write_json(file, {"format": WHOLES, "version": WHOLES_VERSION, "measurements": rows})
        return known[identity]

    @property
    def original(self) -> Any:
        """The model that wholes are compared with."""
        return self.inputs.model

    @property
    def model_parts(self) -> tuple[str, ...]:
        """What tells the measured model from the original; empty: it is the original."""
        return ()

    def _joint(self, changes: Mapping[str, NewWeight], kv_dtype: str) -> JointLoss:
        inputs, work = self.inputs, self.inputs.file.with_name(f".{self.inputs.file.name}.joint")
        with (
            reference_of(self.original, (), inputs.batches, "fp32", MEMORY, work) as reference,
            changed(inputs.model, changes),
            ExitStack() as stack,
        ):
            for block in inputs.anatomy.blocks if kv_dtype != "auto" else ():
                if block.attention is not None:
                    module = inputs.model.get_submodule(block.attention.name)
                    handle = on_keys_and_values(module, functools.partial(_coded_cache, kv_dtype=kv_dtype))
                    stack.callback(handle.remove)
            reference.model = inputs.model
            return _compared(reference)


@dataclass
class CutLosses(Losses):
    """KL of a cut model: its groups cost what they cost in the whole model, and wholes are measured on it.

    Attributes:
        uncut: of the model that was cut.
        sources: group of the whole model by group.
        cut: what was cut, as a text that no other cut has.
    """

    uncut: Losses = None  # type: ignore[assignment]
    sources: Mapping[str, str] = field(default_factory=dict)
    cut: str = ""

    @property
    def original(self) -> Any:
        return self.uncut.inputs.model

    @property
    def model_parts(self) -> tuple[str, ...]:
        return (self.cut,)

    def missing(self, choice: GroupChoice) -> list[tuple[str, str]]:
        return [pair for pair in choice.items() if self.uncut.missing(dict([self._source(*pair)]))]

    def measure(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.uncut.measure([self._source(*pair) for pair in pairs])

    def loss(self, group: str, option: str) -> float:
        return self.uncut.loss(*self._source(group, option))

    def kv_loss(self, kv_dtype: str) -> float:
        return self.uncut.kv_loss(kv_dtype)

    def _source(self, group: str, option: str) -> tuple[str, str]:
        return self.sources.get(group, group), option


@dataclass(frozen=True)
class JointLoss:
    """A model beside its original.

    Attributes:
        kl: mean KL of the original to it, nats a token.
        flips: mean over tokens of p_1 - p_2 of the original, its margin, where the likeliest token is another
            one; 0 elsewhere.
    """

    kl: float
    flips: float


def read_wholes(file: Path) -> dict[str, JointLoss]:
    """What was measured of choices as a whole, by the hash of the choice.

    Raises:
        CheckpointError: it is of another kind, or damaged.
    """
    if not file.exists():
        return {}
    content, hint = read_json(file), "delete it to measure again"
    if content.get("format") != WHOLES or content.get("version") != WHOLES_VERSION:
        raise CheckpointError(f"{file}: not a file of wholes, version {WHOLES_VERSION}", hint=hint)
    try:
        return {
            name: JointLoss(math.inf if kl is None else float(kl), float(flips))
            for name, (kl, flips) in content["measurements"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: a measurement is incomplete: {error}", hint=hint) from error


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


def bits_of(option: str) -> int:
    """The bits in the name of a scheme or a type: 4 of W4A16 and of IQ4_NL."""
    digits = re.search(r"\d", option)
    assert digits is not None, f"{option} names no bits"
    return int(digits[0])


def integer_grids(group_size: int) -> dict[str, CandidateGrid]:
    """Grids of the integer schemes of one group size, and of the rows of an int8 embedding."""

    def rows(storage: torch.dtype) -> Grid:
        return IntGrid(8, 0, storage=storage)

    return {**integer_candidates(group_size), "int8": rows}


def with_kept_scales(rounding: RoundFunction) -> RoundFunction:
    """A rounding that searches the scales of a weight on a grid once: the search is most of its time, and an
    option is rounded alone and again in every whole that has it."""
    kept: dict[tuple[str, str], TileParameters] = {}

    @functools.wraps(rounding)
    def nearest(module: str, weight: Tensor, grid: Grid) -> QuantizedTensor:
        key = module, repr(grid)
        if key in kept:
            return grid.quantize(weight, kept[key])
        quantized = rounding(module, weight, grid)
        kept[key] = quantized.parameters
        return quantized

    return nearest


def _coded_cache(keys: Tensor, values: Tensor, *, kv_dtype: str) -> tuple[Tensor, Tensor]:
    """Keys and values (batch, heads, tokens, width) after the runtime's codes."""
    if keys.is_meta:
        return keys, values
    if kv_dtype == "int4":
        k = keys.float()
        centers, ones = (
            torch.stack((k.mean(dim=(0, 2)), k[:, :, 0].mean(0)))[:, None, :, None],
            k.new_ones(()),
        )
        return (
            kv_int4.decode(*kv_int4.encode(k, ones, centers), ones, centers).to(keys.dtype),
            kv_int4.decode(*kv_int4.encode(values)).to(values.dtype),
        )
    codes = [kv_codes.encode(x, torch.int8) for x in (keys, values)]
    decoded = [(q.float() * s).to(keys.dtype) for q, s in codes]
    return decoded[0], decoded[1]


def _compared(reference: ReferenceModel) -> JointLoss:
    """KL and flips of the model as it is now."""
    kl = flips = 0.0
    for number in range(len(reference.batches)):
        p, q = reference.logits[number].flatten(0, 1).float(), reference.run(number).flatten(0, 1).float()
        p = p.to(q.device)
        kl += float(token_kl(p, q).sum())
        top = p.softmax(-1).topk(2, dim=-1)
        margin = top.values[:, 0] - top.values[:, 1]
        flips += float(margin[top.indices[:, 0] != q.argmax(-1)].double().sum())
    tokens = reference.tokens
    return JointLoss(kl / tokens if math.isfinite(kl) else math.inf, flips / tokens)
