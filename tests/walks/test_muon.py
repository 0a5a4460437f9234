"""Muon against torch's own, which multiplies in bfloat16, and against the SVD."""

import pytest
import torch

from attar.walks.optimizers import Muon, orthogonal, split


def matrices(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in [(24, 16), (16, 40), (16, 16)][:count]]


def test_in_bfloat16_the_steps_are_torchs_bit_for_bit():
    ours, theirs = ([torch.nn.Parameter(m.clone()) for m in matrices()] for _ in range(2))
    one = Muon(ours, 0.02, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for parameters in (ours, theirs):
            for parameter, gradient in zip(parameters, matrices(seed=step + 1), strict=True):
                parameter.grad = gradient
        one.step()
        other.step()
    for mine, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("matrix", matrices())
def test_in_float32_singular_values_come_near_one_and_vectors_stay(matrix):
    U, S, V = torch.linalg.svd(matrix.double(), full_matrices=False)
    result = orthogonal(matrix, torch.float32)
    assert result.dtype == torch.float32
    x = S / S.norm()
    for _ in range(5):  # the same polynomial on the singular values alone
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    assert torch.allclose(result.double(), U @ torch.diag(x) @ V, atol=1e-4)
    assert x.min() > 0.5 and x.max() < 1.3
    assert (orthogonal(matrix).float() - result).norm() < 0.05 * result.norm()


def test_a_stack_of_experts_is_stepped_matrix_by_matrix():
    apart = [torch.nn.Parameter(torch.randn(16, 24)) for _ in range(3)]
    stacked = torch.nn.Parameter(torch.stack([p.detach() for p in apart]))
    gradients = [torch.randn(16, 24) * 10**k for k in range(3)]
    for parameter, gradient in zip(apart, gradients, strict=True):
        parameter.grad = gradient
    stacked.grad = torch.stack(gradients)
    for parameters in (apart, [stacked]):
        Muon(parameters, 0.02).step()
    assert torch.equal(stacked, torch.stack(list(apart)))


def test_experts_are_hidden_matrices_and_convolutions_are_not():
    model = torch.nn.Module()
    model.experts = torch.nn.Parameter(torch.zeros(4, 8, 8))
    model.convolution = torch.nn.Conv1d(8, 8, 4, groups=8)
    hidden, matrices, rest = split(model)
    assert [id(p) for p in hidden] == [id(model.experts)]
    assert [id(p) for p in matrices] == [id(model.convolution.weight)]
    assert [id(p) for p in rest] == [id(model.convolution.bias)]
