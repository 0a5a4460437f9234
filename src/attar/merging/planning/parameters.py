"""The value of a parameter for one tensor: levels, filters, gradients over depth.

    source -> slice -> module -> merge -> the method's default     the first level that has a value wins

A gradient g_0 ... g_{n-1} is read at depth t in [0, 1], linearly between its points: with s = t (n - 1),
i = floor(s), f = s - i the value is (1 - f) g_i + f g_{i+1}. Points that are not numbers are not mixed: g_i
counts. The j-th of m layers of a slice has t = j / (m - 1), and t = 1 where m = 1; tensors outside the layers
have t = 0.

Of a list of filters the first entry counts whose filter is missing, ``*``, or a part of the tensor's name;
where none fits, the next level is asked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attar.errors import RecipeError
from attar.merging.config.schema import SEARCHED, Filtered, Parameters, Scalar, Setting
from attar.merging.methods import METHODS
from attar.merging.methods.method import Method, Parameter


@dataclass(frozen=True)
class Value:
    """A parameter's value and where it was written; ``where`` is empty for a default."""

    value: Any
    where: str = ""


def method_of(name: str) -> Method:
    """A method of the table; one that is searched is a linear merge, equal weights where none are given."""
    if name not in SEARCHED:
        return METHODS[name]
    linear = METHODS["linear"]
    each = tuple(
        dataclasses.replace(parameter, required=False, default=1.0)
        if parameter.name == "weight"
        else parameter
        for parameter in linear.each
    )
    joint = linear.joint

    def normalized(shared: Mapping[str, Any], values: Mapping[str, Sequence[Any]]) -> None:
        if joint is not None:
            joint({"normalize": True}, values)

    return dataclasses.replace(linear, name=name, each=each, shared=(), joint=normalized)


def layer_depth(index: int, count: int) -> float:
    """Depth of the ``index``-th of ``count`` layers of a slice, from 0 to 1; 1 for a single one."""
    return index / (count - 1) if count > 1 else 1.0


def find(parameter: Parameter, levels: Sequence[Parameters], tensor: str, depth: float) -> Value | None:
    """A parameter's value for a tensor.

    Args:
        parameter: which one.
        levels: settings, the first to be asked first.
        tensor: the name that filters look at.
        depth: from 0 to 1.

    Returns:
        The value in the parameter's kind; None where it is required and nothing gives one.
    """
    for level in levels:
        setting = level.get(parameter.name)
        found = None if setting is None else evaluate(setting, tensor, depth)
        if found is not None and setting is not None:
            return Value(_in_kind(parameter, found), setting.where)
    return None if parameter.required else Value(parameter.default)


def evaluate(setting: Setting, tensor: str, depth: float) -> Scalar | None:
    """A setting's value for a tensor; None where no filter fits."""
    value = setting.value
    if not isinstance(value, tuple):
        return value
    if isinstance(value[0], Filtered):
        for entry in value:
            assert isinstance(entry, Filtered), "a list of filters holds nothing else"
            if fits(entry, tensor):
                inner = entry.value
                return _gradient(inner, depth) if isinstance(inner, tuple) else inner
        return None
    return _gradient([point for point in value if not isinstance(point, Filtered)], depth)


def fits(entry: Filtered, tensor: str) -> bool:
    """Whether an entry of a filtered setting is meant for a tensor."""
    return entry.filter is None or entry.filter == "*" or entry.filter in tensor


def _gradient(points: Sequence[Scalar], depth: float) -> Scalar:
    """A gradient's value at a depth."""
    step = depth * (len(points) - 1)
    below = math.floor(step)
    part = step - below
    first, second = points[below], points[min(len(points) - 1, below + 1)]
    if any(isinstance(point, bool | str) for point in points):
        return first
    return (1 - part) * float(first) + part * float(second)


def check_kind(parameter: Parameter, setting: Setting) -> None:
    """Refuse a setting with a value of the wrong kind or out of range, before any model is opened.

    Raises:
        RecipeError: names the place, the parameter, its value and what is allowed.
    """
    for value, where in _values(setting):
        if not parameter.accepts(_in_kind(parameter, value)):
            allowed = "true or false" if parameter.kind is bool else parameter.allowed
            raise RecipeError(f"{where}: {parameter.name} is {value!r}, but must be {allowed}")


def _values(setting: Setting) -> Iterator[tuple[Scalar, str]]:
    """Every value that a setting names, with its place."""
    entries: Sequence[Scalar | Filtered] = (
        setting.value if isinstance(setting.value, tuple) else (setting.value,)
    )
    for entry in entries:
        if isinstance(entry, Filtered):
            points = entry.value if isinstance(entry.value, tuple) else (entry.value,)
            yield from ((point, entry.where) for point in points)
        else:
            yield entry, setting.where


def _in_kind(parameter: Parameter, value: Scalar) -> Scalar:
    """0 and 1 are a flag's false and true, as configs found in the wild have it; 10.0 is a
    whole number."""
    if parameter.kind is bool and not isinstance(value, bool | str) and value in (0, 1):
        return bool(value)
    if parameter.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
