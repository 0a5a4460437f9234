"""A model without weights: the modules of a config, for names and shapes, or to be filled by tensor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights

from attar.models.loading.configs import model_class, parse_config, quiet, refusal
from attar.models.loading.experts import unstack


def empty_model(config: Mapping[str, Any] | Any, *, unstacked: bool = False) -> Any:
    """A model without weights: parameters on meta, buffers (rotary frequencies, position ids) real.

    Args:
        config: a parsed config.json, or a transformers config; its ``architectures`` name the class.
        unstacked: the experts of mixtures are Linears (:mod:`attar.models.loading.experts`).

    Raises:
        ModelError: transformers does not know the architecture, or refuses the config.
    """
    config = parse_config(config) if isinstance(config, Mapping) else copy.deepcopy(config)
    kind = model_class(config)
    with quiet(), init_empty_weights(include_buffers=False), no_init_weights(), _WeightsOnMeta():
        try:
            model = kind._from_config(config)
        except Exception as error:
            raise refusal(kind, config, error) from error
    model.tie_weights()
    return (unstack(model) if unstacked else model).eval()


class _WeightsOnMeta(TorchFunctionMode):  # type: ignore[misc]
    """Lets ``torch.empty``, which allocates every large weight, take no memory; buffers are allocated
    otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
