"""Rules and the words of compressed-tensors for them."""

import pytest

from attar.formats.rules import (
    FLOAT,
    INT,
    MXFP4,
    NAIVE,
    NVFP4,
    PACK,
    ActivationRule,
    WeightRule,
    format_of,
)

WEIGHTS = [
    WeightRule("int", 4, "group", 128),
    WeightRule("int", 3, "channel", symmetric=False),
    WeightRule("int", 4, "group", 32, ordered=True),
    WeightRule("float", 8, "tensor"),
    WeightRule("float", 8, "block", block=(128, 128)),
    WeightRule("float", 4, "tensor_group", 16),
    WeightRule("float", 4, "group", 32),
]
ACTIVATIONS = [
    ActivationRule("int", 8, "token"),
    ActivationRule("float", 8, "tensor", dynamic=False),
    ActivationRule("float", 8, "group", group_size=128, symmetric=False),
]


@pytest.mark.parametrize("rule", WEIGHTS)
def test_weight_rules_come_back_from_their_config(rule):
    assert WeightRule.read(rule.config()) == rule


@pytest.mark.parametrize("rule", ACTIVATIONS)
def test_activation_rules_come_back_from_their_config(rule):
    assert ActivationRule.read(rule.config()) == rule


@pytest.mark.parametrize(
    ("fields", "strategy", "size"),
    [({}, "tensor", 0), ({"group_size": 64}, "group", 64), ({"group_size": -1}, "channel", 0)],
)
def test_what_files_leave_out(fields, strategy, size):
    rule = WeightRule.read(fields)
    assert (rule.kind, rule.bits, rule.strategy, rule.group_size) == ("int", 8, strategy, size)
    assert WeightRule.read({"strategy": "block", "block_structure": "64x128"}).block == (64, 128)


def test_tiles():
    assert WeightRule("int", 4, "group", 32).tiles((6, 96)) == (6, 3)
    assert WeightRule("int", 4, "channel").tiles((6, 96)) == (6, 1)
    assert WeightRule("int", 4, "tensor").tiles((6, 96)) == (1, 1)
    assert WeightRule("float", 8, "block", block=(4, 64)).tiles((6, 96)) == (2, 2)


def test_layouts_are_chosen_as_the_library_chooses():
    token = ACTIVATIONS[0]
    assert format_of(WeightRule("int", 4, "group", 128), None) == PACK
    assert format_of(WeightRule("int", 4, "group", 128), token) == INT
    assert format_of(WeightRule("float", 8, "tensor"), token) == FLOAT
    assert format_of(WeightRule("float", 8, "tensor"), None) == NAIVE
    assert format_of(WeightRule("float", 4, "tensor_group", 16), None) == NVFP4
    assert format_of(WeightRule("float", 4, "group", 32), None) == MXFP4


def test_limits():
    assert ActivationRule("int", 8, "token").limits == (-128, 127)
    assert ActivationRule("int", 4, "token").limits == (-8, 7)
    assert ActivationRule("float", 8, "token").limits == (-448, 448)
