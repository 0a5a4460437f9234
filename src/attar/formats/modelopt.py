"""NVIDIA ModelOpt's "unified Hugging Face" checkpoints (``quant_method: modelopt``): FP8 and NVFP4 for vLLM,
TensorRT-LLM and SGLang.

modelopt_tensors.py has the tensors of a Linear, modelopt_config.py what config.json and hf_quant_config.json
say, modelopt_conversion.py the way from compressed-tensors and back; here is the reader. Beside a Linear's
weight, for an FP8 KV cache:

    k_proj.k_scale, v_proj.v_scale   float32 () of an attention module
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError, ModelError
from attar.formats.coded import Coded
from attar.formats.compressed_tensors import check_codes, check_scales
from attar.formats.modelopt_config import FILE, hf_quant_config, quantization_config
from attar.formats.modelopt_tensors import (
    ALGORITHMS,
    INPUT_SCALE,
    SCALE,
    SCALE_2,
    WEIGHT,
    algorithm,
    coded,
    decode,
    encode,
    layout,
)
from attar.formats.number_type import number_type
from attar.formats.rules import WeightRule

__all__ = [
    "ALGORITHMS",
    "FILE",
    "METHOD",
    "ModelOptReader",
    "algorithm",
    "decode",
    "dequantize_state",
    "encode",
    "hf_quant_config",
    "is_packed",
    "layout",
    "quantization_config",
]

METHOD = "modelopt"
ASIDE = (SCALE, SCALE_2, INPUT_SCALE, "k_scale", "v_scale")
"""Last parts of names of tensors that belong to a weight or an activation and are none themselves."""
CODES = ("U8", "I8", "F8_E4M3")


class ModelOptReader:
    """Reads an FP8 or NVFP4 checkpoint of ModelOpt's tensor by tensor.

    Attributes:
        checkpoint: what is read.
        dtype: of decoded weights.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        self.dtype = number_type(checkpoint)

    def coded(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of a weight."""
        info = self.checkpoint.tensors.get(name)
        return name.endswith(".weight") and info is not None and info.dtype in CODES

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """The codes of a stored weight as they are, and what they are; None for any other tensor.

        Raises:
            CheckpointError: its tensors do not fit together.
        """
        return (coded(self.tensors(name)), self.rule(name)) if self.coded(name) else None

    def rule(self, name: str) -> WeightRule:
        """What the codes of a stored weight are, by the types and shapes of its tensors.

        Raises:
            CheckpointError: they are of no layout that attar reads.
        """
        info, scale = self.checkpoint.tensors[name], self._info(name, SCALE)
        if info.dtype == "U8":
            self._info(name, SCALE_2)
            found = "NVFP4"
        elif len(scale.shape) == 4:
            found = "fp8_pb_wo"
        else:
            found = "FP8" if scale.shape in ((), (1,)) else "FP8_PER_CHANNEL_PER_TOKEN"
        rule = ALGORITHMS[found][0]
        try:
            wanted = layout(self._shape(name), rule)
        except ModelError as error:
            raise self._unfit(name) from error
        kind, shape = wanted[SCALE]
        fits = scale.dtype == kind and scale.shape in (shape, (1,) if shape == () else shape)
        if not fits or wanted[WEIGHT] != (info.dtype, info.shape):
            raise self._unfit(name)
        return rule

    def slot(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor stands for; None for scales and the like."""
        if info.name.rpartition(".")[2] in ASIDE:
            return None
        if not self.coded(info.name):
            return info.name, info.dtype, info.shape
        return info.name, stored_dtype(self.dtype), self._shape(info.name)

    def dense(self, name: str) -> Tensor | None:
        """What a stored tensor stands for: a decoded weight for codes, None for scales and the like, itself
        otherwise.

        Raises:
            CheckpointError: a tensor of a coded weight is missing or does not fit.
        """
        if name.rpartition(".")[2] in ASIDE:
            return None
        if not self.coded(name):
            tensor: Tensor = self.checkpoint.load(name)
            return tensor
        self.rule(name)
        try:
            return decode(self.tensors(name), self.dtype)
        except RuntimeError as error:
            raise self._unfit(name) from error

    def check(self, name: str) -> None:
        """Raise where scales cannot be right or all codes are the same.

        Raises:
            NumericsError: names the layer.
        """
        if not self.coded(name):
            return
        base, tensors = name.removesuffix(".weight"), self.tensors(name)
        scales = [tensors[leaf].float() for leaf in (SCALE, SCALE_2, INPUT_SCALE) if leaf in tensors]
        check_scales(f"{base}.{SCALE}", scales)
        check_codes(base, tensors[WEIGHT])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Everything that belongs to a weight, by the last part of its name."""
        base = name.removesuffix(WEIGHT)
        leaves = [leaf for leaf in (SCALE, SCALE_2, INPUT_SCALE) if base + leaf in self.checkpoint.tensors]
        return {leaf: self.checkpoint.load(base + leaf) for leaf in (WEIGHT, *leaves)}

    def _shape(self, name: str) -> tuple[int, int]:
        """(N, K) of a coded weight."""
        info = self.checkpoint.tensors[name]
        rows, columns = info.shape
        return rows, columns * 2 if info.dtype == "U8" else columns

    def _info(self, name: str, leaf: str) -> Any:
        stored = f"{name.removesuffix(WEIGHT)}{leaf}"
        if stored not in self.checkpoint.tensors:
            raise CheckpointError(
                f"{self.checkpoint.path}: {stored} is missing",
                hint="of ModelOpt's layouts attar reads FP8 and NVFP4",
            )
        return self.checkpoint.tensors[stored]

    def _unfit(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.checkpoint.path}: the tensors of {name} do not fit together",
            hint="of ModelOpt's layouts attar reads FP8 and NVFP4",
        )


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a model's config says that its weights are in this layout."""
    return (config.get("quantization_config") or {}).get("quant_method") == METHOD


def dequantize_state(checkpoint: Any) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, decoded, under the names of the unquantized model.

    Raises:
        CheckpointError: a tensor is missing, or the layout is another one.
    """
    reader = ModelOptReader(checkpoint)
    decoded = {name: reader.dense(name) for name in checkpoint.tensors}
    return {name: tensor for name, tensor in decoded.items() if tensor is not None}
