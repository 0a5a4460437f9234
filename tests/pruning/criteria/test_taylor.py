"""Importance of weights: the sums of |w dL/dw| over what a cut removes."""

import copy

import pytest
import torch

from attar.models.anatomy.discover import discover
from attar.models.surgery.cut_model import RowColumnCut
from attar.pruning.structures import STRUCTURES
from tests import tiny_models
from tests.pruning.scored import loss_of, scored


def products(model, batch):
    """|w dL/dw| of every parameter of the blocks' Linears, in float64; biases and all else are 0."""
    copied = copy.deepcopy(model).double()
    anatomy = discover(copied)
    loss_of(anatomy)(copied, batch).backward()
    weights = [f"{name}.weight" for block in anatomy.blocks for name in block.linears]
    return {
        name: (p.detach() * p.grad).abs() if name in weights else torch.zeros_like(p)
        for name, p in copied.named_parameters()
    }


def removed_sum(table, anatomy, remove):
    """The sum of what surgery removes."""
    cut = RowColumnCut()
    remove(cut)
    before, after = (sum(float(t.sum()) for t in state.values()) for state in (table, cut.apply(table)))
    return before - after


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama3", "phi3", "gpt2", "gpt_neox", "bert"])
def test_is_the_sum_over_what_surgery_removes(family, tmp_path):
    model = tiny_models.build(family)
    anatomy = discover(model)
    rows = tiny_models.tokens(model, batch=3, length=8)
    batches = [rows[:2], rows[2:]]
    tables = [products(model, batch) for batch in batches]
    block = anatomy.blocks[1]
    size = block.attention.heads // block.attention.kv_heads
    for method, unit in (("neurons", 5), ("heads", 2), ("query-heads", 3)):
        got = scored(model, method, "taylor", batches, tmp_path / method).reshape(3, -1)

        def remove(cut, method=method, unit=unit):
            others = [index for index in range(block.mlp.neurons) if index != unit]
            if method == "neurons":
                cut.remove_neurons(block, others)
            elif method == "heads":
                heads = [head for head in range(block.attention.heads) if head // size != unit]
                cut.remove_heads(block.attention, heads)
            else:  # its rows of q and its columns of o
                cut.remove_rows(block.attention.q, block.attention.query_rows(unit))
                cut.remove_columns(block.attention.o, block.attention.query_columns(unit))

        sums = [removed_sum(table, anatomy, remove) for table in tables]
        assert got[1, unit].item() == pytest.approx((2 * sums[0] + sums[1]) / 3, rel=1e-4)


def test_leaves_the_model_alone(tmp_path):
    model = tiny_models.build("llama3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scored(model, "heads", "taylor", [tiny_models.tokens(model)], tmp_path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert STRUCTURES["heads"].weights(model, discover(model))[0].count == 4
