"""Operators ``attar::*`` of torch: a body for every device, kernels over it, a shape without data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")
_LIBRARY = torch.library.Library("attar", "DEF")


def operator(
    shape: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function of tensors under its name; calls of what is returned go through torch's dispatcher.

    Args:
        shape: results without data, from those of the arguments that it names.
        mutates: arguments that are written to.
    """

    needed = inspect.signature(shape).parameters

    def register(body: Callable[P, R]) -> Callable[P, R]:
        name, signature = body.__name__, inspect.signature(body)

        def fake(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            return shape(**{argument: given[argument] for argument in needed})

        _LIBRARY.define(name + torch.library.infer_schema(body, mutates_args=mutates))
        _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"attar::{name}", fake, lib=_LIBRARY)
        return cast("Callable[P, R]", getattr(torch.ops.attar, name).default)

    return register


def register_kernel(operation: Callable[..., Any], kernel: Callable[..., Any]) -> None:
    """Have CUDA tensors run ``kernel``, which takes the operator's arguments, in place of the body."""
    name = cast("Any", operation).name().removeprefix("attar::").removesuffix(".default")
    _LIBRARY.impl(name, kernel, "CUDA")
