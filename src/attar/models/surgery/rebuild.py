"""A model of a changed config that holds given tensors.

An empty model is built from the changed config, as ``from_pretrained`` will build it, and compared with the
tensors name by name and shape by shape. So no table lists what a family's config can express: transformers'
own code decides.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.models.anatomy.discover import text_config
from attar.models.loading.configs import parse_config, quiet
from attar.models.loading.empty import empty_model

# Llama's config wants hidden_size to be a multiple of the number of heads although head_dim is free.
# Mistral's does not, and without a sliding window it is the same network with the same tensor names.
SIBLINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("mistral", "Mistral", {"sliding_window": None}),
}


def rebuild(
    model: Any, state: dict[str, Tensor], changes: dict[str, Any], channels: Sequence[int] | None = None
) -> Any:
    """A model of the changed config that holds ``state``.

    Args:
        channels: of the residual stream, that stay; ``state`` still has all of them.

    Raises:
        ModelError: the family's config cannot express the result.
    """
    width = None if channels is None else len(channels)
    new = fitting_model(model, state, changes, width)
    if channels is not None:
        state = narrowed(state, new.state_dict(), channels)
    new.load_state_dict(state, strict=True, assign=True)
    new.tie_weights()
    device = next(model.parameters()).device
    if device.type != "meta":
        new.to(device)
    if model.can_generate():
        new.generation_config = copy.deepcopy(model.generation_config)
    return new.train(model.training)


def fitting_model(
    model: Any, state: Mapping[str, Tensor], changes: dict[str, Any], width: int | None = None
) -> Any:
    """An empty model of the changed config whose tensors have the names and shapes of ``state``.

    Args:
        width: the dimensions of ``state`` that are as wide as the model's residual stream may be this wide.
    """
    family, refusal = text_config(model).model_type, ""
    widths = None if width is None else (text_config(model).hidden_size, width)
    for config in _configs(model, changes):
        try:
            new = empty_model(parse_config(config))
        except ModelError as error:
            refusal = refusal or error.message
            continue
        wrong = _misfit(new.state_dict(), state, widths)
        if wrong is None:
            with quiet():
                new.set_attn_implementation(model.config._attn_implementation)
            return new
        refusal = refusal or f"it builds {wrong}"
    requested = ", ".join(f"{key} {value}" for key, value in changes.items() if isinstance(value, int | list))
    raise ModelError(f"{family}: its config cannot express {requested}: {refusal}")


def narrowed(
    state: Mapping[str, Tensor], built: Mapping[str, Tensor], channels: Sequence[int]
) -> dict[str, Tensor]:
    """The state dict with these channels alone in every dimension that ``built`` has shorter."""
    result = {}
    for name, tensor in state.items():
        for dim, size in enumerate(built[name].shape):
            if tensor.shape[dim] != size:
                tensor = tensor.index_select(dim, torch.tensor(channels, device=tensor.device))
        result[name] = tensor
    return result


def _configs(model: Any, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The changed config of the model's own family, then the config of a sibling family."""
    config = named_config(model)
    for key, value in changes.items():
        try:
            setattr(config.get_text_config(), key, value)
        except Exception as error:  # a property without a setter, or a validator of the config class
            raise ModelError(f"{config.model_type}: its config's {key} cannot be {value}: {error}") from error
    native = config.to_dict()
    if config.model_type not in SIBLINGS:
        return [native]
    kind, prefix, extra = SIBLINGS[config.model_type]
    ours, theirs = type(config)().to_dict(), parse_config({"model_type": kind}).to_dict()
    shared = {key: value for key, value in native.items() if key in theirs or key not in ours}
    name = prefix + type(model).__name__.removeprefix(type(config).__name__.removesuffix("Config"))
    return [native, {**shared, **extra, "model_type": kind, "architectures": [name]}]


def named_config(model: Any) -> Any:
    """A copy of the model's config that names the model's class."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    return config


def _misfit(
    built: Mapping[str, Tensor], state: Mapping[str, Tensor], widths: tuple[int, int] | None
) -> str | None:
    """The first tensor that differs in name or shape, in words; None when all fit."""
    for name in sorted(built.keys() | state.keys()):
        have = list(built[name].shape) if name in built else "nothing"
        want = list(state[name].shape) if name in state else "nothing"
        if have != want and not _narrower(have, want, widths):
            return f"{name} {have} where the cut needs {want}"
    return None


def _narrower(have: list[int] | str, want: list[int] | str, widths: tuple[int, int] | None) -> bool:
    """Whether two shapes differ by the width of the residual stream alone."""
    if widths is None or isinstance(have, str) or isinstance(want, str) or len(have) != len(want):
        return False
    return all(new == old or (old, new) == widths for new, old in zip(have, want, strict=True))
