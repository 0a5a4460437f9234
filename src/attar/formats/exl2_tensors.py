"""The tensors of one Linear in EXL2, ExLlamaV2's format: codes in, bytes out, and back.

turboderp, ExLlamaV2: ``conversion/adaptivegptq.py`` (pack), ``exllamav2_ext/cuda/pack_tensor.cu``,
``ext.py`` (make_q_matrix), ``cuda/q_matrix.cu`` and ``quant/qdq_util.cuh`` (decoding). There is no paper.

For a weight (N, K), its inputs put into a new order and cut into G groups of a multiple of 32 inputs, each of
2, 3, 4, 5, 6 or 8 bits, groups of more bits first; M is N rounded up to a multiple of 32:

    q_weight      int32 (sum of inputs * bits / 32, M): codes of the reordered, transposed weight, group after
                  group, dense_pack along K
    q_invperm     int32 (K,): place of each input in the new order
    q_scale       int32 (G, M / 8): codes of the scales less 1, 4 bits each, dense_pack along M
    q_scale_max   float16 (G,)
    q_groups      int16 (2 G,): bits and first row in q_weight of each group

A code is stored as signed code + 2^(b-1). ExLlamaV2 computes in float16, and so does the decoder here:

    h = q_scale_max / 256 ,   s = (q_scale + 1)^2 * h ,   w = code * s            each rounded to float16

Outputs that fill up M have scale code 15 and code 0; the file does not say N.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.formats.dense_pack import dense_pack, dense_unpack

BITS = (8, 6, 5, 4, 3, 2)
TILE = 32  # what inputs of a group and outputs of a weight are multiples of
WEIGHT, ORDER, SCALE, LARGEST, GROUPS = "q_weight", "q_invperm", "q_scale", "q_scale_max", "q_groups"
LEAVES = (WEIGHT, ORDER, SCALE, LARGEST, GROUPS)
LONGEST = 1 << 16  # inputs that q_perm, 16 bits in the engine, can name

Sections = Sequence[tuple[int, int]]
"""(bits, inputs) of each group, in the order of the file."""


def refuse(shape: tuple[int, int]) -> None:
    """Raise where a weight cannot stand in this layout.

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
        codes: (N, K) signed, in the new order.
        scale_codes: (N, G), 1 to 16.
        largest: float16 (G,), the scale that code 16 stands for.
        sections: of each group.
        order: int (K,), the input that stands at each place of the new order.
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


def layout(shape: tuple[int, int], sections: Sections) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of the tensors that :func:`encode` makes, known before any weight is.

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
    """Raise where groups are not those of the format.

    Raises:
        ValueError: bits that there are not, or that rise; inputs that do not add up or are no multiple of 32
            (16 with 2 bits, which older files have).
    """
    bits = [bits for bits, _ in sections]
    wrong = any(one not in BITS for one in bits) or bits != sorted(bits, reverse=True)
    if wrong or any(width < 1 or width % (TILE if bits > 2 else TILE // 2) for bits, width in sections):
        raise ValueError(f"no groups of EXL2: {list(sections)}")
    if sum(width for _, width in sections) != columns:
        raise ValueError(f"groups of {sum(width for _, width in sections)} inputs for {columns}")


def runs(sections: Sections) -> list[tuple[int, int]]:
    """(bits, inputs) of neighbouring groups of the same bits together."""
    return [
        (bits, sum(width for _, width in same))
        for bits, same in itertools.groupby(sections, key=lambda section: section[0])
    ]


def _groups(sections: Sections) -> Tensor:
    """q_groups."""
    said, row = [], 0
    for bits, width in sections:
        said += [bits, row]
        row += width * bits // 32
    return torch.tensor(said, dtype=torch.int32).to(torch.int16)


def sections_of(tensors: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """(bits, inputs) of each stored group.

    Raises:
        ValueError: the groups are not those of the format, or do not fit the inputs.
    """
    said = (tensors[GROUPS].to(torch.int32) & 0xFFFF).tolist()
    ends = [*said[3::2], tensors[WEIGHT].shape[0]]
    found = [
        (bits, (end - start) * 32 // max(bits, 1))
        for bits, start, end in zip(said[0::2], said[1::2], ends, strict=True)
    ]
    check_sections(found, tensors[ORDER].shape[0])
    if _groups(found).tolist() != tensors[GROUPS].tolist():
        raise ValueError("rows of q_groups do not follow each other")
    return found


def scales(scale_codes: Tensor, largest: Tensor) -> Tensor:
    """Scales as ExLlamaV2 computes them, float16.

    Args:
        scale_codes: (N, G), 1 to 16.
        largest: float16 (G,).
    """
    step = (largest.float() / 256.0).half()
    return (scale_codes.float().square() * step.float()).half()


def decode(tensors: Mapping[str, Tensor], rows: int | None = None) -> Tensor:
    """The weight (N, K) of a Linear, float16, its inputs in their own order.

    Args:
        tensors: by the last part of their names.
        rows: N; None: every stored output.

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
