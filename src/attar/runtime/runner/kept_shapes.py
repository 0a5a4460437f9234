"""What a model keeps of a sequence, by its config alone: keys and values of each layer, and bytes of states.

A config does not say what the states of its layers are, so an empty model is built on torch's meta device and
probed like a loaded one (``probe.py``): shapes without numbers. That takes seconds, and only models whose
code in transformers keeps states are built.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attar.errors import ModelError
from attar.runtime.kv.memory import LayerShape, layer_shapes
from attar.runtime.kv.state_snapshots import BYTES

if TYPE_CHECKING:
    import torch

    from attar.runtime.runner.probe import ModelShape

_CALLS = ("update_conv_state(", "update_recurrent_state(")  # of transformers' cache


def kept_shapes(
    config: Mapping[str, Any], dtype: torch.dtype | Literal["float32"] | None = "float32"
) -> tuple[tuple[LayerShape, ...], int]:
    """The layers with keys and values, and the bytes of a sequence's states.

    Args:
        config: a ``config.json``.
        dtype: that the model computes in; None: the config's.

    Raises:
        ModelError: the runtime does not run such a model, or its states cannot be counted without weights;
            names the family.
    """
    if not may_carry_states(config):
        return layer_shapes(config), 0
    from attar.models.loading.configs import first_line

    try:
        shape = probed_shape(config, dtype)
    except (RuntimeError, TypeError) as error:
        message = f"{config.get('model_type')}: its states cannot be counted by its config"
        raise ModelError(f"{message}: {first_line(error)}") from error
    sizes = shape.kv_heads, shape.head_dim
    return tuple(LayerShape(*sizes, window, shape.latent) for window in shape.windows), shape.state_bytes


def probed_shape(
    config: Mapping[str, Any], dtype: torch.dtype | Literal["float32"] | None = "float32"
) -> ModelShape:
    """What the modules runner keeps of a model, found without its weights. Arguments as above.

    Raises:
        ModelError: the runtime does not run such a model.
        RuntimeError, TypeError: its code reads numbers, of which there are none.
    """
    import torch

    from attar.models.loading.empty import empty_model
    from attar.runtime.runner.probe import probe

    model = empty_model(config).to(device="meta", dtype=torch.float32 if dtype == "float32" else dtype)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # its shapes do not depend on numbers
    return probe(model)


def states_in_memory(state_bytes: int, sequences: int, *, prefix_cache: bool | None = None) -> int:
    """Bytes of the states of ``sequences`` that run, before and after a step, and of all snapshots, which
    there are unless ``prefix_cache`` is False."""
    snapshots = BYTES // state_bytes if state_bytes and prefix_cache is not False else 0
    return (2 * sequences + snapshots) * state_bytes


def may_carry_states(config: Mapping[str, Any]) -> bool:
    """Whether transformers' code of a family mentions states."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    kinds = (config.get("model_type"), (config.get("text_config") or {}).get("model_type"))
    for kind in filter(None, kinds):
        folder = Path(spec.origin).parent / "models" / str(kind).removesuffix("_text")
        if any(call in file.read_text() for file in folder.glob("modeling_*.py") for call in _CALLS):
            return True
    return False
