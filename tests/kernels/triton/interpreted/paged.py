"""Paged attention in Triton's interpreter, against float64."""

import pytest
import torch

from attar.kernels.triton import paged
from tests.kernels.triton.steps import PagedStep

TREE = (-1, 0, 0, 1, 1, 2, 5)
DECODE = [(299, 1, None), (0, 1, None), (16, 1, None), (15, 1, None), (255, 1, None), (256, 1, None)]
MIXED = [(40, 1, None), (0, 37, None), (260, 7, TREE), (3, 2, None)]


def check(step, most=2e-5):
    out = paged.paged_attention(*step.arguments)
    expected = step.expected()
    assert out.dtype == step.arguments[0].dtype and out.shape == expected.shape
    assert float((out.double() - expected).abs().max()) <= most * float(expected.abs().max())
    return out


CASES = {
    "plain": {},
    "one head of keys for five": {"h": 5, "g": 1, "d": 20},
    "as many key heads": {"h": 3, "g": 3, "d": 16},
    "forty heads of one": {"h": 40, "g": 1, "d": 16},
    "sinks": {"sinks": True},
    "window": {"window": 20, "B": 8},
    "soft cap": {"soft_cap": 3.0},
    "all": {"sinks": True, "window": 24, "soft_cap": 2.0, "B": 8, "h": 6},
}


@pytest.mark.parametrize("case", CASES)
def test_decoded_tokens_attend_to_what_they_see(case):
    check(PagedStep.random(DECODE, **CASES[case]))


@pytest.mark.parametrize("case", ["plain", "all"])
def test_prompts_trees_and_drafts_of_one_step_attend_to_what_they_see(case):
    check(PagedStep.random(MIXED, words=1, **CASES[case]))


def test_trees_of_more_than_32_tokens_and_windows_shorter_than_a_tree():
    parents = (-1, *range(39))
    check(PagedStep.random([(5, 40, parents), (9, 34, (-1,) * 34)], words=2, window=12, B=4))


STORES = {
    torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.int8: 2e-2, torch.float8_e4m3fn: 2e-2, torch.uint8: 3e-2,
}  # fmt: skip


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_store_is_read(store, dtype):
    step = PagedStep.random([(270, 1, None), (20, 7, TREE)], words=1, store=store, dtype=dtype)
    check(step, 2e-5 if dtype == torch.float32 else STORES[store])


@pytest.mark.parametrize("d", [24, 64])
def test_four_bit_codes_are_read_in_their_basis(d):
    check(PagedStep.random(MIXED, words=1, store=torch.uint8, d=d, sinks=True), 5e-5)
    check(PagedStep.random(DECODE, store=torch.uint8, d=d, window=20, B=8), 5e-5)


@pytest.mark.parametrize("store", [torch.float32, torch.uint8])
def test_a_token_has_the_same_bits_alone_and_in_any_step(store, monkeypatch):
    step = PagedStep.random(MIXED, words=1, sinks=True, store=store)
    together = check(step)
    for tokens in (slice(0, 1), slice(38, 45), slice(45, 47)):
        assert torch.equal(paged.paged_attention(*step.part(tokens)), together[tokens])
    monkeypatch.setattr(paged, "ENOUGH", 0)  # one program for all splits of a token
    assert torch.equal(paged.paged_attention(*step.arguments), together)
    monkeypatch.setattr(paged, "ENOUGH", 1 << 30)
    monkeypatch.setattr(paged, "PROGRAMS", 1)  # a program takes several splits
    assert torch.equal(paged.paged_attention(*step.arguments), together)


def test_entries_that_are_not_seen_are_not_read():
    step = PagedStep.random(DECODE)
    for plane in step.arguments[1:3]:
        used = torch.zeros(plane.shape[:2], dtype=torch.bool)
        for row, length in zip(step.arguments[6], step.arguments[9].tolist(), strict=True):
            slots = row.long().repeat_interleave(16) * 16 + torch.arange(len(row) * 16) % 16
            used.view(-1)[slots[:length]] = True
        plane[~used] = float("nan")
    check(step)
