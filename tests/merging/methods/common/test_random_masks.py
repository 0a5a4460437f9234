"""Random masks: the same for a key, whatever the pieces; the right share."""

from __future__ import annotations

import torch

from attar.merging.methods.common.random_masks import RandomMasks


def test_known_numbers() -> None:
    """The stream is part of what "same seed, same bytes" promises: it must not change."""
    mask = RandomMasks.of(0, "model.norm.weight", "a").below(0.5, 16)
    assert "".join("01"[int(bit)] for bit in mask) == "0010010110110110"


def test_seed_tensor_and_model_all_count() -> None:
    masks = [
        RandomMasks.of(*key).below(0.5, 256)
        for key in [(0, "t", "m"), (1, "t", "m"), (0, "u", "m"), (0, "t", "n")]
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert torch.equal(masks[0], RandomMasks.of(0, "t", "m").below(0.5, 256))


def test_the_cut_into_even_pieces_does_not_matter() -> None:
    whole, parts = RandomMasks.of(3, "t", "m"), RandomMasks.of(3, "t", "m")
    assert torch.equal(whole.below(0.3, 1000), torch.cat([parts.below(0.3, n) for n in (2, 600, 398)]))


def test_shares() -> None:
    draws = RandomMasks.of(5, "t", "m")
    for p in (0.1, 0.5, 0.9):
        assert abs(draws.below(p, 200_000).float().mean().item() - p) < 0.004
    assert draws.below(1.0, 1000).all()
    assert not draws.below(0.0, 1000).any()


def test_a_probability_for_each_entry() -> None:
    p = torch.tensor([0.0, 0.25, 1.0]).repeat(40_000)
    mask = RandomMasks.of(5, "t", "m").below(p, p.numel()).view(-1, 3).float().mean(0)
    assert mask[0] == 0
    assert abs(mask[1] - 0.25) < 0.01
    assert mask[2] == 1


def test_scalar_and_tensor_probabilities_draw_alike() -> None:
    a, b = RandomMasks.of(9, "t", "m"), RandomMasks.of(9, "t", "m")
    assert torch.equal(a.below(0.625, 999), b.below(torch.full((999,), 0.625), 999))
