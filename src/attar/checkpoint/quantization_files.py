"""A quantization that older writers describe elsewhere than under ``quantization_config`` of config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attar.checkpoint.jsonfile import read_json
from attar.errors import CheckpointError

FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of a folder with ``qweight``, and the method of folders that name none."""
MODELOPT = "hf_quant_config.json"


def with_quantization(config: dict[str, Any], names: Iterable[str], folder: Path) -> dict[str, Any]:
    """The config with its quantization, where one of the files or the older key has it.

    Args:
        names: of the tensors, which tell whether the files mean anything.

    Raises:
        CheckpointError: a file is no JSON object.
    """
    if config.get("quantization_config"):
        return config
    stated = _elsewhere(config, tuple(names), folder)
    return config if stated is None else {**config, "quantization_config": stated}


def _elsewhere(config: Mapping[str, Any], names: tuple[str, ...], folder: Path) -> dict[str, Any] | None:
    older = config.get("compression_config")
    if isinstance(older, Mapping):
        return {"quant_method": "compressed-tensors", **older}
    if any(name.endswith(".weight_scale") for name in names) and (folder / MODELOPT).is_file():
        return _modelopt(read_json(folder / MODELOPT))
    packed = any(name.endswith(".qweight") for name in names)
    for name, method in FILES.items() if packed else ():
        if (folder / name).is_file():
            return {"quant_method": method, **read_json(folder / name)}
    return None


def _modelopt(content: Mapping[str, Any]) -> dict[str, Any]:
    """ModelOpt's own file, which its older folders have alone, in the terms of config.json."""
    inner = content.get("quantization")
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{MODELOPT}: quantization is {inner!r}, not an object")
    cached = inner.get("kv_cache_quant_algo")
    return {
        "quant_method": "modelopt",
        "quant_algo": inner.get("quant_algo"),
        "ignore": inner.get("exclude_modules") or [],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False} if cached == "FP8" else None,
    }
