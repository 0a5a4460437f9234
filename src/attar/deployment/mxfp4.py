"""Export of a mixture in gpt-oss's own layout (formats/mxfp4.py): experts stacked in MXFP4, everything else
dense. Codes of experts in MXFP4 (``quantize --scheme MXFP4A16``, compressed-tensors) are carried untouched;
other Linears are decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.atomic import write_config
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import StageOutput
from attar.checkpoint.shards import TensorSpec
from attar.deployment.packed import copy_tensors
from attar.deployment.settings import ExportSettings
from attar.deployment.verify import same_weights
from attar.errors import ModelError
from attar.formats import mxfp4
from attar.formats.readers import quant_method, reader
from attar.models.loading.single_experts import Stacked, stacked_reader, stacks_of
from attar.progress import Progress
from attar.walks.stream import WriteStep, stream_steps

FAMILY = "gpt_oss"
DENSE = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
"""``modules_to_not_convert``, as the published checkpoints have it."""
HINT = "attar quantize --scheme MXFP4A16 --ignore re:self_attn makes one"


def refuse(source: Checkpoint, settings: ExportSettings) -> None:
    """Raise where a checkpoint has no place in the layout.

    Raises:
        ModelError: it is of another family, or its experts are not in MXFP4.
    """
    family = source.config["model_type"]
    if family != FAMILY:
        raise ModelError(
            f"{source.spelling} is of {family}; experts stacked in MXFP4 are the layout of {FAMILY} alone",
            hint="MXFP4A16 loads as quantize writes it, in compressed-tensors",
        )
    layout = quant_method(source)
    if layout == mxfp4.METHOD:
        return
    if not layout:
        raise ModelError(f"{source.path} is not quantized", hint=HINT)
    read = reader(source)
    stored = {slot[0]: name for name, info in source.tensors.items() if (slot := read.header(info))}
    for name in (name for stack in _matrices(source) for name in stack.parts):
        coded = read.codes(stored[name]) if name in stored and name.endswith(".weight") else None
        if coded is None or coded[1] != mxfp4.RULE:
            raise ModelError(f"{source.path}: {name.removesuffix('.weight')} is not in MXFP4", hint=HINT)


def write(source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress) -> list[str]:
    """Write the folder; returns what was checked, as sentences."""
    if quant_method(source) == mxfp4.METHOD:
        return copy_tensors(source, output, progress)
    quantization = {"quant_method": mxfp4.METHOD, "modules_to_not_convert": list(DENSE)}
    write_config(output.folder / "config.json", {**source.config, "quantization_config": quantization})
    work = output.work / "shards"
    stream_steps(_steps(source), output.folder, work=work, progress=progress, what="export mxfp4")
    copy_companions(source.path, output.folder)
    return same_weights(source, open_checkpoint(output.folder), progress)


def _matrices(source: Checkpoint) -> list[Stacked]:
    """The stacks of weights, without those of biases."""
    return [stack for stack in stacks_of(source.config) if len(stack.shape) == 3]


def _steps(source: Checkpoint) -> Sequence[WriteStep]:
    """Every tensor of the output, in the order of the source."""
    single, stacked = reader(source), stacked_reader(reader(source), source)
    stored = {slot[0]: name for name, info in source.tensors.items() if (slot := single.header(info))}
    matrices = {stack.name: stack for stack in _matrices(source)}
    steps = []
    for name, info in source.tensors.items():
        slot = stacked.header(info)
        if slot is None:
            continue
        stack = matrices.get(slot[0])
        if stack is not None:
            specs = [TensorSpec(*entry) for entry in mxfp4.layout(stack.name, stack.shape)]
            steps.append(WriteStep(specs, partial(_codes, single, stored, stack)))
        else:
            steps.append(WriteStep([TensorSpec(*slot)], partial(_decoded, stacked, name, slot[0])))
    return steps


def _decoded(read: Any, stored: str, name: str) -> dict[str, Tensor]:
    tensor = read.decode(stored)
    assert tensor is not None, "it has a header"
    return {name: tensor}


def _codes(read: Any, stored: Mapping[str, str], stack: Stacked) -> dict[str, Tensor]:
    """Codes and exponents of a stack (E, K, N)."""
    tensors = {
        name: torch.empty(shape, dtype=torch.uint8)
        for name, _, shape in mxfp4.layout(stack.name, stack.shape)
    }
    for name, part in stack.parts.items():
        coded, _ = read.codes(stored[name])
        rows = slice(None) if part.rows is None else part.rows
        for kind, values in mxfp4.encode(coded).items():
            tensors[f"{stack.name}{kind}"][part.index, rows] = values
    return tensors
