"""Weights as the compiled products read them: panels of 32 rows, a row per 32-bit lane.

Letters: W (N, K) weight; s (N, K / G) scales and z (N, K / G) zero points of groups of G inputs; q (N, K)
codes, unsigned: W = s (q - z). z need not be whole; without zero points it is the middle, 8 or 128.
csrc/decode/linear.h describes the bytes; this packs and unpacks them in torch.

Scales are kept as float16 multiples of a power of two chosen for the matrix, its ``unit``: bfloat16 and
float16 scales are kept exactly (while the largest is less than 2^24 times the smallest), float32 ones to
2^-12 of their value. Of zero points either z is kept in float16 or s z in that unit, whichever is nearer
for the matrix: whole zero points and GGUF's float16 minima are both exact.

A 2:4 weight can be packed to its kept values and their positions (semi_structured.py): the same numbers
in fewer bytes. The caller says where that is faster: ``pays``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attar.errors import NumericsError, UsageError
from attar.kernels import semi_structured
from attar.kernels.memory import Arena

PANEL = 32  # rows
ROWS = 128 * PANEL  # packed at a time
GROUPS = (16, 32, 64, 128)
BITS = {"int4": 4, "int8": 8, "bf16": 16}

Kind = Literal["bf16", "int8", "int4"]
Zeros = Literal["middle", "points", "products"]
Form = Literal["dense", "2:4", "2:4 as dense"]
Pays = Callable[[Kind], bool]  # whether products of a kind are faster in the 2:4 form


@dataclass(frozen=True)
class PackedWeight:
    """A weight (N, K) as the library reads it.

    Attributes:
        data: uint8, the panels.
        rows: N.
        columns: K.
        group: G; 0 for bf16.
        zeros: stored zero points: middle (none: all are 8 or 128), points z, or products s z.
        unit: what stored scales and bfloat16 weights are multiplied by: a power of two, times a factor that
            the whole product has.
        factors: float32 (N,), what the product is multiplied by before the bias is added; None: 1.
        bias: float32 (N,) or None.
        form: "2:4 as dense": the weight is 2:4, and its zeros are stored.
    """

    data: Tensor
    rows: int
    columns: int
    kind: Kind
    group: int = 0
    zeros: Zeros = "middle"
    unit: float = 1.0
    bias: Tensor | None = None
    form: Form = "dense"
    factors: Tensor | None = None

    def __post_init__(self) -> None:
        nbytes = packed_bytes(self.rows, self.columns, self.kind, self.group, self.form)
        if self.zeros != "middle":
            nbytes += _panels(self.rows) * PANEL * 2 * self.columns // self.group
        of_rows = [(part, self.rows, torch.float32) for part in (self.bias, self.factors)]
        parts = [(self.data, nbytes, torch.uint8), *of_rows]
        for part, size, dtype in parts:
            fits = part is None or (part.shape == (size,) and part.dtype == dtype and part.is_contiguous())
            assert fits, f"a packed weight {self.rows} x {self.columns} without {size} numbers of {dtype}"

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return len(self.data)

    @property
    def label(self) -> str:
        """The kind and form, as descriptions have them."""
        forms = {"dense": "", "2:4": " 2:4", "2:4 as dense": " (2:4, run dense: no faster here)"}
        return f"{self.kind}{forms[self.form]}"


def scaled(packed: PackedWeight, outputs: float | Tensor, inputs: float = 1.0) -> PackedWeight:
    """The product whose inputs are multiplied by ``inputs``, and whose results, the bias included, by
    ``outputs``: all by one number, or each by its own, float32 (N,). Does not modify its arguments."""
    if not isinstance(outputs, Tensor) and outputs == inputs == 1.0:
        return packed
    bias = None if packed.bias is None else packed.bias * outputs
    if isinstance(outputs, Tensor):
        return replace(packed, unit=packed.unit * inputs, factors=outputs, bias=bias)
    return replace(packed, unit=packed.unit * inputs * outputs, bias=bias)


def pack_bf16(
    weight: Tensor, *, bias: Tensor | None = None, arena: Arena | None = None, pays: Pays | None = None
) -> PackedWeight:
    """A weight (N, K), rounded to bfloat16. Does not modify its inputs.

    Args:
        pays: whether a 2:4 weight is packed as such; None: no.

    Raises:
        UsageError: K is odd.
    """
    rows, columns = weight.shape
    if columns % 2:
        raise UsageError(f"a weight of {columns} inputs cannot be packed", hint="an even number is needed")
    parts = weight.split(ROWS)  # so that a large head needs little memory besides
    sparse = pays is not None and all(semi_structured.holds(part.to(torch.bfloat16) != 0) for part in parts)
    form = _form("bf16", sparse, pays)
    nbytes = packed_bytes(rows, columns, "bf16", 0, form)
    data = torch.empty(nbytes, dtype=torch.uint8) if arena is None else arena.allocate(nbytes)
    offset = 0
    for rows_part in parts:
        part = _bf16_bytes(_padded(rows_part.to(torch.bfloat16)), form)
        data[offset : offset + len(part)] = part
        offset += len(part)
    return PackedWeight(data, rows, columns, "bf16", bias=_bias(bias), form=form)


def pack_codes(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    kind: Kind,
    bias: Tensor | None = None,
    arena: Arena | None = None,
    pays: Pays | None = None,
) -> PackedWeight:
    """A quantized weight. Does not modify its inputs.

    Args:
        codes: q (N, K), uint8; below 16 for int4.
        scales: s (N, K / G), any float type.
        zeros: z (N, K / G); None: 8 or 128.
        kind: int4 or int8.
        bias: (N,).
        arena: allocates the bytes; None: a tensor of their own.
        pays: whether a 2:4 weight is packed as such; None: no. A code is zero where W is: at its zero point.

    Raises:
        UsageError: the groups do not divide K, or are not of 16, 32, 64 or 128 inputs.
        NumericsError: a scale or a zero point is not finite.
    """
    (rows, columns), bits = codes.shape, BITS[kind]
    group = _group(columns, scales.shape[1])
    unit, stored, parts = _constants(scales, zeros)
    fields = [part.view(-1, PANEL, columns // group).transpose(1, 2).contiguous() for part in parts]
    sparse = None if pays is None or stored == "products" else _sparse_values(codes, zeros, group, bits)
    form = _form(kind, sparse is not None, pays)
    if sparse is not None and form == "2:4":
        values, nonzero = sparse
        steps = semi_structured.encode(_padded(values), _padded(nonzero), bits)
        code_bytes = steps.view(len(steps), columns // group, -1)
    else:
        code_bytes = _code_bytes(_padded(codes), group, bits)
    parts_bytes = [*(field.view(torch.uint8) for field in fields), code_bytes]
    data = _moved(torch.cat(parts_bytes, dim=2).flatten(), arena)
    return PackedWeight(data, rows, columns, kind, group, stored, unit, _bias(bias), form)


def pack(
    weight: Tensor,
    kind: Kind,
    *,
    group: int = 32,
    bias: Tensor | None = None,
    arena: Arena | None = None,
    pays: Pays | None = None,
) -> PackedWeight:
    """A weight (N, K), rounded to nearest where ``kind`` is int4 or int8."""
    if kind == "bf16":
        return pack_bf16(weight, bias=bias, arena=arena, pays=pays)
    codes, scales = quantize(weight, kind, group)
    return pack_codes(codes, scales, kind=kind, bias=bias, arena=arena, pays=pays)


def quantize(weight: Tensor, kind: Kind, group: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 (N, K) and scales float32 (N, K / G), nearest and without zero points. In int4 the number
    of largest size in a group gets the code 0, that is -8 (llama.cpp's Q4_0); in int8 it gets 1 or 255.

    Raises:
        UsageError: G does not divide K.
    """
    if weight.shape[1] % group:
        raise UsageError(f"groups of {group} do not divide {weight.shape[1]} inputs")
    parts = weight.float().unflatten(1, (-1, group))
    peak = parts.gather(2, parts.abs().argmax(2, keepdim=True))
    scales = peak / -8 if kind == "int4" else peak.abs() / 127
    unit = _unit(scales)
    scales = (scales / unit).to(torch.float16).float() * unit  # what will be stored
    middle = 1 << (BITS[kind] - 1)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales)
    codes = (parts * inverse).round().add_(middle).clamp_(0, 2 * middle - 1)
    return codes.to(torch.uint8).flatten(1), scales.squeeze(2)


def unpack(packed: PackedWeight) -> Tensor:
    """W, float32 (N, K), as the product multiplies it."""
    rows, columns = packed.rows, packed.columns
    panels = _panels(rows)
    if packed.kind == "bf16" and packed.form == "2:4":
        values, _ = semi_structured.decode(packed.data.view(panels, columns // semi_structured.STEP, -1), 16)
        return values[:rows].float()
    if packed.kind == "bf16":
        pairs = packed.data.view(torch.bfloat16).view(-1, columns // 2, 2, 16, 2)
        return pairs.permute(0, 2, 3, 1, 4).reshape(-1, columns)[:rows].float()
    bits, group = BITS[packed.kind], packed.group
    head = 64 if packed.zeros == "middle" else 128
    groups = packed.data.view(panels, columns // group, -1)
    scales = groups[..., :64].contiguous().view(torch.float16).transpose(1, 2).float() * packed.unit
    scales, zeros = scales[..., None], torch.tensor(float(1 << (bits - 1)))
    if packed.zeros != "middle":
        zeros = groups[..., 64:128].contiguous().view(torch.float16).transpose(1, 2)[..., None].float()
    if packed.form == "2:4":
        return (_differences(groups[..., head:], zeros, group, bits) * scales).reshape(-1, columns)[:rows]
    codes = _codes(groups[..., head:], group, bits).float()
    products = packed.zeros == "products"
    parts = codes * scales - zeros * packed.unit if products else (codes - zeros) * scales
    return parts.reshape(-1, columns)[:rows]


def packed_bytes(rows: int, columns: int, kind: Kind, group: int, form: Form) -> int:
    """Bytes of a weight without stored zero points."""
    padded = _panels(rows) * PANEL
    bits = BITS[kind] // 2 + 1 if form == "2:4" else BITS[kind]
    scales = 2 * columns // group if group else 0
    return padded * (columns * bits // 8 + scales)


def _panels(rows: int) -> int:
    return -(-rows // PANEL)


def _form(kind: Kind, sparse: bool, pays: Pays | None) -> Form:
    """The form of a weight; ``sparse``: it is 2:4."""
    if not sparse or pays is None:
        return "dense"
    return "2:4" if pays(kind) else "2:4 as dense"


def _bf16_bytes(rows: Tensor, form: Form) -> Tensor:
    """Bytes of whole panels, flat."""
    if form == "2:4":
        return semi_structured.encode(rows, rows != 0, 16).flatten()
    lanes = rows.view(-1, 2, 16, rows.shape[1] // 2, 2)
    return lanes.permute(0, 3, 1, 2, 4).contiguous().view(torch.uint8).flatten()


def _sparse_values(
    codes: Tensor, zeros: Tensor | None, group: int, bits: int
) -> tuple[Tensor, Tensor] | None:
    """What a 2:4 weight stores, uint8 (N, K), and its non-zeros; None where it is not one that can be stored:
    codes q of 4 bits, signed q - z of 8."""
    parts = codes.unflatten(1, (-1, group))
    points = torch.tensor(1 << (bits - 1)) if zeros is None else zeros.float()[..., None]
    nonzero = (parts != points).flatten(1)
    if not semi_structured.holds(nonzero):
        return None
    if bits == 4:
        return codes, nonzero
    differences = (parts.short() - points.short()).flatten(1)
    inside = int(differences.min()) >= -128 and int(differences.max()) < 128
    return (differences.to(torch.int8).view(torch.uint8), nonzero) if inside else None


def _differences(data: Tensor, zeros: Tensor, group: int, bits: int) -> Tensor:
    """q - z of a 2:4 weight, float32 (panels, 32, K / G, G); 0 where nothing is kept."""
    steps = data.reshape(len(data), data.shape[1] * group // semi_structured.STEP, -1)
    values, kept = semi_structured.decode(steps, bits)
    shape = (len(data), PANEL, data.shape[1], group)
    if bits == 8:
        return values.view(torch.int8).float().view(shape)
    return (values.float().view(shape) - zeros) * kept.view(shape)


def _code_bytes(codes: Tensor, group: int, bits: int) -> Tensor:
    """(panels, K / G, bytes of a group's codes)."""
    lanes = codes.view(-1, 2, 16, codes.shape[1] // group, group * bits // 32, 8 // bits, 4)
    lanes = lanes.permute(0, 3, 4, 1, 2, 6, 5)  # panel, group, step, half, lane, byte, nibble
    data = lanes[..., 0] if bits == 8 else lanes[..., 0] | (lanes[..., 1] << 4)
    return data.reshape(data.shape[0], data.shape[1], -1)


def _codes(data: Tensor, group: int, bits: int) -> Tensor:
    """(panels, 32, K / G, G), from the bytes of groups' codes."""
    lanes = data.reshape(*data.shape[:2], group * bits // 32, 2, 16, 4)
    parts = torch.stack([lanes] if bits == 8 else [lanes & 15, lanes >> 4], dim=-1)
    return parts.permute(0, 3, 4, 1, 2, 6, 5).reshape(data.shape[0], PANEL, data.shape[1], group)


def _group(columns: int, groups: int) -> int:
    """G."""
    if columns % groups:
        raise UsageError(
            f"{groups} groups do not divide {columns} inputs", hint="such a layer is not run packed"
        )
    if columns // groups not in GROUPS:
        raise UsageError(
            f"groups of {columns // groups} inputs cannot be packed",
            hint=f"groups of {', '.join(map(str, GROUPS))} inputs can",
        )
    return columns // groups


def _constants(scales: Tensor, zeros: Tensor | None) -> tuple[float, Zeros, list[Tensor]]:
    """The unit, the kind of stored zero points, and the fields, float16 (whole panels, K / G)."""
    unit, scales = _unit(scales), scales.float()
    if zeros is None:
        return unit, "middle", [_padded((scales / unit).to(torch.float16))]
    if not zeros.isfinite().all():
        raise NumericsError("a zero point is not finite", hint="its group's scale is too small")
    products = scales * zeros.float()
    common = _unit(torch.stack([scales.abs().amax(), products.abs().amax()]))
    stored, points = (products / common).to(torch.float16), zeros.to(torch.float16)
    error = ((points.float() - zeros.float()) * scales).abs().amax()
    if error <= (stored.float() * common - products).abs().amax():
        return unit, "points", [_padded((scales / unit).to(torch.float16)), _padded(points)]
    return common, "products", [_padded((scales / common).to(torch.float16)), _padded(stored)]


def _unit(scales: Tensor) -> float:
    """The power of two that makes the largest scale 2^14 to 2^15 times it."""
    peak = float(scales.abs().max())
    if not math.isfinite(peak):
        raise NumericsError("a scale is not finite", hint="look for NaN and infinity in the checkpoint")
    return math.ldexp(1.0, math.frexp(peak)[1] - 15) if peak > 0 else 1.0


def _padded(rows: Tensor) -> Tensor:
    """Zero rows added to fill whole panels."""
    missing = -len(rows) % PANEL
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)).contiguous()


def _moved(data: Tensor, arena: Arena | None) -> Tensor:
    return data if arena is None else arena.allocate(len(data)).copy_(data)


def _bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()
