"""Random masks: a stream of numbers for each tensor of each model, the same on every machine.

    key = SHA-256(seed, tensor, model) ,  u = SFC64(key) 32 bits at a time ,  mask_j = [u_j < p_j 2^32]

A mask depends on the seed and the two names only, not on the order of the tensors, the number of threads, or
the chunks (of even length) of a tensor. Integers are compared, so no rounding can differ.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class MaskSource(Protocol):
    """A stream of random masks."""

    def below(self, probability: float | Tensor, count: int) -> Tensor:
        """The next ``count`` entries of the stream: a bool tensor, each entry True with its probability."""
        ...


class RandomMasks:
    """The random masks of one tensor of one model.

    Args:
        key: a non-negative integer.
    """

    def __init__(self, key: int) -> None:
        self.bits = np.random.SFC64(key)

    @classmethod
    def of(cls, seed: int, tensor: str, model: str) -> RandomMasks:
        """The masks for a tensor's name and a model's identity."""
        text = "\0".join((str(seed), tensor, model))
        return cls(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))

    def below(self, probability: float | Tensor, count: int) -> Tensor:
        """True where u < p 2^32. An odd count leaves one number of the stream unused."""
        raw = self.bits.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
        if isinstance(probability, Tensor):
            return torch.from_numpy(raw < probability.double().flatten().numpy() * 2.0**32)
        bound = math.ceil(probability * 2.0**32)
        if bound > 0xFFFFFFFF:
            return torch.ones(count, dtype=torch.bool)
        return torch.from_numpy(raw < np.uint32(max(bound, 0)))
