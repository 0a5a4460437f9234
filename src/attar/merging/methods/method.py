"""What a merge method declares: its function, the models it takes, and the parameters of its YAML.

A method is a pure function over the tensors of one name; it does not modify its inputs:

    f(tensors, base, *, <parameters>) -> Tensor

    tensors    the models' tensors x_i, of one shape and dtype
    base       the base model's tensor, of the same shape, or None
    result     of the same shape, in base's dtype, or else the tensors'

A shared parameter is one value; a parameter per model is a list with one value for each of ``tensors``.
Parameters that several functions have:

    weight     w_i, of each model
    density    share of the entries that are kept, of each model
    normalize  divide by the sum of the weights (with a vote: of the agreeing models' weights)
    rescale    scale each sparse task vector to make up for the dropped entries
    lambda_    scale of the merged task vector
    int8_mask  without effect, as in mergekit
    compat     ``"mergekit"``, the reference's arithmetic, or ``"paper"``, the paper's
    masks      random masks, one source for each of ``tensors``

``MergeMethod.base`` says how the method uses ``base_model``:

    required   there must be one; it is not among the tensors
    optional   likewise, but it may be absent
    unused     the base model gives the configuration and the tokenizer; listed, it is a model like any other
    member     listed or not, it is one of the tensors
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from attar.errors import SettingsError
from attar.merging.methods.common.random_masks import MaskSource

BASES = ("required", "optional", "unused", "member")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method.

    Args:
        default: None for a required parameter.
        kind: float (an int will do), int or bool.
        allowed: the allowed values in words, for errors.
        check: whether a value of the right kind is allowed; numbers must be finite in any case.
        span: the interval in which a search varies the value; None: not searched.
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
        """The function's keyword: ``lambda`` is reserved in Python and gets an underscore."""
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


class ModelScan(Protocol):
    """Passes over the whole model before its first tensor is merged.

    ``for _ in range(scan.passes)``: ``add`` every output tensor's inputs, in any order, then ``end_pass``; at
    last ``finish`` gives keywords for the method's function.
    """

    passes: int

    def add(self, tensors: Sequence[Tensor], base: Tensor) -> None: ...

    def end_pass(self) -> None: ...

    def finish(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class MergeMethod:
    """A merge method.

    Args:
        name: as in YAML's ``merge_method``.
        function: the arithmetic for one output tensor.
        base: one of :data:`BASES`.
        models: minimum and maximum number of tensors besides the base; None: no maximum.
        shared: parameters with one value for an output tensor, looked up by its name.
        per_model: parameters of each model, looked up by the name of its input tensor.
        random: the function takes ``masks``.
        paper: the function takes ``compat``; other functions have one form.
        scan: for ``compat="paper"``: makes the scan over the whole model from the parameters per model.
        joint: checks several parameters together; raises SettingsError.
    """

    name: str
    function: Callable[..., Tensor]
    base: str
    models: tuple[int, int | None]
    summary: str = ""
    source: str = ""
    shared: tuple[Parameter, ...] = ()
    per_model: tuple[Parameter, ...] = ()
    random: bool = False
    paper: bool = False
    scan: Callable[[Mapping[str, Sequence[Any]]], ModelScan] | None = None
    joint: Callable[[Mapping[str, Any], Mapping[str, Sequence[Any]]], None] | None = None

    def check(self, shared: Mapping[str, Any], per_model: Mapping[str, Sequence[Any]]) -> None:
        """Check complete values, keyed by the names in YAML.

        Raises:
            SettingsError: naming the parameter, its value and what is allowed.
        """
        for parameter in self.shared:
            parameter.verify(shared[parameter.name])
        for parameter in self.per_model:
            for value in per_model[parameter.name]:
                parameter.verify(value)
        if self.joint is not None:
            self.joint(shared, per_model)

    def merge(
        self,
        tensors: Sequence[Tensor],
        base: Tensor | None,
        *,
        shared: Mapping[str, Any],
        per_model: Mapping[str, Sequence[Any]],
        compat: str = "mergekit",
        masks: Sequence[MaskSource] = (),
        scan_result: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """One output tensor. Does not modify its inputs.

        Args:
            tensors: of the models, in the order of the configuration.
            base: of the base model, or None.
            shared: values by the names in YAML.
            per_model: values by the names in YAML, one for each of ``tensors``.
            compat: ``"mergekit"`` or ``"paper"``.
            masks: for random methods, one for each of ``tensors``.
            scan_result: of :meth:`ModelScan.finish`.
        """
        keywords: dict[str, Any] = {p.python_name: shared[p.name] for p in self.shared}
        keywords |= {p.python_name: list(per_model[p.name]) for p in self.per_model}
        if self.paper:
            keywords["compat"] = compat
        if self.random:
            keywords["masks"] = masks
        return self.function(tensors, base, **keywords, **(scan_result or {}))
