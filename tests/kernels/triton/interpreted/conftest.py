"""These files run in a process of their own (tests/kernels/triton/test_interpreter.py): triton reads
TRITON_INTERPRET when it is imported.

Triton's interpreter multiplies the bytes of bfloat16 numbers as whole numbers, and others by BLAS, whose
order of sums depends on the number of rows. Here products are float32, one input after the other, as an
instruction of a tensor core is the same for each row."""

import numpy as np
import pytest

from attar.kernels.triton import interpreted

if interpreted():
    import triton.language as tl
    from triton.runtime import interpreter

    def float32(handle):
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def create_dot(self, a, b, d, *options):
        left, right, total = float32(a), float32(b), d.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[k]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


@pytest.fixture(autouse=True)
def seeded():
    import torch

    torch.manual_seed(0)
