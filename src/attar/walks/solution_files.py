"""The solutions of one block as a safetensors file: tensors named ``module/short``, reports in the header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from attar.checkpoint import atomic
from attar.walks.solvers import Solution


def write_solutions(file: Path, solutions: dict[str, Solution]) -> None:
    """Write the solutions of one block."""
    tensors = {
        f"{name}/{short}": tensor.clone(memory_format=torch.contiguous_format)
        for name, solution in solutions.items()
        for short, tensor in solution.tensors.items()
    }
    reports = [{"name": name, **solution.report} for name, solution in solutions.items()]
    atomic.save_tensors(file, tensors, {"reports": json.dumps(reports)})


def read_solutions(file: Path) -> dict[str, dict[str, Tensor]]:
    """The solution tensors of a block file, by module."""
    tensors: dict[str, dict[str, Tensor]] = {}
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118  (not a dict)
            name, _, short = key.rpartition("/")
            tensors.setdefault(name, {})[short] = opened.get_tensor(key)
    return tensors


def read_reports(file: Path) -> list[dict[str, Any]]:
    """The reports of a block file."""
    with safe_open(file, framework="pt") as opened:
        reports: list[dict[str, Any]] = json.loads(opened.metadata()["reports"])
    return reports
