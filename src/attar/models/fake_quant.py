"""Rounding what flows through a model: inputs of its Linears, keys and values on their way into attention.

A checkpoint whose scheme rounds activations (W8A8, FP8) or the KV cache is loaded with dense weights and
these hooks, so that what is measured is what the scheme does:

    x' = s * (q - z) ,   q = clamp(round(x / s + z), low, high)

    s = e4m3(a max|x| / 6) / a          of NVFP4's groups, float32
    s = 2^e                             of MX groups, coded.mx_exponent

Letters: x an input (..., K); s, z scale and zero of whatever shares them: a token (the last axis), a group of
it, or the whole tensor; q whole numbers, float8 or FP4 values; a global scale of a layer's inputs.

Every operation happens in the type of x, and a dynamic scale is max|x| / ((high - low) / 2) in that type, as
in compressed-tensors, so that transformers with that library gives the same logits. Differs from it: a token
is a vector of the last axis for inputs with any number of axes (the library takes a two-dimensional input to
be one token).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attar.errors import ModelError
from attar.formats.coded import level_fp4, mx_exponent, nearest_fp4
from attar.formats.rules import ActivationRule

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""What models and attention modules call the argument for a cache; the first since transformers 5.24."""

SCALE_LARGEST, SCALE_OF_ZEROS = 448.0, 0.125
"""Of the e4m3 scales of NVFP4's groups."""

KVTransform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``change(keys, values)``, each (batch, heads, tokens, width): what takes their place."""


def quantize_activation(
    x: Tensor, rule: ActivationRule, scale: Tensor | None = None, zero: Tensor | None = None
) -> Tensor:
    """Round an activation to the values of its codes. Does not modify its inputs. Returns the same shape and
    type.

    Args:
        x: (..., K); for a rule with groups, the group size divides K.
        rule: which codes there are and what shares a scale.
        scale: of a static rule; broadcasts against x. Of ``tensor_group`` the global scale, float32.
        zero: likewise, where the rule is asymmetric.
    """
    if not x.numel():
        return x
    if rule.strategy in ("group", "tensor_group"):
        grouped = x.unflatten(-1, (-1, rule.group_size))
        return _round(grouped, rule, *_chosen(grouped, rule, scale)).flatten(-2).to(x.dtype)
    if rule.dynamic:
        scale, zero = _chosen(x, rule)
    assert scale is not None, "a static rule has a scale"
    return _round(x, rule, scale, zero)


def _chosen(
    x: Tensor, rule: ActivationRule, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Dynamic scale and zero, in the type of x: over the last axis, or over everything."""
    low, high = rule.limits
    if rule.strategy == "tensor":
        bottom, top = torch.aminmax(x)
    else:
        bottom, top = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    bottom, top = bottom.clamp(max=0.0), top.clamp(min=0.0)
    least = torch.finfo(x.dtype).eps
    if rule.symmetric:
        top = torch.maximum(-bottom, top)
        if rule.mx:
            return torch.exp2(mx_exponent(top, high).float()).to(x.dtype), None
        scale = top / ((high - low) / 2)
        if rule.strategy == "tensor_group":
            assert global_scale is not None, "NVFP4 has a global scale"
            local = (global_scale * scale).clamp(max=SCALE_LARGEST).to(torch.float8_e4m3fn).float()
            return torch.where(local == 0, SCALE_OF_ZEROS, local) / global_scale, None
        return torch.where(scale == 0, least, scale), None
    scale = (top - bottom) / (high - low)
    scale = torch.where(scale == 0, least, scale)
    return scale, (low - bottom / scale).clamp(low, high).round()


def _round(x: Tensor, rule: ActivationRule, scale: Tensor, zero: Tensor | None) -> Tensor:
    low, high = rule.limits
    scaled = x / scale
    if zero is not None:
        scaled = scaled + zero.to(x.dtype)
    scaled = scaled.clamp(low, high)
    if rule.kind == "int":
        codes = scaled.round()
    elif rule.bits == 8:
        codes = scaled.to(torch.float8_e4m3fn).to(x.dtype)
    else:
        codes = level_fp4(nearest_fp4(scaled)).to(scaled.dtype)
    if zero is not None:
        codes = codes - zero.to(x.dtype)
    return codes * scale


def round_inputs(
    module: nn.Module, rule: ActivationRule, scale: Tensor | None = None, zero: Tensor | None = None
) -> RemovableHandle:
    """Round the input of a Linear from now on. Returns a handle whose ``remove()`` ends it.

    Args:
        module: a Linear or Conv1D; static scale and zero become buffers of it that are not saved.
        scale: of a static rule, one number; of ``tensor_group`` the global scale, which stays float32.
        zero: likewise, where the rule is asymmetric.
    """
    kind: Any = torch.float32 if rule.strategy == "tensor_group" else module.weight.dtype
    for name, value in (("input_scale", scale), ("input_zero", zero)):
        if value is not None:
            module.register_buffer(name, value.reshape(-1).to(kind), persistent=False)

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if inputs[0].is_meta:
            return inputs
        scale, zero = getattr(module, "input_scale", None), getattr(module, "input_zero", None)
        return quantize_activation(inputs[0], rule, scale, zero), *inputs[1:]

    return module.register_forward_pre_hook(hook)


def round_cache(
    attention: nn.Module, rule: ActivationRule, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> RemovableHandle:
    """Round keys and values of an attention module from now on, after the rotary embedding, as they enter the
    cache.

    Args:
        attention: the attention module; static scales become buffers of it that are not saved.
        rule: how both are rounded.
        k_scale, v_scale: of a static rule; they broadcast against (batch, heads, tokens, width).

    Raises:
        ModelError: the module takes no cache.
    """
    kind = next(attention.parameters()).dtype
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if value is not None:
            attention.register_buffer(name, value.to(kind), persistent=False)

    def change(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if keys.is_meta:
            return keys, values
        k, v = getattr(attention, "k_scale", None), getattr(attention, "v_scale", None)
        return quantize_activation(keys, rule, k), quantize_activation(values, rule, v)

    return on_keys_and_values(attention, change)


def cache_argument(module: nn.Module) -> str | None:
    """The name of a module's argument for a cache; None: the module takes none."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in CACHES if name in parameters), None)


def on_keys_and_values(attention: nn.Module, change: KVTransform) -> RemovableHandle:
    """Let a function see and replace keys and values on their way into an attention module's cache (whether
    there is one or not). Calibration looks with a ``change`` that returns what it got.

    Raises:
        ModelError: the module takes no cache.
    """
    signature, name = inspect.signature(attention.forward), cache_argument(attention)
    if name is None:
        raise ModelError(
            f"{type(attention).__name__} takes no cache of keys and values", hint="leave kv_cache at none"
        )

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        bound.arguments[name] = _Cache(bound.arguments.get(name), change)
        return bound.args, bound.kwargs

    return attention.register_forward_pre_hook(hook, with_kwargs=True)


class _Cache:
    """A cache, or none, that changes what goes in; everything else is the cache's."""

    def __init__(self, cache: Any, change: KVTransform) -> None:
        self._cache, self._change = cache, change

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the cache holds after these keys and values."""
        keys, values = self._change(key_states, value_states)
        return (keys, values) if self._cache is None else self._cache.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
