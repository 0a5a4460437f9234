"""FP8 as models are published in it: ``quant_method: fp8`` of DeepSeek, Qwen and MiniMax in blocks, of
Mistral and AutoFP8 with one scale a weight; ``fbgemm_fp8`` of Llama, with one scale an output.

For a weight (N, K):

    weight             float8_e4m3fn (N, K)
    weight_scale_inv   *multiplies* the codes, despite its name (AutoFP8: weight_scale): (ceil(N / h), K / w)
                       for ``weight_block_size: [h, w]``, (N,) or (N, 1) for outputs, () or (1,) for the
                       weight; a float type, or exponents of two: float8_e8m0fnu, and uint8 (2^(byte - 127));
                       blocks of 1 x 32 with them are MXFP8
                       DeepSeek V4: scale, and experts in MXFP4 among weights in blocks: int8 (N, K / 2), two
                       codes of FP4 in a byte, the even input in the low bits, exponents of two (N, K / 32)
    activation_scale   () or (1,): static scale of the inputs (AutoFP8: input_scale)

fbgemm_fp8 stacks Llama 4's experts: X (E, K, N) with X_scale (E, 1, N). Its ``activation_scale_ub``, above
which inputs are cut off, is not imitated. Inputs with ``activation_scheme: dynamic`` get scales by runs of
w inputs, or by token. A decoded weight is code times scale in float32, rounded once to the model's type.
Source: transformers, ``integrations/finegrained_fp8.py`` and ``fbgemm_fp8.py``; vLLM,
``quantization/fp8.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.tensors import stored_dtype
from attar.errors import CheckpointError
from attar.formats import compressed_tensors, layouts
from attar.formats.coded import MX_BIAS, Coded, fp4_levels, unpack_nibbles
from attar.formats.compressed_tensors import ConfigGroup
from attar.formats.packed_reader import FLOATS, PackedReader, check_codes, check_scales, weight_dtype
from attar.formats.rules import FLOAT, MX_GROUP, ActivationRule, WeightRule, one_of

METHOD = "fp8"
FBGEMM = "fbgemm_fp8"
WEIGHT = "weight"
SCALES = ("weight_scale_inv", "weight_scale", "scale")
INPUT_SCALES = ("activation_scale", "input_scale")
AUXILIARY = (*SCALES[:2], *INPUT_SCALES, "input_scale_ub", "k_scale", "v_scale", "kv_scale", "output_scale")
"""Last parts of the names of tensors that belong to a weight or an activation."""
EXPONENTS = ("F8_E8M0", "U8")
STACK_SCALE = "_scale"
MXFP4 = WeightRule("float", 4, "group", MX_GROUP)


class FP8Reader(PackedReader):
    """Reads such a checkpoint tensor by tensor.

    Attributes:
        dtype: of decoded weights.
        block: h and w; None: no blocks.
        activations: how inputs are rounded.
    """

    hint = "weights and config.json's weight_block_size are of different versions, or the file is damaged"

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        config = checkpoint.config["quantization_config"]
        self.dtype = weight_dtype(checkpoint)
        one_of(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        self.block = _block(config.get("weight_block_size"))
        dynamic = one_of(config, "activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
        if self.block:
            mx = self.block == (1, MX_GROUP) and config.get("scale_fmt") == "ue8m0"
            self.activations = ActivationRule("float", 8, "group", group_size=self.block[1], mx=mx)
        else:
            self.activations = ActivationRule("float", 8, "token" if dynamic else "tensor", dynamic)

    def is_coded(self, name: str) -> bool:
        info = self.checkpoint.tensors.get(name)
        if info is None or not name.endswith(f".{WEIGHT}"):
            return False
        return info.dtype == "F8_E4M3" or self._is_fp4(name)

    def is_auxiliary(self, name: str) -> bool:
        base, _, leaf = name.rpartition(".")
        return leaf in AUXILIARY or (leaf == SCALES[2] and self.is_coded(f"{base}.{WEIGHT}"))

    def weight_header(self, name: str) -> tuple[str, str, tuple[int, int]]:
        self.rule(name)
        rows, columns = self.checkpoint.tensors[name].shape
        return name, stored_dtype(self.dtype), (rows, columns * 2 if self._is_fp4(name) else columns)

    def weight(self, name: str) -> Tensor:
        if self._is_fp4(name):
            codes, scale = self._fp4_codes(name), self._scale(name)
            tiles = fp4_levels()[codes.int()].unflatten(1, (-1, MX_GROUP)) * scale[..., None]
            return tiles.flatten(1).to(self.dtype)
        tensors = {layouts.WEIGHT: self.checkpoint.load(name), layouts.SCALE: self._scale(name)}
        return layouts.decode(tensors, self.rule(name), FLOAT).to(self.dtype)

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        if not self.is_coded(name):
            return None
        codes = self._fp4_codes(name) if self._is_fp4(name) else self.checkpoint.load(name)
        return Coded(codes, self._scale(name)), self.rule(name)

    def grid(self, name: str) -> tuple[WeightRule, torch.dtype] | None:
        if not self.is_coded(name):
            return None
        rule = self.rule(name)
        powers = self.stored(self._scale_name(name)).dtype in EXPONENTS
        return None if rule.strategy == "group" and not powers else (rule, torch.float32)

    def rule(self, name: str) -> WeightRule:
        """The rule of a coded weight, by the shapes of its tensors.

        Raises:
            CheckpointError: its scales are missing, or do not fit the weight.
        """
        info, scale = self.checkpoint.tensors[name], self.stored(self._scale_name(name))
        if self._is_fp4(name):
            if scale.shape == (info.shape[0], info.shape[1] * 2 / MX_GROUP):
                return MXFP4
            raise self.unfit(name, f"{list(info.shape)} bytes of FP4, scales {list(scale.shape)}")
        if len(info.shape) == 2 and scale.dtype in (*FLOATS, *EXPONENTS):
            rows, columns = info.shape
            if scale.shape in ((), (1,)):
                return WeightRule("float", 8, "tensor")
            if scale.shape in ((rows,), (rows, 1)) and not self.block:
                return WeightRule("float", 8, "channel")
            rule = WeightRule("float", 8, "block", block=self.block)
            if self.block and self.block[0] == 1:
                rule = WeightRule("float", 8, "group", self.block[1])
            if self.block and columns % self.block[1] == 0 and scale.shape == rule.tiles((rows, columns)):
                return rule
        blocks = f"blocks of {self.block[0]} x {self.block[1]}" if self.block else "no blocks"
        raise self.unfit(name, f"{list(info.shape)} in {blocks}, {scale.dtype} scales {list(scale.shape)}")

    def check(self, name: str) -> None:
        if not self.is_coded(name):
            return
        base = name.removesuffix(f".{WEIGHT}")
        scale = self._scale(name)
        inputs = self.load_present(f"{base}.", INPUT_SCALES).values()
        check_scales(self._scale_name(name), [scale, *(tensor.float() for tensor in inputs)])
        check_codes(base, self._fp4_codes(name) if self._is_fp4(name) else self.checkpoint.load(name), scale)

    def _is_fp4(self, name: str) -> bool:
        """Whether a weight is an expert in MXFP4 among weights in blocks."""
        tensors, scale = self.checkpoint.tensors, self._scale_name(name)
        packed = (
            self.block is not None and tensors[name].dtype in ("I8", "U8") and len(tensors[name].shape) == 2
        )
        return packed and scale in tensors and tensors[scale].dtype in EXPONENTS

    def _fp4_codes(self, name: str) -> Tensor:
        """Codes 0 to 15 (N, K)."""
        return unpack_nibbles(self.checkpoint.load(name).view(torch.uint8))

    def _scale_name(self, name: str) -> str:
        base = name.removesuffix(WEIGHT)
        return next(
            (base + leaf for leaf in SCALES if base + leaf in self.checkpoint.tensors), base + SCALES[0]
        )

    def _scale(self, name: str) -> Tensor:
        """The scales of a weight, float32 (P, G)."""
        rule, stored = self.rule(name), self.checkpoint.load(self._scale_name(name))
        _, _, (rows, columns) = self.weight_header(name)
        scale = torch.exp2(stored.float() - MX_BIAS) if stored.dtype == torch.uint8 else stored.float()
        return scale.reshape(rule.tiles((rows, columns)))


class FBGEMMReader(FP8Reader):
    """Reads ``fbgemm_fp8``: as :class:`FP8Reader` without blocks, and stacks of experts."""

    hint = "the file is damaged; get it again"

    def is_auxiliary(self, name: str) -> bool:
        stack = name.removesuffix(STACK_SCALE)
        return super().is_auxiliary(name) or (stack != name and self._is_stack(stack))

    def header(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        if not self._is_stack(info.name):
            return super().header(info)
        scale = self.stored(info.name + STACK_SCALE)
        if scale.shape != (info.shape[0], 1, info.shape[2]) or scale.dtype not in FLOATS:
            raise self.unfit(info.name, f"{list(info.shape)}, {scale.dtype} scales {list(scale.shape)}")
        return info.name, stored_dtype(self.dtype), info.shape

    def decode(self, name: str) -> Tensor | None:
        if not self._is_stack(name):
            return super().decode(name)
        scale = self.checkpoint.load(name + STACK_SCALE).float()
        return (self.checkpoint.load(name).float() * scale).to(self.dtype)

    def check(self, name: str) -> None:
        if self._is_stack(name):
            check_scales(name + STACK_SCALE, [self.checkpoint.load(name + STACK_SCALE)])
        else:
            super().check(name)

    def _is_stack(self, name: str) -> bool:
        info = self.checkpoint.tensors.get(name)
        return info is not None and info.dtype == "F8_E4M3" and len(info.shape) == 3


def compressed_scheme(checkpoint: Any) -> dict[str, Any]:
    """The ``quantization_config`` in compressed-tensors' terms, for what rounds the inputs of its Linears."""
    read = FP8Reader(checkpoint)
    matrices = [name for name, info in checkpoint.tensors.items() if len(info.shape) == 2]
    dense = [name.removesuffix(f".{WEIGHT}") for name in matrices if not read.is_coded(name)]
    group = ConfigGroup(("Linear",), WeightRule("float", 8, "tensor"), read.activations, FLOAT)
    return compressed_tensors.quantization_config([group], ignore=dense)


def _block(stated: Any) -> tuple[int, int] | None:
    """``weight_block_size``: two whole numbers, or nothing.

    Raises:
        CheckpointError: it is something else.
    """
    if stated is None:
        return None
    if (
        isinstance(stated, list)
        and len(stated) == 2
        and all(type(size) is int and size > 0 for size in stated)
    ):
        return stated[0], stated[1]
    raise CheckpointError(
        f"config.json: quantization_config: weight_block_size is {stated!r}, but must be two whole numbers",
        hint="[128, 128] in most models; null where a weight has one scale",
    )
