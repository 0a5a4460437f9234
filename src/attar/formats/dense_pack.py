"""dense_pack: codes of b bits without gaps in little-endian 32-bit words, as in GPTQ, compressed-tensors and
EXL2.

Element i occupies bits [i b, i b + b) of a bit string cut into 32-bit words, bit 0 the lowest of word 0; a
code may straddle two words.

8 codes fill b bytes exactly, whatever b is. Eight bytes with a code in each are one 64-bit number, and three
steps move the codes together: neighbours within 16 bits, pairs within 32, fours within 64.

    b = 3:   .....aaa .....bbb .....ccc ...   ->   ..........bbbaaa ..........dddccc ...   ->   ...

Unpacking reverses the steps. Both work on pieces that stay in the processor's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 1 << 20  # codes at a time, a multiple of 32
LANES = (8, 16, 32)  # bits from one code, pair or four of codes to the next, with one code in a byte


def dense_pack(codes: Tensor, bits: int) -> Tensor:
    """Pack along the last axis. Returns int32 (..., ceil(K * bits / 32)), the last word padded with zeros.

    Args:
        codes: (..., K) whole numbers from 0 to 2^bits - 1.
        bits: 1 to 8.
    """
    *lead, length = codes.shape
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -length % 32)).contiguous().reshape(-1)
    packed = torch.empty((padded.numel() // 8, bits), dtype=torch.uint8, device=codes.device)
    for start in range(0, padded.numel(), PIECE):
        eights = _pack_lanes(padded[start : start + PIECE].view(torch.int64), bits)
        packed[start // 8 : (start + PIECE) // 8] = eights.view(torch.uint8).reshape(-1, 8)[:, :bits]
    words = packed.reshape(-1).view(torch.int32).reshape(*lead, -(-length // 32) * bits)
    return words[..., : -(-length * bits // 32)].contiguous()


def dense_unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """The inverse: uint8 (..., length) codes of int32 words."""
    *lead, words = packed.shape
    blocks = -(-length // 32)
    flat = torch.nn.functional.pad(packed[..., : blocks * bits], (0, max(blocks * bits - words, 0)))
    octets = flat.contiguous().reshape(-1).view(torch.uint8).reshape(-1, bits)
    codes = torch.empty(octets.shape[0] * 8, dtype=torch.uint8, device=packed.device)
    for start in range(0, codes.numel(), PIECE):
        piece = octets[start // 8 : (start + PIECE) // 8]
        eights = torch.nn.functional.pad(piece, (0, 8 - bits)).contiguous().view(torch.int64)
        codes[start : start + PIECE] = _unpack_lanes(eights.reshape(-1), bits).view(torch.uint8)
    return codes.reshape(*lead, blocks * 32)[..., :length].contiguous()


def _pack_lanes(eights: Tensor, bits: int) -> Tensor:
    """8 codes a byte apart become 8 codes ``bits`` apart; int64 (count,)."""
    for lane, filled in zip(LANES, (bits, 2 * bits, 4 * bits), strict=True):
        if filled < lane:
            low = _lane_mask(lane, filled)
            eights = (eights & low) | ((eights >> (lane - filled)) & (low << filled))
    return eights


def _unpack_lanes(eights: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`_pack_lanes`."""
    for lane, filled in zip(reversed(LANES), (4 * bits, 2 * bits, bits), strict=True):
        if filled < lane:
            low = _lane_mask(lane, filled)
            eights = (eights & low) | ((eights & (low << filled)) << (lane - filled))
    return eights


def _lane_mask(lane: int, filled: int) -> int:
    """The mask of the lowest ``filled`` bits of every other lane; below 2^63, as filled < lane."""
    return sum(((1 << filled) - 1) << offset for offset in range(0, 64, 2 * lane))
