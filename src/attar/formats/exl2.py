"""EXL2: the checkpoints that ExLlamaV2 loads (``quant_method: exl2``).

exl2_tensors.py has the tensors of a Linear; here are config and reader. The tensors do not say how many
outputs N a weight has where N is no multiple of 32: ``rows`` in ``quantization_config`` does, a key that
ExLlamaV2 does not look at; without it a bias or, of the head, the vocabulary tells. Embeddings and norms are
float16. A model with tied embeddings has a head of its own beside the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attar.errors import CheckpointError
from attar.formats.compressed_tensors import check_codes, check_scales
from attar.formats.exl2_tensors import LARGEST, LEAVES, ORDER, TILE, WEIGHT, decode, encode, layout, refuse

__all__ = [
    "METHOD",
    "EXL2Reader",
    "decode",
    "dequantize_state",
    "encode",
    "is_packed",
    "layout",
    "quantization_config",
    "refuse",
]

METHOD = "exl2"
VERSION = "0.3.2"  # of ExLlamaV2, whose layout this is


def quantization_config(
    bits: float,
    head_bits: int,
    *,
    rows: Mapping[str, int] | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        bits: average of the Linears, the head left out.
        head_bits: of the head; 16: it is dense.
        rows: N of each Linear where it is no multiple of 32.
        calibration: ``rows``, ``length`` and ``dataset`` of the text.
    """
    made = {"quant_method": METHOD, "version": VERSION, "bits": bits, "head_bits": head_bits}
    made |= {"calibration": dict(calibration)} if calibration else {}
    return {**made, "rows": dict(rows)} if rows else made


class EXL2Reader:
    """Reads an EXL2 checkpoint tensor by tensor.

    Attributes:
        checkpoint: what is read.
        rows: N of Linears where the config says it.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        said = checkpoint.config.get("quantization_config") or {}
        self.rows: Mapping[str, int] = said.get("rows") or {}

    def coded(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of a weight."""
        return name.endswith(f".{WEIGHT}")

    def codes(self, name: str) -> None:
        """None: no other layout has groups of several bits."""

    def slot(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor stands for; None for scales and the like."""
        base, _, leaf = info.name.rpartition(".")
        if leaf in LEAVES and leaf != WEIGHT:
            return None
        if not self.coded(info.name):
            return info.name, info.dtype, info.shape
        return f"{base}.weight", "F16", (self._outputs(base), self._info(base, ORDER).shape[0])

    def dense(self, name: str) -> Tensor | None:
        """What a stored tensor stands for: a decoded weight for codes, None for scales and the like, itself
        otherwise.

        Raises:
            CheckpointError: a tensor of a coded weight is missing or does not fit.
        """
        base, _, leaf = name.rpartition(".")
        if leaf in LEAVES and leaf != WEIGHT:
            return None
        if not self.coded(name):
            tensor: Tensor = self.checkpoint.load(name)
            return tensor
        try:
            return decode(self._tensors(base), self._outputs(base))
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.checkpoint.path}: the tensors of {base} do not fit together ({error})",
                hint="the packed checkpoint is incomplete",
            ) from error

    def check(self, name: str) -> None:
        """Raise where scales cannot be right or all codes are the same.

        Raises:
            NumericsError: names the layer.
        """
        if self.coded(name):
            base = name.rpartition(".")[0]
            check_scales(f"{base}.{LARGEST}", [self.checkpoint.load(f"{base}.{LARGEST}").float()])
            check_codes(base, self.checkpoint.load(name))

    def _tensors(self, base: str) -> dict[str, Tensor]:
        return {leaf: self.checkpoint.load(self._info(base, leaf).name) for leaf in LEAVES}

    def _info(self, base: str, leaf: str) -> Any:
        info = self.checkpoint.tensors.get(f"{base}.{leaf}")
        if info is None:
            raise CheckpointError(
                f"{self.checkpoint.path}: {base}.{leaf} is missing",
                hint="the packed checkpoint is incomplete",
            )
        return info

    def _outputs(self, base: str) -> int:
        """N of a weight: what is said, or a bias or the vocabulary tells, or everything stored."""
        stored: int = self._info(base, WEIGHT).shape[1]
        bias = self.checkpoint.tensors.get(f"{base}.bias")
        found = self.rows.get(base) or (bias.shape[0] if bias else None)
        if found is None and base.rpartition(".")[2] == "lm_head":
            found = self.checkpoint.config.get("vocab_size")
        return found if found and stored - TILE < found <= stored else stored


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that its weights are in this layout."""
    return (config.get("quantization_config") or {}).get("quant_method") == METHOD


def dequantize_state(checkpoint: Any) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, decoded, under the names of the unquantized model.

    Raises:
        CheckpointError: a tensor is missing or does not fit.
    """
    reader = EXL2Reader(checkpoint)
    state = {}
    for info in checkpoint.tensors.values():
        slot, tensor = reader.slot(info), reader.dense(info.name)
        if slot is not None and tensor is not None:
            state[slot[0]] = tensor
    return state
