"""EXL3: the checkpoints that ExLlamaV3 loads (``quant_method: exl3``), weights on a trellis.

turboderp, ExLlamaV3: ``exl3_lib/quantize.py``, ``quant/codebook.cuh``, ``quant/pack.cu``, ``quant/frac.cu``;
the trellis is that of QTIP (Tseng et al. 2024, arXiv 2406.11235). For a weight W (N, K), N outputs and K
inputs filled up with zeros to multiples of 128, at b bits:

    trellis     int16 (K / 16, N / 16, 16 b): the states of each tile of 16 inputs and 16 outputs
    suh         float16 (K,), scales of the inputs, either sign; older: su, int16 (K / 16,), signs alone
    svh         float16 (N,), scales of the outputs; older: sv
    mcg, mul1   int32: the multiplier of the codebook; neither: the codebook 3inst

    W^T = diag(suh) P T P diag(svh) ,    P = blocks of the Hadamard matrix of 128, over sqrt(128)

T (K, N) has the values of the states in the codebook. A tile is a ring of 256 b bits, its highest bit first
in 16-bit words that are swapped in pairs. State i is the 16 bits that end where the b bits of weight i do:
two neighbours share 16 - b of them. 1.5, 2.5 and 3.5 bits (mul1 alone) take b - 1/2 and b + 1/2 bits in turn.
The weights of a tile are in the order in which a tensor core reads them.

T is float16, rounded as in ExLlamaV3's kernels; the rest is computed in float32 and rounded to float16 once.
The tensors do not state N and K where they were filled up: they are widths that the config names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.tensors import TORCH, tensor_bytes
from attar.errors import CheckpointError, NumericsError
from attar.formats.coded import WeightLayout
from attar.formats.packed_reader import SingleLayoutReader

METHOD = "exl3"
VERSION = "1.6.5"  # of ExLlamaV3, whose layout this is
TRELLIS, INPUTS, OUTPUTS = "trellis", "suh", "svh"
SIGNS = {INPUTS: "su", OUTPUTS: "sv"}
"""Names of signs in older files, by the scales that they stand for."""
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""Codebooks that a tensor names, with the number in it."""
CODEBOOKS = ("3inst", *MULTIPLIERS)
CODEBOOK = "mul1"  # that is written, as by ExLlamaV3
LEAVES = (TRELLIS, INPUTS, OUTPUTS, *SIGNS.values(), *MULTIPLIERS)
BITS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
BLOCK = 128  # inputs and outputs are multiples of it
TILE = 16  # inputs and outputs of a tile
STATE = 16  # bits
MLP = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
WIDTHS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "q_proj": (("heads",), ("hidden",)),
    **dict.fromkeys(("k_proj", "v_proj"), (("keys",), ("hidden",))),
    "o_proj": (("hidden",), ("heads",)),
    **dict.fromkeys(("gate_proj", "up_proj"), (("mlp",), ("hidden",))),
    "down_proj": (("hidden",), ("mlp",)),
    "lm_head": (("vocabulary",), ("hidden",)),
}
"""Outputs and inputs of Linears by their last name; others may be of any width that the config names."""
PIECE = 1 << 20  # weights that are decoded at a time


@functools.cache
def codebook(name: str) -> Tensor:
    """The values of the 2^16 states, float16; not to be modified."""
    x = torch.arange(1 << STATE, dtype=torch.int64)
    if name == "mul1":
        product = (x * MULTIPLIERS[name]) & 0xFFFFFFFF
        octets = sum((product >> shift) & 0xFF for shift in (0, 8, 16, 24))
        step, bias = torch.tensor([0x1EEE, 0xC931 - (1 << 16)], dtype=torch.int16).view(torch.float16)
        return ((octets + 1024).float() * step.float() + bias.float()).half()
    product = x * MULTIPLIERS[name] if name in MULTIPLIERS else x * 89226354 + 64248484
    words = (product & 0x8FFF8FFF) ^ 0x3B603B60
    halves = words.to(torch.int32).view(torch.float16).reshape(-1, 2)
    return (halves[:, 0].float() + halves[:, 1].float()).half()


@functools.cache
def tile_order() -> Tensor:
    """The place, input * 16 + output, of each of the 256 weights of a tile; int64, not to be modified."""
    i = torch.arange(256)
    lane, part = i // 8, i % 8
    inputs = lane % 4 * 2 + part % 2 + part // 2 % 2 * 8
    return inputs * TILE + lane // 4 + part // 4 * 8


@functools.cache
def hadamard() -> Tensor:
    """The symmetric orthogonal matrix of 128, float32; not to be modified."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat((matrix.repeat(1, 2), torch.cat((matrix, -matrix), 1)))
    return matrix * (1.0 / math.sqrt(BLOCK))


def over_inputs(weight: Tensor) -> Tensor:
    """P times a float32 matrix (K, N)."""
    return (hadamard() @ weight.view(-1, BLOCK, weight.shape[1])).view_as(weight)


def over_outputs(weight: Tensor) -> Tensor:
    """A float32 matrix (K, N) times P."""
    return (weight.view(len(weight), -1, BLOCK) @ hadamard()).view_as(weight)


def ends(bits: float) -> Tensor:
    """The bit after the last one of each weight of a tile, int64 (256,)."""
    return (torch.arange(1, 257) * bits).to(torch.int64)


def pack(states: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`states` for whole bits: the last ones of each state, int16 (..., 16 bits)."""
    ring = states[..., None] >> torch.arange(bits - 1, -1, -1) & 1
    words = (ring.flatten(-2).unflatten(-1, (-1, 16)) << torch.arange(15, -1, -1)).sum(-1)
    return words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).to(torch.int16)


def states(trellis: Tensor, bits: float) -> Tensor:
    """The states of tiles, int64 (..., 256), from int16 (..., 16 bits)."""
    words = trellis.to(torch.int64) & 0xFFFF
    words = words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    first = (ends(bits) - STATE) % (16 * words.shape[-1])
    word, skip = first // 16, first % 16
    both = words[..., word] << 16 | words[..., (word + 1) % words.shape[-1]]
    return both >> (16 - skip) & 0xFFFF


def values(trellis: Tensor, name: str, bits: float) -> Tensor:
    """T (K, N), float16."""
    rows, columns = trellis.shape[0], trellis.shape[1]
    result = torch.empty(rows * TILE, columns * TILE, dtype=torch.float16)
    at = torch.argsort(tile_order())
    height = max(PIECE // (columns * 256), 1)
    for start in range(0, rows, height):
        tiles = codebook(name)[states(trellis[start : start + height], bits)][..., at]
        part = tiles.view(-1, columns, TILE, TILE).transpose(1, 2).reshape(-1, columns * TILE)
        result[start * TILE : start * TILE + len(part)] = part
    return result


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int] | None = None) -> Tensor:
    """The weight (N, K) of a Linear, float16.

    Args:
        tensors: by the last part of their names.
        shape: N and K; None: with what fills them up.

    Raises:
        ValueError: the tensors do not fit together.
    """
    name, bits = stored_codebook(tensors), stored_bits(tensors[TRELLIS])
    if bits % 1 and name != "mul1":
        raise ValueError(f"{bits} bits are of codebook mul1, and this is {name}")
    sizes = [size * TILE for size in tensors[TRELLIS].shape[:2]]
    scales = [_scales(tensors, leaf) for leaf in (INPUTS, OUTPUTS)]
    if [scale.shape for scale in scales] != [(size,) for size in sizes]:
        raise ValueError("scales do not fit the trellis")
    weight = over_inputs(values(tensors[TRELLIS], name, bits).float()) * scales[0][:, None]
    rows, columns = shape or (sizes[1], sizes[0])
    return (over_outputs(weight) * scales[1]).T[:rows, :columns].half().contiguous()


def stored_bits(trellis: Any) -> float:
    """Bits of a weight, from a trellis or its header.

    Raises:
        ValueError: it is no trellis.
    """
    shape = tuple(trellis.shape)
    bits = shape[-1] / 16 if len(shape) == 3 else 0
    if bits not in BITS or any(size * TILE % BLOCK for size in shape[:2]):
        raise ValueError(f"{'x'.join(map(str, shape))} is no trellis")
    return int(bits) if bits == int(bits) else bits


def stored_codebook(tensors: Mapping[str, Tensor]) -> str:
    """The codebook of a weight.

    Raises:
        ValueError: it is unknown, or there are two.
    """
    names = [name for name in MULTIPLIERS if name in tensors]
    if len(names) == 2:
        raise ValueError("codebooks mcg and mul1 at once")
    for name in names:
        marker = tensors[name]
        number = int(marker) & 0xFFFFFFFF if marker.numel() == 1 and not marker.is_floating_point() else -1
        if number != MULTIPLIERS[name]:
            raise ValueError(f"{name} {number:#x} is no codebook of ExLlamaV3")
    return names[0] if names else CODEBOOKS[0]


def _scales(tensors: Mapping[str, Tensor], leaf: str) -> Tensor:
    """float32 scales; of signs 1 and -1."""
    if leaf in tensors:
        return tensors[leaf].float()
    signs = tensors[SIGNS[leaf]].to(torch.int32)[:, None] >> torch.arange(16) & 1
    return 1.0 - 2.0 * signs.flatten().float()


def layout(shape: tuple[int, int], bits: int) -> WeightLayout:
    """Type and shape of the tensors that attar writes for a weight (N, K)."""
    outputs, inputs = (size + -size % BLOCK for size in shape)
    return {
        TRELLIS: ("I16", (inputs // TILE, outputs // TILE, 16 * bits)),
        INPUTS: ("F16", (inputs,)),
        OUTPUTS: ("F16", (outputs,)),
        CODEBOOK: ("I32", ()),
    }


def quantization_config(bits: int, head_bits: int, calibration: Mapping[str, Any]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        bits: of the Linears without the head.
        head_bits: of the head; 16: it is dense.
        calibration: ``rows``, ``length`` and ``dataset`` of the text.
    """
    config = {"quant_method": METHOD, "version": VERSION, "bits": bits, "head_bits": head_bits}
    return {**config, "calibration": dict(calibration), "out_scales": "always", "codebook": CODEBOOK}


def storage(base: str, parts: WeightLayout) -> dict[str, Any]:
    """What ``tensor_storage`` says of a weight, in ExLlamaV3's quantization_config.json."""
    stored = {
        f"{base}.{leaf}": {
            "shape": list(shape),
            "n_bytes": tensor_bytes(kind, shape),
            "dtype": f"torch.{TORCH[kind]}",
            "torch_dtype": TORCH[kind],
        }
        for leaf, (kind, shape) in parts.items()
    }
    bits = parts[TRELLIS][1][-1] // 16
    multiplier = {f"{CODEBOOK}_multiplier": MULTIPLIERS[CODEBOOK]}
    return {"stored_tensors": stored, "quant_format": METHOD, "bits_per_weight": bits, **multiplier}


def true_width(stored: int, widths: Iterable[int]) -> int:
    """The number of inputs or outputs that were filled up to ``stored``, one of the model's widths.

    Raises:
        ValueError: there are two such widths.
    """
    fitting = sorted({width for width in widths if stored - BLOCK < width <= stored})
    if len(fitting) > 1:
        raise ValueError(f"{stored} may stand for {' or '.join(map(str, fitting))}")
    return fitting[0] if fitting else stored


def model_widths(config: Mapping[str, Any], leaf: str) -> tuple[list[int], list[int]]:
    """What the outputs and the inputs of a Linear may be, by its last name and the config."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head = config.get("head_dim") or (size // heads if size and heads else 0)
    key_heads = config.get("num_key_value_heads") or heads
    named = {
        "hidden": [size],
        "heads": [heads * head] if heads else [],
        "keys": [key_heads * head] if key_heads else [],
        "mlp": [config.get(name) for name in MLP],
        "vocabulary": [config.get("vocab_size")],
    }
    every = tuple(named)
    outputs, inputs = WIDTHS.get(leaf, (every, every))
    return tuple([w for n in names for w in named[n] if w] for names in (outputs, inputs))  # type: ignore[return-value]


class EXL3Reader(SingleLayoutReader):
    """Reads an EXL3 checkpoint tensor by tensor.

    Raises:
        CheckpointError: the config names an unknown codebook.
    """

    leaves = LEAVES

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        stated = (checkpoint.config.get("quantization_config") or {}).get("codebook", CODEBOOKS[0])
        if stated not in CODEBOOKS:
            raise CheckpointError(
                f"{checkpoint.path}: EXL3 with the codebook {stated!r}, which attar cannot read",
                hint=f"codebook in config.json: attar reads {', '.join(CODEBOOKS)}",
            )

    def weight_header(self, name: str) -> tuple[str, str, tuple[int, int]]:
        base = name.rpartition(".")[0]
        for leaf in (INPUTS, OUTPUTS):
            self.stored(f"{base}.{self._leaf(base, leaf)}")
        return f"{base}.weight", "F16", self._shape(base)

    def header(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """As of other layouts; a bias is as long as the weight's outputs."""
        rows = self._bias_rows(info.name)
        return super().header(info) if rows is None else (info.name, info.dtype, (rows,))

    def decode(self, name: str) -> Tensor | None:
        """As of other layouts; a bias without what fills it up."""
        tensor, rows = super().decode(name), self._bias_rows(name)
        return tensor if tensor is None or rows is None else tensor[:rows].contiguous()

    def decoded(self, base: str) -> Tensor:
        return decode(self.load_present(f"{base}.", LEAVES), self._shape(base))

    def scales(self, base: str) -> Tensor:
        tensors = self.load_present(f"{base}.", LEAVES)
        scales = [_scales(tensors, leaf) for leaf in (INPUTS, OUTPUTS)]
        if not all(torch.isfinite(scale).all() for scale in scales):
            raise NumericsError(f"{base} holds infinite scales", hint="quantize the model again")
        return scales[1]

    def _bias_rows(self, name: str) -> int | None:
        """N where a tensor is the bias of a coded weight."""
        base, _, leaf = name.rpartition(".")
        coded = leaf == "bias" and f"{base}.{TRELLIS}" in self.checkpoint.tensors
        return self._shape(base)[0] if coded else None

    def _leaf(self, base: str, leaf: str) -> str:
        """The name of a weight's scales, which older files have as signs."""
        return SIGNS[leaf] if f"{base}.{SIGNS[leaf]}" in self.checkpoint.tensors else leaf

    def _shape(self, base: str) -> tuple[int, int]:
        """(N, K) of a weight.

        Raises:
            CheckpointError: there is no such trellis.
        """
        trellis = self.stored(f"{base}.{TRELLIS}")
        try:
            stored_bits(trellis)
            outputs, inputs = model_widths(self.checkpoint.config, base.rpartition(".")[2])
            return true_width(trellis.shape[1] * TILE, outputs), true_width(trellis.shape[0] * TILE, inputs)
        except ValueError as error:
            raise self.unfit(base, error) from error
