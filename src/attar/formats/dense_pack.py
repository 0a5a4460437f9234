"""dense_pack: codes of b bits laid end to end in little-endian 32-bit words. The primitive under GPTQ,
compressed-tensors and EXL2.

Element i occupies bits [i b, i b + b) of a bit string cut into 32-bit words, bit 0 the lowest of word 0; a
code may straddle two words.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_pack(codes: Tensor, bits: int) -> Tensor:
    """Pack along the last axis.

    Args:
        codes: (..., K) whole numbers from 0 to 2^bits - 1.
        bits: 1 to 8.

    Returns:
        int32 (..., ceil(K * bits / 32)); the last word is filled up with zeros.
    """
    *lead, length = codes.shape
    if 32 % bits == 0:
        return _pack_whole(codes, bits)
    spread = (codes.to(torch.uint8)[..., None] >> torch.arange(bits, dtype=torch.uint8)) & 1
    flat = spread.reshape(*lead, length * bits)
    flat = torch.nn.functional.pad(flat, (0, -length * bits % 32))
    powers = (1 << torch.arange(8, dtype=torch.int32)).to(torch.uint8)
    octets = (flat.reshape(*lead, -1, 8) * powers).sum(-1, dtype=torch.uint8)
    return octets.contiguous().view(torch.int32)


def _pack_whole(codes: Tensor, bits: int) -> Tensor:
    """The common case: a word holds a whole number of codes."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (padded.reshape(*codes.shape[:-1], -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def dense_unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """The inverse: uint8 (..., length) codes of int32 words."""
    words = packed.to(torch.int64) & 0xFFFFFFFF
    first = torch.arange(length) * bits
    word, shift = first // 32, first % 32
    low = words[..., word] >> shift
    following = torch.nn.functional.pad(words, (0, 1))[..., word + 1]
    high = torch.where(shift + bits > 32, following << (32 - shift), torch.zeros_like(following))
    return ((low | high) & (2**bits - 1)).to(torch.uint8)
