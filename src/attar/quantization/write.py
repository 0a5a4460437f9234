"""Writing what was quantized: codes in, a checkpoint folder out, streamed tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint.shards import TensorSpec
from attar.checkpoint.tensors import TORCH, stored_dtype
from attar.errors import NumericsError
from attar.formats import bitsandbytes, compressed_tensors, layouts
from attar.formats.coded import Coded
from attar.progress import SILENT, Progress
from attar.quantization.grids import IntGrid, QuantizedTensor
from attar.quantization.methods.rtn import rtn
from attar.quantization.plan import LayerPlan, QuantizationPlan
from attar.walks.stream import stream

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

FLOATS = ("F64", "F32", "F16", "BF16")
CodeSource = Callable[[str, Callable[[], Tensor]], QuantizedTensor]
"""``codes(stored name, load)`` gives the quantized weight of a site; ``load()`` reads the dense one as it is
stored."""


def write(
    checkpoint: Checkpoint,
    chosen: QuantizationPlan,
    codes: CodeSource,
    folder: Path,
    work: Path,
    progress: Progress = SILENT,
    *,
    input_scales: Mapping[str, float] | None = None,
    kv_scales: Mapping[str, tuple[float, float]] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the packed checkpoint: its config and its tensors.

    Args:
        checkpoint: the dense model that the codes were made of.
        chosen: what happens to each tensor.
        codes: see :data:`CodeSource`.
        folder: where the result goes.
        work: where unfinished shards survive a kill.
        input_scales: of the inputs of each site whose activations are static, by module name.
        kv_scales: of keys and values, by the name of the attention module.
        dtype: of every floating-point tensor that stays dense, where a transform has left them in another
            one; None: as they are.

    Raises:
        NumericsError: a scale is missing, or neither finite nor positive.
    """
    inputs, caches = input_scales or {}, kv_scales or {}
    _check_scales(chosen, inputs, caches)
    config = {**checkpoint.config, "quantization_config": chosen.config}
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def kept(kind: str) -> str:
        return stored_dtype(dtype) if dtype is not None and kind in FLOATS else kind

    def layout(info: Any) -> Sequence[TensorSpec]:
        base, kind = info.name.removesuffix(".weight"), kept(info.dtype)
        beside = [TensorSpec(name, kind, (1,)) for name in _cache_names(chosen, info.name)]
        if info.name in chosen.sites:
            return [*site_slots(chosen.sites[info.name], base), *beside]
        if info.name == chosen.embedding:
            scale = [TensorSpec(name, kind, (info.shape[0], 1)) for name in _scaled(chosen, base)]
            return [TensorSpec(info.name, "I8", info.shape), *scale, *beside]
        return [TensorSpec(info.name, kind, info.shape), *beside]

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def transform(name: str, load: Callable[[], Tensor]) -> dict[str, Tensor]:
        base = name.removesuffix(".weight")
        beside = {}
        if name in chosen.caches:
            kind = getattr(torch, TORCH[kept(checkpoint.tensors[name].dtype)])
            scales = (torch.tensor([value], dtype=kind) for value in caches[chosen.caches[name]])
            beside = dict(zip(_cache_names(chosen, name), scales, strict=True))
        if name in chosen.sites:
            site = chosen.sites[name]
            return {**site_tensors(site, base, codes(name, load), inputs.get(site.module)), **beside}
        if name == chosen.embedding:
            return {**_embedding(chosen, name, cast(load())), **beside}
        return {name: cast(load()), **beside}

    stream(checkpoint, layout, transform, folder, work=work, progress=progress, what="pack")


def site_slots(site: LayerPlan, base: str) -> list[TensorSpec]:
    """What the weight of a site becomes, known before any number is.

    Args:
        base: name of the stored weight without ``.weight``.
    """
    rule, dtype = site.scheme.weights, stored_dtype(site.grid.storage)
    if rule.kind == "nf4":
        made = bitsandbytes.layout_nf4(site.shape, rule.group_size, site.grid.storage, rule.double)
    else:
        made = layouts.layout(site.shape, rule, site.scheme.form, dtype, stored_dtype(site.grid.code_dtype))
    slots = [TensorSpec(f"{base}.{leaf}", kind, shape) for leaf, (kind, shape) in made.items()]
    if site.static:
        slots.append(TensorSpec(f"{base}.{compressed_tensors.INPUT_SCALE}", dtype, (1,)))
    return slots


def site_tensors(
    site: LayerPlan, base: str, made: QuantizedTensor, input_scale: float | None
) -> dict[str, Tensor]:
    """The tensors of a site, as :func:`site_slots` announces them."""
    rule, parameters = site.scheme.weights, made.parameters
    if rule.kind == "nf4":
        levels = made.grid.level(torch.arange(16))
        nested = parameters.stored if rule.double else None
        found = bitsandbytes.encode_nf4(made.codes, parameters.scale, levels, site.grid.storage, nested)
    else:
        stored = parameters.stored
        coded = Coded(made.codes, parameters.scale, parameters.zero, stored.get("global_scale"), made.g_idx)
        found = layouts.encode(coded, rule, site.scheme.form, site.grid.storage)
    if site.static:
        found[compressed_tensors.INPUT_SCALE] = torch.tensor([input_scale], dtype=site.grid.storage)
    return {f"{base}.{leaf}": value for leaf, value in found.items()}


def _embedding(chosen: QuantizationPlan, name: str, weight: Tensor) -> dict[str, Tensor]:
    """The int8 embedding and its scale, for itself and for a head tied to it."""
    made = rtn(weight, IntGrid(8, 0, storage=weight.dtype))
    scale = made.parameters.scale.to(weight.dtype)
    return {name: made.codes, **dict.fromkeys(_scaled(chosen, name.removesuffix(".weight")), scale)}


def _scaled(chosen: QuantizationPlan, embedding: str) -> list[str]:
    """Names of the scales of an int8 embedding: its own, and that of a head tied to it."""
    owners = [embedding, chosen.tied_head] if chosen.tied_head else [embedding]
    return [f"{owner}.{layouts.SCALE}" for owner in owners]


def _cache_names(chosen: QuantizationPlan, stored: str) -> list[str]:
    """Names of the scales of keys and values that stand beside the weight of the keys."""
    if stored not in chosen.caches:
        return []
    parent = stored.removesuffix(".weight").rpartition(".")[0]
    return [f"{parent}.{compressed_tensors.K_SCALE}", f"{parent}.{compressed_tensors.V_SCALE}"]


def _check_scales(
    chosen: QuantizationPlan, inputs: Mapping[str, float], caches: Mapping[str, tuple[float, float]]
) -> None:
    """Raise where a static scale is missing, not finite or not positive."""
    found = [(site.module, inputs.get(site.module)) for site in chosen.sites.values() if site.static]
    for name in chosen.caches.values():
        found += [(name, value) for value in caches.get(name, (None, None))]
    for name, value in found:
        if value is None or not 0 < value < float("inf"):
            raise NumericsError(
                f"{name}: the scale of its activations is {value}", hint="calibrate with more samples"
            )
