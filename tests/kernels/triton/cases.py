"""Packed weights, pools and steps for the tests of the Triton kernels, each with its float64 meaning."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.kernels.device.planes import join


@dataclass
class PackedLinear:
    """A quantized weight of N outputs and K inputs, and what it stands for.

    Attributes:
        meaning: float64 (N, K).
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    meaning: Tensor

    @classmethod
    def random(cls, N, K, G, bits, zeros=None, scale_dtype=torch.bfloat16, seed=0):
        """zeros: the dtype of random zero points; None: none."""
        g = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 1 << bits, (N, K), generator=g)
        codes[0], codes[-1] = 0, (1 << bits) - 1
        scales = (torch.rand(K // G, N, generator=g) + 0.1).to(scale_dtype)
        points = None
        if zeros is not None:
            points = (torch.rand(K // G, N, generator=g) * (1 << bits)).to(zeros)
        middle = torch.full((K // G, N), 1 << bits - 1).double() if points is None else points.double()
        spread = [part.T.repeat_interleave(G, 1) for part in (scales.double(), middle)]
        return cls(
            join(codes.to(torch.uint8), bits), scales, points, bits, spread[0] * (codes.double() - spread[1])
        )
