"""Describe a checkpoint without loading it: size, geometry, quantization, lineage, duties, measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from attar.checkpoint.card import Card
from attar.checkpoint.description import Inspection
from attar.checkpoint.draft_head import draft_head_of
from attar.checkpoint.geometry import ModelGeometry, geometry
from attar.checkpoint.licences import duties
from attar.checkpoint.lineage import as_parent
from attar.checkpoint.oddities import WORKS
from attar.checkpoint.open import Checkpoint, open_anyway
from attar.checkpoint.parts import ParameterCount, code_bits, count
from attar.checkpoint.paths import resolve
from attar.checkpoint.tensors import TORCH
from attar.errors import ModelError

JUDGE = "attar.models.loading.fit"
"""Module whose ``judged`` compares a checkpoint with its family; by name, because models/ is above."""

DESCRIBERS = {".gguf": "attar.formats.gguf.open"}
"""Modules that describe single-file models, by suffix: ``describe``, and ``open_unknown`` for an unknown
family; by name, because formats/ is above this package."""


def inspect(model: str | Path | Checkpoint) -> Inspection:
    """Inspect a model, also one that verbs refuse. Reads headers and small files; no weights.

    Raises:
        CheckpointError: the folder is missing, incomplete or damaged.
    """
    checkpoint = _opened(model)
    config = checkpoint.config
    counted = count(checkpoint)
    dtype = _dtype(checkpoint)
    shape = geometry(config, dtype)
    card = checkpoint.card or Card(name=checkpoint.name, stage="original")
    itself = as_parent(checkpoint, "weights")
    container = _container(checkpoint)
    return Inspection(
        name=checkpoint.name,
        path=checkpoint.source,
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        dtype=dtype,
        parameters=counted.parameters,
        parts=counted.parts,
        bits_per_weight=checkpoint.nbytes * 8 / max(counted.parameters, 1),
        tensor_bytes=checkpoint.nbytes,
        disk_bytes=sum(path.stat().st_size for path in _files(checkpoint)),
        weight_files=len(checkpoint.weight_files),
        tied=_tied(config, counted, shape),
        geometry=shape,
        quantization=_quantization(config, counted, container),
        zeros=_zeros(card),
        draft_head=_draft_head(checkpoint, card),
        container=container,
        oddities=tuple(_oddities(checkpoint)),
        stage=card.stage,
        command=card.command,
        lineage=itself,
        licence=duties(itself.parents or (itself,), itself.settings),
        measurements=card.measurements,
    )


def _opened(model: str | Path | Checkpoint) -> Checkpoint:
    """The checkpoint; a single file of an unknown family is described without its config."""
    try:
        return open_anyway(model)
    except ModelError:
        assert not isinstance(model, Checkpoint), "an open checkpoint has a known family"
        path = resolve(model)
        if path.suffix.lower() not in DESCRIBERS:
            raise
        opened: Checkpoint = import_module(DESCRIBERS[path.suffix.lower()]).open_unknown(path)
        return opened


def _oddities(checkpoint: Checkpoint) -> Iterator[dict[str, str]]:
    """What :mod:`attar.checkpoint.oddities` has of it; draft heads and unknown files have no family to be
    compared with."""
    known = checkpoint.path.is_dir() and draft_head_of(checkpoint.config, checkpoint.tensors) is None
    judged = import_module(JUDGE).judged(checkpoint) if known else checkpoint.oddities
    for odd in judged:
        if odd.verdict != WORKS:
            yield {"verdict": odd.verdict, "text": odd.text, "hint": odd.hint}


def _files(checkpoint: Checkpoint) -> list[Path]:
    """The files of the model on disk."""
    if checkpoint.source.is_file():
        return checkpoint.weight_files
    return [path for path in checkpoint.path.rglob("*") if path.is_file()]


def _container(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Types and metadata of a single-file model."""
    if not checkpoint.source.is_file():
        return None
    describer = import_module(DESCRIBERS[checkpoint.source.suffix.lower()])
    described: dict[str, Any] = describer.describe(checkpoint)
    return described


def _dtype(checkpoint: Checkpoint) -> str:
    """The number type of the config, or of most stored bytes. A GGUF file with quantized blocks states none:
    bfloat16, in which it is decoded and its keys and values are stored."""
    if any(info.block for info in checkpoint.tensors.values()):
        return "bfloat16"
    for key in ("dtype", "torch_dtype"):
        named = checkpoint.config.get(key)
        if isinstance(named, str):
            return named.removeprefix("torch.")
    stored: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in ("F64", "F32", "F16", "BF16"):
            stored[TORCH[info.dtype]] += info.nbytes
    return stored.most_common(1)[0][0] if stored else "bfloat16"


def _tied(config: dict[str, Any], counted: ParameterCount, shape: ModelGeometry) -> bool:
    """Whether the head is the embedding: by the config, or because a text generator stores no head."""
    if config.get("tie_word_embeddings") is True:
        return True
    return shape.causal and not any(part.name == "head" for part in counted.parts)


def _quantization(
    config: dict[str, Any], counted: ParameterCount, container: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Method, format and bits of the stored codes, from ``quantization_config`` and the counts."""
    stated = config.get("quantization_config")
    if not isinstance(stated, dict) or (container and not counted.quantized_tensors):
        return None
    trellis = stated.get("quant_method") == "exl3"
    form = stated.get("codebook", "trellis") if trellis else stated.get("format")
    return {
        "method": stated.get("quant_method", "unknown"),
        "format": container["file_type"] if container else form,
        "schemes": [] if container or trellis else _schemes(stated),
        "ignore": stated.get("ignore") or stated.get("modules_to_not_convert") or [],
        "tensors": counted.quantized_tensors,
        "parameters": counted.quantized.parameters,
        "bytes": counted.quantized.bytes,
        "bits_per_weight": counted.quantized.bits_per_weight,
    }


def _zeros(card: Card) -> dict[str, Any] | None:
    """Method, fraction and pattern of the zeros that pruning set, where the card says them."""
    stated = card.details.get("zeros")
    kinds = {"method": str, "pattern": str, "fraction": float, "of": int}
    if not isinstance(stated, dict) or not all(isinstance(stated.get(key), kinds[key]) for key in kinds):
        return None
    return {key: stated[key] for key in kinds}


def _draft_head(checkpoint: Checkpoint, card: Card) -> dict[str, Any] | None:
    """What a draft head says of itself, with the report of its training."""
    head = draft_head_of(checkpoint.config, checkpoint.tensors)
    report = card.details.get("drafting")
    return head and head | {"drafting": report if isinstance(report, dict) else {}}


def _schemes(stated: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry for each group of layers with the same format."""
    groups = stated.get("config_groups")
    if not isinstance(groups, dict):
        return [_only_scheme(stated)]
    schemes = []
    for name in sorted(groups):
        weights = groups[name].get("weights") or {}
        activations = groups[name].get("input_activations") or {}
        schemes.append(
            {
                "bits": weights.get("num_bits"),
                "type": weights.get("type"),
                "symmetric": weights.get("symmetric"),
                "strategy": weights.get("strategy"),
                "group_size": weights.get("group_size"),
                "block": weights.get("block_structure"),
                "activation_bits": activations.get("num_bits"),
                "targets": groups[name].get("targets") or [],
            }
        )
    return schemes


def _only_scheme(stated: dict[str, Any]) -> dict[str, Any]:
    """The format of a quantization that has one for all layers, by its method."""
    method, algorithm = stated.get("quant_method"), str(stated.get("quant_algo"))
    kind, bits, activation_bits, block = "int", code_bits(stated), None, None
    group_size = stated.get("group_size") or stated.get("q_group_size")
    if method in ("fp8", "fbgemm_fp8"):
        kind, bits, activation_bits, block = "float", 8, 8, stated.get("weight_block_size")
    elif method == "mxfp4":
        kind, bits, group_size = "float", 4, 32
    elif method == "modelopt":
        kind, bits = "float", 4 if "FP4" in algorithm else 8
    elif method == "mlx" and stated.get("mode", "affine") != "affine":
        kind = "float"
    elif method == "bitsandbytes":
        bits = 4 if stated.get("load_in_4bit") else 8
        kind = str(stated.get("bnb_4bit_quant_type", "fp4")) if bits == 4 else "int"
    scheme = {"bits": bits, "type": kind, "group_size": group_size, "block": block}
    return {**scheme, "activation_bits": activation_bits}
