"""A mixture of experts out of dense models: planned by their headers, written tensor by tensor.

    attention, norms, embedding, head    the base model's
    expert e of layer l                  the MLP of layer l of expert e's model, its down projection times
                                         ``residual_scale``, with noise of ``noise_scale`` added first
    router of layer l                    a row for each expert (gates.py)

Peak memory is one tensor, and one block of the base model where prompts are read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint import atomic
from attar.checkpoint.mtp import LEFT_OUT, without_mtp
from attar.checkpoint.output import StageOutput
from attar.checkpoint.shards import TensorSpec
from attar.checkpoint.tensors import check_finite, stored_dtype, tensor_bytes
from attar.checkpoint.units import byte_count, bytes_text
from attar.errors import ModelError, SettingsError
from attar.merging.adapters.apply import copy_companions_of
from attar.merging.mixture.architectures import (
    PARTS,
    MixtureArchitecture,
    choose_architecture,
    is_outside,
    split_name,
)
from attar.merging.mixture.config import RANDOM_MODES, ExpertSource, MixtureConfig
from attar.merging.parents import ParentModels, stored_checkpoint
from attar.merging.planning.naming import is_buffer
from attar.merging.planning.output_config import shape_text
from attar.merging.settings import MergeSettings
from attar.progress import Progress
from attar.walks.stream import WriteStep, stream_steps

TOGETHER = 400_000_000
"""Bytes of tensors that are copied in parallel."""


@dataclass(frozen=True)
class MixtureTensor:
    """A tensor of the result.

    Attributes:
        source: name in ``view``; None: it is made (rows of a router, a bias of zeros).
        rows: of a router: the layer, the first row and the one after the last; else None.
        expert: whose weight it is; None: the base model's.
    """

    name: str
    shape: tuple[int, ...]
    view: Any
    source: str | None = None
    rows: tuple[int, int, int] | None = None
    expert: ExpertSource | None = None


@dataclass(frozen=True)
class PreparedMixture:
    """A mixture that can be written, and the document it was made from."""

    document: MixtureConfig
    architecture: MixtureArchitecture
    base: Any
    tensors: tuple[MixtureTensor, ...]
    config: dict[str, Any]
    dtype: str
    notes: tuple[str, ...]

    def specs(self) -> list[TensorSpec]:
        """Name, stored type and shape of every tensor."""
        dtype = stored_dtype(getattr(torch, self.dtype))
        return [TensorSpec(tensor.name, dtype, tensor.shape) for tensor in self.tensors]

    def nbytes(self) -> int:
        """Bytes of the result's weights."""
        return sum(tensor_bytes(spec.dtype, spec.shape) for spec in self.specs())

    def to_dict(self) -> dict[str, Any]:
        """What would be made, as JSON values."""
        return {
            "name": None,
            "method": "mixture",
            "architecture": self.architecture.name,
            "models": [str(reference) for reference in self.document.models()],
            "experts": len(self.document.experts),
            "active": self.document.active,
            "gate_mode": self.document.gate_mode,
            "tensors": len(self.tensors),
            "bytes": self.nbytes(),
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """What would be made, for people."""
        document = self.document
        first = (
            f"{self.architecture.name} of {len(document.experts)} experts, {document.active} a token, "
            f"on {document.base}; gate_mode {document.gate_mode}"
        )
        size = f"{len(self.tensors)} tensors, {bytes_text(self.nbytes())}"
        return "\n".join([first, size, *self.notes])


def prepare_mixture(
    document: MixtureConfig, parents: ParentModels, settings: MergeSettings
) -> PreparedMixture:
    """Plan a mixture. Reads headers and configs, no weights.

    Raises:
        ModelError: the models do not fit together or into any architecture.
        SettingsError: a setting that has no meaning for a mixture.
    """
    if settings.search:
        raise SettingsError("search", settings.search, "0: a mixture has no coefficients to search")
    if settings.tokens > 0:
        raise SettingsError("tokens", settings.tokens, "0: attar evaluate measures a mixture")
    from attar.models.loading.configs import parse_config

    base = parents.view(document.base)
    sources = [*document.experts, *document.shared]
    views = [parents.view(source.model) for source in sources]
    kind = choose_architecture(document, [str(view.config.get("model_type")) for view in (base, *views)])
    dense = parse_config(base.config).to_dict()
    mlps = _mlps(base, dense["num_hidden_layers"])
    for source, view in zip(sources, views, strict=True):
        _check_expert(source, base, view, mlps)
    config = kind.config(dense, document)
    dtype = document.dtype or _stored_type(base)
    config["dtype"] = dtype
    tensors = tuple(_tensors(document, kind, base, views, dense))
    return PreparedMixture(
        document, kind, base, tensors, config, dtype, tuple(_notes(document, config, dense))
    )


def write_mixture(
    prepared: PreparedMixture, output: StageOutput, settings: MergeSettings, progress: Progress
) -> None:
    """Write the mixture's folder."""
    from attar.merging.mixture.gates import alike, gate_rows

    document = prepared.document
    gated = [*document.experts, *(document.shared if prepared.architecture.shared_gate else ())]
    rows = gate_rows(
        prepared.base,
        gated,
        document.gate_mode,
        seed=settings.seed,
        device=settings.device,
        work=output.work / "prompts",
    )
    notes = list(prepared.notes)
    layers = [] if document.gate_mode in RANDOM_MODES else alike(rows[:, : len(document.experts)])
    if layers:
        notes.append(
            f"the routers of layers {', '.join(map(str, layers))} tell their experts badly apart:"
            " the prompts are too similar"
        )
        progress.log(f"warning: {notes[-1]}")
    if stored_checkpoint(prepared.base).mtp:
        notes.append(LEFT_OUT.format("the base's is for a dense model"))
        progress.log(f"note: {notes[-1]}")
    atomic.write_json(output.folder / "config.json", without_mtp(prepared.config))
    copy_companions_of(prepared.base, output.folder)
    dtype = getattr(torch, prepared.dtype)
    steps = [
        WriteStep(
            [spec],
            partial(_output_tensor, tensor, rows, dtype, settings.seed),
            math.prod(tensor.shape) * 4,
        )
        for spec, tensor in zip(prepared.specs(), prepared.tensors, strict=True)
    ]
    stream_steps(
        steps,
        output.folder,
        work=output.shared / "shards",
        processes=output.processes,
        shard_bytes=byte_count("shard_size", settings.shard_size),
        together=TOGETHER,
        progress=progress,
        what="mixture",
    )
    output.exit_unless_rank0()
    output.details |= {**prepared.to_dict(), "notes": notes}


def _output_tensor(tensor: MixtureTensor, rows: Tensor, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """One tensor by its name, in the type that is written."""
    if tensor.rows is not None:
        layer, first, last = tensor.rows
        return {tensor.name: rows[layer, first:last].to(dtype)}
    if tensor.source is None:
        return {tensor.name: torch.zeros(tensor.shape, dtype=dtype)}
    weight = tensor.view.load(tensor.source)
    check_finite(tensor.source, weight, tensor.view.path)
    if tensor.expert is not None:
        if tensor.expert.noise is not None:
            weight = weight + tensor.expert.noise * _noise(weight, seed, tensor.name)
        if tensor.expert.residual is not None and ".down_proj." in tensor.source:
            weight = weight * tensor.expert.residual
    return {tensor.name: weight.to(dtype)}


def _noise(weight: Tensor, seed: int, name: str) -> Tensor:
    """Normal noise of a weight's shape and type, from a separate stream for each (seed, name)."""
    key = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big"))
    return torch.randn(weight.shape, generator=generator).to(weight.dtype)


def _tensors(
    document: MixtureConfig,
    kind: MixtureArchitecture,
    base: Any,
    views: list[Any],
    dense: dict[str, Any],
) -> Iterator[MixtureTensor]:
    """Every tensor of the result, layer by layer.

    Raises:
        ModelError: the base model has a tensor that the architecture has no place for.
    """
    width, experts = dense["hidden_size"], list(zip(document.experts, views, strict=False))
    shared = list(zip(document.shared, views[len(experts) :], strict=True))
    kept: dict[int | None, list[str]] = {}
    for name in base.tensors:
        layer, local_name = split_name(name)
        if is_buffer(name) or (layer is not None and _part(local_name)):
            continue
        if not (is_outside(name) if layer is None else local_name in kind.kept()):
            raise ModelError(f"{base.name}: {name} has no place in {kind.name}")
        kept.setdefault(layer, []).append(name)
    yield from (MixtureTensor(name, _shape(base, name), base, name) for name in kept.get(None, ()))
    for layer in range(dense["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        yield from (MixtureTensor(name, _shape(base, name), base, name) for name in kept.get(layer, ()))
        for name in (kept_name for kept_name in kind.kept() if kept_name.endswith(".bias")):
            if start + name not in base.tensors:
                size = _shape(base, start + name.replace(".bias", ".weight"))[:1]
                yield MixtureTensor(start + name, size, base)
        count = len(experts)
        yield MixtureTensor(start + kind.router(), (count, width), base, rows=(layer, 0, count))
        if kind.shared_gate:
            gate, rows = f"{start}{kind.shared_block}_gate.weight", (layer, count, count + 1)
            yield MixtureTensor(gate, (1, width), base, rows=rows)
        for part in PARTS:
            source = f"{start}mlp.{part}.weight"
            for index, (expert, view) in enumerate(experts):
                name = start + kind.expert(index, part)
                yield MixtureTensor(name, _shape(view, source), view, source, expert=expert)
            for expert, view in shared:
                name = f"{start}{kind.shared_block}.{part}.weight"
                yield MixtureTensor(name, _shape(view, source), view, source, expert=expert)


def _mlps(base: Any, layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the base model's MLPs by name."""
    names = [f"model.layers.{layer}.mlp.{part}.weight" for layer in range(layers) for part in PARTS]
    missing = next((name for name in names if name not in base.tensors), None)
    if missing:
        raise ModelError(f"{base.name}: has no tensor {missing}", hint="mixtures are made of dense models")
    return {name: _shape(base, name) for name in names}


def _check_expert(source: ExpertSource, base: Any, view: Any, mlps: dict[str, tuple[int, ...]]) -> None:
    layers = view.config.get("num_hidden_layers")
    if layers != base.config.get("num_hidden_layers"):
        raise ModelError(
            f"{source.where}: {source.model} has {layers} layers, and the base model"
            f" {base.config.get('num_hidden_layers')}"
        )
    for name, shape in mlps.items():
        if name not in view.tensors:
            raise ModelError(f"{source.where}: {source.model} has no tensor {name}")
        if _shape(view, name) != shape:
            raise ModelError(
                f"{source.where}: {name} of {source.model} is {shape_text(_shape(view, name))}, and the base"
                f" model's {shape_text(shape)}"
            )
    unknown = [name for name in view.tensors if ".mlp." in name and name not in mlps]
    if unknown:
        raise ModelError(f"{source.where}: {source.model} has {unknown[0]}, for which experts have no place")


def _notes(document: MixtureConfig, config: dict[str, Any], dense: dict[str, Any]) -> Iterator[str]:
    if dense.get("sliding_window") and config.get("sliding_window") is None:
        yield f"sliding_window {dense['sliding_window']} is given up, as mergekit does"
    models = {source.model for source in document.experts}
    if len(document.experts) > 1 and len(models) == 1 and not any(e.noise for e in document.experts):
        yield "all experts are the same model: until it is trained, the mixture computes what that model does"
    if config["model_type"] == "deepseek":
        yield "transformers runs deepseek with the code on the hub alone (trust_remote_code); attar does not"


def _stored_type(base: Any) -> str:
    dtype = base.config.get("dtype") or base.config.get("torch_dtype")
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    stored = base.tensors["model.embed_tokens.weight"].dtype
    return {"BF16": "bfloat16", "F16": "float16"}.get(stored, "float32")


def _part(local_name: str) -> bool:
    return local_name in tuple(f"mlp.{part}.weight" for part in PARTS)


def _shape(view: Any, name: str) -> tuple[int, ...]:
    return tuple(view.tensors[name].shape)
