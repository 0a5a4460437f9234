"""What a merge method declares: its function, the models it takes, and the parameters of its YAML.

A method is a pure function over the tensors of one name:

    f(tensors, base, *, <parameters>) -> Tensor

``tensors``: the models' tensors of one name, of one shape and one dtype; ``base``: the base model's, or None.
A shared parameter is one value; a parameter of each model is a list with one value for each of ``tensors``.
The result has the same shape, and the dtype of the base, or else of the tensors. No function modifies its
inputs.

``base`` of a method says what becomes of ``base_model``:

    required   there must be one; it is not among the tensors
    optional   likewise, but it may be absent
    unused     the base model gives the configuration and the tokenizer; listed, it is a model like any other
    member     listed or not, it is one of the tensors

``compat`` is ``"mergekit"``, the reference's arithmetic, or ``"paper"``, the paper's; only functions whose
method says ``paper=True`` have the argument, the others know one form. ``draws``
(:mod:`attar.merging.methods.common.random_masks`) goes to methods with ``random=True``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attar.errors import SettingsError
from attar.merging.methods.common.random_masks import Source
from attar.merging.methods.common.selection import Scan

BASES = ("required", "optional", "unused", "member")
COMPATS = ("mergekit", "paper")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method.

    Args:
        name: as in YAML.
        default: value where none is given.
        required: one must be given, there is no default.
        kind: what YAML must hold: float (an int will do), int or bool.
        allowed: the allowed values in words, for errors.
        check: whether a value of the right kind is allowed; numbers must be finite in any case.
        span: the interval in which a search looks for a good value; None: not searched.
    """

    name: str
    default: float | bool | None = None
    required: bool = False
    kind: type = float
    allowed: str = "a finite number"
    check: Callable[[Any], bool] | None = None
    span: tuple[float, float] | None = None

    @property
    def python_name(self) -> str:
        """The function's keyword: ``lambda`` is a word of Python and gets an underscore."""
        return "lambda_" if self.name == "lambda" else self.name

    def accepts(self, value: object) -> bool:
        """Whether a value has the right kind and lies in the allowed range."""
        if value is None:
            return self.default is None and not self.required
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if not isinstance(value, int if self.kind is int else (int, float)):
            return False
        return math.isfinite(value) and (self.check is None or self.check(value))

    def verify(self, value: object) -> None:
        """Raise SettingsError unless the value is accepted."""
        if not self.accepts(value):
            raise SettingsError(self.name, value, "true or false" if self.kind is bool else self.allowed)


Joint = Callable[[Mapping[str, Any], Mapping[str, Sequence[Any]]], None]


@dataclass(frozen=True)
class Method:
    """A merge method. What the fields mean in full is in the module's docstring.

    Args:
        name: as in YAML's ``merge_method``.
        function: the arithmetic for one output tensor.
        base: one of ``BASES``.
        models: least and most tensors beside the base; None: no upper bound.
        shared: parameters with one value for an output tensor, looked up by its name.
        each: parameters of each model, looked up by the name of its input tensor.
        random: the function takes ``draws``, one source a tensor.
        paper: the function takes ``compat``.
        scan: for ``compat="paper"``: what must be known of the whole model before the first tensor is merged.
        joint: check over several parameters; raises SettingsError.
        summary: one line.
        source: the paper.
    """

    name: str
    function: Callable[..., Tensor]
    base: str
    models: tuple[int, int | None]
    shared: tuple[Parameter, ...] = ()
    each: tuple[Parameter, ...] = ()
    random: bool = False
    paper: bool = False
    scan: Callable[[Mapping[str, Sequence[Any]]], Scan] | None = None
    joint: Joint | None = None
    summary: str = ""
    source: str = ""

    def check(self, shared: Mapping[str, Any], each: Mapping[str, Sequence[Any]]) -> None:
        """Check complete values, keyed by the names in YAML.

        Raises:
            SettingsError: naming the parameter, its value and what is allowed.
        """
        for parameter in self.shared:
            parameter.verify(shared[parameter.name])
        for parameter in self.each:
            for value in each[parameter.name]:
                parameter.verify(value)
        if self.joint is not None:
            self.joint(shared, each)

    def merge(
        self,
        tensors: Sequence[Tensor],
        base: Tensor | None,
        *,
        shared: Mapping[str, Any],
        each: Mapping[str, Sequence[Any]],
        compat: str = "mergekit",
        draws: Sequence[Source] = (),
        known: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """One output tensor. Does not modify its inputs.

        Args:
            tensors: of the models, in the order of the configuration.
            base: of the base model, or None.
            shared: values by the names in YAML.
            each: values by the names in YAML, one for each of ``tensors``.
            compat: one of ``COMPATS``.
            draws: for random methods, one for each of ``tensors``.
            known: what the scan over the whole model found (:meth:`Scan.finish`).
        """
        keywords: dict[str, Any] = {p.python_name: shared[p.name] for p in self.shared}
        keywords |= {p.python_name: list(each[p.name]) for p in self.each}
        if self.paper:
            keywords["compat"] = compat
        if self.random:
            keywords["draws"] = draws
        return self.function(tensors, base, **keywords, **(known or {}))
