"""No argument of a step makes the compiled library read or write beyond a table."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from attar.errors import ModelError
from attar.kernels.decode import Program
from attar.kernels.draft_block import DraftProgram, DraftSpan
from attar.kernels.structures import StepTokens
from tests.compiler import needs_compiler
from tests.kernels.test_draft_block import BLOCK, CONTEXT, DIM, HEADS, TAPS, H, V, drafter

pytestmark = needs_compiler

BLOCKS, SIZE = 4, 16
TREE = np.tril(np.ones((3, 3), dtype=bool))


def step(**changes):
    """Three tokens after eight others; logits of the last."""
    values = {
        "ids": [1, 2, 3],
        "positions": [8, 9, 10],
        "slots": [24, 25, 26],
        "counts": [3],
        "past": [8],
        "blocks": [[1]],
        "rows": [2],
        "copies": [],
        "trees": (),
    }
    return StepTokens(**values | changes)


def model(*, mask=False, window=0):
    weights = drafter().model
    layers = tuple(dataclasses.replace(layer, window=window) for layer in weights.layers)
    return dataclasses.replace(weights, layers=layers, mask=weights.mask if mask else None)


@pytest.fixture(scope="module")
def program():
    made = Program(model(), BLOCKS, threads=1)
    yield made
    made.close()


FAR = 1 << 40
OUTSIDE = {
    "a token id": {"ids": [1, V, 3]},
    "the largest of a message": {"ids": [1, 2**31 - 1, 3]},
    "a mask token without masks": {"ids": [-1, 2, 3]},
    "a negative token id": {"ids": [1, 2, -2]},
    "a position": {"positions": [8, 9, CONTEXT]},
    "a negative position": {"positions": [-1, 9, 10]},
    "a slot": {"slots": [24, 25, BLOCKS * SIZE]},
    "a negative slot": {"slots": [-1, 25, 26]},
    "a block": {"blocks": [[BLOCKS]]},
    "a released block that is read": {"blocks": [[-1]]},
    "a short table": {"past": [SIZE - 2]},
    "past": {"past": [FAR]},
    "a negative past": {"past": [-3]},
    "a row": {"rows": [3]},
    "a negative row": {"rows": [-1]},
    "a copy": {"copies": [(0, BLOCKS)]},
    "a copy from below": {"copies": [(-1, 0)]},
    "a short list of ids": {"ids": [1, 2]},
    "a short list of positions": {"positions": [8]},
    "a short list of slots": {"slots": []},
    "no table": {"blocks": []},
    "counts of another sum": {"counts": [2]},
    "a negative count": {"counts": [4, -1], "past": [8, 8], "blocks": [[1], [1]]},
    "a tree of other tokens": {"trees": [TREE[:2, :2]]},
    "fewer trees than spans": {"counts": [1, 2], "past": [8, 9], "blocks": [[1]] * 2, "trees": [None]},
}


@pytest.mark.parametrize("changes", OUTSIDE.values(), ids=OUTSIDE)
def test_a_step_out_of_bounds_is_an_error_and_nothing_is_done(changes, program):
    expected = program.run(step())
    before = program.pool.clone()
    with pytest.raises((IndexError, AssertionError, ValueError)):
        program.run(step(**changes))
    assert torch.equal(program.pool, before)
    assert torch.equal(program.run(step(trees=[TREE])), expected)


@pytest.mark.parametrize(
    "positions, past, table, holds",
    [
        ([20, 21, 22], 20, [-1, 1], True),  # a window of 4 from position 17 on: in the second block
        ([18, 19, 20], 18, [-1, 1], False),  # from 15 on: in the first
        ([40, 41, 42], 20, [0, 1], False),  # the window begins behind the keys
    ],
)
def test_blocks_before_every_window_may_be_gone(positions, past, table, holds):
    windowed = Program(model(window=4), BLOCKS, threads=1)
    tokens = step(positions=positions, past=[past], blocks=[table], slots=[20, 21, 22])
    if holds:
        assert windowed.run(tokens).isfinite().all()
    else:
        with pytest.raises(IndexError):
            windowed.run(tokens)
    windowed.close()


@pytest.mark.parametrize("pair", [(0, BLOCKS * SIZE), (-1, 0), (FAR, 0)])
def test_a_move_out_of_bounds(pair, program):
    with pytest.raises(IndexError, match="slots"):
        program.move([pair])


@pytest.mark.parametrize("position, slot", [(CONTEXT, 0), (-1, 0), (0, BLOCKS * SIZE), (0, -1), (FAR, FAR)])
def test_a_context_out_of_bounds(position, slot):
    drafts = DraftProgram(drafter(), BLOCKS, threads=1)
    with pytest.raises(IndexError):
        drafts.write_context(torch.zeros(1, TAPS * H), np.array([position]), np.array([slot]))
    drafts.close()


@pytest.mark.parametrize(
    "changes",
    [{"last": V}, {"last": -1}, {"last": 2**31 - 1}, {"position": CONTEXT - BLOCK + 1}, {"table": [BLOCKS]}],
)
def test_a_block_of_drafts_out_of_bounds(changes):
    drafts = DraftProgram(drafter(), BLOCKS, threads=1)
    span = DraftSpan(last=3, position=0, past=0, table=[0], most=BLOCK)
    assert drafts.draft([span]).counts.tolist() == [BLOCK]
    with pytest.raises(IndexError):
        drafts.draft([dataclasses.replace(span, **changes)])
    drafts.close()


@pytest.mark.parametrize(
    "name, shape",
    [
        ("norm", (H,)),
        ("before_mlp", (H - 16,)),
        ("after_attention", (1,)),
        ("query_norm", (DIM // 2,)),
        ("sinks", (HEADS - 1,)),
        ("rotary", (CONTEXT, DIM // 2)),
        ("embedding", (V, H - 16)),
    ],
)
def test_tensors_of_other_shapes_are_refused(name, shape):
    weights = model()
    if name == "norm":
        weights = dataclasses.replace(weights, norm=torch.ones(H + 16))
    elif name == "embedding":
        weights = dataclasses.replace(weights, embedding=torch.ones(shape))
    else:
        last = dataclasses.replace(weights.layers[1], **{name: torch.ones(shape)})
        weights = dataclasses.replace(weights, layers=(weights.layers[0], last))
    with pytest.raises(ModelError):
        Program(weights, BLOCKS, threads=1)


def test_a_map_of_tokens_that_leaves_the_vocabulary_is_refused():
    weights = drafter()
    for id in (V, -1):
        chosen = weights.chosen.clone()
        chosen[3] = id
        with pytest.raises(ModelError, match="map of tokens"):
            DraftProgram(dataclasses.replace(weights, chosen=chosen), BLOCKS, threads=1)


@pytest.mark.parametrize("change", [{"rows": 128}, {"columns": 256}, {"bias": torch.ones(3)}])
def test_a_packed_weight_of_fewer_bytes(change):
    with pytest.raises(AssertionError):
        dataclasses.replace(drafter().context, **change)
