"""A batch of examples as the inputs of a model of transformers."""

from __future__ import annotations

import inspect
from typing import Any

from attar.data.examples import Examples


def model_inputs(model: Any, batch: Examples) -> dict[str, Any]:
    """Arguments of a forward pass.

    Padding is the token that the config names, because classifiers with a causal backbone look for the last
    token before it; token 0 where it names none, which the attention mask hides.

    Args:
        model: of transformers, or what wraps it.
        batch: on the model's device.
    """
    mask, config = batch.mask, _text_config(model)
    inputs: dict[str, Any] = {"input_ids": batch.inputs}
    if _can_cache(model):
        inputs["use_cache"] = False  # keys and values of all layers would stay until the end of the pass
    if not batch.full:
        padding = getattr(config, "pad_token_id", None)
        fill = padding if isinstance(padding, int) and padding >= 0 else 0
        inputs |= {"input_ids": batch.tokens.masked_fill(~mask, fill), "attention_mask": mask.long()}
    if batch.segments is not None and getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = batch.segments
    return inputs


def _can_cache(model: Any) -> bool:
    """Whether a model makes a KV cache unless it is told not to."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "use_cache" in inspect.signature(model.forward).parameters


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
