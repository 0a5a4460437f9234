"""The compiled planes against the torch ones, on every type of blocks."""

import pytest
import torch

from attar.formats.gguf import blocks
from attar.formats.gguf.types import TYPES
from attar.kernels.build import load

pytestmark = pytest.mark.skipif(load("planes") is None, reason="no C++ compiler")


@pytest.mark.parametrize("kind", list(blocks.LAYOUTS))
def test_blocks_are_cut_and_joined_as_in_torch(kind, monkeypatch):
    data = torch.randint(0, 256, (24, TYPES[kind].size * 3), generator=torch.Generator().manual_seed(0))
    data = data.to(torch.uint8)
    columns = TYPES[kind].block * 3
    codes, stored = blocks.unpack(kind, data, columns)
    packed = blocks.pack(kind, codes, stored)
    monkeypatch.setenv("ATTAR_KERNELS", "off")
    plain, plain_stored = blocks.unpack(kind, data, columns)
    assert torch.equal(codes, plain)
    for name, value in plain_stored.items():  # as bytes: some of the random numbers are NaN
        assert torch.equal(stored[name].view(torch.uint8), value.view(torch.uint8))
    assert torch.equal(packed, blocks.pack(kind, plain, plain_stored))
    assert int(codes.view(torch.uint8).max()) > 0
