"""The value of a parameter for one tensor: levels, filters, gradients over depth.

    source -> slice -> module -> merge -> the method's default     the first level that has a value wins

A gradient g_0 ... g_{n-1} at depth t in [0, 1] is linear between its points: with s = t (n - 1), i =
floor(s), f = s - i its value is (1 - f) g_i + f g_{i+1}; for points that are not numbers it is g_i. The j-th
of m layers of a slice has t = j / (m - 1), and t = 1 where m = 1; tensors outside the layers have t = 0.

Of a list of filters the first entry applies whose filter is missing, ``*``, or a part of the tensor's name;
if none matches, the next level is looked up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attar.errors import RecipeError
from attar.merging.config.schema import SEARCHED, MergeConfig, ParameterSetting, ParameterSettings, Scalar
from attar.merging.methods import METHODS
from attar.merging.methods.method import MergeMethod, Parameter


@dataclass(frozen=True)
class ParameterValue:
    """A parameter's value and where it was written; ``where`` is empty for a default."""

    value: Any
    where: str = ""


def method_of(name: str) -> MergeMethod:
    """A method of the table; a searched one is a linear merge whose weights are equal unless given."""
    if name not in SEARCHED:
        return METHODS[name]
    linear = METHODS["linear"]
    per_model = tuple(
        dataclasses.replace(parameter, required=False, default=1.0)
        if parameter.name == "weight"
        else parameter
        for parameter in linear.per_model
    )
    joint = linear.joint

    def check_normalized(shared: Mapping[str, Any], values: Mapping[str, Sequence[Any]]) -> None:
        if joint is not None:
            joint({"normalize": True}, values)

    return dataclasses.replace(linear, name=name, per_model=per_model, shared=(), joint=check_normalized)


def layer_depth(index: int, count: int) -> float:
    """Depth of the ``index``-th of ``count`` layers of a slice, from 0 to 1; 1 for a single layer."""
    return index / (count - 1) if count > 1 else 1.0


def find_value(
    parameter: Parameter, levels: Sequence[ParameterSettings], tensor: str, depth: float
) -> ParameterValue | None:
    """A parameter's value for a tensor; None if it is required and no level gives one.

    Args:
        levels: settings; the first one with a value wins.
        tensor: the name that filters are compared with.
        depth: from 0 to 1.
    """
    for level in levels:
        setting = level.get(parameter.name)
        value = None if setting is None else evaluate(setting, tensor, depth)
        if value is not None and setting is not None:
            return ParameterValue(_in_kind(parameter, value), setting.where)
    return None if parameter.required else ParameterValue(parameter.default)


def evaluate(setting: ParameterSetting, tensor: str, depth: float) -> Scalar | None:
    """A setting's value for a tensor; None where no filter matches."""
    if not setting.filters():
        return _at_depth(setting.points() if isinstance(setting.value, tuple) else setting.value, depth)
    return next((_at_depth(entry.value, depth) for entry in setting.filters() if entry.matches(tensor)), None)


def _at_depth(points: Scalar | tuple[Scalar, ...], depth: float) -> Scalar:
    """A gradient's value at a depth; a scalar itself."""
    if not isinstance(points, tuple):
        return points
    step = depth * (len(points) - 1)
    below = math.floor(step)
    part = step - below
    first, second = points[below], points[min(len(points) - 1, below + 1)]
    if any(isinstance(point, bool | str) for point in points):
        return first
    return (1 - part) * float(first) + part * float(second)


def check_kind(parameter: Parameter, setting: ParameterSetting) -> None:
    """Refuse a setting with a value of the wrong kind or out of range, before any model is opened.

    Raises:
        RecipeError: names file and line, the parameter, its value and what is allowed.
    """
    values = [(point, setting.where) for point in setting.points()]
    for entry in setting.filters():
        points = entry.value if isinstance(entry.value, tuple) else (entry.value,)
        values += [(point, entry.where) for point in points]
    for value, where in values:
        if not parameter.accepts(_in_kind(parameter, value)):
            allowed = "true or false" if parameter.kind is bool else parameter.allowed
            raise RecipeError(f"{where}: {parameter.name} is {value!r}, but must be {allowed}")


def _in_kind(parameter: Parameter, value: Scalar) -> Scalar:
    """0 and 1 as a flag's false and true, as many configurations write them; 10.0 as an integer."""
    if parameter.kind is bool and not isinstance(value, bool | str) and value in (0, 1):
        return bool(value)
    if parameter.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def unused_parameters(config: MergeConfig, method: MergeMethod) -> Iterator[str]:
    """Notes on parameters that the method does not have."""
    known = {parameter.name for parameter in (*method.shared, *method.per_model)}
    for level in config.levels():
        for name, setting in level.items():
            if name not in known:
                yield f"{setting.where}: {name} is not a parameter of {method.name}: without effect"


def unmatched_filters(config: MergeConfig, tensors: Sequence[str]) -> Iterator[str]:
    """Notes on filters that match none of these names."""
    for level in config.levels():
        for entry in (entry for setting in level.values() for entry in setting.filters()):
            if not any(entry.matches(tensor) for tensor in tensors):
                yield f"{entry.where}: the filter {entry.filter!r} fits no tensor"
