"""The bits that another tool's search gives each layer under an average."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from peers import environments

HERE = Path(__file__).parent


def chosen_bits(tool: str, model: Path, tokens: Path, bits: float, modules: Sequence[str]) -> dict[str, int]:
    """Bits by module.

    Args:
        tool: auto-round or modelopt.
        model: folder of a dense checkpoint.
        tokens: file of int64 ``tokens`` (rows, length).
        bits: average over the modules' weights.

    Raises:
        SystemExit: the tool failed.
    """
    runner = HERE / f"{tool.replace('-', '')}_mix_run.py"
    job = {"model": str(model), "tokens": str(tokens), "bits": bits, "modules": list(modules)}
    ended = subprocess.run(
        [str(environments.python(tool)), str(runner), json.dumps(job)], capture_output=True, text=True
    )
    if ended.returncode:
        raise SystemExit(f"{tool}: {ended.stderr[-2000:]}")
    chosen: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return chosen
