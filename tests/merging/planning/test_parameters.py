"""Levels, filters and gradients of parameters."""

from __future__ import annotations

import pytest

from attar.merging.config.schema import FilteredValue, ParameterSetting
from attar.merging.methods.method import Parameter
from attar.merging.planning.parameters import ParameterValue, evaluate, find_value, layer_depth, method_of

WEIGHT = Parameter("weight", required=True)
FLAG = Parameter("normalize", True, kind=bool)


@pytest.mark.parametrize(
    ("points", "depth", "value"),
    [
        ((0, 0.5, 0.3, 0.7, 1), 0.0, 0.0),
        ((0, 0.5, 0.3, 0.7, 1), 1.0, 1.0),
        ((0, 0.5, 0.3, 0.7, 1), 0.25, 0.5),
        ((0, 0.5, 0.3, 0.7, 1), 0.375, 0.4),
        ((1, 0), 0.75, 0.25),
        ((0.4,), 0.9, 0.4),
        ((True, False), 0.99, True),
        ((True, False), 1.0, False),
    ],
)
def test_gradients(points: tuple[float, ...], depth: float, value: float) -> None:
    assert evaluate(ParameterSetting(points), "x", depth) == pytest.approx(value, abs=1e-15)


def test_a_gradient_of_two_points_is_the_line_between_them() -> None:
    for layer in range(7):
        depth = layer_depth(layer, 7)
        assert evaluate(ParameterSetting((2, 5)), "x", depth) == pytest.approx(2 + 3 * layer / 6)


def test_depth_of_layers() -> None:
    assert [layer_depth(index, 3) for index in range(3)] == [0, 0.5, 1]
    assert layer_depth(0, 1) == 1


def test_the_first_filter_that_fits_counts() -> None:
    setting = ParameterSetting((FilteredValue("mlp", 1), FilteredValue("up", 2), FilteredValue("*", (3, 5))))
    assert evaluate(setting, "layers.0.mlp.up.weight", 0) == 1
    assert evaluate(setting, "layers.0.up.weight", 0) == 2
    assert evaluate(setting, "norm", 0.5) == 4
    assert evaluate(ParameterSetting((FilteredValue("mlp", 1),)), "norm", 0) is None
    assert evaluate(ParameterSetting((FilteredValue(None, 7),)), "norm", 0) == 7


def test_the_first_level_with_a_value_wins() -> None:
    source = {"weight": ParameterSetting((FilteredValue("mlp", 1),), "f:1")}
    whole = {"weight": ParameterSetting(3, "f:9")}
    assert find_value(WEIGHT, [source, {}, whole], "a.mlp", 0) == ParameterValue(1, "f:1")
    assert find_value(WEIGHT, [source, {}, whole], "a.norm", 0) == ParameterValue(3, "f:9")
    assert find_value(WEIGHT, [source, {}], "a.norm", 0) is None
    assert find_value(FLAG, [source], "a.norm", 0) == ParameterValue(True)


def test_a_value_of_zero_is_a_value() -> None:
    assert find_value(
        WEIGHT, [{"weight": ParameterSetting(0)}, {"weight": ParameterSetting(3)}], "x", 0
    ) == ParameterValue(0)


def test_kinds() -> None:
    actual = find_value(FLAG, [{"normalize": ParameterSetting(0)}], "x", 0)
    assert actual is not None
    assert actual.value is False
    iterations = Parameter("max_iter", 10, kind=int)
    actual = find_value(iterations, [{"max_iter": ParameterSetting((4, 8))}], "x", 0.5)
    assert actual is not None
    assert (actual.value, type(actual.value)) == (6, int)


def test_a_soup_has_weights_of_its_own() -> None:
    soup = method_of("greedy_soup")
    assert (soup.name, soup.base, soup.shared) == ("greedy_soup", "unused", ())
    assert find_value(soup.per_model[0], [], "x", 0) == ParameterValue(1.0)
    assert method_of("linear").per_model[0].required
