"""What is known of a model from its headers and small files, for /api/tags, /api/show and /api/ps."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from attar.checkpoint import open_checkpoint
from attar.checkpoint.description import Inspection
from attar.checkpoint.inspect import inspect
from attar.checkpoint.units import count_text
from attar.errors import AttarError
from attar.runtime.loading import tokenizer_of
from attar.serving.http.tokenizer import ServerTokenizer

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class ModelFacts:
    """Of a model.

    Attributes:
        size: bytes on the disk.
        modified: seconds since 1970.
        digest: SHA-256 of source, size and time; not of the weights, which would all have to be read.
        info: the keys of GGUF's metadata that clients read.
        causal: whether it completes text; otherwise it makes embeddings.
    """

    source: str
    format: str = ""
    family: str = ""
    size: int = 0
    modified: float = 0.0
    parameters: int = 0
    quantization: str = ""
    context: int | None = None
    info: dict[str, Any] | None = None
    causal: bool = True

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.source, self.size, self.modified)).encode()).hexdigest()

    def details(self, parent: str = "") -> dict[str, Any]:
        """``details`` of a model.

        Args:
            parent: name of the model that an adapter is for.
        """
        return {
            "parent_model": parent,
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else [],
            "parameter_size": count_text(self.parameters).replace(" ", "") if self.parameters else "",
            "quantization_level": self.quantization,
        }


@lru_cache(maxsize=256)
def model_facts(source: str) -> ModelFacts:
    """The facts of a model that the server serves; few where its files cannot be read now.

    Args:
        source: folder, file or hub id; empty: not known.
    """
    try:
        return _facts_of(source, inspect(source)) if source else ModelFacts(source)
    except (AttarError, OSError):
        return ModelFacts(source)


@lru_cache(maxsize=16)
def tokenizer_for(source: str) -> ServerTokenizer | None:
    """The tokenizer of a model that is not loaded; None where it cannot be read."""
    try:
        tokenizer = tokenizer_of(open_checkpoint(source)) if source else None
    except (AttarError, OSError):
        return None
    return None if tokenizer is None else ServerTokenizer(tokenizer)


def _facts_of(source: str, seen: Inspection) -> ModelFacts:
    container, shape = seen.container, asdict(seen.geometry)
    keys = {
        "context_length": "context",
        "embedding_length": "hidden",
        "block_count": "layers",
        "attention.head_count": "heads",
        "attention.head_count_kv": "kv_heads",
        "vocab_size": "vocabulary",
    }
    lengths = {f"{seen.model_type}.{key}": shape[name] for key, name in keys.items()}
    general = {"general.architecture": seen.model_type, "general.parameter_count": seen.parameters}
    return ModelFacts(
        source=source,
        format="gguf" if container else "safetensors",
        family=seen.model_type,
        size=seen.disk_bytes,
        modified=seen.path.stat().st_mtime,
        parameters=seen.parameters,
        quantization=_quantization(seen),
        context=seen.geometry.context,
        info=general | {key: number for key, number in lengths.items() if number is not None},
        causal=seen.geometry.causal,
    )


def _quantization(seen: Inspection) -> str:
    """``Q4_0`` of a GGUF file, ``INT4`` of codes, else the dtype."""
    if seen.container:
        return str(seen.container["file_type"]).split(" ")[0]
    schemes = (seen.quantization or {}).get("schemes") or [{}]
    if schemes[0].get("bits"):
        return f"{schemes[0].get('type') or 'int'}{schemes[0]['bits']}".upper()
    return _DTYPES.get(seen.dtype, seen.dtype.upper())
