"""Blocks of all anchors in one pass against one anchor at a time, with the context cut off at it."""

import pytest
import torch

from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.heads.anchors import block_mask, choose_anchors, run_blocks
from attar.distillation.heads.target_pass import run_target
from attar.models.head import head_of
from tests import tiny_models
from tests.distillation.heads.drafters import drafter_of


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gpt2"])  # grouped queries, tied, neither
def test_blocks_in_one_pass_are_those_of_a_loop_over_anchors(family):
    model = tiny_models.build(family).double()
    drafter = drafter_of(model, "dspark").double()
    batch = Examples.of_text(tiny_models.tokens(model, batch=2, length=11))
    target = run_target(model, head_of(model), drafter.config.layers, batch)
    anchors = torch.tensor([[0, 3, 4, 9], [1, 2, 8, 10]])
    together = run_blocks(drafter, target, anchors)
    assert together.dtype == torch.float64
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            keys, values = drafter.context(target.states[row, :anchor], torch.arange(anchor))

            def attend(layer, q, k, v, keys=keys, values=values):
                k, v = torch.cat([keys[layer], k]), torch.cat([values[layer], v])
                out = torch.zeros_like(q)
                group = q.shape[1] // k.shape[1]
                for head in range(q.shape[1]):
                    scores = q[:, head] @ k[:, head // group].T / q.shape[-1] ** 0.5
                    out[:, head] = scores.softmax(-1) @ v[:, head // group]
                return out.flatten(1)

            x = drafter.slots(target.embedding[batch.tokens[row, anchor]])
            alone = drafter(x, anchor + torch.arange(len(x)), attend)
            torch.testing.assert_close(together[row, index], alone, rtol=0, atol=1e-6)


def test_a_slot_sees_what_comes_before_its_anchor_and_its_own_block():
    mask = block_mask(torch.tensor([[2, 5]]), 6, 3)[0]
    for slot in range(6):
        anchor = (2, 5)[slot // 3]
        for position in range(6):
            assert mask[slot, position] == (position < anchor)
        for other in range(6):
            assert mask[slot, 6 + other] == (slot // 3 == other // 3)


def test_anchors_are_different_positions_whose_next_token_counts():
    targets = torch.full((2, 9), PADDING)
    targets[0, 2:8] = 5
    targets[1, 4] = 5
    anchors, real = choose_anchors(targets, 4, None)
    assert anchors.shape == (2, 4) and real.sum(1).tolist() == [4, 1]
    for row in range(2):
        chosen = anchors[row][real[row]].tolist()
        assert len(set(chosen)) == len(chosen) and all(targets[row, at] != PADDING for at in chosen)
    assert choose_anchors(targets, 99, None)[0].shape == (2, 6)
