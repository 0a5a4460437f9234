"""Every Linear on every grid as GPTQ rounds it, computed in one sweep: what sensitivities are measured with.

GPTQ and its kin move the columns behind against the error of each column (QuIP, Chee 2023, arXiv 2307.13304,
theorem 1), with scales searched by the output. What that leaves of a Linear's loss differs tenfold between
the Linears of one model and between grids: the order of options to nearest is not their order under GPTQ.

The Hessians are those of the original model's inputs, on text that sensitivities are not measured on. Codes
are kept on disk, a byte for a weight and grid.
"""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attar.checkpoint.atomic import check_space, explain_os_errors, open_own, try_lock, write_json
from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.errors import CheckpointError
from attar.models.loading.calibration import calibration_text
from attar.models.loading.device import pick_device
from attar.models.loading.single_experts import decoded_view
from attar.models.loading.stored import stored_precision
from attar.options import flatten
from attar.progress import SILENT, Progress
from attar.quantization.grids import Grid, QuantizedTensor
from attar.quantization.hessian import Hessian
from attar.quantization.layerwise import LayerSolver
from attar.quantization.mixed_precision.sensitivity import CandidateGrid, RoundFunction, nearest_mse
from attar.quantization.rounding import METHODS, counted_tokens
from attar.quantization.settings import GPTQ_KIN, OPTION_TOKENS, CalibrationSettings, SparseGPTQSettings
from attar.sensitivity.weight_changes import cache_folder
from attar.walks.positions import PositionWeights
from attar.walks.settings import FIRST_WEIGHT
from attar.walks.solvers import LinearSolver, Solution
from attar.walks.sweep import SweepOptions, SweepResult, sweep_linears

WIDE = 8.0  # bits a weight from which rounding to nearest loses nothing
KEPT = 4 << 30  # bytes of codes that stay for other budgets, of all models and texts
SPLIT = "train"  # of the text: sensitivities are measured on the one for calibration


@dataclass(frozen=True)
class RoundedOptions:
    """A :data:`RoundFunction` that knows the codes of a sweep; a module or grid that the sweep had not is
    rounded otherwise.

    Attributes:
        keys: of the tensors of each block's file.
    """

    swept: SweepResult
    keys: tuple[frozenset[str], ...]
    otherwise: RoundFunction
    __name__ = "gptq"

    def __call__(self, module: str, weight: Tensor, grid: Grid) -> QuantizedTensor:
        """The codes of a weight (N, K).

        Raises:
            CheckpointError: the kept file is damaged.
        """
        block, prefix = self.swept.block_of.get(module), f"{module}/{grid!r} "
        names = [name for name in self.keys[block] if name.startswith(prefix)] if block is not None else []
        if block is None or not names:
            return self.otherwise(module, weight, grid)
        file = self.swept.files[block]
        try:
            with safe_open(file, framework="pt", device=str(weight.device)) as stored:
                tensors = {name.removeprefix(prefix): stored.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise _damaged(file.parent, error) from error
        return QuantizedTensor.from_tensors(grid, tensors)


@contextmanager
def rounding_of(
    checkpoint: Checkpoint,
    groups: Mapping[str, Sequence[str]],
    candidates: Mapping[str, CandidateGrid],
    method: str,
    settings: Any,
    *,
    fits: Callable[[Grid, tuple[int, int]], bool] = lambda grid, shape: True,
    dtype: torch.dtype | None = None,
    otherwise: RoundFunction = nearest_mse,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
) -> Iterator[RoundFunction]:
    """How options are rounded that a method will round: by GPTQ for the methods of :data:`GPTQ_KIN`, else to
    nearest. Codes are computed once and stay for other budgets, those used last up to :data:`KEPT`. A killed
    sweep goes on.

    Args:
        groups: names of Linears by group; those of no block are rounded to nearest.
        candidates: grids by option.
        method: of the rounding.
        settings: with the options data, bos, sequence_length, batch_size, seed and device.
        fits: whether a grid suits an (N, K) weight.
        dtype: of the stored weights; None: the checkpoint's.

    Raises:
        DataError: there is not enough text.
        CheckpointError: the kept files are damaged.
    """
    if method not in GPTQ_KIN:
        yield otherwise
        return
    wanted = {module for modules in groups.values() for module in modules}
    every = [candidate(dtype or stored_precision(checkpoint)) for candidate in candidates.values()]
    grids = [grid for grid in every if grid.bits_per_weight((4096, 4096)) < WIDE]
    options = flatten(settings)
    text = calibration_text(checkpoint, settings, max(OPTION_TOKENS // options["sequence_length"], 1), SPLIT)
    tokens = sum(batch.numel() for batch in text)
    if tokens < OPTION_TOKENS // 2:
        progress.log(f"note: options are rounded by {tokens:,} tokens of {OPTION_TOKENS:,}: give more text")
    digest = sha256_text(str([batch.tolist() for batch in text]))
    key = [checkpoint.fingerprint(), digest, sorted(wanted), *map(repr, grids)]
    work = cache_folder() / f"rounded-{sha256_text(canonical_json(key))[:16]}"
    finished = work / "finished.json"
    weights = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    sweep = SweepOptions(
        work=work,
        select=wanted.__contains__,
        device=pick_device(options["device"]),
        experts=counted_tokens(CalibrationSettings()),
        positions=PositionWeights(FIRST_WEIGHT),
        processes=processes,
        progress=progress,
        what="options",
    )
    with locked(work, progress) if processes.first else nullcontext():
        try:
            if processes.agreed(finished.exists()):
                swept = SweepResult.read(sorted(work.glob("block-*.safetensors")), "")
            else:
                check_space(work, weights * len(grids), "another ATTAR_CACHE, or --method rtn")
                swept = sweep_linears(decoded_view(checkpoint), text, _OptionSolver(grids, fits), sweep)
            keys = tuple(_keys(file) for file in swept.files)
        except SafetensorError as error:
            raise _damaged(work, error) from error
        if processes.first:
            write_json(finished, key)  # again: its time says when the codes were used
        yield RoundedOptions(swept, keys, otherwise)
        processes.wait()
    if processes.first:
        _forget(cache_folder(), KEPT)


def _forget(cache: Path, most: int) -> None:
    """Delete the codes that were not used for the longest time where all are more than ``most`` bytes;
    another process keeps those that it works with."""
    total = 0
    for work in sorted(cache.glob("rounded-*"), key=_used, reverse=True):
        with suppress(FileNotFoundError):  # another process forgets too
            total += sum(file.stat().st_size for file in work.glob("block-*.safetensors"))
        if total > most:
            with open_own(_lock_of(work)) as lock:
                if try_lock(lock.fileno()):
                    shutil.rmtree(work, ignore_errors=True)


def _used(work: Path) -> float:
    """When the codes were used last; of a killed sweep, when it began its last block."""
    for path in (work / "finished.json", work):
        with suppress(FileNotFoundError):
            return path.stat().st_mtime
    return 0.0


def _lock_of(work: Path) -> Path:
    return work.with_name(f".{work.name}.lock")


@contextmanager
def locked(work: Path, progress: Progress) -> Iterator[None]:
    """One process has a folder, others wait for it.

    Raises:
        OutputError: it cannot be written.
    """
    with explain_os_errors(work):
        work.parent.mkdir(parents=True, exist_ok=True)
    with open_own(_lock_of(work)) as lock:
        for second in itertools.count():
            if try_lock(lock.fileno()):
                break
            if second == 0:
                progress.log(f"note: waiting for another process, which works in {work}")
            time.sleep(1)
        with explain_os_errors(work):
            work.mkdir(exist_ok=True)
        yield


@dataclass(frozen=True)
class _OptionSolver(LinearSolver):
    """Rounds each Linear on several grids; its weight stays."""

    grids: Sequence[Grid]
    fits: Callable[[Grid, tuple[int, int]], bool]

    def accumulator(self, names: Sequence[str], inputs: int) -> Hessian:
        """Empty statistics of a group."""
        return Hessian(inputs)

    def solve(self, weights: dict[str, Tensor], accumulator: Hessian) -> dict[str, Solution]:
        """The weights as they are, with the codes of every grid."""
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
        for grid in self.grids:
            fitting = {
                name: weight
                for name, weight in weights.items()
                if self.fits(grid, (weight.shape[0], weight.shape[1]))
            }
            solver = LayerSolver(dict.fromkeys(fitting, grid), METHODS["gptq"], SparseGPTQSettings())
            for name, solution in solver.solve(fitting, accumulator).items() if fitting else ():
                tensors[name] |= {f"{grid!r} {short}": value for short, value in solution.tensors.items()}
        return {name: Solution(weight, tensors[name]) for name, weight in weights.items()}

    def restore(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Weights of a finished block are those of the checkpoint."""


def _keys(file: Path) -> frozenset[str]:
    with safe_open(file, framework="pt") as stored:
        return frozenset(stored.keys())


def _damaged(work: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{work}: damaged: {error}", hint="delete the folder to round again")
