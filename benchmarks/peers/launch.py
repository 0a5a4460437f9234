"""Start a runner in its environment and read its answer; write the tokens that all of them calibrate on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import attar
from attar.checkpoint import open_checkpoint
from attar.data.packing import calibration_batches, row_length
from attar.data.sources import COMPRESSION
from attar.models.loading.load import load_tokenizer
from peers import environments
from peers.job import Job

HERE = Path(__file__).parent
OURS = "attar"


class RunnerError(Exception):
    """A runner ended without an answer; carries the end of what it said."""


@dataclass(frozen=True)
class Method:
    """One tool's way to round.

    Attributes:
        tool: attar or a peer.
        name: what the tool's runner calls it.
        changes: fields of the job and, for attar, settings that differ from the usual.
    """

    tool: str
    name: str
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """As it was asked for: ``gptq,act_order=none``."""
        return ",".join([self.name, *(f"{key}={value}" for key, value in self.changes)])


def parse_method(tool: str, text: str) -> Method:
    """A method from ``name`` or ``name,key=value,...``; values are JSON where they can be, else text."""
    name, *pairs = text.split(",")
    changes = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SystemExit(f"{text}: {pair} is not key=value")
        try:
            changes.append((key, json.loads(value)))
        except json.JSONDecodeError:
            changes.append((key, value))
    return Method(tool, name, tuple(changes))


def with_method(job: Job, method: Method) -> Job:
    """The job with a method's name and changes; what is no field of a job becomes an option."""
    known = {field.name for field in fields(Job)}
    mine = {key: value for key, value in method.changes if key in known}
    options = {key: value for key, value in method.changes if key not in known}
    return replace(job, method=method.name, options=options, **mine)


def write_tokens(model: str, file: Path, *, samples: int, length: int, seed: int, data: str) -> None:
    """The calibration rows that attar would take, int64 (samples, length), as ``tokens``."""
    checkpoint = open_checkpoint(model)
    rows = calibration_batches(
        load_tokenizer(checkpoint),
        data,
        samples=samples,
        sequence_length=row_length(length, checkpoint.config),
        batch_size=8,
        seed=seed,
        split=COMPRESSION,
    )
    save_file({"tokens": torch.cat(rows)}, file)


def script(tool: str, verb: str) -> Path:
    """A tool's runner: ``X_run.py``, or ``X_prune_run.py`` for ``prune``."""
    name = "attar_run.py" if tool == OURS else environments.PEERS[tool].runner
    return HERE / name.replace("_run.py", f"_{verb}_run.py" if verb else "_run.py")


def launch(tool: str, job: Job, timeout: float | None = None, *, verb: str = "") -> dict[str, Any]:
    """Run a job in a process of its own.

    Args:
        verb: what the runner does, where that is not a quantization: prune.

    Returns:
        the runner's line: seconds, wall, peak_rss_mb, start_rss_mb, out, versions.

    Raises:
        RunnerError: it failed, or took longer than ``timeout`` seconds.
    """
    command = [sys.executable if tool == OURS else environments.python(tool), script(tool, verb)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if tool == OURS:  # the attar of this process, also where PYTHONPATH is relative
        environment["PYTHONPATH"] = str(Path(attar.__file__).parents[1])
    with tempfile.TemporaryDirectory() as folder:  # some tools write where they stand
        text = replace(job, started=time.time()).text()
        try:
            ended = subprocess.run(
                [*map(str, command), text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise RunnerError(f"{tool}: longer than {timeout:.0f} s") from None
    lines = ended.stdout.splitlines()
    if ended.returncode or not lines:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        raise RunnerError(f"{tool}: {lines[-1] if lines else f'exit code {ended.returncode}'}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
