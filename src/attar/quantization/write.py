"""Writing a quantized checkpoint: codes in, a folder out, streamed tensor by tensor; and which libraries can
load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.atomic import write_config
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.checkpoint.shards import TensorSpec, shard_bytes
from attar.checkpoint.tensors import TORCH, check_finite, stored_dtype
from attar.errors import NumericsError
from attar.formats import bitsandbytes, compressed_tensors, layouts
from attar.formats.coded import Coded
from attar.formats.limits import kernels
from attar.formats.rules import PACK
from attar.progress import SILENT, Progress
from attar.quantization.grids import IntGrid, QuantizedTensor
from attar.quantization.methods.rtn import rtn
from attar.quantization.plan import LayerPlan, QuantizationPlan
from attar.quantization.quantization_method import CodeSource
from attar.walks.stream import SHARD_BYTES, stream

FLOATS = ("F64", "F32", "F16", "BF16")
YES = "yes"
STACKED = (
    "no: it stacks experts while it loads, which works for packed integers alone; "
    "attar export --format dense loads everywhere"
)
APART = (
    "no: its code has the experts of this family in one tensor, not in codes one by one; "
    "attar export --format dense loads everywhere"
)
GPT_OSS = "no: it takes gpt-oss's experts in MXFP4 alone; attar export --format mxfp4 writes them so"
MIXED = "no: it has one scheme for all experts of a layer; --moe-schemes together"
SPLIT = "no: it runs q, k and v as one matrix of one scheme; --qkv together"
TIED = "no: it does not run a coded embedding that is the head as well; --embedding-bits 0"
UNTRIED = "nothing known against it; attar is not tested with vLLM"
CONV1D = (
    "no: the packed layout of Conv1D modules is attar's own; attar export --format dense loads everywhere"
)
KERNEL_GROUPS = "no: its kernel for W4AFP8 has groups of 128 alone"
ORDERED = "no: compressed-tensors dropped groups in act-order with version 0.20; attar export --format gptq"
READS = (
    "no: the family's code reads weights that stay packed; one scheme for all Linears and no kv_cache load"
)


def write(
    checkpoint: Checkpoint,
    chosen: QuantizationPlan,
    codes: CodeSource,
    folder: Path,
    work: Path,
    progress: Progress = SILENT,
    *,
    processes: Processes = SINGLE_PROCESS,
    input_scales: Mapping[str, float] | None = None,
    kv_scales: Mapping[str, tuple[float, float]] | None = None,
    dtype: torch.dtype | None = None,
    norms: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the packed checkpoint: its config and its tensors.

    Args:
        checkpoint: the dense model that the codes were made of.
        work: where unfinished shards survive a kill.
        processes: they share the shards.
        input_scales: of the inputs of each layer whose activations are static, by module name.
        kv_scales: of keys and values, by the name of the attention module.
        dtype: of every floating-point tensor that stays dense, where a transform has left them in another
            one; None: as they are.
        norms: in place of the checkpoint's, by stored name; in the same types.

    Raises:
        NumericsError: a scale is missing, or neither finite nor positive.
    """
    inputs, caches = input_scales or {}, kv_scales or {}
    _check_scales(chosen, inputs, caches)
    config = {**checkpoint.config, "quantization_config": chosen.config}
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    write_config(folder / "config.json", config)

    coded = {**chosen.sites, **chosen.mtp}

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def transform(name: str, load: Callable[[], Tensor]) -> dict[str, Tensor]:
        base = name.removesuffix(".weight")
        cache_scales = {}
        if name in chosen.caches:
            kind = getattr(torch, TORCH[_kept(checkpoint.tensors[name].dtype, dtype)])
            scales = (torch.tensor([value], dtype=kind) for value in caches[chosen.caches[name]])
            cache_scales = dict(zip(_cache_names(chosen, name), scales, strict=True))
        if name in coded:
            layer = coded[name]
            packed = layer_tensors(layer, base, codes(name, load), inputs.get(layer.module))
            return {**packed, **cache_scales}
        if name == chosen.embedding:
            return {**_embedding(chosen, name, cast(load())), **cache_scales}
        other = load()
        if norms is not None and name in norms:
            other = norms[name].to(other.dtype).view_as(other)
        check_finite(name, other, checkpoint.path)
        return {name: cast(other), **cache_scales}

    stream(
        checkpoint,
        partial(tensor_specs, chosen, dtype=dtype),
        transform,
        folder,
        work=work,
        processes=processes,
        progress=progress,
        what="pack",
    )


def tensor_specs(chosen: QuantizationPlan, info: Any, dtype: torch.dtype | None = None) -> list[TensorSpec]:
    """What a stored tensor becomes.

    Args:
        info: its header.
        dtype: as :func:`write` has it.
    """
    base, kind = info.name.removesuffix(".weight"), _kept(info.dtype, dtype)
    caches = [TensorSpec(name, kind, (1,)) for name in _cache_names(chosen, info.name)]
    layer = chosen.sites.get(info.name) or chosen.mtp.get(info.name)
    if layer is not None:
        return [*layer_specs(layer, base), *caches]
    if info.name == chosen.embedding:
        scale = [TensorSpec(name, kind, (info.shape[0], 1)) for name in _scaled(chosen, base)]
        return [TensorSpec(info.name, "I8", info.shape), *scale, *caches]
    return [TensorSpec(info.name, kind, info.shape), *caches]


def file_bytes(checkpoint: Checkpoint, chosen: QuantizationPlan, dtype: torch.dtype | None = None) -> int:
    """Bytes of the weight files that :func:`write` makes, their headers included. Reads headers only.

    Args:
        checkpoint: with single experts, as the plan has them (``models/loading/single_experts.py``).
    """
    infos = (*checkpoint.tensors.values(), *checkpoint.mtp.values())
    specs = [spec for info in infos for spec in tensor_specs(chosen, info, dtype)]
    return shard_bytes(specs, SHARD_BYTES)


def _kept(kind: str, dtype: torch.dtype | None) -> str:
    """The format's name of the type of a tensor that stays dense."""
    return stored_dtype(dtype) if dtype is not None and kind in FLOATS else kind


def layer_specs(layer: LayerPlan, base: str) -> list[TensorSpec]:
    """The tensors of a layer's weight, known before any number is.

    Args:
        base: name of the stored weight without ``.weight``.
    """
    rule, storage = layer.scheme.weights, layer.grid.storage
    dtype, code_dtype = stored_dtype(storage), stored_dtype(layer.grid.code_dtype)
    if rule.kind == "nf4":
        parts = bitsandbytes.layout_nf4(layer.shape, rule.group_size, storage, rule.double)
    else:
        parts = layouts.layout(layer.shape, rule, layer.scheme.form, dtype, code_dtype)
    specs = [TensorSpec(f"{base}.{leaf}", kind, shape) for leaf, (kind, shape) in parts.items()]
    if layer.static:
        leaf, kind = _input_scale(layer)
        specs.append(TensorSpec(f"{base}.{leaf}", stored_dtype(kind), (1,)))
    return specs


def layer_tensors(
    layer: LayerPlan, base: str, quantized: QuantizedTensor, input_scale: float | None
) -> dict[str, Tensor]:
    """The tensors of a layer, as :func:`layer_specs` announces them."""
    rule, parameters, storage = layer.scheme.weights, quantized.parameters, layer.grid.storage
    if rule.kind == "nf4":
        levels = quantized.grid.level(torch.arange(16))
        nested = parameters.stored if rule.double else None
        tensors = bitsandbytes.encode_nf4(quantized.codes, parameters.scale, levels, storage, nested)
    else:
        global_scale = parameters.stored.get("global_scale")
        coded = Coded(quantized.codes, parameters.scale, parameters.zero, global_scale, quantized.g_idx)
        tensors = layouts.encode(coded, rule, layer.scheme.form, storage)
    if layer.static:
        assert input_scale is not None
        leaf, kind = _input_scale(layer)
        divides = leaf == compressed_tensors.INPUT_GLOBAL
        tensors[leaf] = torch.tensor([1.0 / input_scale if divides else input_scale], dtype=kind)
    return {f"{base}.{leaf}": value for leaf, value in tensors.items()}


def _input_scale(layer: LayerPlan) -> tuple[str, torch.dtype]:
    """Name and type of a static scale of a layer's input."""
    rule = layer.scheme.activations
    if rule is not None and rule.strategy == "tensor_group":
        return compressed_tensors.INPUT_GLOBAL, torch.float32
    return compressed_tensors.INPUT_SCALE, layer.grid.storage


def _embedding(chosen: QuantizationPlan, name: str, weight: Tensor) -> dict[str, Tensor]:
    """The int8 embedding and its scale, for itself and for a head tied to it."""
    quantized = rtn(weight, IntGrid(8, 0, storage=weight.dtype))
    scale = quantized.parameters.scale.to(weight.dtype)
    return {name: quantized.codes, **dict.fromkeys(_scaled(chosen, name.removesuffix(".weight")), scale)}


def _scaled(chosen: QuantizationPlan, embedding: str) -> list[str]:
    """Names of the scales of an int8 embedding: the embedding's, and the scale of a head tied to it."""
    owners = [embedding, chosen.tied_head] if chosen.tied_head else [embedding]
    return [f"{owner}.{layouts.SCALE}" for owner in owners]


def _cache_names(chosen: QuantizationPlan, stored: str) -> list[str]:
    """Names of the scales of keys and values, written with the weight of the keys."""
    if stored not in chosen.caches:
        return []
    parent = stored.removesuffix(".weight").rpartition(".")[0]
    return [f"{parent}.{compressed_tensors.K_SCALE}", f"{parent}.{compressed_tensors.V_SCALE}"]


def _check_scales(
    chosen: QuantizationPlan, inputs: Mapping[str, float], caches: Mapping[str, tuple[float, float]]
) -> None:
    """Raise where a static scale is missing, not finite or not positive."""
    scales = [(layer.module, inputs.get(layer.module)) for layer in chosen.sites.values() if layer.static]
    for name in chosen.caches.values():
        scales += [(name, value) for value in caches.get(name, (None, None))]
    for name, value in scales:
        if value is None or not 0 < value < float("inf"):
            raise NumericsError(
                f"{name}: the scale of its activations is {value}", hint="calibrate with more samples"
            )


def loads_in(chosen: QuantizationPlan) -> dict[str, str]:
    """For transformers and vLLM: "yes", or the reason why not in a sentence. attar loads everything that it
    writes."""
    sites = list(chosen.sites.values())
    rules = {site.module: site.scheme.weights for site in sites}
    if any(rule.kind == "nf4" for rule in rules.values()):
        return {
            "transformers": "yes, with bitsandbytes",
            "vllm": "with bitsandbytes, which it does not split over devices",
        }
    if any(site.transposed for site in sites):
        return {"transformers": CONV1D, "vllm": CONV1D}
    if any(rule.ordered for rule in rules.values()):
        return {"transformers": ORDERED, "vllm": ORDERED}
    packed = any(site.scheme.form == PACK for site in sites)
    stuck = chosen.reads_weights and packed and not chosen.config.get("dequantize")
    dense = {site.module: site.shape for site in sites if not site.scheme.activations}
    missing = kernels("compressed-tensors", dense, {name: rules[name] for name in dense})
    plain = all(site.scheme.form == PACK and not site.scheme.activations for site in sites)
    if any(site.scheme.name == "W4AFP8" and site.scheme.weights.group_size != 128 for site in sites):
        missing = KERNEL_GROUPS
    missing = MIXED if chosen.mixed else SPLIT if chosen.split else TIED if chosen.tied_head else missing
    if chosen.stacked:
        vllm = GPT_OSS if chosen.stacked == "gpt_oss" else missing or UNTRIED
        return {"transformers": APART, "vllm": vllm}
    ours = STACKED if chosen.experts and not plain else READS if stuck else YES
    return {"transformers": ours, "vllm": missing or UNTRIED}


def warnings(loads: dict[str, str]) -> list[str]:
    """Notes for the user before the work: a sentence for each library that may not load the result."""
    return [f"{library}: {why}" for library, why in loads.items() if why not in (YES, UNTRIED)]
