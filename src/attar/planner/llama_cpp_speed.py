"""Seconds of a step of llama.cpp, from a calibration run of its own: the model with each type wherever a
group can have it, the other groups in Q8_0, timed by llama.cpp's own ``llama-batched-bench``.

    T(c) = sum_g n_g (T_0 / N + d[c_g])        d[t] = (T_t - T_0) / N_t

Letters: c a choice of types, g a group, t a type; T_0 the step with all groups in Q8_0, which all can have,
and T_t with t; n_g the weights of a group that a step reads, N those of all groups, N_t of the groups that
can have t. A weight of one type is taken to cost the same time in every group.

The files are rounded to nearest, as a product takes the same time whatever its weights are.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attar.checkpoint.atomic import explain_os_errors, open_own, try_lock, write_bytes
from attar.checkpoint.hashing import canonical_json, computed_folder, sha256_text
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import OutputError, UsageError
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Anatomy
from attar.models.loading.empty import empty_model
from attar.planner.costs import StepTimes
from attar.planner.gguf_costs import GGUFCosts
from attar.planner.speed import CONTEXT
from attar.printable import one_line
from attar.progress import Progress
from attar.recipe.machine import machine

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

PROGRAM = "llama-batched-bench"
REFERENCE = "Q8_0"
TOKENS, TRIES = 32, 5  # steps that are timed; the fastest of


def llama_cpp_times(checkpoint: Checkpoint, costs: GGUFCosts, batch: int, progress: Progress) -> StepTimes:
    """Times of this machine's llama.cpp, measured where the user's cache lacks them: a file of the model at a
    time.

    Args:
        batch: sequences.

    Raises:
        UsageError: there is no llama-batched-bench, or it fails.
        AttarError: the model cannot be exported.
    """
    layout = costs.layout
    types = [kind for group in layout.groups for kind in layout.candidates(group)]
    reads = weights_read(costs, discover(empty_model(checkpoint.config, unstacked=True)), batch)
    program = llama_program()
    here = machine()
    key = [checkpoint.fingerprint(), batch, here["cpu"], here["cores"], _version(program), _arguments()]
    file = computed_folder() / "llama-cpp" / f"{sha256_text(canonical_json(key))[:16]}.json"
    seconds = _known(file)
    missing = [kind for kind in dict.fromkeys([REFERENCE, *types]) if kind not in seconds]
    with explain_os_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    with open_own(file.with_suffix(".lock")) as lock, progress.task("llama.cpp", total=len(missing)) as task:
        if missing and not try_lock(lock.fileno()):
            raise OutputError(f"{file.parent}: another plan times this model", hint="run one at a time")
        for kind in missing:
            choice = {
                group: kind if kind in layout.candidates(group) else REFERENCE for group in layout.groups
            }
            seconds[kind] = _timed(checkpoint, costs.stage(choice, "rtn")["overrides"], program, file, batch)
            write_bytes(file, json.dumps(seconds).encode())
            task.advance()
    return StepTimes(spread(seconds, {group: layout.candidates(group) for group in layout.groups}, reads))


def spread(
    seconds: Mapping[str, float], candidates: Mapping[str, tuple[str, ...]], reads: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """The module's equation: seconds of each group in each of its types.

    Args:
        seconds: of a step with each type wherever a group can have it.
        candidates: types of each group.
        reads: weights of each group that a step reads.
    """
    total, reference = math.fsum(reads.values()), seconds[REFERENCE]
    more = {}
    for kind in seconds:
        weights = math.fsum(reads[group] for group, kinds in candidates.items() if kind in kinds)
        more[kind] = (seconds[kind] - reference) / weights if weights else 0.0
    return {
        group: {kind: reads[group] * (reference / total + more[kind]) for kind in kinds}
        for group, kinds in candidates.items()
    }


def weights_read(costs: GGUFCosts, anatomy: Anatomy, batch: int) -> dict[str, float]:
    """Weights of each group that a step of ``batch`` tokens reads: of a mixture the experts that some token
    chose, of an embedding that is no head none."""
    layout = costs.layout
    shares = {
        module: 1 - (1 - block.mixture.active / block.mixture.count) ** batch
        for block in anatomy.blocks
        if block.mixture is not None
        for module in block.mixture.linears
    }
    if not anatomy.tied:
        shares[anatomy.embedding] = 0.0
    return {
        group: shares.get(modules[0], 1.0) * sum(math.prod(layout.shapes[name]) for name in layout.of(group))
        for group, modules in layout.groups.items()
    }


def llama_program() -> str:
    """The path of llama-batched-bench.

    Raises:
        UsageError: it is not on PATH.
    """
    path = shutil.which(PROGRAM)
    if path is None:
        raise UsageError(
            f"speed for llama.cpp is measured by its {PROGRAM}, which is not on PATH",
            hint="install llama.cpp, add the folder of its programs to PATH, or leave --speed out",
        )
    return path


def _timed(checkpoint: Checkpoint, types: Sequence[str], program: str, file: Path, batch: int) -> float:
    """Seconds of a step with these types."""
    settings = ExportSettings(format="gguf", overrides=tuple(types), imatrix="none", effort="fast")
    folder = file.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
    folder.mkdir()
    try:
        export(checkpoint, folder / "model.gguf", settings)
        return step_seconds(program, folder / "model.gguf", batch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def step_seconds(program: str, model: Path, batch: int) -> float:
    """Seconds of a step of a file, the fastest of :data:`TRIES` runs of :data:`TOKENS` steps.

    Raises:
        UsageError: the program fails, or prints no times.
    """
    sizes = {"-c": batch * (CONTEXT + TOKENS), "-npp": CONTEXT, "-ntg": TOKENS}
    words = [str(word) for pair in sizes.items() for word in pair]
    tries = ["-npl", ",".join([str(batch)] * TRIES), "--output-format", "jsonl"]
    process = _run(program, "-m", str(model), *words, *tries)
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    try:
        seconds = [float(json.loads(line)["t_tg"]) / TOKENS for line in lines]
    except (ValueError, KeyError, TypeError):
        seconds = []
    if process.returncode or not seconds or min(seconds) <= 0:
        last = one_line((process.stderr.strip().splitlines() or [f"exit {process.returncode}"])[-1])
        raise UsageError(f"{program} printed no times: {last}", hint="leave --speed out, or mend it")
    return min(seconds)


def _version(program: str) -> str:
    """What the program says of itself; it prints it to stderr."""
    process = _run(program, "--version")
    return process.stdout + process.stderr


def _run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([program, *words], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise UsageError(f"{program} does not run: {error.strerror}", hint="leave --speed out") from None


def _arguments() -> dict[str, str]:
    """What llama.cpp reads of the environment, such as LLAMA_ARG_THREADS."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("LLAMA_ARG_")}


def _known(file: Path) -> dict[str, float]:
    """Times that are measured; none of a damaged file."""
    try:
        content = json.loads(file.read_bytes())
        return {str(kind): float(s) for kind, s in content.items() if 0 < float(s) < math.inf}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
