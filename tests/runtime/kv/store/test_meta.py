"""Every store without data: nothing of a step is read from the device, and no tensor is on another one."""

from __future__ import annotations

import pytest
import torch

from attar.runtime.kv.pool import KVPool
from attar.runtime.kv.store import STORES, PoolGeometry
from attar.runtime.step import StepInput, TokenSpan

GEOMETRY = PoolGeometry(layers=2, blocks=6, block_size=32, kv_heads=3, head_dim=16)


@pytest.mark.parametrize("name", STORES)
def test_a_store_reads_nothing_of_its_device(name):
    """Prompts over a border of blocks, a tree, an accepted path, a copied block, and blocks that are full."""
    pool = KVPool(GEOMETRY, name, dtype=torch.bfloat16, device="meta")
    steps = [
        StepInput([1] * 70, (TokenSpan(0, 0, 40, (3, 1), 1), TokenSpan(1, 0, 30, (2,), 1))),
        StepInput(
            [1] * 5,
            (TokenSpan(0, 40, 44, (3, 1), 4), TokenSpan(1, 30, 31, (2,), 1)),
            ((0, 4),),
            (
                (-1, 0, 0, 1),
                None,
            ),
        ),
    ]
    for step in steps:
        slots = pool.begin(step)
        k = torch.empty(step.count, 3, 16, device="meta", dtype=torch.bfloat16)
        for layer in range(GEOMETRY.layers):
            pool.write(layer, slots, k, k)
            for span in step.spans:
                keys, values = pool.gather(layer, span.blocks, span.end)
                assert keys.shape == values.shape == (span.end, 3, 16)
                assert (keys.dtype, keys.device.type) == (torch.bfloat16, "meta")
        pool.end(step)
    pool.move([(32 + 11, 32 + 10)])
