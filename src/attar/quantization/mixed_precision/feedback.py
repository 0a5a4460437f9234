"""What a rounding that makes up for its errors leaves of the output error of rounding to nearest.

    gain[b] = tr(E_b H E_b^T) / tr(N_b H N_b^T)

GPTQ and its kin (QuIP, Chee 2023, arXiv 2307.13304, theorem 1) move the columns behind against the error of
each column. How much that saves differs tenfold between the Linears of one model, so that an order of options
that was measured with rounding to nearest is not the order under GPTQ. It hardly depends on the bits, but for
two and three, where codes end before a moved weight does.

Letters: H (K, K) Hessian of a Linear's inputs; E_b, N_b (N, K) errors of its weight on a grid of b bits, by
GPTQ and to nearest, with the same scales.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoint.atomic import write_json
from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.data.sources import COMPRESSION
from attar.errors import CheckpointError
from attar.models.loading.calibration import calibration_text
from attar.models.loading.device import pick_device
from attar.models.loading.single_experts import decoded_view
from attar.options import flatten
from attar.progress import SILENT, Progress
from attar.quantization.grids import IntGrid
from attar.quantization.grids.scales import choose_scales
from attar.quantization.hessian import Hessian, HessianFactor, energy, factorize
from attar.quantization.methods.gptq import gptq
from attar.quantization.settings import GROUP_ORDERED
from attar.walks.positions import PositionWeights
from attar.walks.settings import FIRST_WEIGHT
from attar.walks.solvers import LinearSolver, Solution
from attar.walks.sweep import SweepOptions, sweep_linears

BITS = (2, 3, 4)  # of the grids; of more bits the gain is that of the most
TOKENS = 1 << 15  # of the Hessians
FORMAT, VERSION = "attar feedback", 1
METHODS = tuple(name for name in GROUP_ORDERED if name != "awq")
"""Methods that move columns against the errors of others."""


Errors = tuple[tuple[float, float], ...]
"""By :data:`BITS`, the output error of GPTQ and of rounding to nearest, summed over tokens."""


@dataclass(frozen=True)
class FeedbackGains:
    """The gains of groups of Linears.

    Attributes:
        errors: by group, of each of its Linears; a group that is not there has a gain of 1.
    """

    errors: Mapping[str, Sequence[Errors]] = field(default_factory=dict)

    def of(self, group: str, option: str) -> float:
        """Of an option that is named after its bits; 1 where the sweep never reached the group."""
        at = BITS.index(min(max(bits_of(option), BITS[0]), BITS[-1]))
        fed, nearest = (sum(rows[at][part] for rows in self.errors.get(group, ())) for part in (0, 1))
        return min(fed / nearest, 1.0) if nearest > 0 else 1.0


def bits_of(option: str) -> int:
    """The bits in the name of a scheme or a type: 4 of W4A16 and of IQ4_NL."""
    digits = re.search(r"\d", option)
    assert digits is not None, f"{option} names no bits"
    return int(digits[0])


def feedback_gains(
    checkpoint: Checkpoint,
    groups: Mapping[str, Sequence[str]],
    method: str,
    settings: Any,
    sensitivities: Path,
    *,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> FeedbackGains:
    """The gains of groups under a method, 1 for one that makes up for nothing; measured once, and kept beside
    the sensitivities. A killed sweep goes on.

    Args:
        groups: names of Linears by group.
        method: of the rounding.
        settings: with the options data, bos, sequence_length, batch_size, seed and device.
        sensitivities: the file of this model and text.

    Raises:
        CheckpointError: the file is damaged.
        DataError: there is not enough text.
    """
    if method not in METHODS:
        return FeedbackGains()
    wanted = {module for modules in groups.values() for module in modules}
    file = sensitivities.with_name(f"{sensitivities.stem}-feedback.json")
    known = read_errors(file)
    if not wanted <= known.keys():
        options, modules = flatten(settings), sha256_text(canonical_json(sorted(wanted)))[:16]
        work = file.with_name(f".{file.name}.{modules}")  # a killed sweep of other Linears is another one
        samples = max(TOKENS // options["sequence_length"], 1)
        swept = sweep_linears(
            decoded_view(checkpoint),
            calibration_text(checkpoint, settings, samples, COMPRESSION),
            _FeedbackSolver(),
            SweepOptions(
                work=work,
                select=wanted.__contains__,
                device=pick_device(options["device"]),
                positions=PositionWeights(FIRST_WEIGHT),
                processes=processes,
                progress=progress,
                what="feedback",
            ),
        )
        known |= dict.fromkeys(wanted, ((0.0, 0.0),) * len(BITS))  # a head is in no block
        known |= {row["name"]: tuple(map(tuple, row["errors"])) for row in swept.reports}
        processes.wait()
        if processes.first:
            write_json(file, {"format": FORMAT, "version": VERSION, "errors": known})
            shutil.rmtree(work, ignore_errors=True)
        processes.wait()
    return FeedbackGains({group: [known[module] for module in modules] for group, modules in groups.items()})


@dataclass(frozen=True)
class _FeedbackSolver(LinearSolver):
    """Reports the errors of each Linear; weights stay."""

    def accumulator(self, names: Sequence[str], inputs: int) -> Hessian:
        """Empty statistics of a group."""
        return Hessian(inputs)

    def solve(self, weights: dict[str, Tensor], accumulator: Hessian) -> dict[str, Solution]:
        """The weights as they are, with reports."""
        tokens, H = accumulator.weight, accumulator.final()
        factor = factorize(H)
        return {
            name: Solution(
                weight, {}, {"errors": [output_errors(weight, H, factor, bits, tokens) for bits in BITS]}
            )
            for name, weight in weights.items()
        }

    def restore(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        """Weights of a finished block are those of the checkpoint."""
        raise AssertionError("nothing was stored")


def output_errors(
    weight: Tensor, H: Tensor, factor: HessianFactor, bits: int, tokens: float = 1.0
) -> tuple[float, float]:
    """tr(E H E^T) and tr(N H N^T) of a weight (N, K), times the tokens that H (K, K) is a mean over."""
    size = next((size for size in (128, 64, 32) if weight.shape[1] % size == 0), 0)
    grid = IntGrid(bits, size)
    scales = choose_scales(weight, grid, how="mse")
    fed = gptq(weight, H, grid, parameters=scales, factor=factor).quantized
    nearest = grid.quantize(weight, scales)
    return (
        tokens * energy(weight, H, less=fed.dequantize()),
        tokens * energy(weight, H, less=nearest.dequantize()),
    )


def read_errors(file: Path) -> dict[str, Errors]:
    """What was measured, by module.

    Raises:
        CheckpointError: it is of another kind, or damaged.
    """
    if not file.exists():
        return {}
    content, hint = read_json(file), "delete it to measure again"
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(f"{file}: not a file of feedback, version {VERSION}", hint=hint)
    try:
        errors = {
            name: tuple((float(fed), float(nearest)) for fed, nearest in rows)
            for name, rows in content["errors"].items()
        }
        for name, rows in errors.items():
            if len(rows) != len(BITS) or not all(0 <= error < math.inf for row in rows for error in row):
                raise ValueError(name)
        return errors
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: an entry is incomplete: {error}", hint=hint) from error
