"""The result's ``config.json``: the config of one parent, the donor, with the changes of the merge."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attar.errors import ModelError
from attar.merging.planning.model import MergeModel
from attar.merging.planning.naming import LAYER_KEYS, layer_count, text_config
from attar.merging.planning.slices import SliceLayers
from attar.merging.planning.tensor_map import TensorMap

_DTYPE_KEYS = ("torch_dtype", "dtype")
_NOT_BY_LAYER = ("architectures", "mrope_section")
_NOT_BY_LAYER_ENDINGS = ("_id", "_ids", "_token", "_tokens", "_languages", "_labels")

_FUNCTION_KEYS = (
    *(
        "num_attention_heads",
        "num_key_value_heads",
        "n_head",
        "head_dim",
        "hidden_act",
        "activation_function",
    ),
    *("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "layer_norm_eps"),
    *("layer_norm_epsilon", "sliding_window", "layer_types"),
)
"""Keys of a config that change what the same weights compute."""


def check_donor(donor: MergeModel, shapes: Mapping[str, tuple[int, ...]], tensor_map: TensorMap) -> None:
    """Refuse a base model that only gives its config and whose tensors have other shapes than the result's.

    Args:
        shapes: of the result's tensors by name, without tensors of one row a token.

    Raises:
        ModelError: names the tensor, both models and both shapes.
    """
    if donor in tensor_map.models():
        return
    lead = tensor_map.lead
    if layer_count(donor.view.config) is not None:
        donor.stack_like(lead.stacks[0], lead)
    for name, shape in shapes.items():
        if name in donor.view.tensors and donor.shape(name) != shape:
            raise ModelError(
                f"{name}: {lead.label} has {shape_text(shape)}, and the base model {donor.label},"
                f" whose config the result gets, has {shape_text(donor.shape(name))}",
                hint="leave base_model out, or name one of the same shapes",
            )


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape for errors: ``320 x 64``."""
    return " x ".join(str(size) for size in shape) or "one number"


def output_config(
    donor: Mapping[str, Any], dtype: str | None, tensor_map: TensorMap, *, rows: int | None = None
) -> dict[str, Any]:
    """The new config; the donor's is not changed.

    Args:
        donor: config of the base model, else of the first.
        dtype: torch's name of the type that is written; None: no floats are written.
        rows: of the embedding, where a vocabulary was built.
    """
    config: dict[str, Any] = copy.deepcopy(dict(donor))
    for key in ("quantization_config", *_DTYPE_KEYS):
        config.pop(key, None)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if dtype is not None:
        text |= {key: dtype for key in _DTYPE_KEYS if text is not config and key in text}
        config["dtype"] = dtype
    for prefix, slices in tensor_map.slices.items():
        if any(layers.source.layers is not None for part in slices for layers in part.sources):
            _set_layers((config, text), donor, prefix, slices)
    for part in (config, text):
        if rows is not None and "vocab_size" in part:
            part["vocab_size"] = rows
    if _untied(tensor_map):
        config["tie_word_embeddings"] = False
        if "tie_word_embeddings" in text:
            text["tie_word_embeddings"] = False
    return config


def _untied(tensor_map: TensorMap) -> bool:
    """Whether the result stores a head while the head of some parent is its embedding."""
    heads = [tensor for tensor in tensor_map.tensors if tensor.kind == "head"]
    sources = [source for head in heads if head.name.endswith(".weight") for source in head.tensors]
    ties = [source.model.view.config.get("tie_word_embeddings") for source in sources]
    return any(source.name == source.model.embedding for source in sources) or (
        False in ties and True in ties
    )


def _set_layers(
    parts: Sequence[dict[str, Any]], donor: Mapping[str, Any], prefix: str, slices: Sequence[SliceLayers]
) -> None:
    """Set a stack's number of layers, and every list with one entry a layer, in the parts of a config."""
    keys = _count_keys(prefix, parts[0])
    donor_count, count = layer_count(donor), sum(part.count for part in slices)
    for config in parts:
        for key, value in list(config.items()):
            if key in keys and isinstance(value, int):
                config[key] = count
            elif isinstance(value, list) and donor_count == len(value) and _by_layer(key):
                config[key] = _entries(key, donor, slices, value)


def _count_keys(prefix: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that hold a stack's number of layers."""
    text = text_config(config)
    for word, keys in (
        ("decoder", ("num_decoder_layers", "decoder_layers")),
        ("encoder", ("encoder_layers",)),
    ):
        if word in prefix.split(".") and any(key in text for key in keys):
            return keys
    return LAYER_KEYS


def _by_layer(key: str) -> bool:
    return key not in _NOT_BY_LAYER and not key.endswith(_NOT_BY_LAYER_ENDINGS)


def _entries(
    key: str, donor: Mapping[str, Any], slices: Sequence[SliceLayers], default: list[Any]
) -> list[Any]:
    """A per-layer list of the result: of each slice the donor's entries if the donor is a source, else the
    entries of the first source."""
    entries: list[Any] = []
    for part in slices:
        sources = part.all()
        layers = next((source for source in sources if source.model.view.config is donor), sources[0])
        listed = text_config(layers.model.view.config).get(key)
        long_enough = isinstance(listed, list) and len(listed) >= layers.first + part.count
        values = listed if isinstance(listed, list) and long_enough else default
        entries += [values[(layers.first + index) % len(values)] for index in range(part.count)]
    return entries


def config_differences(donor: MergeModel, model: MergeModel) -> Iterator[str]:
    """Notes on the keys in which a parent's config differs from the result's."""
    donor_config, model_config = donor.view.config, model.view.config
    if donor_config.get("model_type") != model_config.get("model_type"):
        yield (
            f"{model.label} is a {model_config.get('model_type')}, {donor.label} is a "
            f"{donor_config.get('model_type')}: the shapes fit, and the result gets the latter's type"
        )
    for key in _FUNCTION_KEYS:
        kept, value = text_config(donor_config).get(key), text_config(model_config).get(key)
        if kept != value and not (key == "layer_types" and (kept is None or value is None)):
            yield f"{key} differs: {_short(kept)} in {donor.label} (taken), {_short(value)} in {model.label}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
