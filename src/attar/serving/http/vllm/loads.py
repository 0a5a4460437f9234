"""Whether vLLM loads a folder: asked of its own code before it is started (reader.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from attar.checkpoint import Checkpoint
from attar.errors import ModelError
from attar.formats.gguf import reader as gguf
from attar.formats.limits import kernels
from attar.formats.readers import quant_method
from attar.formats.readers import reader as format_reader
from attar.formats.rules import WeightRule
from attar.models.draft_heads.kind import refuse_draft_head
from attar.serving.http.vllm.process import Vllm
from attar.serving.http.vllm.reader import MODULES

READER = Path(__file__).with_name("reader.py")
SECONDS = 120


def check_loads(checkpoint: Checkpoint, vllm: Vllm) -> str:
    """What was checked, or why nothing was, in a few words.

    Raises:
        ModelError: vLLM does not load it; names what it does not read.
    """
    refuse_draft_head(checkpoint)
    if quant_method(checkpoint) == gguf.METHOD:
        raise ModelError(
            f"{checkpoint.path}: vLLM loads no GGUF file", hint="name a folder, or leave out --engine vllm"
        )
    layout, described, files = quant_method(checkpoint), quantized_linears(checkpoint), vllm.package()
    linears = {name: shape for name, (_, shape) in described.items()}
    if layout is None:
        return "dense"
    if layout not in MODULES["vllm"]["configs"] or not linears or files is None:
        return f"{layout}, not checked" + ("" if files else f": no package vllm beside {vllm.program}")
    command = [sys.executable, str(READER), str(files), "vllm", str(checkpoint.path)]
    process = subprocess.run(
        command, input=json.dumps(linears), capture_output=True, text=True, timeout=SECONDS
    )
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no reason"])[-1]
        return f"{layout}, not checked: this version is read otherwise ({reason[:200]})"
    report = json.loads(process.stdout.splitlines()[-1])
    if against := _against(report):
        raise ModelError(
            f"{checkpoint.path}: vLLM does not load it: {against}",
            hint="attar export OUT --format dense is loaded, or leave out --engine vllm",
        )
    methods = dict.fromkeys(report["methods"].values())
    few = kernels(layout, linears, {name: rule for name, (rule, _) in described.items()})
    return f"{layout}: {len(linears)} Linears by {', '.join(methods)}" + (f"; {few}" if few else "")


def _against(report: dict[str, Any]) -> str:
    """The first thing that vLLM's code says against a folder; empty: nothing."""
    if report["refused"]:
        return str(report["refused"])
    kinds = {"missing": "no tensor", "unknown": "no place for", "other": "another shape of"}
    lines = [f"{words} {report[kind][0]}" for kind, words in kinds.items() if report[kind]]
    return lines[0] if lines else ""


def quantized_linears(checkpoint: Checkpoint) -> dict[str, tuple[WeightRule, tuple[int, int]]]:
    """Rule, outputs and inputs of the Linears that are stored as codes, by name, but for experts."""
    read: Any = format_reader(checkpoint)
    if not hasattr(read, "rule_and_shape"):
        return {}
    described = {name: read.rule_and_shape(name) for name in checkpoint.tensors}
    return {
        name.rpartition(".")[0]: both
        for name, both in described.items()
        if both is not None and ".experts." not in name
    }
