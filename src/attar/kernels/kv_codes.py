"""Keys and values of one byte: INT8 and FP8 (e4m3), symmetric, with a scale for each token and head.

s = max |x| / 127 (FP8: 448), at least 1e-6;  q = round(x / s);  x ~ s q

And bytes of several codes, for the formats of fewer bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
FLOOR = 1e-6  # smallest scale


def encode(x: Tensor, code: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes (..., head_dim) and scales float32 (..., 1) of x (..., head_dim); accumulates in float32."""
    x, top = x.float(), LARGEST[code]
    s = (x.abs().amax(dim=-1, keepdim=True) / top).clamp_(min=FLOOR)
    q = (x / s).clamp_(-top, top)
    return (q.round_() if code == torch.int8 else q).to(code), s


def packed(q: Tensor, bits: int) -> Tensor:
    """Codes (..., n) as bytes (..., n * bits / 8), the first in the lowest bits."""
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=q.device, dtype=torch.uint8) * bits
    return (q.unflatten(-1, (-1, per_byte)) << shifts).sum(dim=-1, dtype=torch.uint8)


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """float32 (..., n) of bytes (..., n * bits / 8)."""
    shifts = torch.arange(8 // bits, device=codes.device, dtype=torch.uint8) * bits
    return ((codes[..., None] >> shifts) & (2**bits - 1)).flatten(-2).float()
