"""What a checkpoint says of its quantization: in config.json, or in the file that older writers put beside
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attar.checkpoint.jsonfile import read_json
from attar.errors import ModelError

BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that stand alone for ``quantization_config``, and the method of those that name none."""


def read_quantization_config(checkpoint: Any) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a checkpoint with its ``quant_method``; None where it is dense.

    Raises:
        CheckpointError: the file beside config.json is no JSON object.
    """
    said = checkpoint.config.get("quantization_config")
    if said:
        return said  # type: ignore[no-any-return]
    if not any(name.endswith(".qweight") for name in checkpoint.tensors):
        return None
    for name, method in BESIDE.items():
        if (checkpoint.path / name).is_file():
            return {"quant_method": method, **read_json(checkpoint.path / name)}
    return None


def refuse_packed(checkpoint: Any) -> None:
    """Raise where a checkpoint is quantized: rounding a second time would add one error to another.

    Raises:
        ModelError: names the file or folder, and how to go on.
    """
    said = read_quantization_config(checkpoint)
    if said:
        name = checkpoint.spelling
        raise ModelError(
            f"{name} is quantized already ({said.get('quant_method', 'unknown method')})",
            hint="start from the dense model it was made from; or decode it first: "
            f"attar export {name} -o DENSE --format dense",
        )
