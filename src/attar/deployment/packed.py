"""Export of a quantized checkpoint in another packed layout, with the same codes.

    scan     every Linear once: do the codes fit, do scales change their type?
    write    codes in the target's layout, everything else as it expects it        (streamed)
    verify   both checkpoints decoded and compared, tensor by tensor

compressed-tensors, GPTQ, AWQ and bitsandbytes' INT8 share integer codes (integers.py), compressed-tensors and
ModelOpt those of FP8 and NVFP4 (formats/modelopt_conversion.py). A checkpoint in the target's layout is
copied and checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from attar.checkpoint.atomic import write_config
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import StageOutput
from attar.checkpoint.shards import TensorSpec
from attar.deployment.integers import IntegerConversion, refuse_source
from attar.deployment.settings import ExportSettings
from attar.deployment.verify import same_tensors, same_weights
from attar.errors import ModelError
from attar.formats.compressed_tensors import TRANSPOSED
from attar.formats.limits import limits
from attar.formats.modelopt_conversion import FromCompressedTensors, ToCompressedTensors
from attar.formats.readers import quant_method, reader
from attar.progress import Progress
from attar.walks.stream import stream

INTEGERS = ("compressed-tensors", "gptq", "awq", "gguf")
"""Layouts whose readers give integer codes."""


class Conversion(Protocol):
    """A checkpoint's tensors in another layout."""

    config: dict[str, Any]

    def headers(self, info: Any) -> Sequence[tuple[str, str, tuple[int, ...]]]:
        """Names, types and shapes of the output of a stored tensor, known before it is read."""

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The output of a stored tensor."""


def refuse(source: Checkpoint, settings: ExportSettings) -> None:
    """Raise where a checkpoint cannot be written in the layout asked for.

    Raises:
        ModelError: it is not quantized, or its codes cannot be stored there.
    """
    layout = quant_method(source)
    if not layout:
        raise ModelError(f"{source.path} is not quantized", hint="quantize it first, or --format dense")
    quantization = source.config.get("quantization_config") or {}
    if quantization.get("format") == TRANSPOSED:
        raise ModelError(
            f"{source.path}: {settings.format} has no transposed Linears ({source.config['model_type']})",
            hint="--format dense loads everywhere; the packed checkpoint itself is for attar",
        )
    if layout == settings.format:
        return
    if {layout, settings.format} == {"compressed-tensors", "modelopt"}:
        _modelopt(source, settings.format)
    elif settings.format == "modelopt" or layout not in INTEGERS:
        raise ModelError(
            f"{source.path} is in the layout of {layout}, whose codes have no place in {settings.format}",
            hint="it loads as it is; --format dense loads everywhere",
        )
    else:
        refuse_source(source, settings.format)


def write(source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress) -> list[str]:
    """Write the folder; returns what was checked, as sentences."""
    layout = quant_method(source)
    if layout == settings.format:
        return copy_tensors(source, output, progress)
    conversion: Conversion
    if "modelopt" in (layout, settings.format):
        conversion = _modelopt(source, settings.format)
    else:
        conversion = IntegerConversion(source, settings.format, progress)
        output.details["notes"] = conversion.notes
    write_config(output.folder / "config.json", conversion.config)
    if isinstance(conversion, FromCompressedTensors):
        write_config(output.folder / "hf_quant_config.json", conversion.hf_quant_config)
    _stream(source, conversion, output, progress)
    output.exit_unless_rank0()
    copy_companions(source.path, output.folder)
    written = open_checkpoint(output.folder).with_mtp
    output.details["limits"] = target_limits(written)
    return same_weights(source, written, progress)


def _modelopt(source: Checkpoint, target: str) -> FromCompressedTensors | ToCompressedTensors:
    return FromCompressedTensors(source) if target == "modelopt" else ToCompressedTensors(source)


def copy_tensors(source: Checkpoint, output: StageOutput, progress: Progress) -> list[str]:
    """The same tensors in a new folder."""
    write_config(output.folder / "config.json", source.config)
    stream(
        source,
        lambda info: [TensorSpec(info.name, info.dtype, info.shape)],
        lambda name, load: {name: load()},
        output.folder,
        work=output.shared / "shards",
        processes=output.processes,
        progress=progress,
        what="export",
    )
    output.exit_unless_rank0()
    copy_companions(source.path, output.folder)
    written = open_checkpoint(output.folder).with_mtp
    output.details["limits"] = target_limits(written)
    return same_tensors(source, written, None, progress)


def _stream(source: Checkpoint, conversion: Conversion, output: StageOutput, progress: Progress) -> None:
    def transform(name: str, load: Callable[[], Tensor]) -> Mapping[str, Tensor]:
        return conversion.tensors(name)

    stream(
        source,
        lambda info: [TensorSpec(*slot) for slot in conversion.headers(info)],
        transform,
        output.folder,
        work=output.shared / "shards",
        processes=output.processes,
        progress=progress,
        what="export",
    )


def target_limits(written: Checkpoint) -> list[str]:
    """Limits of engines that this packed checkpoint meets, as sentences."""
    read: Any = reader(written)
    if not hasattr(read, "rule_and_shape"):
        return []
    described = {name: read.rule_and_shape(name) for name in written.tensors}
    linears = {
        name.rpartition(".")[0]: rule_and_shape
        for name, rule_and_shape in described.items()
        if rule_and_shape is not None
    }
    config = written.config
    heads = int(config.get("num_attention_heads") or 0)
    groups = ((config.get("quantization_config") or {}).get("config_groups") or {}).values()
    return limits(
        str(quant_method(written)),
        {name: shape for name, (_, shape) in linears.items()},
        {name: rule for name, (rule, _) in linears.items()},
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        activations=any(group.get("input_activations") for group in groups),
    )
