"""Placement of a tensor: its rows against loops over the description, and the way back."""

import pytest
import torch

from attar.formats.gguf.tensor_map import Placement, paired, sorted_groups


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("heads, width", [(1, 2), (4, 8), (3, 6), (2, 64)])
def test_pairing_puts_the_halves_of_a_head_beside_each_other(heads, width):
    weight = numbers(heads * width, 5)
    expected = torch.empty_like(weight)
    for head in range(heads):
        for index in range(width // 2):
            expected[head * width + 2 * index] = weight[head * width + index]
            expected[head * width + 2 * index + 1] = weight[head * width + width // 2 + index]
    assert torch.equal(weight[paired(heads, width)], expected)


@pytest.mark.parametrize("heads, kv_heads, width", [(4, 4, 8), (6, 2, 4), (5, 1, 2)])
def test_sorting_takes_the_groups_apart(heads, kv_heads, width):
    each = heads // kv_heads
    rows = [
        (kind, group, part, row)
        for group in range(kv_heads)
        for kind, parts in (("q", each), ("k", 1), ("v", 1))
        for part in range(parts)
        for row in range(width)
    ]
    wanted = [row for kind in "qkv" for row in rows if row[0] == kind]
    assert [rows[index] for index in sorted_groups(heads, kv_heads, width)] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_matrix_comes_back_bit_for_bit(dtype, transposed, ordered):
    rows = paired(2, 8) if ordered else None
    placement = Placement("g", "s", (16, 6), transposed=transposed, rows=rows)
    weight = numbers(*placement.stored_shape, dtype=dtype)
    before = weight.clone()
    placed = placement.apply(weight)
    assert placed.shape == (16, 6) and placed.dtype == dtype and placed.is_contiguous()
    restored = placement.undo(placed)
    assert torch.equal(restored, before) and torch.equal(weight, before) and restored.is_contiguous()
    for row in range(16):
        source = row if rows is None else int(rows[row])
        assert torch.equal(placed[row], weight[:, source] if transposed else weight[source])


@pytest.mark.parametrize("dtype, smallest", [(torch.bfloat16, -15), (torch.float16, -12)])
def test_norms_gain_one_in_float32_and_come_back(dtype, smallest):
    placement = Placement("g", "s", (4096,), plus=1.0, matrix=False)
    exponents = torch.randint(smallest, 2, (4096,), generator=torch.Generator().manual_seed(1))
    weight = (numbers(4096, seed=2).sign() * (1 + torch.rand(4096)) * 2.0**exponents).to(dtype)
    placed = placement.apply(weight)
    assert placed.dtype == torch.float32
    assert torch.equal(placed, (weight.double() + 1).float())
    assert torch.equal(placement.undo(placed, dtype), weight)


def test_a_float32_norm_comes_back_within_the_rounding_of_the_sum():
    placement = Placement("g", "s", (4096,), plus=1.0, matrix=False)
    weight = numbers(4096)
    error = (placement.undo(placement.apply(weight)) - weight).abs()
    assert (error <= 2**-23 * (weight + 1).abs().clamp(min=1)).all()


def test_a_files_norm_survives_the_checkpoint():
    placement = Placement("g", "s", (4096,), plus=1.0, matrix=False)
    file = 0.5 + 3 * torch.rand(4096, generator=torch.Generator().manual_seed(3))
    assert torch.equal(placement.apply(placement.undo(file)), file)


def test_what_is_no_matrix_becomes_float32():
    bias = numbers(16, dtype=torch.bfloat16)
    placement = Placement("g", "s", (16,), rows=paired(2, 8), matrix=False)
    placed = placement.apply(bias)
    assert placed.dtype == torch.float32 and torch.equal(placed, bias.float()[paired(2, 8)])
    assert torch.equal(placement.undo(placed, torch.bfloat16), bias)
