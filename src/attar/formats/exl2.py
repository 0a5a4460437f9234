"""EXL2: the checkpoints that ExLlamaV2 loads (``quant_method: exl2``).

turboderp, ExLlamaV2: ``conversion/adaptivegptq.py`` (pack), ``exllamav2_ext/cuda/pack_tensor.cu``,
``ext.py`` (make_q_matrix), ``cuda/q_matrix.cu`` and ``quant/qdq_util.cuh`` (decoding). There is no paper.

For a weight (N, K), its inputs reordered and cut into G groups of a multiple of 32 inputs, each of 2, 3, 4,
5, 6 or 8 bits, groups of more bits first; M is N rounded up to a multiple of 32:

    q_weight      int32 (sum of inputs * bits / 32, M): codes of the reordered, transposed weight, group after
                  group, dense_pack along K
    q_invperm     int32 (K,): position of each input in the new order
    q_scale       int32 (G, M / 8): codes of the scales less 1, 4 bits each, dense_pack along M
    q_scale_max   float16 (G,)
    q_groups      int16 (2 G,): bits and first row in q_weight of each group

A code is stored as signed code + 2^(b-1). ExLlamaV2 computes in float16, and so does the decoder here:

    h = q_scale_max / 256 ,   s = (q_scale + 1)^2 * h ,   w = code * s            each rounded to float16

Outputs that pad M have scale code 15 and code 0. The tensors do not state N where it is no multiple of 32: it
is read from ``rows`` in ``quantization_config``, a key that ExLlamaV2 ignores, else from a bias or, for the
head, the vocabulary. Embeddings and norms are float16. A model with tied embeddings stores a separate head.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.formats.coded import WeightLayout
from attar.formats.dense_pack import dense_pack, dense_unpack
from attar.formats.packed_reader import SingleLayoutReader, check_scales

METHOD = "exl2"
VERSION = "0.3.2"  # of ExLlamaV2, whose layout this is
BITS = (8, 6, 5, 4, 3, 2)
TILE = 32  # inputs of a group and stored outputs are multiples of it
WEIGHT, ORDER, SCALE, LARGEST, GROUPS = "q_weight", "q_invperm", "q_scale", "q_scale_max", "q_groups"
LEAVES = (WEIGHT, ORDER, SCALE, LARGEST, GROUPS)
LONGEST = 1 << 16  # inputs that q_perm, 16 bits in the engine, can index

Sections = Sequence[tuple[int, int]]
"""(bits, inputs) of each group, in the order of the file."""


def refuse(shape: tuple[int, int]) -> None:
    """Raise where the layout cannot hold a weight.

    Raises:
        ModelError: its inputs are no multiple of 32, or too many.
    """
    if shape[1] % TILE or shape[1] > LONGEST:
        raise ModelError(
            f"EXL2 needs a multiple of {TILE} inputs, at most {LONGEST}; a weight is {shape[0]} x {shape[1]}",
            hint="export another format",
        )


def encode(
    codes: Tensor, scale_codes: Tensor, largest: Tensor, sections: Sections, order: Tensor
) -> dict[str, Tensor]:
    """The tensors of a Linear, by the last part of their names. Does not modify its inputs.

    Args:
        codes: (N, K) signed, reordered.
        scale_codes: (N, G), 1 to 16.
        largest: float16 (G,), the scale of code 16.
        sections: of each group.
        order: int (K,), the input at each position of the new order.
    """
    rows = codes.shape[0]
    fill = -rows % TILE
    packed, start = [], 0
    for bits, width in runs(sections):
        part = codes[:, start : start + width].to(torch.int16) + (1 << (bits - 1))
        part = torch.nn.functional.pad(part, (0, 0, 0, fill), value=1 << (bits - 1))
        packed.append(dense_pack(part, bits).T)
        start += width
    scales = torch.nn.functional.pad(scale_codes.to(torch.int16) - 1, (0, 0, 0, fill), value=15)
    return {
        WEIGHT: torch.cat(packed).contiguous(),
        ORDER: torch.argsort(order).to(torch.int32),
        SCALE: dense_pack(scales.T.contiguous(), 4),
        LARGEST: largest.to(torch.float16),
        GROUPS: _groups(sections),
    }


def layout(shape: tuple[int, int], sections: Sections) -> WeightLayout:
    """Type and shape of the tensors that :func:`encode` returns for a weight of ``shape`` (N, K).

    Raises:
        ModelError: see :func:`refuse`.
    """
    refuse(shape)
    check_sections(sections, shape[1])
    outputs, count = shape[0] + -shape[0] % TILE, len(sections)
    return {
        WEIGHT: ("I32", (sum(bits * width for bits, width in sections) // 32, outputs)),
        ORDER: ("I32", (shape[1],)),
        SCALE: ("I32", (count, outputs // 8)),
        LARGEST: ("F16", (count,)),
        GROUPS: ("I16", (2 * count,)),
    }


def check_sections(sections: Sections, columns: int) -> None:
    """Raise where groups are not the groups of the format.

    Raises:
        ValueError: unknown or rising bits; inputs that do not add up or are no multiple of 32 (16 with
            2 bits, which older files have).
    """
    bits = [bits for bits, _ in sections]
    wrong = not set(bits) <= set(BITS) or bits != sorted(bits, reverse=True)
    if wrong or any(width < 1 or width % (TILE if bits > 2 else TILE // 2) for bits, width in sections):
        raise ValueError(f"no groups of EXL2: {list(sections)}")
    if sum(width for _, width in sections) != columns:
        raise ValueError(f"groups of {sum(width for _, width in sections)} inputs for {columns}")


def runs(sections: Sections) -> list[tuple[int, int]]:
    """(bits, inputs) of runs of groups with the same bits."""
    return [
        (bits, sum(width for _, width in same))
        for bits, same in itertools.groupby(sections, key=lambda section: section[0])
    ]


def _groups(sections: Sections) -> Tensor:
    """q_groups."""
    stored, row = [], 0
    for bits, width in sections:
        stored += [bits, row]
        row += width * bits // 32
    return torch.tensor(stored, dtype=torch.int32).to(torch.int16)


def sections_of(tensors: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """(bits, inputs) of each stored group.

    Raises:
        ValueError: the groups are not the groups of the format, or do not fit the inputs.
    """
    stored = (tensors[GROUPS].to(torch.int32) & 0xFFFF).tolist()
    ends = [*stored[3::2], tensors[WEIGHT].shape[0]]
    sections = [
        (bits, (end - start) * 32 // max(bits, 1))
        for bits, start, end in zip(stored[0::2], stored[1::2], ends, strict=True)
    ]
    check_sections(sections, tensors[ORDER].shape[0])
    if _groups(sections).tolist() != tensors[GROUPS].tolist():
        raise ValueError("rows of q_groups do not follow each other")
    return sections


def scales(scale_codes: Tensor, largest: Tensor) -> Tensor:
    """Scales as ExLlamaV2 computes them, float16.

    Args:
        scale_codes: (N, G), 1 to 16.
        largest: float16 (G,).
    """
    step = (largest.float() / 256.0).half()
    return (scale_codes.float().square() * step.float()).half()


def decode(tensors: Mapping[str, Tensor], rows: int | None = None) -> Tensor:
    """The weight (N, K) of a Linear, float16, its inputs in the original order.

    Args:
        rows: N; None: all stored outputs.

    Raises:
        ValueError: the tensors do not fit together.
    """
    sections = sections_of(tensors)
    outputs, columns = tensors[WEIGHT].shape[1], tensors[ORDER].shape[0]
    order = tensors[ORDER].long()
    if tensors[SCALE].shape != (len(sections), outputs // 8) or tensors[LARGEST].shape != (len(sections),):
        raise ValueError("scales do not fit the groups")
    if not torch.equal(order.sort().values, torch.arange(columns)):
        raise ValueError("q_invperm is no order of the inputs")
    rows = outputs if rows is None else rows
    codes = dense_unpack(tensors[SCALE], 4, outputs).T[:rows].int() + 1
    scale = scales(codes, tensors[LARGEST]).float()
    weight, start, row = torch.empty(rows, columns, dtype=torch.float16), 0, 0
    for (bits, width), group in zip(sections, scale.T, strict=True):
        words = tensors[WEIGHT][row : row + width * bits // 32, :rows].T.contiguous()
        signed = dense_unpack(words, bits, width).float() - (1 << (bits - 1))
        weight[:, start : start + width] = (signed * group[:, None]).half()
        start, row = start + width, row + width * bits // 32
    return weight[:, order]


def quantization_config(
    bits: float,
    head_bits: int,
    *,
    rows: Mapping[str, int] | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        bits: average of the Linears without the head.
        head_bits: of the head; 16: it is dense.
        rows: N of each Linear where it is no multiple of 32.
        calibration: ``rows``, ``length`` and ``dataset`` of the text.
    """
    config = {"quant_method": METHOD, "version": VERSION, "bits": bits, "head_bits": head_bits}
    config |= {"calibration": dict(calibration)} if calibration else {}
    return {**config, "rows": dict(rows)} if rows else config


class EXL2Reader(SingleLayoutReader):
    """Reads an EXL2 checkpoint tensor by tensor.

    Attributes:
        rows: N of Linears where the config states it.
    """

    leaves = LEAVES

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        config = checkpoint.config.get("quantization_config") or {}
        self.rows: Mapping[str, int] = config.get("rows") or {}

    def weight_header(self, name: str) -> tuple[str, str, tuple[int, int]]:
        base = name.rpartition(".")[0]
        return f"{base}.weight", "F16", (self._outputs(base), self.stored(f"{base}.{ORDER}").shape[0])

    def decoded(self, base: str) -> Tensor:
        tensors = {leaf: self.checkpoint.load(self.stored(f"{base}.{leaf}").name) for leaf in LEAVES}
        return decode(tensors, self._outputs(base))

    def scales(self, base: str) -> Tensor:
        largest: Tensor = self.checkpoint.load(f"{base}.{LARGEST}").float()
        check_scales(f"{base}.{LARGEST}", [largest])
        return largest

    def _outputs(self, base: str) -> int:
        """N of a weight: from the config, a bias or the vocabulary, else all stored outputs."""
        stored: int = self.stored(f"{base}.{WEIGHT}").shape[1]
        bias = self.checkpoint.tensors.get(f"{base}.bias")
        rows = self.rows.get(base) or (bias.shape[0] if bias else None)
        if rows is None and base.rpartition(".")[2] == "lm_head":
            rows = self.checkpoint.config.get("vocab_size")
        return rows if rows and stored - TILE < rows <= stored else stored
